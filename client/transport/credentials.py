"""Tokens and the authority's certificate, which are read again while the client runs: both are rotated."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from logferry.client.events import log_event
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.dialer import Dialer
from logferry.gateway.contract.names import check_token


def read_token(path: str) -> str:
    """The token that the file of ``--token-file`` holds. Raises ValueError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {path}: {error}") from None
    return check_token(text, f"--token-file {path}")


class Credentials:
    """The files behind ``clusters``, by their numbers, and behind ``dialer``; None: there is no file."""

    def __init__(
        self, clusters: Sequence[GatewayCluster], token_files: Sequence[str | None], dialer: Dialer, ca_file: str | None
    ) -> None:
        self._clusters = clusters
        self._token_files = token_files
        self._dialer = dialer
        self._ca_file = ca_file
        self._seen = self._look()

    def read(self, always: bool = False) -> bool:
        """Reads the files again if one changed, or ``always``. True: new values are used from the next connection on.

        If a file cannot be used, that is logged, and what was read before stays in use.
        """
        seen = self._look()
        if seen == self._seen and not always:
            return False
        self._seen = seen
        try:
            tokens = [None if path is None else read_token(path) for path in self._token_files]
            self._dialer.reload()
        except (ValueError, OSError, ssl.SSLError) as error:
            log_event("credentials-unusable", reason=error)
            return False
        for cluster, token in zip(self._clusters, tokens):
            if token is not None:
                cluster.token = token
        log_event("credentials-read")
        return True

    def _look(self) -> list[tuple[int, ...]]:
        """What tells a file from the one before; a file that is missing has nothing of it."""
        found: list[tuple[int, ...]] = []
        for path in (*self._token_files, self._ca_file):
            try:
                facts = None if path is None else os.stat(path)  # noqa: PTH116
            except OSError:
                facts = None
            found.append(() if facts is None else (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return found
