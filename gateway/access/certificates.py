"""Callers by client certificate: the names in it, and how a worker tells another one who sent a request.

What one worker hands on to another is signed as a whole, too: its caller's quotas of requests and connections were
charged where it arrived. Without a valid signature it is charged once more, so nobody evades them by that header.

The TLS library has verified the certificate, with the authorities and the revocation list of the configuration. A
worker that hands a request on has no certificate of its caller: it signs the names with the key that all workers of the
data centre share, for this method and path and some seconds. A header of that name without a valid signature is
refused, and one that a caller sends is never handed on.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from logferry.gateway.errors import Problem

CALLER_HEADER: Final = "X-Logferry-Caller"
_VALID_S: Final = 60.0
# All of the names are in one line of a request's head.
_NAMES_BYTES, _NAME_BYTES = 2048, 256
_KINDS: Final = {"DNS": "dns", "URI": "uri", "email": "email"}


class Identity(NamedTuple):
    """What a verified certificate says. ``names``: as ``dns:web1.example``; ``ends_s``: when it expires."""

    names: tuple[str, ...]
    ends_s: float


class PeerRequest(NamedTuple):
    """What the gate needs of a request besides its headers. ``certificate``: verified, as `ssl` gives it."""

    method: str
    path: str
    certificate: Mapping[str, Any] | None


def identity_of(certificate: Mapping[str, Any]) -> Identity:
    """The subject's alternative names, those of hosts in lower case, and its common names; not more than fit."""
    found = [
        f"{_KINDS[kind]}:{name.lower() if kind == 'DNS' else name}"
        for kind, name in certificate.get("subjectAltName", ())
        if kind in _KINDS
    ]
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    found += [f"cn:{name}" for kind, name in subject if kind == "commonName"]
    names, room = [], _NAMES_BYTES
    for name in found:
        size = len(name.encode("utf-8", "replace"))
        if name.isprintable() and size <= min(_NAME_BYTES, room):
            names.append(name)
            room -= size
    return Identity(tuple(names), ssl.cert_time_to_seconds(certificate["notAfter"]))


def matching_name(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """The first of the names that one of the patterns fits, escaped and without its kind; None: there is none."""
    patterns = list(patterns)
    found = next((name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)), None)
    return None if found is None else quote(found.partition(":")[2], safe="@|+=:,*")


def signed(key: bytes, method: str, path: str, identity: Identity, now_s: float) -> str:
    """The header for another worker."""
    names = ",".join(quote(name, safe=":@") for name in identity.names)
    said = f"{int(now_s)};{int(identity.ends_s)};{names}"
    return f"{_signature(key, method, path, said)};{said}"


def verified(key: bytes | None, method: str, path: str, header: str, now_s: float) -> Identity:
    """The identity that another worker has signed. Raises Problem ``unauthenticated``."""
    signature, _, said = header.partition(";")
    parts = said.split(";")
    if key is None or len(parts) != 3 or not said.isascii() or not signature.isascii():
        raise _refused()
    if not hmac.compare_digest(signature, _signature(key, method, path, said)):
        raise _refused()
    at_s, ends_s = int(parts[0]), int(parts[1])  # as signed
    if abs(now_s - at_s) > _VALID_S:
        raise Problem("unauthenticated", "another worker signed the caller too long ago; compare the hosts' clocks")
    return Identity(tuple(unquote(name) for name in parts[2].split(",")), float(ends_s))


def hand_on(key: bytes, method: str, path: str, now_s: float) -> str:
    """The value of the header of a forwarded request."""
    said = f"{int(now_s)}"
    return f"{_signature(key, method, path, said, 'forward')};{said}"


def handed_on(key: bytes | None, method: str, path: str, header: str, now_s: float) -> bool:
    """Whether another worker has signed that value for this request, within the last minute."""
    signature, _, said = header.partition(";")
    if key is None or not header.isascii():
        return False
    if not hmac.compare_digest(signature, _signature(key, method, path, said, "forward")):
        return False
    return abs(now_s - int(said)) <= _VALID_S  # as signed


def _signature(key: bytes, method: str, path: str, said: str, what: str = "caller") -> str:
    text = "\n".join((f"logferry {what} 1", method, path, said))
    return hmac.new(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _refused() -> Problem:
    return Problem("unauthenticated", f"{CALLER_HEADER} is not signed by a worker of this data centre")
