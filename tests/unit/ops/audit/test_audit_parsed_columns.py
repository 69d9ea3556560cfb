"""Columns against the text of their rows: each format, and tables whose parser changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import LOAD, RELOAD, REQUARANTINE, LedgerEntry
from logferry.loaders.planning.plan import Range
from logferry.ops.audit.tables.ledger_parsers import LedgerParsers
from logferry.ops.audit.tables.parsed_columns import ColumnCheck, ParsedColumns

_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_TIME = pa.timestamp("us", "UTC")
_HEAD: list[tuple[str, pa.DataType]] = [
    *(("dc", pa.string()), ("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())),
    *(("created", _TIME), ("recorded", _TIME), ("text", pa.string())),
]


def parser(**settings: Any) -> ParserSettings:
    return ParserSettings.model_validate(settings)


def entry(batch: int, by: ParserSettings, start: int, end: int, kind: str = LOAD) -> LedgerEntry:
    read = (Range("dc1.t", 0, "id", start, end),)
    ranges, reload = ((), read) if kind == RELOAD else (read, ())
    return LedgerEntry(batch, "dc1", by.name, "run", _AT, ranges, kind, by.as_json, reload=reload)


def check(
    columns: Sequence[tuple[str, pa.DataType]], entries: Sequence[LedgerEntry], *rows: tuple[str, dict[str, Any]]
) -> ColumnCheck:
    """The n-th row has the offset n."""
    head = {"dc": "dc1", "topic": "dc1.t", "partition": 0, "created": None, "recorded": _AT}
    stored = [{**head, "offset": n, "text": text, **values} for n, (text, values) in enumerate(rows)]
    schema = pa.schema([*_HEAD, *columns])
    batch = pa.RecordBatch.from_pylist(stored, schema=schema)
    return ParsedColumns.of(schema, LedgerParsers.of(entries, entries[-1].batch)).check(batch)


def differing(found: ColumnCheck) -> list[tuple[int, str]]:
    return [(one.row, one.column) for one in found.differences]


_JSON = parser(
    format="json",
    columns={
        "n": "int",
        "at": "timestamp",
        "ok": "boolean",
        "price": "decimal(6,2)",
        "day": "date",
        "tags": "array<string>",
        "by": "map<string,double>",
        "who": "struct<id:bigint,names:array<string>>",
    },
    event_time={"column": "n", "formats": ["epoch_s"]},
)
_JSON_TYPES = [
    ("n", pa.int32()),
    ("at", _TIME),
    ("ok", pa.bool_()),
    ("price", pa.decimal128(6, 2)),
    ("day", pa.date32()),
    ("tags", pa.list_(pa.string())),
    ("by", pa.map_(pa.string(), pa.float64())),
    ("who", pa.struct([("id", pa.int64()), ("names", pa.list_(pa.string()))])),
    ("event_time", _TIME),
]
_JSON_LINE = (
    '{"n": 7, "at": "2026-01-02T03:04:05Z", "ok": true, "price": 1.5, "day": "2026-01-02", "tags": ["a", null],'
    ' "by": {"x": 1, "y": "NaN"}, "who": {"id": 3, "names": ["b"]}}'
)
_JSON_ROW = {
    "n": 7,
    "at": _AT,
    "ok": True,
    "price": Decimal("1.50"),
    "day": date(2026, 1, 2),
    "tags": ["a", None],
    "by": [("y", float("nan")), ("x", 1.0)],
    "who": {"id": 3, "names": ["b"]},
    "event_time": datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC),
}
_ACCESS_TYPES = [
    *((name, pa.string()) for name in ("remote_host", "ident", "user", "time", "request", "method", "path")),
    *((name, pa.string()) for name in ("protocol", "referer", "user_agent")),
    *(("status", pa.string()), ("body_bytes", pa.int64()), ("event_time", _TIME)),
]
_ACCESS_ROW = {
    "remote_host": "h",
    "ident": "-",
    "user": "u",
    "time": "02/Jan/2026:03:04:05 +0000",
    "request": "GET /a HTTP/1.1",
    "method": "GET",
    "path": "/a",
    "protocol": "HTTP/1.1",
    "referer": "",
    "user_agent": "",
    "status": "200",
    "body_bytes": 5,
    "event_time": _AT,
}
_FORMATS: dict[str, tuple[ParserSettings, list[tuple[str, pa.DataType]], str, dict[str, Any], dict[str, Any]]] = {
    "json": (
        _JSON,
        _JSON_TYPES,
        _JSON_LINE,
        _JSON_ROW,
        {
            "n": 8,
            "ok": None,
            "price": Decimal("1.51"),
            "day": date(2026, 1, 3),
            "tags": ["a"],
            "at": None,
            "by": [("x", 1.0)],
            "who": {"id": 3, "names": ["c"]},
            "event_time": _AT,
        },
    ),
    "logfmt": (
        parser(format="logfmt", columns={"level": "string", "ms": "double"}),
        [("level", pa.string()), ("ms", pa.float64()), ("fields", pa.map_(pa.string(), pa.string()))],
        'level=info ms=2.5 a=1 b="x y"',
        {"level": "info", "ms": 2.5, "fields": [("a", "1"), ("b", "x y")]},
        {"level": "warn", "ms": 2.0, "fields": [("a", "1")]},
    ),
    "regex": (
        parser(
            format="regex",
            pattern=r"(?<at>\S+ \S+) (?<n>\d+) (?<rest>.*)",
            columns={"n": "bigint"},
            event_time={"column": "at", "formats": ["MMM d"]},
        ),
        [("at", pa.string()), ("n", pa.int64()), ("rest", pa.string()), ("event_time", _TIME)],
        "Jan 1 5 näher",
        {"at": "Jan 1", "n": 5, "rest": "näher", "event_time": datetime(2026, 1, 1, tzinfo=UTC)},
        {"at": "Jan 2", "n": None, "rest": "", "event_time": datetime(2025, 1, 1, tzinfo=UTC)},
    ),
    "delimited": (
        parser(format="delimited", separator=",", quoted=True, columns={"a": "string", "b": "float"}),
        [("a", pa.string()), ("b", pa.float32())],
        '"x,""y",-\r',
        {"a": 'x,"y', "b": None},
        {"a": "x", "b": 0.0},
    ),
    "access": (
        parser(format="access", columns={"status": "string"}),
        _ACCESS_TYPES,
        'h - u [02/Jan/2026:03:04:05 +0000] "GET /a HTTP/1.1" 200 5',
        _ACCESS_ROW,
        {**dict.fromkeys((name for name, _ in _ACCESS_TYPES[:11]), "other"), "body_bytes": 6, "event_time": None},
    ),
    "lines": (parser(), [("older", pa.string())], "x", {"older": None}, {"older": "x"}),
}


@pytest.mark.parametrize("name", _FORMATS)
def test_each_column_of_each_format_is_compared_with_the_text(name: str):
    settings, columns, text, right, wrong = _FORMATS[name]
    entries = [entry(0, settings, 0, 100)]
    assert check(columns, entries, (text, right), (text, right)) == ColumnCheck(2, 0, [])
    assert {column for column, _ in columns} == wrong.keys()
    for column, value in wrong.items():
        found = check(columns, entries, (text, right), (text, {**right, column: value}), (text, right))
        assert (found.compared, found.unknown, differing(found)) == (3, 0, [(1, column)])


@pytest.mark.parametrize("name", [name for name in _FORMATS if name != "lines"])
def test_a_row_that_the_parser_does_not_make_is_named(name: str):
    settings, columns, text, right, _ = _FORMATS[name]
    found = check(columns, [entry(0, settings, 0, 9)], (text, right), ("", right))
    assert differing(found) == [(1, "text")]
    assert found.differences[0].parsed == f"no row of the parser {settings.name}"


_RESCUING = parser(format="json", columns={"n": "int"}, rescued=True)


def test_the_column_rescued_is_compared_as_text():
    columns, entries = [("n", pa.int32()), ("rescued", pa.string())], [entry(0, _RESCUING, 0, 9)]
    text, right = '{"n":1, "a": {"b" : [1.50]},"a":2.0}', '{"a":2.0}'
    for value, rows in ((right, []), ('{"a":2}', [(1, "rescued")]), (None, [(1, "rescued")])):
        rest = (text, {"n": 1, "rescued": value})
        found = check(columns, entries, ('{"n": 1}', {"n": 1, "rescued": None}), rest)
        assert (found.compared, differing(found)) == (2, rows)


# ---- parsers that changed ----------------------------------------------------------------------------------------

_OLD = parser(format="json", columns={"n": "int", "who": "struct<id:int>", "f": "float"})
_NEW = parser(format="json", columns={"n": "double", "who": "struct<id:bigint,name:string>", "f": "double", "m": "int"})
_WIDE = [
    ("n", pa.float64()),
    ("who", pa.struct([("id", pa.int64()), ("name", pa.string())])),
    ("f", pa.float64()),
    ("m", pa.int32()),
]
_LINE = '{"n": 1, "who": {"id": 2, "name": "x"}, "f": 0.1, "m": 3}'
_BEFORE = {"n": 1.0, "who": {"id": 2, "name": None}, "f": 0.10000000149011612, "m": None}
_AFTER = {"n": 1.0, "who": {"id": 2, "name": "x"}, "f": 0.1, "m": 3}


def test_the_entry_of_a_row_decides_which_columns_and_types_its_parser_had():
    entries = [entry(0, _OLD, 0, 2), entry(1, _NEW, 2, 9)]
    found = check(_WIDE, entries, (_LINE, _BEFORE), (_LINE, _BEFORE), (_LINE, _AFTER))
    assert found == ColumnCheck(3, 0, [])
    found = check(_WIDE, entries, (_LINE, _AFTER), (_LINE, _BEFORE), (_LINE, _BEFORE))
    assert differing(found) == [(0, "who"), (0, "f"), (0, "m"), (2, "who"), (2, "f"), (2, "m")]


def test_rows_that_were_reloaded_are_of_either_parser():
    entries = [entry(0, _OLD, 0, 2), entry(1, _NEW, 1, 2, RELOAD)]
    found = check(_WIDE, entries, (_LINE, _AFTER), (_LINE, _BEFORE), *[(_LINE, _AFTER)] * 2)
    assert {row for row, _ in differing(found)} == {0}


def test_a_line_that_was_quarantined_is_of_the_parser_that_read_it_later():
    narrow = parser(format="json", columns={"n": "int"})
    wide = parser(format="json", columns={"n": "bigint"})
    entries = [entry(0, narrow, 0, 9), entry(1, wide, 9, 9, REQUARANTINE)]
    columns, big = [("n", pa.int64())], '{"n": 5000000000}'
    assert check(columns, entries, ('{"n": 1}', {"n": 1}), (big, {"n": 5_000_000_000})) == ColumnCheck(2, 0, [])
    assert differing(check(columns, entries, ('{"n": 1}', {"n": 1}), (big, {"n": 1}))) == [(1, "n")]
    # What the first parser reads, no later batch has read.
    later = parser(format="json", columns={"n": "bigint", "m": "int"})
    entries = [entry(0, narrow, 0, 9), entry(1, later, 9, 9, REQUARANTINE)]
    found = check([*columns, ("m", pa.int32())], entries, ('{"n": 1, "m": 2}', {"n": 1, "m": 2}))
    assert differing(found) == [(0, "m")]


def test_rows_of_batches_after_the_last_one_have_no_parser():
    found = LedgerParsers.of([entry(0, _OLD, 0, 2), entry(1, _NEW, 2, 9)], 0)
    assert [one.name for one in found.every] == [_OLD.name]


def test_an_offset_that_no_entry_holds_may_be_of_any_parser():
    entries = [entry(0, _OLD, 1, 2), entry(1, _NEW, 2, 3)]
    found = check(_WIDE, entries, *[(_LINE, _AFTER)] * 3, (_LINE, _BEFORE))
    assert {row for row, _ in differing(found)} == {1}


# ---- what only the JVM can parse ---------------------------------------------------------------------------------


def test_rows_of_a_pattern_of_java_alone_are_not_compared():
    only = parser(format="regex", pattern=r"(?<a>[a-z&&[^b]]+)")
    entries = [entry(0, only, 0, 9)]
    assert check([("a", pa.string())], entries, ("x", {"a": "?"})) == ColumnCheck(0, 1, [])
    parsed = ParsedColumns(LedgerParsers.of(entries, 0), ())
    assert parsed.why_unknown().startswith(f"{only.name}: pattern: '[a-z&&' may match otherwise outside of Java")


def test_a_line_that_versions_of_java_read_differently_is_not_compared():
    bound = parser(format="regex", pattern=r"(?<a>\S+)\b(?<b>.*)")
    columns, good = [("a", pa.string()), ("b", pa.string())], {"a": "x", "b": ""}
    rows = [("x", good), ("ä", {"a": "?", "b": ""}), ("x", {"a": "y", "b": ""}), (" ", good)]
    found = check(columns, [entry(0, bound, 0, 9)], *rows)
    assert (found.compared, found.unknown, differing(found)) == (3, 1, [(2, "a"), (3, "text")])


def test_rows_of_an_unknown_parser_are_not_compared():
    unknown = entry(0, _OLD, 0, 9)._replace(parser="json/9:0123456789ab")
    assert check(_WIDE, [unknown], (_LINE, _AFTER)) == ColumnCheck(0, 1, [])
