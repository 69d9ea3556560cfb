r"""The columns of lines: their types as configured, groups of regular expressions, and those of access logs. Pure.

Java's group names have no ``_``, and Java lists them only from version 20 on; so groups are counted here, and Java gets
numbers. Java reports other mistakes in a pattern when the job starts.

An access log has host, identity, user, [time], "request", status, bytes; in the combined format "referer" and "user
agent". The parser in Python is for records that are not loaded yet. Java and Python interpret the pattern alike if
Python's ``\d`` and ``\S`` are limited to ASCII. The other differences (where ``.`` stops, how a time is parsed) are
implemented here; a test compares both on lines made to differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final, NamedTuple

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


_GROUP: Final = "[a-zA-Z_][a-zA-Z0-9_]*"
# Quoted text, a reference to a group, an escaped character, a named group, another parenthesis, or any character.
_TOKEN: Final = re.compile(
    rf"\\Q.*?(?:\\E|\Z)|\\k<(?P<again>{_GROUP})>|\\.?|\(\?<(?P<named>{_GROUP})>|\(\??|.", re.DOTALL
)


class NumberedPattern(NamedTuple):
    """``pattern`` with numbered groups only. ``groups``: name → number, in order."""

    pattern: str
    groups: Mapping[str, int]


def named_groups(pattern: str) -> NumberedPattern:
    """Parentheses in character classes, after backslashes and in ``\\Q…\\E`` are not groups. Raises ValueError for a
    duplicate name, or a reference to an unknown one.
    """
    found: dict[str, int] = {}
    number = classes = 0

    def plain(token: re.Match[str]) -> str:
        nonlocal number, classes
        text, again, name = token[0], token["again"], token["named"]
        if again is not None:
            if again not in found:
                raise ValueError(f"\\k<{again}> does not refer to a group before it")
            return f"(?:\\{found[again]})"
        classes = max(0, classes + (text == "[") - (text == "]"))
        if classes or (name is None and text != "("):
            return text
        number += 1
        if name in found:
            raise ValueError(f"the group {name} is defined twice")
        if name is not None:
            found[name] = number
        return "("

    return NumberedPattern(_TOKEN.sub(plain, pattern), found)


# ---- members of a JSON object -------------------------------------------------------------------------------

# The most objects and arrays, one in the other, in a value that is rescued.
RESCUED_DEPTH: Final = 64
_TEXT: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BLANK: Final = r"[ \t\r]*+"


def _value(depth: int) -> str:
    """Jackson has checked the grammar of the line, so braces and brackets need no distinction. The characters leave
    out what Jackson takes beyond JSON: single quotes, NaN and Infinity."""
    inner = ""
    for _ in range(depth):
        inner = rf"|[{{\[](?:[-+0-9.eEtrufalsn,: \t\r]++|{_TEXT}{inner})*+[}}\]]"
    return rf"(?:[-+0-9.eEtrufalsn]++|{_TEXT}{inner})"


def member_pattern(names: Iterable[str]) -> str:
    """One member of an object, from the end of the one before; group 1 is its text unless its key is one of the names.

    The comma or brace after it belongs to it, and the brace before the first one. With the brace the text ends: Jackson
    does not look at what comes after an object.
    """
    member = rf"{_BLANK}:{_BLANK}{_value(RESCUED_DEPTH)}"
    named, other = rf'"(?:{"|".join(names)})"{member}', rf"({_TEXT}{member})"
    return rf"(?s)\G(?:{_BLANK}\{{)?+{_BLANK}(?>{named}|{other}){_BLANK}(?:,|\}}\z)"


ESCAPED_KEY: Final = r'\A"[^"\\]*+\\'
MEMBER_KEY: Final = rf"(?s)\A{_TEXT}"
NO_MEMBER: Final = rf"\A{_BLANK}\{{{_BLANK}\}}\z"


# ---- access logs --------------------------------------------------------------------------------------------

_INSIDE: Final = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
ACCESS_LINE: Final = (
    r"(?<remote_host>\S++) (?<ident>\S++) (?<user>.+?) \[(?<time>[^\]]++)\] "
    rf'"(?<request>{_INSIDE})" (?<status>\d{{3}}|-) (?<body_bytes>\d++|-)'
    rf'(?: "(?<referer>{_INSIDE})" "(?<user_agent>{_INSIDE})")?+ ?+'
)
REQUEST: Final = r"\A([A-Za-z0-9_-]+) (.+?)(?: ([A-Za-z]+/[0-9.]+))?\z"
REQUEST_PARTS: Final = {"method": 1, "path": 2, "protocol": 3}
TIME: Final = "dd/MMM/yyyy:HH:mm:ss Z"

MARK: Final = "\x01"

_PLAIN, _GROUPS = named_groups(ACCESS_LINE)
_LINE: Final = re.compile(_PLAIN, re.ASCII | re.DOTALL)
_REQUEST: Final = re.compile(REQUEST.replace(r"\z", r"\Z").replace(".+?", r"[^\n\r\u0085\u2028\u2029]+?"))
_SPACES: Final = re.compile(r"\s+", re.ASCII)
_TIME: Final = re.compile(
    r"(\d\d)/([A-Z]{3})/(\d{4}):(\d\d):(\d\d):(\d\d) ([+-])(\d\d)(\d\d)", re.ASCII | re.IGNORECASE
)
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_FAREST: Final = timedelta(hours=18)
_BIGINT: Final = 2**63 - 1


def access_columns(text: str) -> dict[str, Any] | None:
    """The columns of a line and ``event_time``; None: the line goes to the quarantine."""
    line = text.removesuffix("\r")
    if MARK in line:
        return None
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    found: dict[str, Any] = {name: match[number] or "" for name, number in _GROUPS.items()}
    found["status"] = None if found["status"] == "-" else int(found["status"])
    found["body_bytes"] = None if found["body_bytes"] == "-" else int(found["body_bytes"])
    if (found["body_bytes"] or 0) > _BIGINT:
        return None
    request = _REQUEST.search(found["request"])
    for name, number in REQUEST_PARTS.items():
        found[name] = request[number] if request is not None else None
    found["event_time"] = _time(found["time"])
    return None if found["event_time"] is None else found


def _time(said: str) -> datetime | None:
    match = _TIME.fullmatch(_SPACES.sub(" ", said).strip(" "))
    if match is None or match[2].lower() not in _MONTHS:
        return None
    offset = timedelta(hours=int(match[8]), minutes=int(match[9])) * (-1 if match[7] == "-" else 1)
    if abs(offset) > _FAREST or int(match[9]) > 59:
        return None
    day, year, hour, minute, second = (int(match[number]) for number in (1, 3, 4, 5, 6))
    month = _MONTHS.index(match[2].lower()) + 1
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=timezone(offset)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
