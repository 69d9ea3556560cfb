"""OpenTelemetry's log requests (OTLP 1.x) to lines of JSON: how a line is put together, and OTLP's JSON. Pure.

A line has the record's members in one order, then the scope's, then those of the resource that fit no chunk. What is
0, empty or missing is left out, since protobuf does not tell them apart.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

from logferry.gateway.contract.names import MAX_ATTRIBUTE_VALUE_BYTES, Malformed

_RECORDS: Final = 100_000
_RESOURCES: Final = 10_000
_LINES_BYTES: Final = 1 << 26
DEPTH: Final = 32
# Commas, colons and brackets of a JSON body, as in other formats.
_TOKENS: Final = 1_000_000
# Attributes and elements of arrays in protobuf, where each may have two bytes: what is parsed has hundreds.
_VALUES: Final = 500_000
_ATTRIBUTES: Final = 60
_NAME: Final = re.compile(r"[a-z0-9._-]{1,64}\Z")
_HEX: Final = re.compile(r"[0-9a-fA-F]*\Z")
_ORDER: Final = (
    *("name", "version", "time_unix_nano", "observed_time_unix_nano", "severity_number", "severity_text", "event_name"),
    *("body", "attributes", "dropped_attributes_count", "trace_id", "span_id", "flags"),
)
# An encoder is made once: `json.dumps` makes one for each call.
encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class ResourceLines:
    """The records of one resource, each a line without its newline. ``attributes``: those that fit a chunk's."""

    attributes: dict[str, str] = field(default_factory=dict)
    lines: list[bytes] = field(default_factory=list)

    def name(self, *attributes: str) -> str | None:
        """The first of these attributes that there is."""
        return next((self.attributes[name] for name in attributes if self.attributes.get(name)), None)


class Builder:
    """Puts the resources together, within limits. Both encodings use it, so that both give the same lines.

    A resource begins, its records follow, and each scope ends those before it.
    """

    __slots__ = ("_bytes", "_heads", "_more", "_records", "found", "values_left")

    def __init__(self) -> None:
        self.found: list[ResourceLines] = []
        self.values_left = _VALUES
        self._records = self._bytes = 0
        # Of the present scope: each record as JSON without its last bracket.
        self._heads: list[bytes] = []
        self._more: dict[str, Any] = {}

    def count_value(self) -> None:
        """Of protobuf; the values of JSON are limited before it is parsed."""
        self.values_left -= 1
        if self.values_left < 0:
            raise too_many_values()

    def begin(self, attributes: dict[str, Any]) -> None:
        """Begins a resource."""
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
        self._more = {"resource": rest} if rest else {}

    def add(self, head: str) -> None:
        """A record as JSON without its last bracket."""
        self._records += 1
        if self._records > _RECORDS:
            raise Malformed(f"more than {_RECORDS} records in one request")
        encoded = head.encode()
        self._bytes += len(encoded) + 1
        if self._bytes > _LINES_BYTES:
            raise _too_large()
        self._heads.append(encoded)

    def end_scope(self, scope: dict[str, Any] | None) -> None:
        """The records since the last one are of this scope; None: of none."""
        heads, self._heads = self._heads, []
        members = {**({"scope": scope} if scope else {}), **self._more}
        if heads and members:
            bare = encode(members).encode()[1:]
            tail = b"," + bare
            # Scope and resource stand in each line, so that a small request may become large ones.
            self._bytes += sum(len(bare if head == b"{" else tail) - 1 for head in heads)
            if self._bytes > _LINES_BYTES:
                raise _too_large()
            lines = [head + (bare if head == b"{" else tail) for head in heads]
        else:
            lines = [head + b"}" for head in heads]
        self.found[-1].lines += lines


def too_many_values() -> Malformed:
    return Malformed(f"more than {_VALUES} values in one request")


def _too_large() -> Malformed:
    return Malformed(f"the records have more than {_LINES_BYTES} bytes as lines")


def without_nothing(found: dict[str, Any]) -> dict[str, Any]:
    """In one order, without what is 0, empty or missing."""
    order = (name for name in _ORDER if name in found)
    return {name: found[name] for name in order if name == "body" or found[name] not in (0, "", {}, None)}


def finite(value: float) -> float | str:
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
        builder = Builder()
        for resource_logs in _list(read, "resourceLogs"):
            resource = resource_logs.get("resource") or {}
            builder.begin(_json_attributes(_list(resource, "attributes"), 0))
            for scope_logs in _list(resource_logs, "scopeLogs"):
                scope = scope_logs.get("scope") or {}
                said: dict[str, Any] = {
                    "name": str(scope.get("name") or ""),
                    "version": str(scope.get("version") or ""),
                }
                said["attributes"] = _json_attributes(_list(scope, "attributes"), 0)
                for record in _list(scope_logs, "logRecords"):
                    builder.add(encode(_json_record(record))[:-1])
                builder.end_scope(without_nothing(said))
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
    return without_nothing({**found, "attributes": _json_attributes(_list(record, "attributes"), 0)})


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
    if depth > DEPTH:
        raise Malformed(f"values are nested more than {DEPTH} deep")
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
            return finite(float(said))
        if name == "arrayValue":
            return [_json_any(one, depth + 1) for one in _list(said, "values")]
        if name == "kvlistValue":
            return _json_attributes(_list(said, "values"), depth + 1)
    return None
