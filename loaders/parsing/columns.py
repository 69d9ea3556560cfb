"""Types of columns as a configuration names them: ``int``, ``decimal(10,2)``, ``array<struct<a:string>>``. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

# A type as Delta and Spark write it in the JSON of a schema: a name, or an object for what holds other types.
ColumnType = str | dict[str, Any]

# Date columns by which a table may be partitioned → the column they are made from.
DATES: Final = {"event_date": "event_time", "recorded_date": "recorded"}
# The end of the year 9999, the last that every reader of the table can show; later values become null.
LAST_MS: Final = 253_402_300_799_999

_SIMPLE: Final[Mapping[str, ColumnType]] = {
    "string": "string",
    "int": "integer",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp",
}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_DECIMAL: Final = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)")
_TOKEN: Final = re.compile(r"\s*(?:(decimal\([^)]*\))|([A-Za-z_][A-Za-z0-9_]*)|([<>,:]))")
_DEPTH: Final = 16


def check_name(name: str) -> str:
    """Checks that every reader of a table can use the column's name without quotes. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a column: a letter or _, then letters, digits and _, at most 128")
    return name


def schema_field(name: str, kind: ColumnType) -> dict[str, Any]:
    """A column as a field of a schema's JSON."""
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def column_type(text: str) -> ColumnType:
    """The type that the text describes. Raises ValueError with the part that is not a type."""
    tokens = _tokens(text)
    kind = _take(tokens, text, 0)
    if tokens:
        raise ValueError(f"{text!r} is not a type: unexpected {tokens[-1]!r}")
    return kind


def _tokens(text: str) -> list[str]:
    """The last one first, so that they can be popped."""
    found, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text!r} is not a type: {text[position:]!r} is unknown")
        found.append(match[1] or match[2] or match[3])
        position = match.end()
    return found[::-1]


def _take(tokens: list[str], text: str, depth: int) -> ColumnType:
    word = _next(tokens, text)
    if depth > _DEPTH:
        raise ValueError(f"{text!r} is not a type: more than {_DEPTH} levels")
    if (decimal := _DECIMAL.fullmatch(word)) is not None:
        precision, scale = int(decimal[1]), int(decimal[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise ValueError(f"{word} is not a type: decimal(digits, at most 38; of these after the point)")
        return f"decimal({precision},{scale})"
    if word in _SIMPLE:
        return _SIMPLE[word]
    if word == "array":
        _expect(tokens, text, "<")
        element = _take(tokens, text, depth + 1)
        _expect(tokens, text, ">")
        return {"type": "array", "elementType": element, "containsNull": True}
    if word == "map":
        _expect(tokens, text, "<", "string", ",")
        value = _take(tokens, text, depth + 1)
        _expect(tokens, text, ">")
        return {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": True}
    if word == "struct":
        return _struct(tokens, text, depth)
    known = ", ".join([*_SIMPLE, "decimal(p,s)", "array<…>", "map<string,…>", "struct<name:…>"])
    raise ValueError(f"{word!r} is not a type; types are {known}")


def _struct(tokens: list[str], text: str, depth: int) -> ColumnType:
    fields: list[dict[str, Any]] = []
    _expect(tokens, text, "<")
    while True:
        name = check_name(_next(tokens, text))
        _expect(tokens, text, ":")
        fields.append(schema_field(name, _take(tokens, text, depth + 1)))
        if (mark := _next(tokens, text)) == ">":
            break
        if mark != ",":
            raise ValueError(f"{text!r} is not a type: {mark!r} where , or > is expected")
    if len({field["name"].lower() for field in fields}) != len(fields):
        raise ValueError(f"{text!r} has a field twice")
    return {"type": "struct", "fields": fields}


def _next(tokens: list[str], text: str) -> str:
    if not tokens:
        raise ValueError(f"{text!r} is not a type: it ends too early")
    return tokens.pop()


def _expect(tokens: list[str], text: str, *wanted: str) -> None:
    for want in wanted:
        if (have := _next(tokens, text)) != want:
            raise ValueError(f"{text!r} is not a type: {have!r} where {want} is expected")
