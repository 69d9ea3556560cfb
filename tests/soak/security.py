"""Tokens and certificates of a campaign, which change while it runs."""

from __future__ import annotations

import hashlib
import secrets
import ssl
from pathlib import Path
from typing import Any, Final

import trustme

_VALID_TOKENS: Final = 3


class Security:
    """An authority, a certificate for each data centre, and tokens, of which the last three are valid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._authority = trustme.CA()
        self.authority_file = self._store("ca.pem", self._authority.cert_pem.bytes())
        self.context = ssl.create_default_context(cafile=str(self.authority_file))
        self._tokens: list[str] = []
        self._loader_token = secrets.token_urlsafe(32)
        self.loader_token_file = self._store("loader.token", self._loader_token.encode())
        self.token_file = folder / "token"
        self.change_tokens()

    def change_tokens(self) -> None:
        """A new token for the gateways, the one before it in `token_file`; the oldest becomes invalid."""
        self._tokens = [*self._tokens, secrets.token_urlsafe(32)][-_VALID_TOKENS:]
        self._store("token", self.token.encode())

    @property
    def token(self) -> str:
        """The last but one: the gateways know it before it is used."""
        return self._tokens[-2:][0]

    def tokens(self) -> list[dict[str, Any]]:
        """For a gateway's configuration."""
        rights = {"write": ["*"], "read": ["*"], "admin": ["*"]}
        loader = {"name": "loader", "sha256": _digest(self._loader_token), "read": ["*"]}
        digests = [_digest(token) for token in self._tokens]
        return [loader, *({"name": f"all-{digest[:6]}", "sha256": digest, **rights} for digest in digests)]

    def new_certificate(self, dc: str) -> dict[str, str]:
        """Makes it at the place of the older one; returns the table for the configuration of a gateway."""
        made = self._authority.issue_cert("127.0.0.1", "127.0.0.2")
        certificate = self._store(f"{dc}.pem", made.cert_chain_pems[0].bytes())
        key = self._store(f"{dc}.key", made.private_key_pem.bytes())
        return {"certificate": str(certificate), "key": str(key), "ca": str(self.authority_file)}

    def _store(self, name: str, data: bytes) -> Path:
        new = self._folder / f"{name}.new"
        new.write_bytes(data)
        return new.replace(self._folder / name)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
