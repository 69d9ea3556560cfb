"""Compares the columns that a parser made of a line with the line's text, row by row, without the loader's expressions.

Of each row the parser is the ledger's (see `ledger_parsers`). Rows of access logs are compared by Arrow's kernels: the
line must have the usual form, in which each field ends at the first character that ends it, and the columns joined must
be the line again. All other rows are parsed by `parse_lines`, and each column of the table must be what that makes of
the text, as the type that the column has now; one that the parser does not have must be null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.parsing.columns import DATES, MARK, access_columns
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from logferry.loaders.query.line_texts import UnequalLine
from logferry.loaders.query.parsed_lines import LineParser, parse_lines
from logferry.ops.audit.tables.ledger_parsers import Candidates, LedgerParser, LedgerParsers
from logferry.ops.audit.tables.row_groups import CHUNK, HEAD

# The columns of every row; all others are the parser's.
EVERY_ROW: Final = frozenset({*CHUNK, *HEAD, "line", "text", "newline", "data", *DATES})
_ACCESS_PARSER: Final = "access/1"
_TEXTS: Final = ("remote_host", "ident", "user", "time", "request", "method", "path", "protocol")
_ACCESS: Final = frozenset({*_TEXTS, "status", "body_bytes", "referer", "user_agent", "event_time"})
# Of access logs, what ends a field: a column without it can have been read in one way only.
_WORD: Final = rf"[^ \t\n\v\f\r{MARK}]+"
_PATH: Final = rf'^[^ "\\{MARK}\n\r\x85\x{{2028}}\x{{2029}}]+$'
_QUOTED: Final = re.compile(rf'[^"\\{MARK}]*')
_FEW: Final = {
    "ident": re.compile(_WORD),
    "user": re.compile(_WORD),
    "method": re.compile("[A-Za-z0-9_-]+"),
    "protocol": re.compile("[A-Za-z]+/[0-9.]+"),
    "referer": _QUOTED,
    "user_agent": _QUOTED,
}
_TIME: Final = pa.timestamp("us", "UTC")


class ColumnDifference(NamedTuple):
    """``row``: its index in the batch. ``stored`` and ``parsed``: the values, as text."""

    row: int
    column: str
    stored: str
    parsed: str


@dataclass
class ColumnCheck:
    """Of one batch. ``compared``: rows whose columns were compared with the text; ``unknown``: those of which only the
    JVM can parse the line."""

    compared: int = 0
    unknown: int = 0
    differences: list[ColumnDifference] = field(default_factory=list)


class _Verdict(NamedTuple):
    """Of one parser, as masks of rows. ``rejected``: it makes no row of the text; ``unknown``: only the JVM knows."""

    right: np.ndarray
    rejected: np.ndarray
    unknown: np.ndarray
    differences: list[ColumnDifference]


@dataclass(frozen=True)
class ParsedColumns:
    """``columns``: those of all parsers that the table had."""

    parsers: LedgerParsers
    columns: tuple[pa.Field, ...]
    dates: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: pa.Schema, parsers: LedgerParsers) -> ParsedColumns:
        """``schema``: of the main table."""
        columns = tuple(column for column in schema if column.name not in EVERY_ROW)
        return cls(parsers, columns, tuple(name for name in DATES if name in schema.names))

    @property
    def names(self) -> list[str]:
        """The columns to read for `check`, besides those of every row."""
        return [*(column.name for column in self.columns), *self.dates]

    def why_unknown(self) -> str:
        """Why columns of rows were not compared."""
        if not self.parsers.every:
            return "the ledger names no parser"
        parsers = {one.name: _usable(one) for one in self.parsers.every}
        refused = [f"{name}: {parser}" for name, parser in parsers.items() if isinstance(parser, str)]
        return "; ".join(refused) or "of lines that are not ASCII, versions of Java differ in what \\b matches"

    def check(self, batch: pa.RecordBatch) -> ColumnCheck:
        """A row is right if a parser that may have made it makes it of its text."""
        found = ColumnCheck(differences=list(self._wrong_dates(batch)))
        if not self.columns or "text" not in batch.schema.names:
            return found
        for rows, candidates in self.parsers.groups(batch):
            if any(one.name == _ACCESS_PARSER for one in candidates.loaded):
                plain = pc.fill_null(_is_plain_access(_taken(batch, rows), self.columns), False)
                rows = rows[~plain.to_numpy(zero_copy_only=False)]
            if len(rows):
                self._check_rows(_taken(batch, rows), rows, candidates, found)
        found.compared = batch.num_rows - found.unknown
        return found

    def _check_rows(self, batch: pa.RecordBatch, names: np.ndarray, candidates: Candidates, found: ColumnCheck) -> None:
        """``names``: what the rows are called in ``found``."""
        right, unknown = np.zeros((2, batch.num_rows), dtype=bool)
        rejected = ~right
        wrong: dict[int, list[ColumnDifference]] = {}
        for parser in (*candidates.loaded, *candidates.later):
            # Lines that a later batch has parsed again were in the quarantine: no parser before made a row of them.
            rows = np.flatnonzero(~right if parser in candidates.loaded else ~right & rejected)
            verdict = self._verdict(_taken(batch, rows), parser)
            right[rows], rejected[rows] = verdict.right, rejected[rows] & verdict.rejected
            unknown[rows] |= verdict.unknown
            by_row: dict[int, list[ColumnDifference]] = {}
            for one in verdict.differences:
                by_row.setdefault(int(rows[one.row]), []).append(one._replace(row=int(names[rows[one.row]])))
            wrong |= by_row
        unknown = ~right & (unknown | (not candidates.loaded))
        found.unknown += int(unknown.sum())
        for row in np.flatnonzero(~right & ~unknown).tolist():
            found.differences += wrong[row]

    def _verdict(self, batch: pa.RecordBatch, parser: LedgerParser) -> _Verdict:
        usable = _usable(parser)
        if isinstance(usable, str):
            none = np.zeros(batch.num_rows, dtype=bool)
            return _Verdict(none, none, ~none, [])
        parsed, rejected, unknown = _parsed(batch, usable)
        differences = [
            ColumnDifference(row, "text", "a row", f"no row of the parser {parser.name}")
            for row in np.flatnonzero(rejected).tolist()
        ]
        right = ~rejected & ~unknown
        wrong = np.zeros(batch.num_rows, dtype=bool)
        for column in self.columns:
            stored, made = batch.column(column.name), _made(parsed, column, batch.num_rows)
            differ = right & _differ(stored, made)
            wrong |= differ
            for row in np.flatnonzero(differ).tolist():
                values = (_shown(one[row].as_py()) for one in (stored, made))
                differences.append(ColumnDifference(row, column.name, *values))
        return _Verdict(right & ~wrong & ~unknown, rejected, unknown & ~wrong, differences)

    def _wrong_dates(self, batch: pa.RecordBatch) -> Iterator[ColumnDifference]:
        for name in self.dates:
            stored, source = batch.column(name), batch.column(DATES[name])
            expected = source.cast(_TIME).cast(pa.timestamp("us")).cast(pa.date32(), safe=False)
            same = pc.if_else(stored.is_valid(), pc.fill_null(pc.equal(stored, expected), False), expected.is_null())
            for row in pc.indices_nonzero(pc.invert(same)).to_pylist():
                yield ColumnDifference(row, name, _shown(stored[row].as_py()), _shown(expected[row].as_py()))


def _taken(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    """``rows``: in order, if they are all rows."""
    return batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))


@lru_cache(maxsize=64)
def _usable(parser: LedgerParser) -> ParserSettings | str:
    """The settings, or why only the JVM can parse by them."""
    settings = settings_of(parser.name, parser.settings)
    if settings is None:
        return "this version does not have the parser"
    try:
        LineParser(settings)
    except LoaderConfigError as error:
        return str(error)
    return settings


def _parsed(batch: pa.RecordBatch, settings: ParserSettings) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """The columns; which lines are no rows; and which lines only the JVM can parse, where all columns are null."""
    lines = batch.column("text").fill_null("").cast(pa.binary())
    times = [batch.column(name).cast(_TIME).cast(pa.int64()) for name in ("created", "recorded")]
    made = pc.fill_null(pc.coalesce(*times), 0)
    try:
        parsed, reasons = parse_lines(lines, settings, made)
    except UnequalLine:
        # None of them is ASCII.
        known = pc.string_is_ascii(lines.cast(pa.string()))
        order = pc.if_else(known, pc.subtract(pc.cumulative_sum(known.cast(pa.int32())), 1), None)
        parsed, reasons = parse_lines(lines.filter(known), settings, made.filter(known))
        rejected = reasons.take(order).is_valid().to_numpy(zero_copy_only=False)
        return parsed.take(order), rejected, ~known.to_numpy(zero_copy_only=False)
    return parsed, reasons.is_valid().to_numpy(zero_copy_only=False), np.zeros(len(lines), dtype=bool)


def _made(parsed: pa.Table, column: pa.Field, size: int) -> pa.Array:
    """What the parser makes of the column, which may have got a wider type, or be of another parser."""
    if column.name not in parsed.column_names:
        return pa.nulls(size, column.type)
    return parsed[column.name].combine_chunks().cast(column.type)


def _differ(stored: pa.Array, made: pa.Array) -> np.ndarray:
    """NaN is equal to NaN, and maps are equal in any order."""
    if stored.equals(made):
        return np.zeros(len(stored), dtype=bool)
    if pa.types.is_nested(made.type):
        pairs = zip(stored.to_pylist(), made.to_pylist(), strict=True)
        return np.array([not _same(one, other) for one, other in pairs])
    same = pc.fill_null(pc.equal(stored, made), False)
    if pa.types.is_floating(made.type):
        same = pc.or_(same, pc.fill_null(pc.and_(pc.is_nan(stored), pc.is_nan(made)), False))
    same = pc.or_(same, pc.and_(stored.is_null(), made.is_null()))
    found: np.ndarray = ~same.to_numpy(zero_copy_only=False)
    return found


def _same(stored: Any, made: Any) -> bool:
    if isinstance(stored, dict) and isinstance(made, dict):
        return stored.keys() == made.keys() and all(_same(value, made[key]) for key, value in stored.items())
    if isinstance(stored, list) and isinstance(made, list):
        return len(stored) == len(made) and all(map(_same, _ordered(stored), _ordered(made)))
    if isinstance(stored, tuple) and isinstance(made, tuple):
        return all(map(_same, stored, made))
    return bool(stored == made or (stored != stored and made != made))


def _ordered(values: list[Any]) -> list[Any]:
    """The pairs of a map by key; the values of an array as they are."""
    return sorted(values, key=itemgetter(0)) if values and isinstance(values[0], tuple) else values


def _shown(value: Any) -> str:
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _is_plain_access(batch: pa.RecordBatch, columns: Iterable[pa.Field]) -> Any:
    """Whether the line has the usual form and the row has its fields; False or null: it is to be parsed.

    The columns joined are the line, and none of them holds what ends it.
    """
    if {column.name for column in columns} != _ACCESS:
        return pa.repeat(pa.scalar(False), batch.num_rows)
    of = {name: batch.column(name) for name in ("text", *_ACCESS)}
    text, join = of["text"], pc.binary_join_element_wise
    status, size = (pc.fill_null(pc.cast(of[name], pa.string()), "-") for name in ("status", "body_bytes"))
    words = [of["remote_host"], " ", of["ident"], " ", of["user"], " [", of["time"], '] "', of["request"], '" ']
    short = join(*words, status, " ", size, "")
    long = join(short, ' "', of["referer"], '" "', of["user_agent"], '"', "")
    is_short = pc.and_(pc.equal(of["referer"], ""), pc.equal(of["user_agent"], ""))
    found = pc.or_(pc.equal(text, long), pc.and_(is_short, pc.equal(text, short)))
    found = pc.and_(found, pc.match_substring_regex(of["remote_host"], f"^{_WORD}$"))
    found = pc.and_(found, pc.match_substring_regex(of["path"], _PATH))
    found = pc.and_(found, pc.fill_null(pc.and_(pc.greater(of["status"], 99), pc.less(of["status"], 1000)), True))
    found = pc.and_(found, pc.equal(of["request"], join(of["method"], " ", of["path"], " ", of["protocol"], "")))
    for name, form in _FEW.items():
        found = pc.and_(found, _of_each(of[name], partial(_has_form, form), pa.bool_()))
    time = of["event_time"].cast(_TIME)
    return pc.and_(found, pc.equal(time, _of_each(of["time"], _access_time, _TIME)))


def _of_each(column: Any, read: Callable[[str], Any], kind: pa.DataType) -> Any:
    """A function of each value, called once for each that differs."""
    words = column.dictionary_encode()
    read_words = [None if word is None else read(word) for word in words.dictionary.to_pylist()]
    return pa.array(read_words, kind).take(words.indices)


def _has_form(form: re.Pattern[str], word: str) -> bool:
    return form.fullmatch(word) is not None


def _access_time(said: str) -> Any:
    """The time of a line with this text between its brackets."""
    columns = None if "]" in said else access_columns(f'- - - [{said}] "" - -')
    return None if columns is None else columns["event_time"]
