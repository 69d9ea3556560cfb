"""Compares the columns that a parser made of a line with the line's text, row by row, without the loader's expressions.

What the parser is, the ledger names. Rows of access logs are compared by Arrow's kernels: the line must have the usual
form, in which each field ends at the first character that ends it, and the columns joined must be the line again.
Other rows are parsed by `python_rows`, the implementation in Python of what the JVM did, as far as it has the parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from logferry.client.reading.decode import ReceivedChunk
from logferry.loaders.parsing.columns import DATES, MARK, access_columns
from logferry.loaders.query import python_rows
from logferry.ops.audit.tables.row_groups import CHUNK, HEAD

# The columns of every row; all others are the parser's.
EVERY_ROW: Final = frozenset({*CHUNK, *HEAD, "line", "text", "newline", "data", *DATES})
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
    """Of one batch. ``compared``: rows whose columns were compared with the text; ``unknown``: those of a parser that
    only the JVM implements."""

    compared: int = 0
    unknown: int = 0
    differences: list[ColumnDifference] = field(default_factory=list)


@dataclass(frozen=True)
class ParsedColumns:
    """``parsers``: those by which rows may have been parsed, the newest last. ``columns``: the parser's."""

    parsers: tuple[str, ...]
    columns: tuple[pa.Field, ...]
    dates: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: pa.Schema, parsers: Iterable[str]) -> ParsedColumns:
        """``schema``: of the main table."""
        columns = tuple(column for column in schema if column.name not in EVERY_ROW)
        return cls(tuple(dict.fromkeys(parsers)), columns, tuple(name for name in DATES if name in schema.names))

    @property
    def names(self) -> list[str]:
        """The columns to read for `check`, besides those of every row."""
        return [*(column.name for column in self.columns), *self.dates]

    def check(self, batch: pa.RecordBatch) -> ColumnCheck:
        """A row that any of the parsers makes of its text is right."""
        found = ColumnCheck(differences=list(self._wrong_dates(batch)))
        if not self.columns or "text" not in batch.schema.names:
            return found
        left: Iterable[int] = range(batch.num_rows)
        if python_rows.ACCESS in self.parsers:
            left = pc.indices_nonzero(pc.invert(pc.fill_null(_is_plain_access(batch, self.columns), False))).to_pylist()
        wrong = list(left)
        differing: dict[int, list[ColumnDifference]] = {}
        for parser in filter(python_rows.can_read, self.parsers):
            if wrong:
                differing = dict(self._differing(batch, wrong, parser))
                wrong = list(differing)
        if all(map(python_rows.can_read, self.parsers)):
            found.differences += [one for row in wrong for one in differing[row]]
        else:
            found.unknown = len(wrong)
        found.compared = batch.num_rows - found.unknown
        return found

    def _wrong_dates(self, batch: pa.RecordBatch) -> Iterator[ColumnDifference]:
        for name in self.dates:
            stored, source = batch.column(name), batch.column(DATES[name])
            expected = source.cast(_TIME).cast(pa.timestamp("us")).cast(pa.date32(), safe=False)
            same = pc.if_else(stored.is_valid(), pc.fill_null(pc.equal(stored, expected), False), expected.is_null())
            for row in pc.indices_nonzero(pc.invert(same)).to_pylist():
                yield ColumnDifference(row, name, _shown(stored[row].as_py()), _shown(expected[row].as_py()))

    def _differing(
        self, batch: pa.RecordBatch, rows: list[int], parser: str
    ) -> Iterator[tuple[int, list[ColumnDifference]]]:
        """The rows that the parser does not make of their text, each with what differs."""
        schema = pa.schema([("seqno", pa.int64()), *self.columns])
        chosen = batch.take(pa.array(rows))
        parsed = {
            one["seqno"]: one
            for part in python_rows.batches(_as_chunks(chosen, rows), None, parser, schema)
            for one in part.to_pylist()
        }
        stored = chosen.select([column.name for column in self.columns]).to_pylist()
        for row, values in zip(rows, stored, strict=True):
            other = parsed.get(row)
            if other is None:
                yield row, [ColumnDifference(row, "text", "a row", f"no row of the parser {parser}")]
                continue
            different = [name for name, value in values.items() if not _same(value, other[name])]
            if different:
                yield row, [ColumnDifference(row, n, _shown(values[n]), _shown(other[n])) for n in different]


def _as_chunks(batch: pa.RecordBatch, rows: list[int]) -> Iterator[ReceivedChunk]:
    """Each line as a chunk with its row as seqno; event times without a year follow from the chunk's times."""
    times = [_millis(batch, name) for name in ("created", "recorded")]
    for row, text, created, recorded in zip(rows, batch.column("text").to_pylist(), *times, strict=True):
        data = (text or "").encode() + b"\n"
        yield ReceivedChunk("", "", 0, 0, "", row, None, created, recorded or 0, {}, data)


def _millis(batch: pa.RecordBatch, name: str) -> list[int | None]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    micros = batch.column(name).cast(_TIME).cast(pa.int64()).to_pylist()
    return [None if at is None else at // 1000 for at in micros]


def _same(stored: Any, parsed: Any) -> bool:
    return bool(stored == parsed or (stored != stored and parsed != parsed))  # NaN


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
