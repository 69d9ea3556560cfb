"""OpenTelemetry's log requests (OTLP 1.x) in protobuf to lines of JSON. Pure.

A decoder of its own: the messages are few, and a library builds the whole tree first, which takes fifty times the
memory of a hostile body. Unknown fields are passed over, as protobuf wants. The field numbers are those of
``opentelemetry/proto/logs/v1/logs.proto`` and its imports.

A record becomes text in one pass, without a tree of its values. What senders write in fact, short fields in their usual
encoding, is recognised by its bytes; all else takes the general way, which gives the same.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from itertools import chain
from json.encoder import encode_basestring as quoted
from typing import Any, Final

from logferry.gateway.contract.names import Malformed
from logferry.gateway.receivers.otlp import (
    DEPTH,
    Builder,
    ResourceLines,
    encode,
    finite,
    too_many_values,
    without_nothing,
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# The first bytes of fields: of records, of a text that is field 1, and of the scalars among values.
_RECORD: Final = 0x12
_TIME, _SEVERITY, _BODY, _ATTRIBUTE, _OBSERVED = 0x09, 0x10, 0x2A, 0x32, 0x59
_TEXT, _BOOL, _INT, _DOUBLE = 0x0A, 0x10, 0x18, 0x21
_VALUE: Final = 0x12
# Behind the body, so that the first bytes of a field can be read before its length is known to fit.
_PADDING: Final = bytes(256)
# Names of attributes of one request that are remembered.
_KEYS: Final = 1000
_U64: Final = struct.Struct("<Q").unpack_from
_F64: Final = struct.Struct("<d").unpack_from


class _Key:
    """The name of an attribute of records. ``head``: its bytes up to the length of its value; ``value_at``: where that
    length stands, from the attribute's first byte on; ``name``: as JSON, between a comma and a colon; ``following``:
    the one that came after it last, which mostly comes again."""

    __slots__ = ("following", "head", "name", "value_at")

    def __init__(self, raw: bytes) -> None:
        self.head = bytes((_TEXT, len(raw))) + raw + bytes((_VALUE,)) if len(raw) < 0x80 else b"-"
        self.value_at = len(self.head) + 2
        self.name = f",{quoted(raw.decode())}:"
        self.following = self


def decode_protobuf(body: bytes) -> list[ResourceLines]:
    """The lines of an ExportLogsServiceRequest. Raises Malformed."""
    request = _Request(body)
    try:
        for number, _, value in _fields(request.data, 0, len(body)):
            if number == 1:
                request.resource_logs(*_span(value))
    except UnicodeDecodeError:
        raise Malformed("a text is not UTF-8") from None
    return request.builder.found


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            break
    raise Malformed("a number is cut off or too long")


def _field(data: bytes, at: int, end: int) -> tuple[int, int, Any, int]:
    """Number, wire type and value of a field, and what follows it; of bytes and messages the value is (start, end)."""
    tag = data[at]
    at += 1
    if tag >= 0x80:
        tag, at = _varint(data, at - 1, end)
    number, wire = tag >> 3, tag & 7
    value: Any
    if wire == _BYTES:
        if at < end and data[at] < 0x80:
            size, at = data[at], at + 1
        else:
            size, at = _varint(data, at, end)
        if size > end - at:
            raise Malformed("a field is cut off")
        value, at = (at, at + size), at + size
    elif wire == _VARINT:
        value, at = _varint(data, at, end)
    elif wire in (_FIXED64, _FIXED32):
        size = 8 if wire == _FIXED64 else 4
        if size > end - at:
            raise Malformed("a field is cut off")
        value, at = int.from_bytes(data[at : at + size], "little"), at + size
    else:
        raise Malformed(f"wire type {wire} is not known")
    if not number:
        raise Malformed("a field has the number 0")
    return number, wire, value, at


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, Any]]:
    while at < end:
        number, wire, value, at = _field(data, at, end)
        yield number, wire, value


def _span(value: Any) -> tuple[int, int]:
    if not isinstance(value, tuple):
        raise Malformed("a field has another type than it should")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise Malformed("a field has another type than it should")
    return value


class _Request:
    """The decoding of one request. ``data``: its body, and the padding behind it."""

    __slots__ = ("_first", "_keys", "_text", "builder", "data")

    def __init__(self, body: bytes) -> None:
        self.data, self.builder = body + _PADDING, Builder()
        # A character a byte: right where it is ASCII, and then cheaper to cut.
        self._text = self.data.decode("latin-1")
        self._keys: dict[bytes, _Key] = {}
        # Before the first attribute of a record.
        self._first = _Key(b"")

    def resource_logs(self, start: int, end: int) -> None:
        """Fields are read twice, since what comes first may stand behind."""
        data, attributes = self.data, dict[str, Any]()
        for number, _, value in _fields(data, start, end):
            if number == 1:
                for inner, _, attribute in _fields(data, *_span(value)):
                    if inner == 1:
                        self._attribute(_span(attribute), attributes)
        self.builder.begin(attributes)
        for number, _, value in _fields(data, start, end):
            if number == 2:
                self._scope_logs(*_span(value))

    def _scope_logs(self, at: int, end: int) -> None:
        data, add, record = self.data, self.builder.add, self._record
        scope: dict[str, Any] | None = None
        while at < end:
            if data[at] == _RECORD and data[at + 1] >= 0x80 > data[at + 2]:  # of 128 bytes to 16 KiB
                start = at + 3
                at = start + data[at + 1] + (data[at + 2] - 1 << 7)
                if at > end:
                    raise Malformed("a field is cut off")
                add(record(start, at))
                continue
            number, _, value, at = _field(data, at, end)
            if number == 2:
                add(record(*_span(value)))
            elif number == 1:
                scope = self._scope(_span(value))
        self.builder.end_scope(scope)

    def _scope(self, span: tuple[int, int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        attributes: dict[str, Any] = {}
        for number, _, value in _fields(self.data, *span):
            if number in (1, 2):
                found["name" if number == 1 else "version"] = self._string(value)
            elif number == 3:
                self._attribute(_span(value), attributes)
        return without_nothing({**found, "attributes": attributes})

    def _record(self, at: int, end: int) -> str:
        """As JSON without its last bracket."""
        data, text, builder, key = self.data, self._text, self.builder, self._first
        attributes: dict[str, str] = {}
        body: str | None = None
        time = observed = severity = dropped = flags = 0
        severity_text = event = trace = span = ""
        while at < end:
            tag, size = data[at], data[at + 1]
            if tag == _ATTRIBUTE:
                builder.values_left -= 1
                if builder.values_left < 0:
                    raise too_many_values()
                expected = key.following
                found, after = at + expected.value_at, at + 2 + size
                left = after - found - 3
                # The expected name, and a text up to the end; a negative size is no byte.
                if (
                    size < 0x80
                    and data[found + 2] == left
                    and data[found + 1] == _TEXT
                    and data[found] == left + 2
                    and data.startswith(expected.head, at + 2)
                    and after <= end
                ):
                    value = text[found + 3 : after]
                    if not value.isascii():
                        value = data[found + 3 : after].decode()
                    attributes[expected.name] = quoted(value)
                    at, key = after, expected
                    continue
                _, _, where, at = _field(data, at, end)
                key = self._record_attribute(_span(where), key, attributes)
            elif tag == _TIME and at + 9 <= end:
                (time,) = _U64(data, at + 1)
                at += 9
            elif tag == _OBSERVED and at + 9 <= end:
                (observed,) = _U64(data, at + 1)
                at += 9
            elif tag == _SEVERITY and size < 0x80 and at + 2 <= end:
                severity = size
                at += 2
            else:
                number, _, value, at = _field(data, at, end)
                if number == 5:
                    body = self._scalar(*_span(value)) or encode(self._any(value))
                elif number == 6:
                    builder.count_value()
                    key = self._record_attribute(_span(value), key, attributes)
                elif number == 1:
                    time = _number(value)
                elif number == 2:
                    severity = _number(value)
                elif number == 3:
                    severity_text = self._string(value)
                elif number == 7:
                    dropped = _number(value)
                elif number == 8:
                    flags = _number(value)
                elif number == 9:
                    trace = data[slice(*_span(value))].hex()
                elif number == 10:
                    span = data[slice(*_span(value))].hex()
                elif number == 11:
                    observed = _number(value)
                elif number == 12:
                    event = self._string(value)
        members = [f'"time_unix_nano":{time}'] if time else []
        if observed:
            members.append(f'"observed_time_unix_nano":{observed}')
        if severity:
            members.append(f'"severity_number":{severity}')
        if severity_text:
            members.append(f'"severity_text":{quoted(severity_text)}')
        if event:
            members.append(f'"event_name":{quoted(event)}')
        if body is not None:
            members.append(f'"body":{body}')
        if attributes:
            members.append(f'"attributes":{{{"".join(chain.from_iterable(attributes.items()))[1:]}}}')
        if dropped:
            members.append(f'"dropped_attributes_count":{dropped}')
        if trace:
            members.append(f'"trace_id":"{trace}"')
        if span:
            members.append(f'"span_id":"{span}"')
        if flags:
            members.append(f'"flags":{flags}')
        return "{" + ",".join(members)

    def _record_attribute(self, span: tuple[int, int], before: _Key, into: dict[str, str]) -> _Key:
        """Decodes one of a record, which was counted, after ``before``. Returns its key."""
        data, (start, end) = self.data, span
        value: str | None = None
        size = data[start + 1]
        at = start + 2 + size
        if at + 4 <= end and data[start] == _TEXT and size < 0x80 and data[at] == _VALUE:
            length, after = _varint(data, at + 1, end)
            value = self._scalar(after, end) if after + length == end else None
        if value is None:
            name, found = self._pair(start, end, 0)
            raw, value = name.encode(), encode(found)
        else:
            raw = data[start + 2 : at]
        key = self._keys.get(raw) or _Key(raw)
        into[key.name] = value
        if len(self._keys) < _KEYS or raw in self._keys:
            self._keys[raw] = before.following = key
        return key

    def _scalar(self, at: int, end: int) -> str | None:
        """A value as JSON, where it is a text, a number or a boolean in its usual encoding; None: it is not."""
        data = self.data
        kind, size = data[at], data[at + 1]
        if kind == _TEXT:
            at += 2
            if size >= 0x80:
                size += data[at] - 1 << 7
                if data[at] >= 0x80:
                    return None
                at += 1
            if at + size != end:
                return None
            value = self._text[at:end]
            return quoted(value if value.isascii() else data[at:end].decode())
        if at + 2 == end and size < 0x80:
            if kind == _INT:
                return str(size)
            if kind == _BOOL:
                return "true" if size else "false"
        elif kind == _INT and at + 2 < end:
            number, after = _varint(data, at + 1, end)
            return str(number - (number >> 63 << 64)) if after == end else None
        elif kind == _DOUBLE and at + 9 == end:
            return encode(finite(_F64(data, at + 1)[0]))
        return None

    def _attribute(self, span: tuple[int, int], into: dict[str, Any], depth: int = 0) -> None:
        self.builder.count_value()
        key, value = self._pair(*span, depth)
        into[key] = value

    def _pair(self, start: int, end: int, depth: int) -> tuple[str, Any]:
        key, found = "", None
        for number, _, value in _fields(self.data, start, end):
            if number == 1:
                key = self._string(value)
            elif number == 2:
                found = self._any(_span(value), depth)
        return key, found

    def _string(self, value: Any) -> str:
        start, end = _span(value)
        return self.data[start:end].decode()

    def _any(self, span: tuple[int, int], depth: int = 0) -> Any:
        if depth > DEPTH:
            raise Malformed(f"values are nested more than {DEPTH} deep")
        data = self.data
        found: Any = None
        for number, wire, value in _fields(data, *span):
            if number == 1:
                found = self._string(value)
            elif number == 2:
                found = bool(_number(value))
            elif number == 3:
                found = _number(value)
                found -= (found >> 63) << 64
            elif number == 4 and wire == _FIXED64:
                found = finite(_F64(_number(value).to_bytes(8, "little"))[0])
            elif number == 5:
                found = []
                for field_number, _, inner in _fields(data, *_span(value)):
                    if field_number == 1:
                        self.builder.count_value()
                        found.append(self._any(_span(inner), depth + 1))
            elif number == 6:
                found = {}
                for field_number, _, inner in _fields(data, *_span(value)):
                    if field_number == 1:
                        self._attribute(_span(inner), found, depth + 1)
            elif number == 7:
                start, end = _span(value)
                found = base64.b64encode(data[start:end]).decode()
        return found
