"""A gateway's HTTP interface as the commands ask it: where it is, with which token, verified by whom."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final

from logferry.client.agent.config import check_token, read_token
from logferry.ops.cli.problems import Problem, Unavailable, WrongUse

TOKEN_VARIABLE: Final = "LOGFERRY_TOKEN"
_TIMEOUT_S: Final = 60.0


class Refused(Problem):
    """The gateway said no: its problem document. ``kind``: the last segment of its type."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        self.status = status
        self.kind = str(document.get("type", "")).rpartition("/")[2]
        text = str(document.get("detail") or document.get("title") or f"the gateway answered {status}")
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            text += f" (--token-file, or {TOKEN_VARIABLE} in the environment)"
        super().__init__(text)
        if status in (http.client.BAD_REQUEST, http.client.UNAUTHORIZED):
            self.exit_status = WrongUse.exit_status
        elif status >= http.client.INTERNAL_SERVER_ERROR:
            self.exit_status = Unavailable.exit_status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Followed, a redirect would take the token along to wherever it points."""

    def redirect_request(self, *_args: Any, **_more: Any) -> None:
        return None


class Gateway:
    """One worker. ``ca_file``: who signed its certificate, None: the system's authorities."""

    def __init__(
        self, url: str, token: str | None = None, ca_file: Path | None = None, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Raises WrongUse."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WrongUse(f"--url: {url!r} is not like http://127.0.0.1:8080")
        self.url, self.is_encrypted = url.rstrip("/"), parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise WrongUse(f"--ca-file {ca_file}: {getattr(error, 'strerror', None) or error}") from None
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
        self._timeout_s = timeout_s

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's document. Raises Refused, and Unavailable when no gateway answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return self._document(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, self._document(error.read())) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"no gateway answers at {self.url}: {reason}; is it running? (logferry up)") from None

    def _document(self, raw: bytes) -> dict[str, Any]:
        try:
            document = json.loads(raw)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unavailable(f"what answers at {self.url} is not a gateway")
        return document


def options(parser: argparse.ArgumentParser, url_help: str = "any gateway worker") -> list[argparse.Action]:
    """Adds what says where the gateway is and who asks."""
    token_help = f"the token for the gateway (default: what {TOKEN_VARIABLE} in the environment holds, if anything)"
    return [
        parser.add_argument("--url", default="http://127.0.0.1:8080", help=f"{url_help} (default: %(default)s)"),
        parser.add_argument("--token-file", metavar="FILE", help=token_help),
        parser.add_argument("--ca-file", metavar="FILE", help="who signed its certificate (default: the system's)"),
    ]


def token_of(args: argparse.Namespace) -> str | None:
    """The token of the options or the environment. Raises WrongUse."""
    try:
        if args.token_file is not None:
            return read_token(args.token_file)
        given = os.environ.get(TOKEN_VARIABLE)
        return check_token(given, TOKEN_VARIABLE) if given else None
    except ValueError as error:
        raise WrongUse(str(error)) from None


def ca_file_of(args: argparse.Namespace) -> Path | None:
    return None if args.ca_file is None else Path(args.ca_file)
