"""The export format of systemd's journal → JSON lines. Pure.

An entry is a field a line, ``NAME=value``, or ``NAME``, a size of 64 bits (little endian), so many bytes and a
newline; an empty line ends it (systemd.io, *Journal Export Formats*). Its JSON line is that of ``journalctl -o json``:
every field is a text, or a list where it comes more than once. Beside these it has ``time`` (of
``__REALTIME_TIMESTAMP``). Bytes that are not UTF-8 are replaced; ``_raw`` has them in base64, by field. A value that is
too long is cut; ``_cut`` has its size in bytes, by field, and as ``fields`` the number of fields that are left out.
``time``, ``_raw`` and ``_cut`` are no names that the journal stores: it has capital letters alone.
"""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone
from typing import Any

CURSOR = "__CURSOR"
LONGEST_VALUE_BYTES = 128 << 10
LONGEST_RECORD_BYTES = 768 << 10  # below a request's and the spool's limits for a line
SHORT_VALUE_BYTES = 1 << 10  # of each, where an entry has too many long ones
_MOST_FIELDS = 4096
_FIRST_FIELDS = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class DamagedExport(ValueError):
    """The bytes are no export of a journal."""


class ExportParser:
    """Feed it bytes; it gives the entries that are complete. What it holds is one entry of cut values, and one read."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._fields: list[tuple[str, bytes, int]] = []  # name, the value's beginning, its size
        self._name: str | None = None  # of the value that is being read
        self._left = -1  # bytes of it that are to come, its newline too; -1: a line of text
        self._value = bytearray()
        self._size = 0

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """The cursor and the line of each. Raises `DamagedExport`."""
        self._rest += data
        found: list[tuple[str, bytes]] = []
        at = 0
        while True:
            taken = self._next(at, found) if self._name is None else self._continue(at)
            if taken is None:
                break
            at = taken
        del self._rest[:at]
        return found

    def _next(self, at: int, found: list[tuple[str, bytes]]) -> int | None:
        """Begins a field, or ends the entry. Returns where the next begins; None: more bytes are needed."""
        rest = self._rest
        if rest[at : at + 1] == b"\n":
            if self._fields:
                found.append(self._entry())
            self._fields = []
            return at + 1
        end = rest.find(b"\n", at)
        equals = rest.find(b"=", at, end if end >= 0 else len(rest))
        if equals < 0 and end < 0:
            if len(rest) - at > LONGEST_VALUE_BYTES:
                raise DamagedExport("a field has no name")
            return None
        if equals >= 0:
            self._begin(at, equals, -1)
            return equals + 1
        if len(rest) < end + 9:
            return None
        self._begin(at, end, int.from_bytes(rest[end + 1 : end + 9], "little") + 1)
        return end + 9

    def _begin(self, at: int, end: int, left: int) -> None:
        name = bytes(self._rest[at:end])
        if not name or not name.isascii() or len(name) > 256 or len(self._fields) > _MOST_FIELDS:
            raise DamagedExport(f"{name[:80]!r} is no field")
        self._name, self._left, self._size = name.decode(), left, 0
        self._value.clear()

    def _continue(self, at: int) -> int | None:
        """Takes what there is of the value."""
        rest = self._rest
        if at >= len(rest):
            return None
        if self._left < 0:
            newline = rest.find(b"\n", at)
            end = len(rest) if newline < 0 else newline
            is_whole = newline >= 0
            taken = end + is_whole
        else:
            taken = min(len(rest), at + self._left)
            self._left -= taken - at
            is_whole = not self._left
            end = taken - is_whole
            if is_whole and rest[end : end + 1] != b"\n":
                raise DamagedExport(f"the value of {self._name} is longer than its size")
        room = LONGEST_VALUE_BYTES - len(self._value)
        self._value += rest[at : min(end, at + room)]
        self._size += end - at
        if is_whole:
            self._fields.append((str(self._name), bytes(self._value), self._size))
            self._name = None
        return taken

    def _entry(self) -> tuple[str, bytes]:
        fields = self._fields
        cursor = next((value.decode(errors="replace") for name, value, _ in fields if name == CURSOR), "")
        if not cursor:
            raise DamagedExport("an entry has no cursor")
        line = _line(fields)
        if len(line) > LONGEST_RECORD_BYTES:
            line = _line([(name, value[:SHORT_VALUE_BYTES], size) for name, value, size in fields])
        if len(line) > LONGEST_RECORD_BYTES:  # thousands of fields: those of the journal itself come first
            short = [(name, value[:SHORT_VALUE_BYTES], size) for name, value, size in fields[:_FIRST_FIELDS]]
            line = _line(short, len(fields) - len(short))
        return cursor, line


def _line(fields: list[tuple[str, bytes, int]], left_out: int = 0) -> bytes:
    record: dict[str, Any] = {}
    raw: dict[str, Any] = {}
    cut: dict[str, Any] = {}
    for name, value, size in fields:
        if name == "__REALTIME_TIMESTAMP" and value.isdigit() and len(value) < 18:
            at = _EPOCH + timedelta(microseconds=int(value))
            record["time"] = at.isoformat(timespec="microseconds").replace("+00:00", "Z")
        if len(value) < size:
            _add(cut, name, size)
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            if len(value) < size and len(value) - error.start < 4:  # cut within a character
                value = value[: error.start]
            text = value.decode(errors="replace")
            if "\ufffd" in text:
                _add(raw, name, base64.b64encode(value).decode())
        _add(record, name, text)
    if left_out:
        cut["fields"] = left_out
    record.update((key, values) for key, values in (("_raw", raw), ("_cut", cut)) if values)
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _add(record: dict[str, Any], name: str, value: object) -> None:
    if name not in record:
        record[name] = value
    elif isinstance(record[name], list):
        record[name].append(value)
    else:
        record[name] = [record[name], value]
