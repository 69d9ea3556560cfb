"""The rules of rows without Spark: equal to the tests' reference, and to the versions of the loader."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.client.reading.decode import ReceivedChunk
from logferry.loaders.errors import LedgerBroken
from logferry.loaders.parsing.columns import column_type
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.query import tail_rows
from logferry.loaders.query.parsed_lines import arrow_type
from logferry.loaders.query.tail_rows import lines_of

from tests.support.loader import chunks_of, rows_of

SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "source_id": pa.string(),
        "seqno": pa.int64(),
        "line": pa.int32(),
        "created": pa.timestamp("us", "UTC"),
        "recorded": pa.timestamp("us", "UTC"),
        "attributes": pa.map_(pa.string(), pa.string()),
        "text": pa.string(),
        "newline": pa.bool_(),
        "data": pa.binary(),
        "recorded_date": pa.date32(),
        "of_another_parser": pa.int32(),
    }
)


def chunk(data: bytes, created_ms: int | None = 1000) -> ReceivedChunk:
    return ReceivedChunk("dc1", "dc1.a", 0, 7, "s", 5, None, created_ms, 1_700_000_000_123, {"host": "web1"}, data)


def rows(chunks: list[ReceivedChunk], dc: str, parser: str, schema: pa.Schema) -> list[dict[str, Any]]:
    if parser == tail_rows.CHUNK:
        make = tail_rows.chunk_batches(dc, schema)
    else:
        make = tail_rows.line_batches(tail_rows.line_parser(parser, ""), dc, schema)
    return [row for batch in make(chunks, 0) for row in batch.to_pylist()]


PIECES = [b"\n", b"\r", b"a", b"\x00", "ü€😀".encode(), b"\xff", b"\xc3", "\u2028".encode()]


@given(st.lists(st.lists(st.sampled_from(PIECES)).map(b"".join), max_size=5))
def test_lines_are_those_of_the_reference(parts: list[bytes]):
    found = lines_of(parts)
    have = [
        *zip(found.chunk.tolist(), found.number.tolist(), found.data.to_pylist(), found.newline.tolist(), strict=True)
    ]
    want = []
    for index, data in enumerate(parts):
        (sent,) = chunks_of("s", data)
        lines = sorted(line for found in rows_of([sent]) for line in found)
        want += [(index, line.line, line.data, line.newline) for line in sorted(lines, key=lambda one: one.line or 0)]
    assert have == want


@given(st.lists(st.sampled_from(PIECES)).map(b"".join))
def test_lines_that_are_not_utf8_are_no_rows(data: bytes):
    (sent,) = chunks_of("s", data)
    want = {(line.line, line.data.decode(), line.newline) for line in rows_of([sent])[0]}
    found = rows([chunk(data)], "dc1", tail_rows.LINES, SCHEMA)
    assert {(row["line"], row["text"], row["newline"]) for row in found} == want


def test_no_chunk_is_taken_ahead_and_a_portion_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tail_rows, "_BATCH_BYTES", 3000)
    taken = 0

    def chunks() -> Iterator[ReceivedChunk]:
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield chunk(b"x" * 99 + b"\n")

    found = tail_rows.portions(chunks())
    first = next(found)
    assert 0 < len(first) == taken < 12
    assert len(first) + sum(map(len, found)) == 50


@pytest.mark.parametrize("name", ["lines/2", "access/1:3f2a9c01d4e7", "json/1", "lines", ""])
def test_no_other_version_is_read(name: str):
    with pytest.raises(LedgerBroken, match="which this version does not have"):
        tail_rows.line_parser(name, "")


def test_the_columns_of_a_row():
    (row,) = rows([chunk(b"x\n")], "dc2", tail_rows.LINES, SCHEMA)
    recorded = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert row == {
        "topic": "dc1.a",
        "source_id": "s",
        "seqno": 5,
        "line": 0,
        "created": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        "recorded": recorded,
        "attributes": [("host", "web1")],
        "text": "x",
        "newline": True,
        "data": None,
        "recorded_date": date(2023, 11, 14),
        "of_another_parser": None,
    }


@pytest.mark.parametrize("created_ms", [None, -1, 253_402_300_800_000])
def test_a_creation_time_out_of_range_is_null(created_ms: int | None):
    (row,) = rows([chunk(b"x", created_ms)], "dc1", tail_rows.LINES, SCHEMA)
    assert row["created"] is None


def test_a_whole_chunk_is_one_row():
    (row,) = rows([chunk(b"\xff\n\x00")], "dc1", tail_rows.CHUNK, SCHEMA)
    assert (row["data"], row["text"]) == (b"\xff\n\x00", None)


def test_lines_that_do_not_fit_an_access_log_are_left_out():
    schema = SCHEMA.append(pa.field("status", pa.int32())).append(pa.field("event_time", pa.timestamp("us", "UTC")))
    schema = schema.append(pa.field("event_date", pa.date32())).append(pa.field("protocol", pa.string()))
    line = b'10.0.0.1 - - [31/Dec/2025:23:30:00 -0100] "GET /" 304 -'
    (row,) = rows([chunk(b"none\n" + line + b"\r\n")], "dc1", "access/1", schema)
    assert (row["line"], row["text"], row["status"], row["protocol"]) == (1, line.decode() + "\r", 304, None)
    assert (row["event_time"], row["event_date"]) == (datetime(2026, 1, 1, 0, 30, tzinfo=UTC), date(2026, 1, 1))


def test_columns_that_the_table_has_with_wider_types():
    """After `columns` changed, until a batch is loaded by them: the tail has the types of the last batch's parser."""
    columns = {"i": "int", "f": "float", "d": "decimal(4,1)", "s": "struct<a:int>", "l": "array<struct<a:int>>"}
    parser = ParserSettings(format="json", columns={**columns, "m": "map<string,struct<a:float>>"}, rescued=True)
    wide = {"i": "double", "f": "double", "d": "decimal(9,3)", "s": "struct<a:bigint,b:string>"}
    wide |= {"l": "array<struct<a:decimal(12,1),b:int>>", "m": "map<string,struct<a:double,b:date>>", "new": "date"}
    schema = pa.schema([(name, arrow_type(column_type(kind))) for name, kind in wide.items()])
    line = b'{"i":1,"f":1.5,"d":2.25,"s":{"a":3,"b":"x"},"l":[{"a":4},null],"m":{"k":{"a":1.5},"j":null},"more":1}\n'
    make = tail_rows.line_batches(tail_rows.line_parser(parser.name, parser.as_json), "dc1", schema)
    (full,) = [row for batch in make([chunk(line)], 0) for row in batch.to_pylist(maps_as_pydicts="strict")]
    assert full == {
        "i": 1.0,
        "f": 1.5,
        "d": Decimal("2.300"),
        "s": {"a": 3, "b": None},
        "l": [{"a": Decimal("4.0"), "b": None}, None],
        "m": {"k": {"a": 1.5, "b": None}, "j": None},
        "new": None,
    }
