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
_OUTER: Final = re.compile(r"(array|map|struct)\s*<(.*)>", re.DOTALL)
_DEPTH: Final = 16


def check_name(name: str) -> str:
    """Checks that every reader of a table can use the column's name without quotes. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a column: a letter or _, then letters, digits and _, at most 128")
    return name


def schema_field(name: str, kind: ColumnType) -> dict[str, Any]:
    """A column as a field of a schema's JSON."""
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def column_type(text: str, depth: int = 0) -> ColumnType:
    """The type that the text describes. Raises ValueError with the part that is not a type."""
    word = text.strip()
    if depth > _DEPTH:
        raise ValueError(f"{word!r} is not a type: more than {_DEPTH} levels")
    if (decimal := _DECIMAL.fullmatch(word)) is not None:
        precision, scale = int(decimal[1]), int(decimal[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise ValueError(f"{word} is not a type: decimal(digits, at most 38; of these after the point)")
        return f"decimal({precision},{scale})"
    if word in _SIMPLE:
        return _SIMPLE[word]
    outer = _OUTER.fullmatch(word)
    parts = _split(outer[2]) if outer is not None else []
    if outer is not None and outer[1] == "struct":
        return _struct(word, parts, depth)
    if outer is not None and outer[1] == "array" and len(parts) == 1:
        return {"type": "array", "elementType": column_type(parts[0], depth + 1), "containsNull": True}
    if outer is not None and outer[1] == "map" and len(parts) == 2 and parts[0].strip() == "string":
        value = column_type(parts[1], depth + 1)
        return {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": True}
    known = ", ".join([*_SIMPLE, "decimal(p,s)", "array<…>", "map<string,…>", "struct<name:…>"])
    raise ValueError(f"{word!r} is not a type; types are {known}")


def _struct(text: str, parts: list[str], depth: int) -> ColumnType:
    fields = []
    for part in parts:
        name, _, kind = part.partition(":")
        fields.append(schema_field(check_name(name.strip()), column_type(kind, depth + 1)))
    if len({field["name"].lower() for field in fields}) != len(fields):
        raise ValueError(f"{text!r} has a field twice")
    return {"type": "struct", "fields": fields}


def _split(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, level, start = [], 0, 0
    for position, letter in enumerate(text):
        level += (letter in "<(") - (letter in ">)")
        if letter == "," and not level:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]
