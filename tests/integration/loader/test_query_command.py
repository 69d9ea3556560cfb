"""``logferry query`` as a user runs it: the table and its tail once each, formats, missing parts, errors."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from logferry.client import Reader, Writer
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.parsing.settings import LINES, ParserSettings
from logferry.loaders.planning.ledger_entry import JobOrigin, LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.query import tail_rows
from logferry.loaders.runs.table_run import load_table, prepare
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import Ledger, new_entry
from logferry.loaders.storage.tables import snapshot_of
from logferry.ops.audit.log.read import committed
from logferry.ops.cli import main
from logferry.ops.commands import tail_kafka
from pyspark.sql import SparkSession

from tests.support.checker import committed_records
from tests.support.gateway import Gateway
from tests.support.kafka import delete_topic, recreate_topic
from tests.support.loader import stored

Ran = Callable[..., tuple[int, str, str]]


class Loaded:
    """A topic of two partitions, and a table that holds its first chunks, loaded without Spark."""

    def __init__(
        self, workers: Gateway, name: str, path: Location, dc: str = "dc1", parser: ParserSettings = LINES
    ) -> None:
        self.workers, self.name, self.path, self.dc, self.parser = workers, name, path, dc, parser
        self.paths = TablePaths.of(path)
        self.ends: dict[int, int] = {}
        asyncio.run(workers.make_topic(name, 2))
        self.topic_id = self.id_now()
        prepare(self.paths)

    def id_now(self) -> str:
        answer = asyncio.run(self.workers.ask("GET", f"/v1/topics/{self.topic}"))
        return str(answer.document["id"])

    @property
    def topic(self) -> str:
        return f"dc1.{self.name}"

    def write(self, source: str, *chunks: bytes) -> None:
        with Writer(self.workers.urls, self.name, source) as writer:
            for data in chunks:
                writer.write(data)
        asyncio.run(committed_records(self.workers.kafka.bootstrap, self.topic))  # Kafka shows it a moment later

    def load(self, batch: int) -> LedgerEntry:
        """All records that Kafka has now."""
        with Reader(self.workers.urls, self.topic, follow=False) as reader:
            fresh = [chunk for chunk in reader if chunk.offset >= self.ends.get(chunk.partition, 0)]
            after = {number: at.offset for (_, number), at in reader.position.items()}
        ranges = [Range(self.topic, n, self.topic_id, self.ends.get(n, 0), after.get(n, 0)) for n in (0, 1)]
        origin = JobOrigin("127.0.0.1:9", (f"*.{self.name}*",))
        parser = self.parser
        entry = new_entry(batch, self.dc, parser.name, "run", ranges, settings=parser.as_json, origin=origin)
        Ledger(self.paths.ledger).put(entry)
        table = open_table(self.paths.main)
        assert table is not None
        schema = table.to_pyarrow_dataset().schema
        rows = tail_rows.line_batches(tail_rows.line_parser(tail_rows.LINES, ""), self.dc, schema)(fresh, 0)
        commit_rows(pa.Table.from_batches(rows, schema=schema), self.paths.main, batch, "run")
        self.ends = {r.partition: r.end for r in ranges}
        return entry


@pytest.fixture
def loaded(workers: Gateway, topic_name: str, tmp_path: Path) -> Loaded:
    found = Loaded(workers, topic_name, Location.of(tmp_path / "nginx"))
    found.write("a", b"1\n2\n", b"3\n")
    found.load(0)
    found.write("a", b"4\n")
    found.write("b", b"5\n\xff\n6")
    return found


@pytest.fixture
def ran(workers: Gateway, capfd: pytest.CaptureFixture[str]) -> Ran:
    """``ran(sql, …)``: exit status, output, and messages."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main.main(["query", *map(str, arguments), "--gateway", workers.urls[0]])
        output, said = capfd.readouterr()
        return status, output, said

    return run


def texts(ran: Ran, table: Location, *arguments: object) -> list[str]:
    status, output, said = ran("SELECT text FROM logs ORDER BY ALL", "--table", table, "--format", "json", *arguments)
    assert status == 0, said
    return [row["text"] for row in json.loads(output)]


def test_the_table_and_what_is_behind_it(ran: Ran, loaded: Loaded):
    assert texts(ran, loaded.path) == ["1", "2", "3", "4", "5", "6"]
    assert texts(ran, loaded.path, "--no-tail") == ["1", "2", "3"]
    loaded.load(1)
    assert texts(ran, loaded.path) == texts(ran, loaded.path, "--no-tail") == ["1", "2", "3", "4", "5", "6"]


def test_the_tail_out_of_kafka_itself(ran: Ran, loaded: Loaded):
    kafka = ("--bootstrap", loaded.workers.kafka.bootstrap)
    assert texts(ran, loaded.path, *kafka) == ["1", "2", "3", "4", "5", "6"]
    assert ran("SELECT 1", "--table", loaded.path, "--bootstrap", "127.0.0.1:9")[0] == 3


def test_a_topic_that_was_recreated_is_refused_whatever_it_holds(ran: Ran, loaded: Loaded):
    """It has as many records as the one that was loaded, so its offsets do not show it."""
    kafka = loaded.workers.kafka.bootstrap
    gone = asyncio.run(delete_topic(kafka, loaded.topic))
    asyncio.run(recreate_topic(kafka, loaded.topic, loaded.workers.urls, 2, gone))
    loaded.write("a", b"7\n", b"8\n", b"9\n")
    assert loaded.id_now() != loaded.topic_id
    for options in ((), ("--bootstrap", kafka)):
        status, _, said = ran("SELECT 1", "--table", loaded.path, *options)
        assert (status, "was recreated" in said) == (1, True), said


def test_a_tail_of_kafka_is_fetched_as_it_is_taken(loaded: Loaded, monkeypatch: pytest.MonkeyPatch):
    fetched: list[tuple[str, int]] = []

    def counted(kafka: Any, place: tuple[str, int], *others: Any) -> Any:
        fetched.append(place)
        return committed(kafka, place, *others)

    monkeypatch.setattr(tail_kafka, "committed", counted)
    loaded.write("s0", b"x\n")
    loaded.write("s1", b"x\n")
    tail = tail_kafka.KafkaTail(loaded.workers.kafka.bootstrap, None)
    chunks = tail.chunks(tail.ranges(snapshot_of(loaded.path), None))
    next(chunks)
    assert len(fetched) == 1
    assert len([*chunks]) == 3
    assert len(fetched) == 2


def test_a_tail_of_many_batches_is_whole(ran: Ran, loaded: Loaded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tail_rows, "_BATCH_BYTES", 1)
    for number in range(20):
        loaded.write(f"s{number}", b"x\n")
    for options in ((), ("--bootstrap", loaded.workers.kafka.bootstrap)):
        assert len(texts(ran, loaded.path, *options)) == 26


def test_a_batch_that_is_committed_meanwhile_moves_no_row(ran: Ran, loaded: Loaded, monkeypatch: pytest.MonkeyPatch):
    """After the version is pinned, and before the ledger is read."""
    from logferry.loaders.storage import tables

    batches: list[LedgerEntry] = []

    def slow(path: Path) -> Any:
        opened = open_table(Location.of(path))
        if not batches:
            batches.append(loaded.load(1))
        return opened

    monkeypatch.setattr(tables, "open_table", slow)
    assert texts(ran, loaded.path) == ["1", "2", "3", "4", "5", "6"]
    assert len(batches) == 1


def test_a_topic_that_came_since_and_one_that_does_not_fit(ran: Ran, loaded: Loaded):
    asyncio.run(loaded.workers.make_topic(f"{loaded.name}-later"))
    asyncio.run(loaded.workers.make_topic(f"other-{loaded.name}"))
    for name, data in ((f"{loaded.name}-later", b"later\n"), (f"other-{loaded.name}", b"other\n")):
        with Writer(loaded.workers.urls, name, "s") as writer:
            writer.write(data)
        asyncio.run(committed_records(loaded.workers.kafka.bootstrap, f"dc1.{name}"))
    assert texts(ran, loaded.path) == ["1", "2", "3", "4", "5", "6", "later"]
    assert texts(ran, loaded.path, "--topics", loaded.topic) == ["1", "2", "3", "4", "5", "6"]


def test_formats_and_the_name_of_the_table(ran: Ran, loaded: Loaded):
    sql = "SELECT text, seqno, newline, attributes, prev FROM nginx WHERE text = '6' "
    arguments = (sql, "--table", loaded.path, "--format")
    (row,) = json.loads(ran(*arguments, "json")[1])
    assert (row["text"], row["newline"], row["attributes"]) == ("6", False, {})
    head, line = csv.reader(io.StringIO(ran(*arguments, "csv")[1]))
    assert head == ["text", "seqno", "newline", "attributes", "prev"]
    assert line[:4] == ["6", str(row["seqno"]), "false", "{}"]
    lines = ran(*arguments, "table")[1].splitlines()
    assert lines[0].split() == head
    assert lines[-1] == "(1 row)"
    assert json.loads(ran("SELECT * FROM logs WHERE false", "--table", loaded.path, "--format", "json")[1]) == []


def test_types_of_an_answer(ran: Ran, loaded: Loaded):
    sql = """SELECT TIMESTAMPTZ '2026-11-22 01:02:03Z' AS t, DATE '2026-11-22' AS d, 'x'::BLOB AS b, '\\xFF'::BLOB AS c,
             1.5::DECIMAL(4, 2) AS e, [1, NULL] AS f, {'g': 'h'} AS g, 'nan'::DOUBLE AS i, NULL AS j"""
    (row,) = json.loads(ran(sql, "--table", loaded.path, "--no-tail", "--format", "json")[1])
    assert row == {
        "t": "2026-11-22T01:02:03Z",
        "d": "2026-11-22",
        "b": "x",
        "c": "/w==",
        "e": "1.50",
        "f": [1, None],
        "g": {"g": "h"},
        "i": "nan",
        "j": None,
    }


def test_an_error_is_reported(ran: Ran, loaded: Loaded, tmp_path: Path):
    cases: list[tuple[list[object], int, str]] = [
        (["SELEC 1", "--table", loaded.path], 2, "syntax error"),
        (["SELECT nope FROM logs", "--table", loaded.path], 2, "nope"),
        (["SELECT 1; SELECT 2", "--table", loaded.path], 2, "expected one SQL statement, got 2"),
        (["", "--table", loaded.path], 2, "expected one SQL statement, got 0"),
        (["SELECT 1", "--table", tmp_path / "nothing"], 2, "is not a table"),
        (
            ["SELECT 1", "--table", loaded.path, "--topics", "dc1.unknown", "--url", "ftp://x"],
            2,
            "is not http(s)://host",
        ),
    ]
    for arguments, status, said in cases:
        found = ran(*arguments) if "--url" not in arguments else ran_plain(arguments)
        assert found[0] == status, found
        assert said in found[2]
        assert found[1] == ""


def ran_plain(arguments: list[object]) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "logferry.ops.cli.main", "query", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_gateway_that_is_away(loaded: Loaded):
    away = ["SELECT count(*) AS n FROM logs", "--table", loaded.path, "--format", "csv", "--url", "http://127.0.0.1:9"]
    status, output, said = ran_plain(away)
    assert (status, output) == (3, "")
    assert "no gateway answers at http://127.0.0.1:9" in said
    assert "or read the table alone with --no-tail" in said
    assert ran_plain([*away, "--no-tail"]) == (0, "n\n3\n", "")


def test_a_gateway_of_another_data_centre(ran: Ran, workers: Gateway, topic_name: str, warehouse: Location):
    elsewhere = Loaded(workers, topic_name, warehouse / "logs", dc="dc2")
    elsewhere.write("a", b"1\n")
    elsewhere.load(0)
    status, output, said = ran("SELECT 1", "--table", elsewhere.path)
    assert (status, output) == (2, "")
    assert "is a gateway of dc1, but the table holds offsets of dc2" in said


def test_topics_that_do_not_continue_the_table(ran: Ran, loaded: Loaded):
    """The ledger is ahead of what Kafka holds: its log was truncated."""
    ranges = [Range(loaded.topic, n, loaded.topic_id, 0, 1000) for n in (0, 1)]
    origin = JobOrigin("127.0.0.1:9", (loaded.topic,))
    Ledger(loaded.paths.ledger).put(new_entry(1, "dc1", tail_rows.LINES, "run", ranges, origin=origin))
    commit_rows(stored_schema(loaded).empty_table(), loaded.paths.main, 1, "run")
    status, _, said = ran("SELECT 1", "--table", loaded.path)
    assert status == 1
    assert "its log was truncated" in said


def stored_schema(loaded: Loaded) -> Any:
    table = open_table(loaded.paths.main)
    assert table is not None
    return table.to_pyarrow_dataset().schema


def test_a_parser_that_only_spark_can_apply_is_refused(
    ran: Ran, workers: Gateway, topic_name: str, warehouse: Location
):
    settings = ParserSettings(format="regex", pattern=r"(?<word>\p{L}+)")
    parsed = Loaded(workers, topic_name, warehouse / "logs", parser=settings)
    parsed.write("a", b"x\n")
    parsed.load(0)
    parsed.write("a", b"y\n")
    status, output, said = ran("SELECT text FROM logs", "--table", parsed.path, "--format", "csv")
    assert (status, output) == (2, "")
    assert "'\\\\p{L}+)' may match otherwise outside of Java" in said
    assert "read the table alone with --no-tail" in said
    assert ran("SELECT 1 AS n", "--table", parsed.path, "--format", "csv", "--no-tail") == (0, "n\n1\n", "")


def test_it_needs_no_spark_and_about_a_second(loaded: Loaded):
    program = "import sys; sys.modules['pyspark'] = None; from logferry.ops.cli.main import main; sys.exit(main())"
    sql = ["query", "SELECT count(*) AS n FROM logs", "--table", str(loaded.path), "--format", "csv"]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *sql, "--url", loaded.workers.urls[0]],
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{time.monotonic() - started:.2f} s")
    assert (done.stdout, done.stderr, done.returncode) == ("n\n6\n", "", 0)


@pytest.mark.spark
async def test_the_tail_is_what_the_loader_will_load(
    ran: Ran, spark: SparkSession, loader: Callable[..., Loader], workers: Gateway, topic_name: str, warehouse: Location
):
    """Every column, and chunks that came by two data centres."""
    from tests.support.loader import Topic, chunks_of

    one, two = (Topic(workers.kafka.bootstrap, f"{dc}.{topic_name}") for dc in ("dc1", "dc2"))
    await one.create()
    await two.create()
    job = TableJob(path=Location.of(warehouse / "logs"), topics=[f"*.{topic_name}"], partition_by=["recorded_date"])
    await one.write(chunks_of("s", b"1\n"))
    list(load_table(loader(), job))
    await one.write(chunks_of("s", b"2\n\xff\n", start=2))
    await two.write(chunks_of("s", b"1\n", b"2\n\xff\n", b"3"))

    def all_of_it(*options: str) -> list[dict[str, Any]]:
        sql = "SELECT * FROM logs ORDER BY topic, source_id, seqno, line"
        status, output, said = ran(sql, "--table", job.path, "--format", "json", *options)
        assert status == 0, said
        found: list[dict[str, Any]] = json.loads(output)
        return found

    before = await asyncio.to_thread(all_of_it)
    assert [(row["text"], row["topic"]) for row in before] == [("1", one.name), ("2", one.name), ("3", two.name)]
    assert before == await asyncio.to_thread(all_of_it, "--bootstrap", workers.kafka.bootstrap)
    list(load_table(loader(), job))
    assert before == await asyncio.to_thread(all_of_it)
    assert len(stored(job.path)) == 3
