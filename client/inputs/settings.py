"""``[[inputs]]`` → `InputSettings`: checks the values."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from logferry.client.inputs.listeners import Certificates, ListenAddress

KINDS = ("stdin", "syslog", "journald")
SPOOL_BYTES = 256 << 20
MESSAGE_BYTES = 64 << 10
RECORD_BYTES = 1 << 20  # no JSON line is longer, so none is split
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OF_KIND = {
    "record_start": "stdin",
    "cut_lines": "stdin",
    "listen": "syslog",
    "message_bytes": "syslog",
    "cert_file": "syslog",
    "key_file": "syslog",
    "client_ca_file": "syslog",
    "units": "journald",
    "start": "journald",
    "directory": "journald",
    "namespace": "journald",
}


class InputSettings(NamedTuple):
    """``name``: of its spool; ``source``: what its source ids begin with. ``from_end``: of the journal."""

    kind: str
    name: str
    source: str
    spool_bytes: int = SPOOL_BYTES
    listen: tuple[ListenAddress, ...] = ()
    message_bytes: int = MESSAGE_BYTES
    certificates: Certificates | None = None
    units: tuple[str, ...] = ()
    from_end: bool = False
    directory: str | None = None
    namespace: str | None = None


def input_settings(table: dict[str, Any], host: str, line_bytes: int) -> InputSettings:
    """Raises ValueError, which begins with the key."""
    kind = table.get("type", "")
    if kind not in KINDS:
        raise ValueError(f"type: {kind!r} is not one of {', '.join(KINDS)}")
    for key, of_kind in _OF_KIND.items():
        if key in table and kind != of_kind:
            raise ValueError(f"{key}: is a setting of {of_kind}, not of {kind}")
    name = table.get("name", kind)
    if not _NAME.fullmatch(name):
        raise ValueError(f"name: {name!r} is not 1 to 64 letters, digits and ._-, beginning with a letter or a digit")
    source = table.get("source", f"{host}:{name}")
    if not 1 <= len(source.encode("utf-8", "surrogateescape")) <= 512:
        raise ValueError("source: is not 1 to 512 bytes long")
    if kind != "stdin" and line_bytes < RECORD_BYTES:
        raise ValueError(f"type: {kind} needs line_bytes of at least {RECORD_BYTES}")
    return InputSettings(
        kind,
        name,
        source,
        _whole(table, "spool_bytes", SPOOL_BYTES, 16 << 20, 1 << 40),
        _listen(table, kind),
        _whole(table, "message_bytes", MESSAGE_BYTES, 480, MESSAGE_BYTES),
        _certificates(table),
        tuple(table.get("units", ())),
        _from_end(table),
        table.get("directory"),
        table.get("namespace"),
    )


def _whole(table: dict[str, Any], key: str, default: int, least: int, most: int) -> int:
    value: int = table.get(key, default)
    if not least <= value <= most:
        raise ValueError(f"{key}: {value} is not between {least} and {most}")
    return value


def _listen(table: dict[str, Any], kind: str) -> tuple[ListenAddress, ...]:
    if kind == "syslog" and not table.get("listen"):
        raise ValueError("listen: is required")
    try:
        found = tuple(ListenAddress.of(text) for text in table.get("listen", ()))
    except ValueError as error:
        raise ValueError(f"listen: {error}") from None
    if any(address.kind == "tls" for address in found) and "cert_file" not in table:
        raise ValueError("cert_file: is required for tls://")
    return found


def _certificates(table: dict[str, Any]) -> Certificates | None:
    if ("cert_file" in table) != ("key_file" in table):
        raise ValueError("cert_file, key_file: one of them is missing")
    if "cert_file" not in table:
        return None
    found = Certificates(table["cert_file"], table["key_file"], table.get("client_ca_file"))
    try:
        found.context()
    except OSError as error:
        raise ValueError(f"cert_file, key_file, client_ca_file: {error.strerror or error}") from None
    return found


def _from_end(table: dict[str, Any]) -> bool:
    start = table.get("start", "beginning")
    if start not in ("beginning", "end"):
        raise ValueError(f"start: {start!r} is not beginning or end")
    return bool(start == "end")
