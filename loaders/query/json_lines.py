"""Lines of JSON to typed columns, as Spark's ``from_json`` with `parsing.formats` reads them, without Spark.

A line whose values have all the types of their columns by Arrow's stricter rules is read by Arrow; any other one by
`Values`, with Jackson's rules. `Values` is the rule; a test compares it with Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from logferry.loaders.parsing.columns import MEMBER_KEY, NO_MEMBER, RESCUED_DEPTH, column_type, member_pattern
from logferry.loaders.parsing.settings import RESCUED, ParserSettings
from logferry.loaders.query.jackson import (
    Float,
    Int,
    NotJson,
    Pairs,
    as_string,
    is_variant,
    read_object,
    whole_characters,
)
from logferry.loaders.query.spark_values import day_number, double, exact_decimal, micros, single

NOT_JSON: Final = "the line is not JSON"
NOT_OBJECT: Final = "the JSON is not one object, or a value does not have the type of its column"
NOT_STRICT: Final = (
    "the line has JSON that cannot be rescued: single quotes, NaN, Infinity, text after the object, "
    f"or a value of more than {RESCUED_DEPTH} levels"
)

# A value of JSON that is not null → a value of the column.
Convert = Callable[[Any], Any]


class WrongType(ValueError):
    """A value that does not have the type of its column."""


class Values:
    """The columns of an object."""

    def __init__(self, settings: ParserSettings) -> None:
        self._converts = {name: converter(column_type(kind)) for name, kind in settings.kinds.items()}
        self._none = dict.fromkeys(settings.kinds)
        self._members = Members(settings.kinds) if settings.rescued else None

    def of(self, line: str) -> dict[str, Any] | str:
        """Dates are days, timestamps microseconds; as a string: why the line has no columns."""
        # Spark's reader ignores text after an object, so the loader wants a brace at the end.
        if line.rstrip(" ").endswith("}"):
            try:
                found = _struct(self._converts, self._none, read_object(line))
                return found if self._members is None else found | {RESCUED: self._members.of(line)}
            except NotStrict:
                return NOT_STRICT
            except (NotJson, WrongType):
                pass
        return NOT_OBJECT if is_variant(line) else NOT_JSON

    def rescued(self, lines: pa.StringArray) -> pa.StringArray:
        """The column of lines that Arrow has read."""
        assert self._members is not None
        return pa.array(map(self._members.of, lines.to_pylist()), pa.string())


def _struct(converts: Mapping[str, Convert], none: Mapping[str, None], value: Any) -> dict[str, Any]:
    """Every value must fit, also one that another of the same name replaces."""
    if not isinstance(value, Pairs):
        raise WrongType
    found: dict[str, Any] = dict(none)
    for name, one in value:
        convert = converts.get(name)
        if convert is not None:
            found[name] = None if one is None else convert(one)
    return found


def converter(kind: Any) -> Convert:
    """``kind``: a type of `parsing.columns.column_type`."""
    if isinstance(kind, str):
        if kind.startswith("decimal"):
            precision, scale = kind[8:-1].split(",")
            return partial(_decimal, int(precision), int(scale))
        return _CONVERTS[kind]
    if kind["type"] == "struct":
        fields = {field["name"]: converter(field["type"]) for field in kind["fields"]}
        return partial(_struct, fields, dict.fromkeys(fields))
    inner = converter(kind["elementType" if kind["type"] == "array" else "valueType"])
    return partial(_array if kind["type"] == "array" else _map, inner)


def _array(inner: Convert, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WrongType
    return [None if one is None else inner(one) for one in value]


def _map(inner: Convert, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Pairs):
        raise WrongType
    found: dict[str, Any] = {}
    for name, one in value:
        key = whole_characters(name)
        found.pop(key, None)  # the last one counts, in its place
        found[key] = None if one is None else inner(one)
    return list(found.items())


def _integer(bits: int, value: Any) -> int:
    if not isinstance(value, Int) or len(value) > 20:
        raise WrongType
    number = int(value)
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise WrongType
    return number


_NAMED: Final = {
    **dict.fromkeys(("+INF", "+Infinity", "Infinity"), float("inf")),
    **dict.fromkeys(("-INF", "-Infinity"), float("-inf")),
    "NaN": float("nan"),
}


def _number(parse: Callable[[str], float | None], value: Any) -> float:
    found = None
    if isinstance(value, str):
        number = "0" if value == "-0" else value  # an integer first
        found = parse(number) if isinstance(value, (Int, Float)) else _NAMED.get(value)
    if found is None:
        raise WrongType
    return found


def _decimal(precision: int, scale: int, value: Any) -> Any:
    found = exact_decimal(precision, scale, value) if isinstance(value, str) and value else None
    if found is None:
        raise WrongType
    return found


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise WrongType
    return value


_DAYS: Final = re.compile(r"[+-]?\d+")


def _date(value: Any) -> int:
    if not isinstance(value, str) or isinstance(value, (Int, Float)):
        raise WrongType
    for text in (value, value.replace("GMT", "", 1)):
        if (days := day_number(text)) is not None:
            return days
    # Spark 1.5 wrote a date as its days since 1970.
    if not _DAYS.fullmatch(value) or len(value) > 11 or not -(2**31) <= int(value) < 2**31:
        raise WrongType
    return int(value)


def _timestamp(value: Any) -> int:
    if isinstance(value, Int):
        seconds = _integer(64, value)
        # Java's multiplication overflows without an error.
        return (seconds * 1_000_000 + 2**63) % 2**64 - 2**63
    if not isinstance(value, str) or isinstance(value, Float) or not value:
        raise WrongType
    found = micros(value)
    if found is None:
        found = micros(value.replace("GMT", "", 1))
    if found is None:
        raise WrongType
    return found


_CONVERTS: Final[Mapping[str, Convert]] = {
    "string": as_string,
    "integer": partial(_integer, 32),
    "long": partial(_integer, 64),
    "float": partial(_number, single),
    "double": partial(_number, double),
    "boolean": _boolean,
    "date": _date,
    "timestamp": _timestamp,
}

# ---- the column rescued -------------------------------------------------------------------------------------

_KEY: Final = re.compile(MEMBER_KEY)
_EMPTY: Final = re.compile(NO_MEMBER.replace(r"\z", r"\Z"))


class NotStrict(ValueError):
    """The line has JSON that cannot be rescued."""


class Members:
    """Of lines that Jackson reads. ``names``: the columns, whose keys are not rescued."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        # Each match begins where the one before ended, which Java calls \G.
        self._member = re.compile(member_pattern(names).replace(r"\G", "", 1).replace(r"\z", r"\Z"))

    def of(self, line: str) -> str | None:
        """A JSON object of the other members, None without any. Raises NotStrict."""
        line = line.rstrip(" ")
        found, at = [], 0
        while (match := self._member.match(line, at)) is not None:
            at = match.end()
            if match[1]:
                found.append(match[1])
        if (not at or at < len(line)) and _EMPTY.match(line) is None:
            raise NotStrict
        if len(found) > 1 or (found and "\\" in found[0]):
            last = {_key(member): number for number, member in enumerate(found)}
            kept = sorted(number for key, number in last.items() if key not in self._names)
            found = [found[number] for number in kept]
        return f"{{{','.join(found)}}}" if found else None


def _key(member: str) -> str:
    match = _KEY.match(member)
    assert match is not None
    return whole_characters(json.loads(match[0])) if "\\" in match[0] else match[0][1:-1]


# ---- the fast way -----------------------------------------------------------------------------------------

# Types of which Arrow reads a part of what Spark reads, to the same value, and refuses the rest.
ARROW_READS: Final = {
    "string": pa.string(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
}
# Read as texts, and then by `Values`' rules.
_TEXTS: Final = frozenset(("date", "timestamp"))
# Jackson's limits are above this: digits of a number, levels, characters of a name.
_SHORT: Final = 900
_LEAST: Final = 64
# Arrow takes Inf and -NaN as values, and Jackson does not.
_NOT_FINITE: Final = "NaN|Inf"
# It is an integer, so it has no sign as a double.
_MINUS_ZERO: Final = r"-0[ \t\r,\]}]"


def arrow_schema(kinds: Mapping[str, str]) -> pa.Schema | None:
    """None where a type needs the slow way. Dates and timestamps are texts in it, which `time_of` reads."""
    found = {name: _arrow_reads(column_type(kind)) for name, kind in kinds.items() if kind not in _TEXTS}
    if None in found.values():
        return None
    return pa.schema([(name, found.get(name, pa.string())) for name in kinds])


def _arrow_reads(kind: Any) -> pa.DataType | None:
    if isinstance(kind, str):
        return ARROW_READS.get(kind)
    if kind["type"] == "array":
        inner = _arrow_reads(kind["elementType"])
        return None if inner is None else pa.list_(inner)
    if kind["type"] == "map":
        return None
    fields = [(field["name"], _arrow_reads(field["type"])) for field in kind["fields"]]
    return None if any(inner is None for _, inner in fields) else pa.struct(fields)


def time_of(kind: str, text: str) -> int | None:
    """Days or microseconds of a string in JSON; None: it does not have the type."""
    try:
        return _date(text) if kind == "date" else _timestamp(text)
    except WrongType:
        return None


def read_by_arrow(
    lines: pa.StringArray, schema: pa.Schema, *, is_flat: bool = False
) -> Iterable[tuple[np.ndarray, pa.Table]]:
    """The lines that Arrow reads without doubt, with their indices.

    One object per line is sure if each begins with a brace and ends with one: within one value no ``}`` is followed by
    a ``{``, and a string holds no line feed. A part with a line that Arrow refuses is halved.

    ``is_flat``: those alone that cannot have more than `RESCUED_DEPTH` levels.
    """
    sure = pc.and_(pc.starts_with(lines, "{"), pc.ends_with(lines, "}"))
    sure = pc.and_(sure, pc.less_equal(pc.binary_length(lines), _SHORT))
    sure = pc.and_(sure, pc.invert(pc.match_substring_regex(lines, _NOT_FINITE)))
    if any(kind in str(schema) for kind in ("float", "double")):
        sure = pc.and_(sure, pc.invert(pc.match_substring_regex(lines, _MINUS_ZERO)))
    if is_flat:
        levels = pc.add(pc.count_substring(lines, "{"), pc.count_substring(lines, "["))
        sure = pc.and_(sure, pc.less_equal(levels, RESCUED_DEPTH))
    rows = np.flatnonzero(sure.to_numpy(zero_copy_only=False))
    pending = [rows] if len(rows) else []
    while pending:
        part = pending.pop()
        table = _table(lines.take(pa.array(part)), schema)
        if table is not None:
            yield part, table
        elif len(part) > _LEAST:
            pending += [part[: len(part) // 2], part[len(part) // 2 :]]


def _table(lines: pa.StringArray, schema: pa.Schema) -> pa.Table | None:
    data = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines), "\n")[0].as_buffer()
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        found = pj.read_json(
            pa.BufferReader(data), pj.ReadOptions(use_threads=False, block_size=max(len(data), 1)), options
        )
    except pa.ArrowException:
        return None
    return found if found.num_rows == len(lines) else None
