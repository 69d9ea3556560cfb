"""Lines to the columns of a table's parser with Arrow, without Spark: the rules of `parsing`, a second time.

`parse_lines` is the whole of it for one array of lines, such as for a check of stored columns. Columns and verdicts are
equal to those of the loader; a test loads the same lines by Spark. A parser of which this cannot be said is refused
when the `LineParser` is made, by the part of its settings.

What a text becomes depends on nothing else, so each distinct text is cast once per batch; common forms of numbers are
cast by Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.parsing.columns import column_type
from logferry.loaders.parsing.settings import RESCUED, ParserSettings
from logferry.loaders.query.access_lines import AccessLines
from logferry.loaders.query.java_times import Reader, event_times, needs_made
from logferry.loaders.query.json_lines import ARROW_READS, NOT_OBJECT, Values, arrow_schema, read_by_arrow, time_of
from logferry.loaders.query.line_texts import (
    FIELDS,
    DelimitedLines,
    Format,
    LogfmtLines,
    PatternLines,
    Texts,
    split_lines,
)
from logferry.loaders.query.spark_values import caster, decimal_digits, double_text

NOT_UTF8: Final = "the line is not UTF-8"
NO_TIME: Final = "the time of the event is missing or of no known format"
EVENT_TIME: Final = "event_time"
# Texts that mean null in columns that are not text.
_NOTHING: Final = pa.array(["", "-"])
TIMESTAMP: Final = pa.timestamp("us", "UTC")

_TYPES: Final[Mapping[str, pa.DataType]] = {**ARROW_READS, "date": pa.date32(), "timestamp": TIMESTAMP}


class Group(NamedTuple):
    """Rows: the indices of their lines, and their columns in this order."""

    rows: np.ndarray
    columns: dict[str, pa.Array]


def parse_lines(
    lines: pa.Array, settings: ParserSettings, made: pa.Array, wanted: Collection[str] | None = None
) -> tuple[pa.Table, pa.Array]:
    """The parser's columns of each line, and why a line has none, as in the quarantine; null: it is a row.

    ``lines``: binary, each without its newline. ``made``: for each the microseconds at which its chunk was created, or
    recorded if that is unknown. ``wanted``: the columns to make; None: all, with ``event_time``. Raises
    LoaderConfigError for settings that only Spark can apply, and UnequalLine for such a line.
    """
    parser = LineParser(settings)
    names = [name for name in parser.types if wanted is None or name in wanted]
    good, flaws = utf8_lines(lines)
    groups, more = parser.groups(good.values, made.take(pa.array(good.rows)), names)
    reasons: list[str | None] = [None] * len(lines)
    for row in flaws:
        reasons[row] = NOT_UTF8
    for index, reason in more.items():
        reasons[int(good.rows[index])] = reason
    place = np.full(len(lines), -1)
    order = np.concatenate([np.zeros(0, dtype=np.int64), *(good.rows[group.rows] for group in groups)])
    place[order] = np.arange(len(order))
    indices = pa.array(place, mask=place < 0)
    columns = {n: pa.concat_arrays([pa.array([], parser.types[n]), *(g.columns[n] for g in groups)]) for n in names}
    return pa.table({n: column.take(indices) for n, column in columns.items()}), pa.array(reasons, pa.string())


class Utf8Lines(NamedTuple):
    """``rows``: the indices of the lines that are UTF-8."""

    values: pa.StringArray
    rows: np.ndarray


def utf8_lines(lines: pa.Array) -> tuple[Utf8Lines, list[int]]:
    """``lines``: binary. The lines that are UTF-8, and the indices of those that are not."""
    every = np.arange(len(lines))
    try:
        return Utf8Lines(lines.cast(pa.string()), every), []
    except pa.ArrowInvalid:
        bad = _not_utf8(lines)
    good = np.delete(every, bad)
    return Utf8Lines(lines.take(pa.array(good)).cast(pa.string()), good), bad


_BLOCK: Final = 64


def _not_utf8(lines: pa.Array) -> list[int]:
    """Blocks are checked by Arrow; the lines of a block that fails, one by one."""
    found = []
    for start in range(0, len(lines), _BLOCK):
        block = lines.slice(start, _BLOCK)
        try:
            block.cast(pa.string())
        except pa.ArrowInvalid:
            for row, line in enumerate(block.to_pylist(), start):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    found.append(row)
    return found


class LineParser:
    """``types``: all columns that it can make, ``event_time`` with them. Raises LoaderConfigError."""

    def __init__(self, settings: ParserSettings) -> None:
        self._settings = settings
        self.types = {name: arrow_type(column_type(kind)) for name, kind in settings.kinds.items()}
        if settings.format == "logfmt":
            self.types[FIELDS] = pa.map_(pa.string(), pa.string())
        if settings.rescued:
            self.types[RESCUED] = pa.string()
        self._time: Reader | None = None
        if settings.time is not None:
            self.types[EVENT_TIME] = TIMESTAMP
            self._time = event_times(settings.time.column, settings.time.formats, settings.time.zone)
        # Whether the time of a line depends on when its chunk was made.
        self.needs_made = settings.time is not None and needs_made(settings.time.formats)
        self._format = _format(settings)
        self._json = Values(settings) if settings.format == "json" else None
        self._json_schema = arrow_schema(settings.kinds) if settings.format == "json" else None

    def groups(
        self, lines: pa.StringArray, made: pa.Int64Array | None, wanted: Collection[str]
    ) -> tuple[list[Group], dict[int, str]]:
        """The rows in no order, with the columns ``wanted``; and the other lines, each with its reason.

        ``made``: see `parse_lines`; it may be None unless `needs_made`.
        """
        if not self.needs_made:
            made = None
        if self._format is None and self._json is None:  # lines
            return [Group(np.arange(len(lines)), {})], {}
        ends = pc.ends_with(lines, "\r")
        if pc.any(ends).as_py():
            cut = pc.binary_slice(lines.filter(ends).cast(pa.binary()), 0, -1).cast(pa.string())
            lines = pc.replace_with_mask(lines, ends, cut)
        if self._json is not None:
            return self._json_groups(lines, made, wanted)
        assert self._format is not None
        found, flaws = split_lines(self._format, lines)
        return [self._typed(texts, made, wanted, flaws) for texts in found], flaws

    def _typed(self, texts: Texts, made: pa.Int64Array | None, wanted: Collection[str], flaws: dict[int, str]) -> Group:
        """Every column with a type is read, wanted or not: a text that does not have it is a flaw of the line."""
        columns, bad = {}, np.zeros(len(texts.rows), dtype=bool)
        for name, kind in self._settings.kinds.items():
            if kind == "string":
                if name in wanted:
                    columns[name] = texts.column(name)
                continue
            if (name, kind) in texts.sure and name not in wanted and name != self._time_column:
                continue
            values, wrong = cast_texts(texts.column(name), kind, is_plain=(name, kind) in texts.sure)
            _note(texts.rows, wrong & ~bad, f"{name} is not of the type {kind}", flaws)
            bad |= wrong
            columns[name] = values
        if FIELDS in wanted and self._settings.format == "logfmt":
            columns[FIELDS] = texts.column(FIELDS)
        if self._time is not None and self._settings.time is not None:
            name = self._settings.time.column
            said = columns[name] if name in columns else texts.column(name)
            columns[EVENT_TIME] = self._times(said, made, texts.rows)
            _note(texts.rows, (late := _nulls(columns[EVENT_TIME])) & ~bad, NO_TIME, flaws)
            bad |= late
        return _chosen(texts.rows, columns, wanted, bad)

    def _json_groups(
        self, lines: pa.StringArray, made: pa.Int64Array | None, wanted: Collection[str]
    ) -> tuple[list[Group], dict[int, str]]:
        assert self._json is not None
        flaws: dict[int, str] = {}
        read: list[tuple[np.ndarray, dict[str, pa.Array]]] = []
        left = np.ones(len(lines), dtype=bool)
        if self._json_schema is not None:
            for rows, table in read_by_arrow(lines, self._json_schema, is_flat=self._settings.rescued):
                left[rows] = False
                if self._settings.rescued and RESCUED in wanted:
                    table = table.append_column(RESCUED, self._json.rescued(lines.take(pa.array(rows))))
                read.append(self._with_times(rows, table, flaws))
        rest = np.flatnonzero(left)
        values = [self._json.of(line) for line in lines.take(pa.array(rest)).to_pylist()]
        flaws |= {int(row): one for row, one in zip(rest, values, strict=True) if isinstance(one, str)}
        good = [one for one in values if not isinstance(one, str)]
        if good:
            rows = np.array([row for row, one in zip(rest, values, strict=True) if not isinstance(one, str)])
            needed = [name for name in good[0] if name in wanted or name == self._time_column]
            read.append((rows, {n: built([one[n] for one in good], self.types[n]) for n in needed}))
        groups = []
        for rows, columns in read:
            bad = np.zeros(len(rows), dtype=bool)
            if self._time is not None:
                columns[EVENT_TIME] = self._times(columns[self._time_column], made, rows)
                bad = _nulls(columns[EVENT_TIME])
                _note(rows, bad, NO_TIME, flaws)
            groups.append(_chosen(rows, columns, wanted, bad))
        return groups, flaws

    def _with_times(
        self, rows: np.ndarray, table: pa.Table, flaws: dict[int, str]
    ) -> tuple[np.ndarray, dict[str, pa.Array]]:
        """The lines that Arrow has read, without those that have no date or timestamp where one should be."""
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        bad = np.zeros(len(rows), dtype=bool)
        for name, kind in self._settings.kinds.items():
            if kind in ("date", "timestamp"):
                texts = columns[name]
                columns[name] = each_once(texts, partial(time_of, kind), self.types[name])
                bad |= _nulls(columns[name]) & ~_nulls(texts)
        if not bad.any():
            return rows, columns
        _note(rows, bad, NOT_OBJECT, flaws)
        good = pa.array(~bad)
        return rows[~bad], {name: column.filter(good) for name, column in columns.items()}

    @property
    def _time_column(self) -> str:
        return self._settings.time.column if self._settings.time is not None else ""

    def _times(self, said: pa.Array, made: pa.Int64Array | None, rows: np.ndarray) -> pa.Array:
        """The event times of a column of texts or numbers, as Spark casts these to texts."""
        assert self._time is not None
        assert self._settings.time is not None
        read: Reader = self._time
        if pa.types.is_floating(said.type):
            said = pa.array([None if x is None else double_text(x) for x in said.to_pylist()], pa.string())
        elif not pa.types.is_string(said.type):
            said = said.cast(pa.string())
        if made is None:
            is_iso = self._settings.time.formats[0] == "iso"
            return each_once(said, lambda text: read(text, 0), TIMESTAMP, is_timestamp=is_iso)
        known: dict[tuple[str, int], int | None] = {}
        found = []
        for key in zip(said.to_pylist(), made.take(pa.array(rows)).to_pylist(), strict=True):
            if key not in known:
                known[key] = None if key[0] is None else read(*key)
            found.append(known[key])
        return pa.array(found, pa.int64()).cast(TIMESTAMP)


def _format(settings: ParserSettings) -> Format | None:
    names = list(settings.kinds)
    if settings.format == "access":
        return AccessLines()
    if settings.format == "regex":
        return PatternLines(settings.pattern or "")
    if settings.format == "logfmt":
        return LogfmtLines(names)
    if settings.format == "delimited":
        return DelimitedLines(names, settings.separator or "", quoted=settings.quoted)
    if settings.format in ("lines", "json"):
        return None
    if settings.format == "hbase":
        raise LoaderConfigError("the format hbase is parsed by Spark alone")
    raise LoaderConfigError(f"the format {settings.format} has no lines")


def _nulls(values: pa.Array) -> np.ndarray:
    found: np.ndarray = values.is_null().to_numpy(zero_copy_only=False)
    return found


def _note(rows: np.ndarray, bad: np.ndarray, reason: str, flaws: dict[int, str]) -> None:
    flaws.update(dict.fromkeys(rows[bad].tolist(), reason))


def _chosen(rows: np.ndarray, columns: dict[str, pa.Array], wanted: Collection[str], bad: np.ndarray) -> Group:
    found = {name: column for name, column in columns.items() if name in wanted}
    if not bad.any():
        return Group(rows, found)
    good = pa.array(~bad)
    return Group(rows[~bad], {name: column.filter(good) for name, column in found.items()})


# ---- types ------------------------------------------------------------------------------------------------


def arrow_type(kind: Any) -> pa.DataType:
    """``kind``: a type of `parsing.columns.column_type`."""
    if isinstance(kind, str):
        return pa.decimal128(*decimal_digits(kind)) if kind.startswith("decimal") else _TYPES[kind]
    if kind["type"] == "struct":
        return pa.struct([(field["name"], arrow_type(field["type"])) for field in kind["fields"]])
    if kind["type"] == "array":
        return pa.list_(arrow_type(kind["elementType"]))
    return pa.map_(pa.string(), arrow_type(kind["valueType"]))


def built(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Of values as `spark_values` and `json_lines` have them: dates are days, timestamps microseconds."""
    return pa.array(values, kind)


_DIGITS: Final = {"int": "[0-9]{1,9}", "bigint": "[0-9]{1,18}", "double": r"[0-9]{1,15}(?:\.[0-9]{1,15})?"}


def cast_texts(texts: pa.Array, kind: str, *, is_plain: bool = False) -> tuple[pa.Array, np.ndarray]:
    """The values of a column that is not text, and which texts do not have its type. ``is_plain``: all are of the
    common form, empty or ``-``."""
    named = pc.and_(texts.is_valid(), pc.invert(pc.is_in(texts, value_set=_NOTHING)))
    said = texts if pc.all(named).as_py() else pc.if_else(named, texts, pa.scalar(None, pa.string()))
    target = arrow_type(column_type(kind))
    cast: Callable[[str], Any] = caster(kind)
    if kind in _DIGITS:
        if is_plain:
            return said.cast(target), np.zeros(len(said), dtype=bool)
        plain = pc.fill_null(pc.match_substring_regex(said, f"^-?{_DIGITS[kind]}$"), False)
        values = (said if pc.all(plain).as_py() else pc.if_else(plain, said, pa.scalar(None, pa.string()))).cast(target)
        odd = np.flatnonzero(pc.and_not(named, plain).to_numpy(zero_copy_only=False))
        if len(odd):
            mask = np.zeros(len(said), dtype=bool)
            mask[odd] = True
            values = pc.replace_with_mask(values, pa.array(mask), each_once(said.take(pa.array(odd)), cast, target))
    else:
        values = each_once(said, cast, target)
    return values, pc.and_(named, values.is_null()).to_numpy(zero_copy_only=False)


# A time with its zone, which Arrow reads as Spark does.
_ZONED: Final = (
    r"^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:0[0-9]|1[0-7]):[0-5][0-9])$"
)


def each_once(
    texts: pa.Array, cast: Callable[[str], Any], target: pa.DataType, *, is_timestamp: bool | None = None
) -> pa.Array:
    """Casts each distinct text once. ``is_timestamp``: a time with its zone is what it says; None: by the type."""
    encoded = texts.dictionary_encode()
    distinct = encoded.dictionary
    if target == TIMESTAMP and is_timestamp is not False and len(distinct):
        zoned = pc.match_substring_regex(distinct, _ZONED)
        try:
            known = pc.if_else(zoned, distinct, pa.scalar(None, pa.string())).cast(TIMESTAMP)
        except pa.ArrowInvalid:  # such as the 30th of February
            known = pa.nulls(len(distinct), TIMESTAMP)
        rest = pc.filter(distinct, known.is_null())
        if len(rest) < len(distinct):
            odd = built([None if text is None else cast(text) for text in rest.to_pylist()], target)
            return pc.replace_with_mask(known, known.is_null(), odd).take(encoded.indices)
    found = [None if text is None else cast(text) for text in distinct.to_pylist()]
    return built(found, target).take(encoded.indices)
