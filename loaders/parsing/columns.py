"""Types of columns as a configuration names them: ``int``, ``decimal(10,2)``, ``array<struct<a:string>>``. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_SIMPLE: Final[Mapping[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestampType(),
}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_DECIMAL: Final = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)")
_TOKEN: Final = re.compile(r"\s*(?:(decimal\([^)]*\))|([A-Za-z_][A-Za-z0-9_]*)|([<>,:]))")
_DEPTH: Final = 16


def check_name(name: str) -> str:
    """A column's name that every reader of a table can write without quotes. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a column: a letter or _, then letters, digits and _, at most 128")
    return name


def is_simple(kind: DataType) -> bool:
    """One value, such as a text can be read as."""
    return not isinstance(kind, (ArrayType, MapType, StructType))


def column_type(text: str) -> DataType:
    """Raises ValueError, which says what is not a type."""
    tokens = _tokens(text)
    kind = _take(tokens, text, 0)
    if tokens:
        raise ValueError(f"{text!r} is not a type: {tokens[-1]!r} is too much")
    return kind


def _tokens(text: str) -> list[str]:
    """The last one first, so that they can be popped."""
    found, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text!r} is not a type: what is {text[position:]!r}?")
        found.append(match[1] or match[2] or match[3])
        position = match.end()
    return found[::-1]


def _take(tokens: list[str], text: str, depth: int) -> DataType:
    word = _next(tokens, text)
    if depth > _DEPTH:
        raise ValueError(f"{text!r} goes deeper than {_DEPTH}")
    if (decimal := _DECIMAL.fullmatch(word)) is not None:
        precision, scale = int(decimal[1]), int(decimal[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise ValueError(f"{word} is not a type: decimal(1 to 38 digits, of which so many after the point)")
        return DecimalType(precision, scale)
    if word in _SIMPLE:
        return _SIMPLE[word]
    if word == "array":
        _expect(tokens, "<", text)
        element = _take(tokens, text, depth + 1)
        _expect(tokens, ">", text)
        return ArrayType(element)
    if word == "map":
        _expect(tokens, "<", text)
        _expect(tokens, "string", text)
        _expect(tokens, ",", text)
        value = _take(tokens, text, depth + 1)
        _expect(tokens, ">", text)
        return MapType(StringType(), value)
    if word == "struct":
        return _struct(tokens, text, depth)
    known = ", ".join([*_SIMPLE, "decimal(p,s)", "array<…>", "map<string,…>", "struct<name:…>"])
    raise ValueError(f"{word!r} is not a type; there are {known}")


def _struct(tokens: list[str], text: str, depth: int) -> StructType:
    fields: list[StructField] = []
    _expect(tokens, "<", text)
    while True:
        name = check_name(_next(tokens, text))
        _expect(tokens, ":", text)
        fields.append(StructField(name, _take(tokens, text, depth + 1)))
        if (mark := _next(tokens, text)) == ">":
            break
        if mark != ",":
            raise ValueError(f"{text!r} is not a type: {mark!r} where , or > is expected")
    if len({field.name.lower() for field in fields}) != len(fields):
        raise ValueError(f"{text!r} has a field twice")
    return StructType(fields)


def _next(tokens: list[str], text: str) -> str:
    if not tokens:
        raise ValueError(f"{text!r} is not a type: it ends too early")
    return tokens.pop()


def _expect(tokens: list[str], want: str, text: str) -> None:
    have = _next(tokens, text)
    if have != want:
        raise ValueError(f"{text!r} is not a type: {have!r} where {want} is expected")
