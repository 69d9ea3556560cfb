"""OpenTelemetry's log requests (OTLP 1.x), in protobuf and JSON, to lines of JSON. Pure.

A decoder of its own: the messages are few, and a library builds the whole tree first, which takes fifty times the
memory of a hostile body. Unknown fields are passed over, as protobuf wants. The field numbers are those of
``opentelemetry/proto/logs/v1/logs.proto`` and its imports.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from logferry.gateway.contract.names import MAX_ATTRIBUTE_VALUE_BYTES, Malformed

# The first bytes of a text that is field 1, and of a message that is field 2.
_TEXT_1, _MESSAGE_2 = 0x0A, 0x12
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_RECORDS: Final = 100_000
_RESOURCES: Final = 10_000
_LINES_BYTES: Final = 1 << 26
_DEPTH: Final = 32
# Commas, colons and brackets of a JSON body, as in other formats.
_TOKENS: Final = 1_000_000
# Attributes and elements of arrays in protobuf, where each may have two bytes: what is parsed has hundreds.
_VALUES: Final = 500_000
_ATTRIBUTES: Final = 60
_NAME: Final = re.compile(r"[a-z0-9._-]{1,64}\Z")
_DOUBLE: Final = struct.Struct("<d")
_HEX: Final = re.compile(r"[0-9a-fA-F]*\Z")


@dataclass(slots=True)
class ResourceLines:
    """The records of one resource, each a line without its newline. ``attributes``: those that fit a chunk's."""

    attributes: dict[str, str] = field(default_factory=dict)
    lines: list[bytes] = field(default_factory=list)

    def name(self, *attributes: str) -> str | None:
        """The first of these attributes that there is."""
        return next((self.attributes[name] for name in attributes if self.attributes.get(name)), None)


class _Builder:
    """Puts the resources together, within limits. Both encodings use it, so that both give the same lines."""

    def __init__(self) -> None:
        self.found: list[ResourceLines] = []
        self._records = self._bytes = 0
        self._values = _VALUES

    def count_value(self) -> None:
        """Of protobuf; the values of JSON are limited before it is parsed."""
        self._values -= 1
        if self._values < 0:
            raise Malformed(f"more than {_VALUES} values in one request")

    def resource(self, attributes: dict[str, Any]) -> Callable[[dict[str, Any] | None, dict[str, Any]], None]:
        """Begins a resource; returns what takes its records: (scope, record)."""
        if len(self.found) >= _RESOURCES:
            raise Malformed(f"more than {_RESOURCES} resources in one request")
        kept = ResourceLines()
        self.found.append(kept)
        rest: dict[str, Any] = {}
        for name, value in attributes.items():
            text = value if isinstance(value, str) else json.dumps(value)
            fits = len(kept.attributes) < _ATTRIBUTES and _NAME.match(name.lower()) is not None
            if fits and name.lower() not in kept.attributes and len(text.encode()) <= MAX_ATTRIBUTE_VALUE_BYTES:
                kept.attributes[name.lower()] = text
            else:
                rest[name] = value
        more = {"resource": rest} if rest else {}

        def add(scope: dict[str, Any] | None, record: dict[str, Any]) -> None:
            self._records += 1
            if self._records > _RECORDS:
                raise Malformed(f"more than {_RECORDS} records in one request")
            line = {**record, **({"scope": scope} if scope else {}), **more}
            encoded = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode()
            self._bytes += len(encoded)
            if self._bytes > _LINES_BYTES:
                # Scope and resource stand in each line, so that a small request may become large ones.
                raise Malformed(f"the records have more than {_LINES_BYTES} bytes as lines")
            kept.lines.append(encoded)

        return add


# ---- protobuf ---------------------------------------------------------------------------------------------------


def decode_protobuf(body: bytes) -> list[ResourceLines]:
    """The lines of an ExportLogsServiceRequest. Raises Malformed."""
    builder = _Builder()
    try:
        for number, _, value in _fields(body, 0, len(body)):
            if number == 1:
                _resource_logs(body, _span(value), builder)
    except UnicodeDecodeError:
        raise Malformed("a text is not UTF-8") from None
    return builder.found


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


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of each field; of bytes and messages the value is (start, end)."""
    while at < end:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(data, at - 1, end)
        number, wire = tag >> 3, tag & 7
        if wire == _BYTES:
            if at < end and data[at] < 0x80:
                size, at = data[at], at + 1
            else:
                size, at = _varint(data, at, end)
            if size > end - at:
                raise Malformed("a field is cut off")
            yield number, wire, (at, at + size)
            at += size
        elif wire == _VARINT:
            value, at = _varint(data, at, end)
            yield number, wire, value
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
            if size > end - at:
                raise Malformed("a field is cut off")
            yield number, wire, int.from_bytes(data[at : at + size], "little")
            at += size
        else:
            raise Malformed(f"wire type {wire} is not known")
        if not number:
            raise Malformed("a field has the number 0")


def _span(value: Any) -> tuple[int, int]:
    if not isinstance(value, tuple):
        raise Malformed("a field has another type than it should")
    return value


def _text(data: bytes, value: Any) -> str:
    start, end = _span(value)
    return data[start:end].decode()


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise Malformed("a field has another type than it should")
    return value


def _resource_logs(data: bytes, span: tuple[int, int], builder: _Builder) -> None:
    """Fields are read twice, since what comes first may stand behind: a list of them could be large."""
    attributes: dict[str, Any] = {}
    for number, _, value in _fields(data, *span):
        if number == 1:
            for inner, _, attribute in _fields(data, *_span(value)):
                if inner == 1:
                    _attribute(data, _span(attribute), attributes, builder)
    add = builder.resource(attributes)
    for number, _, value in _fields(data, *span):
        if number == 2:
            scope_span = _span(value)
            scope: dict[str, Any] | None = None
            for inner, _, found in _fields(data, *scope_span):
                if inner == 1:
                    scope = _scope(data, _span(found), builder)
            for inner, _, found in _fields(data, *scope_span):
                if inner == 2:
                    add(scope, _record(data, _span(found), builder))


def _scope(data: bytes, span: tuple[int, int], builder: _Builder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for number, _, value in _fields(data, *span):
        if number in (1, 2):
            found["name" if number == 1 else "version"] = _text(data, value)
        elif number == 3:
            _attribute(data, _span(value), attributes, builder)
    return _without_nothing({**found, "attributes": attributes})


_NUMBERS: Final = {
    1: "time_unix_nano",
    2: "severity_number",
    7: "dropped_attributes_count",
    8: "flags",
    11: "observed_time_unix_nano",
}
_ORDER: Final = (
    *("name", "version", "time_unix_nano", "observed_time_unix_nano", "severity_number", "severity_text", "event_name"),
    *("body", "attributes", "dropped_attributes_count", "trace_id", "span_id", "flags"),
)
_TEXTS: Final = {3: "severity_text", 12: "event_name"}
_IDS: Final = {9: "trace_id", 10: "span_id"}


def _record(data: bytes, span: tuple[int, int], builder: _Builder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for number, _, value in _fields(data, *span):
        if number == 6:
            _attribute(data, _span(value), attributes, builder)
        elif number == 5:
            found["body"] = _any(data, _span(value), builder)
        elif number in _NUMBERS:
            found[_NUMBERS[number]] = _number(value)
        elif number in _TEXTS:
            found[_TEXTS[number]] = _text(data, value)
        elif number in _IDS:
            start, end = _span(value)
            found[_IDS[number]] = data[start:end].hex()
    return _without_nothing({**found, "attributes": attributes})


def _without_nothing(found: dict[str, Any]) -> dict[str, Any]:
    """In one order, without what is 0, empty or missing: protobuf does not tell them apart."""
    order = (name for name in _ORDER if name in found)
    return {name: found[name] for name in order if name == "body" or found[name] not in (0, "", {}, None)}


def _attribute(data: bytes, span: tuple[int, int], into: dict[str, Any], builder: _Builder, depth: int = 0) -> None:
    builder.count_value()
    start, end = span
    if end - start > 5 and data[start] == _TEXT_1 and data[start + 1] < 0x80:
        # The usual form: a name and a text, both short. It saves two thirds of the time of a record.
        at = start + 2 + data[start + 1]
        is_text = at + 4 <= end and data[at] == _MESSAGE_2 and data[at + 1] == end - at - 2 < 0x80
        if is_text and data[at + 2] == _TEXT_1 and data[at + 3] == end - at - 4:
            into[data[start + 2 : at].decode()] = data[at + 4 : end].decode()
            return
    key, found = "", None
    for number, _, value in _fields(data, *span):
        if number == 1:
            key = _text(data, value)
        elif number == 2:
            found = _any(data, _span(value), builder, depth)
    into[key] = found


def _any(data: bytes, span: tuple[int, int], builder: _Builder, depth: int = 0) -> Any:
    if depth > _DEPTH:
        raise Malformed(f"values are nested more than {_DEPTH} deep")
    found: Any = None
    for number, wire, value in _fields(data, *span):
        if number == 1:
            found = _text(data, value)
        elif number == 2:
            found = bool(_number(value))
        elif number == 3:
            found = _number(value)
            found -= (found >> 63) << 64
        elif number == 4 and wire == _FIXED64:
            found = _double(_DOUBLE.unpack(_number(value).to_bytes(8, "little"))[0])
        elif number == 5:
            found = []
            for field_number, _, inner in _fields(data, *_span(value)):
                if field_number == 1:
                    builder.count_value()
                    found.append(_any(data, _span(inner), builder, depth + 1))
        elif number == 6:
            found = {}
            for field_number, _, inner in _fields(data, *_span(value)):
                if field_number == 1:
                    _attribute(data, _span(inner), found, builder, depth + 1)
        elif number == 7:
            start, end = _span(value)
            found = base64.b64encode(data[start:end]).decode()
    return found


def _double(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


# ---- JSON -------------------------------------------------------------------------------------------------------


def decode_json(body: bytes) -> list[ResourceLines]:
    """The lines of an ExportLogsServiceRequest in OTLP's JSON. Raises Malformed."""
    if sum(map(body.count, (b",", b":", b"[", b"{"))) > _TOKENS:
        raise Malformed(f"more than {_TOKENS} values and keys in one request")
    try:
        read = json.loads(body)
        if not isinstance(read, dict):
            raise Malformed("the body is not a JSON object")
        builder = _Builder()
        for resource_logs in _list(read, "resourceLogs"):
            resource = resource_logs.get("resource") or {}
            add = builder.resource(_json_attributes(_list(resource, "attributes"), 0))
            for scope_logs in _list(resource_logs, "scopeLogs"):
                scope = scope_logs.get("scope") or {}
                said: dict[str, Any] = {
                    "name": str(scope.get("name") or ""),
                    "version": str(scope.get("version") or ""),
                }
                said["attributes"] = _json_attributes(_list(scope, "attributes"), 0)
                for record in _list(scope_logs, "logRecords"):
                    add(_without_nothing(said), _json_record(record))
        return builder.found
    except Malformed:
        raise
    except (ValueError, OverflowError, RecursionError, AttributeError, TypeError) as error:
        raise Malformed(f"not a log request in OTLP's JSON: {error}") from None


def _list(of: dict[str, Any], name: str) -> list[Any]:
    found = of.get(name) or []
    if not isinstance(found, list):
        raise Malformed(f"{name} is not a list")
    return found


def _json_record(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("time_unix_nano", "observed_time_unix_nano", "dropped_attributes_count", "flags", "severity_number"):
        value = record.get(_camel(name)) or 0
        # An enum may be its name; a number of 64 bits is text.
        found[name] = value if name == "severity_number" and isinstance(value, str) else _integer(value, 0, 64)
    for name in ("severity_text", "event_name"):
        found[name] = str(record.get(_camel(name)) or "")
    for name in ("trace_id", "span_id"):
        found[name] = str(record.get(_camel(name)) or "").lower()
        if not _HEX.match(found[name]):
            raise Malformed(f"{_camel(name)} is not hexadecimal")
    if record.get("body") is not None:
        found["body"] = _json_any(record["body"], 0)
    return _without_nothing({**found, "attributes": _json_attributes(_list(record, "attributes"), 0)})


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _json_attributes(attributes: list[Any], depth: int) -> dict[str, Any]:
    return {str(one.get("key") or ""): _json_any(one.get("value") or {}, depth) for one in attributes}


def _integer(said: Any, signs: int, bits: int) -> int:
    """``signs``: 1 where it may be negative."""
    number = int(said)
    if not -signs << bits <= number < 1 << bits:
        raise Malformed("a number has more than 64 bits, or is negative and must not be")
    return number


def _json_any(value: dict[str, Any], depth: int) -> Any:
    if depth > _DEPTH:
        raise Malformed(f"values are nested more than {_DEPTH} deep")
    for name, said in value.items():
        if name in ("stringValue", "bytesValue"):
            return str(said)
        if name == "boolValue":
            if not isinstance(said, bool):
                raise Malformed("a boolValue is not true or false")
            return said
        if name == "intValue":
            return _integer(said, 1, 63)
        if name == "doubleValue":
            return _double(float(said))
        if name == "arrayValue":
            return [_json_any(one, depth + 1) for one in _list(said, "values")]
        if name == "kvlistValue":
            return _json_attributes(_list(said, "values"), depth + 1)
    return None
