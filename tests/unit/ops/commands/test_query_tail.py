"""Statements over a table and a tail that is given: rows once each, and only the columns that are read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from logferry.client.reading.decode import ReceivedChunk
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import JobOrigin, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.query import tail_rows
from logferry.loaders.runs.table_run import prepare
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import Ledger, new_entry
from logferry.ops.audit.records.batches import StoredRecord
from logferry.ops.cli.problems import CommandError
from logferry.ops.commands import query, tail_file
from logferry.ops.commands.tail_kafka import chunk_of


def chunk(topic: str, offset: int, seqno: int, data: bytes, recorded_ms: int = 1_700_000_000_000) -> ReceivedChunk:
    return ReceivedChunk("dc1", topic, 0, offset, "s", seqno, None, 1_700_000_000_000, recorded_ms, {"h": "x"}, data)


# The table has 1 and 2 of dc1; of dc2 their copies come, and those of the tail's own.
STORED = [chunk("dc1.a", 0, 2, b"1\n"), chunk("dc1.a", 1, 4, b"2\n")]
TAIL = [
    *(chunk("dc1.a", 2, 6, b"3\n\xff\n"), chunk("dc1.a", 3, 9, b"4\nx"), chunk("dc2.a", 0, 2, b"1\n")),
    *(chunk("dc2.a", 1, 6, b"3\n"), chunk("dc2.a", 2, 20, b"5\n")),
    chunk("dc2.a", 3, 4, b"2, by another writer, too late\n", 1_700_000_000_000 + 15 * 86_400_000),
]
LATE = "2, by another writer, too late"


class GivenTail:
    def __init__(self, *_: Any) -> None:
        self.reads = 0

    def ranges(self, *_: Any) -> tuple[Range, ...]:
        return Range("dc1.a", 0, "id", 2, 4), Range("dc2.a", 0, "id2", 0, 4)

    def chunks(self, *_: Any) -> Iterator[ReceivedChunk]:
        yield from TAIL


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(query, "HttpTail", GivenTail)
    monkeypatch.setattr(tail_rows, "_BATCH_BYTES", 1)
    paths = TablePaths.of(Location.of(tmp_path / "nginx"))
    prepare(paths)
    ranges = [Range("dc1.a", 0, "id", 0, 2), Range("dc2.a", 0, "id2", 0, 0)]
    Ledger(paths.ledger).put(new_entry(0, "dc1", "lines/1", "run", ranges, origin=JobOrigin("127.0.0.1:9", ("*.a",))))
    opened = open_table(paths.main)
    assert opened is not None
    schema = opened.to_pyarrow_dataset().schema
    rows = tail_rows.line_batches(tail_rows.line_parser("lines/1", ""), "dc1", schema)(STORED, 0)
    commit_rows(pa.Table.from_batches(rows, schema=schema), paths.main, 0, "run")
    return tmp_path / "nginx"


STATEMENTS: list[tuple[str, list[list[str]]]] = [
    ("SELECT text FROM logs ORDER BY ALL", [[t] for t in ("1", "2", LATE, "3", "4", "5", "x")]),
    ("SELECT count(*) FROM nginx", [["7"]]),
    ("SELECT 1", [["1"]]),
    ("SELECT a.text, b.newline FROM logs a JOIN logs b USING (seqno, line) WHERE line = 1", [["x", "false"]]),
    ("SELECT attributes['h'], count(*) FROM logs GROUP BY ALL", [["x", "7"]]),
    ("WITH t AS (FROM logs) SELECT max(t.source_id) FROM t WHERE recorded < now() AND newline", [["s"]]),
    ("SELECT column_name, count FROM (SUMMARIZE SELECT text FROM logs)", [["text", "7"]]),
    ("SELECT count(*) FROM logs l WHERE l::TEXT LIKE '%too late%'", [["1"]]),
    ("SELECT \"1\" FROM (PIVOT logs ON line USING count(*)) WHERE text = 'x'", [["1"]]),
]


@pytest.mark.parametrize(("sql", "want"), STATEMENTS)
def test_a_statement_sees_each_row_once(table: Path, capsys: pytest.CaptureFixture[str], sql: str, want: list[Any]):
    assert query.main([sql, "--table", str(table), "--format", "csv"]) == 0
    assert [*csv.reader(io.StringIO(capsys.readouterr().out))][1:] == want


def test_a_statement_without_a_plan_in_json_is_run(table: Path, capsys: pytest.CaptureFixture[str]):
    assert query.main(["EXPLAIN SELECT * FROM logs", "--table", str(table), "--format", "csv"]) == 0
    assert "SCAN" in capsys.readouterr().out


def test_only_the_columns_that_are_read_are_made(table: Path, monkeypatch: pytest.MonkeyPatch):
    schemas: list[list[str]] = []
    filled = tail_file.TailFile.fill

    def noted(self: Any, *others: Any) -> Any:
        found = filled(self, *others)
        schemas.append(found.schema.names)
        return found

    monkeypatch.setattr(tail_file.TailFile, "fill", noted)
    query.main(["SELECT max(text) FROM logs WHERE line < 3", "--table", str(table)])
    assert schemas == [["line", "text", tail_rows.TAIL_CHUNK]]


def test_a_column_that_was_not_made_is_an_error(table: Path, monkeypatch: pytest.MonkeyPatch):
    """It would be null in the rows of the tail."""
    monkeypatch.setattr(query, "needed_columns", lambda *_: ["text"])
    with pytest.raises(CommandError, match="seqno is not read"):
        query.main(["SELECT seqno FROM logs", "--table", str(table)])


def test_memory_is_limited(table: Path, capsys: pytest.CaptureFixture[str]):
    sql = "SELECT current_setting('memory_limit') FROM logs LIMIT 1"
    query.main([sql, "--table", str(table), "--memory-mb", "200", "--format", "csv"])
    assert "190.7 MiB" in capsys.readouterr().out


def test_records_that_no_gateway_wrote_are_no_chunks():
    """Those that the loader quarantines as a whole."""
    good = StoredRecord(0, 5, b"s", b"x", [("seqno", bytes(8)), ("a.host", b"web1"), ("other", None)])
    at = Range("dc1.a", 0, "", 0, 9)
    made = chunk_of("dc1", at, *good)
    assert made is not None
    assert (made.source_id, made.data, made.attributes) == ("s", b"x", {"host": "web1"})
    negative = (-1).to_bytes(8, "big", signed=True)
    heads: list[list[tuple[str, bytes | None]]] = [
        [],
        [("seqno", None)],
        [("seqno", negative)],
        [("seqno", bytes(7))],
        [*good.headers, ("prev", None)],
        [*good.headers, ("prev", negative)],
        [*good.headers, ("created", b"")],
        [*good.headers, ("a.x", None)],
        [*good.headers, ("a.x", b"\xff")],
    ]
    bad = [good._replace(headers=headers) for headers in heads]
    bad += [good._replace(key=None), good._replace(key=b"\xff"), good._replace(value=None)]
    assert [chunk_of("dc1", at, *one) for one in bad] == [None] * len(bad)
