"""A corrected parser: lines that it reads leave the quarantine in the same commit that adds them to the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ForeignTable, LedgerBroken, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs import table_run
from logferry.loaders.runs.table_run import load_table, requarantine_table
from logferry.loaders.storage.commit import commit_files, committed_batch
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Topic, chunks_of, quarantine, stored
from tests.support.table_loads import LoaderDied, die, done, losing_a_file

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]

BROKEN = {"format": "regex", "pattern": r"(?<level>[A-Z]+) (?<n>\d+)", "columns": {"n": "int"}}
MENDED = {"format": "regex", "pattern": r"(?<level>[A-Za-z]+) (?<n>\d+)( (?<more>.*))?", "columns": {"n": "int"}}
LINES = [b"INFO 1", b"warn 2", b"INFO 3 x y", b"\xff", b"", b"WARN many", b"INFO 4"]


@pytest.fixture
async def topic(kafka: KafkaCluster, topic_name: str) -> Topic:
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create()
    await topic.write(chunks_of("a", b"".join(line + b"\n" for line in LINES)))
    await topic.write_raw(b"INFO 1\n", b"stranger", [])
    return topic


def job(table: Location, topic: Topic, parser: dict[str, Any]) -> TableJob:
    return TableJob.model_validate({"path": table, "topics": [topic.name], "parser": parser})


def where(table: Location) -> tuple[Counter[bytes], Counter[bytes]]:
    """(lines in the table, lines that stand in the quarantine)"""
    rows = Counter(row["text"].encode() for row in stored(table))
    return rows, Counter(row["bytes"] for row in quarantine(table) if row["line"] is not None)


def check_each_line_once(table: Location) -> tuple[Counter[bytes], Counter[bytes]]:
    rows, bad = where(table)
    assert rows + bad == Counter(LINES)
    return rows, bad


STAY = Counter([b"\xff", b"", b"WARN many"])


async def test_lines_that_the_new_parser_reads_move_into_the_table(loader: Start, topic: Topic, warehouse: Location):
    table = warehouse / "logs"
    done(load_table(loader(), job(table, topic, BROKEN)))
    rows, bad = check_each_line_once(table)
    assert rows == Counter([b"INFO 1", b"INFO 4"])
    (batch,) = done(requarantine_table(loader(), job(table, topic, MENDED)))
    assert (batch.ours, batch.rows, batch.quarantined) == (True, 2, -2)
    rows, bad = check_each_line_once(table)
    assert bad == STAY
    new = {row["text"]: (row["level"], row["n"], row["more"], row["line"]) for row in stored(table)}
    assert new["INFO 3 x y"] == ("INFO", 3, "x y", 2)
    assert new["warn 2"] == ("warn", 2, "", 1)
    assert new["INFO 1"] == ("INFO", 1, None, 0), "as the older parser wrote it"
    standing = {row["bytes"]: row for row in quarantine(table)}
    assert standing[b"INFO 1\n"]["reason"].startswith("no seqno header"), "what no gateway wrote stays"
    assert standing[b""]["parser"] == MENDED_NAME
    # Again, and with more to load: each line stays once, and the positions continue where they were.
    await topic.write(chunks_of("b", b"info 5 z\n"))
    (more,) = done(load_table(loader(), job(table, topic, MENDED)))
    assert more.rows == 1
    (nothing,) = done(requarantine_table(loader(), job(table, topic, MENDED)))
    assert nothing.rows == 0
    rows, bad = where(table)
    assert rows + bad == Counter([*LINES, b"info 5 z"])
    assert [entry.kind for entry in read_ledger(table)] == ["load", "requarantine", "load", "requarantine"]


MENDED_NAME = TableJob.model_validate({"path": "x", "topics": ["dc1.a"], "parser": MENDED}).parser.name


WINDOWS = {
    "after the ledger": "resolve",
    "after the mark": "resolved_rows",
    "before the commit": "commit_files",
}


@pytest.mark.parametrize("window", ["after the mark", *(pytest.param(w, marks=pytest.mark.long) for w in WINDOWS)])
async def test_a_loader_that_dies_in_between(
    window: str, loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    """Each line is in exactly one table at any time. The next run, of any kind, finishes the batch."""
    table = warehouse / "logs"
    done(load_table(loader(), job(table, topic, BROKEN)))
    with monkeypatch.context() as patch:
        patch.setattr(execute, WINDOWS[window], die)
        with pytest.raises(LoaderDied):
            done(requarantine_table(loader("dies"), job(table, topic, MENDED)))
    rows, _ = check_each_line_once(table)
    assert rows == Counter([b"INFO 1", b"INFO 4"]), "nothing of the batch is in the table"
    # The next run is a plain load, and has the broken parser still: what was planned is done as it was planned.
    (ended,) = done(load_table(loader("continues"), job(table, topic, BROKEN)))
    assert (ended.ours, ended.rows) == (True, 2)
    _, bad = check_each_line_once(table)
    assert bad == STAY


@pytest.mark.long
async def test_a_lost_file_of_the_quarantine_does_not_replace_it(loader: Start, topic: Topic, warehouse: Location):
    """A requarantine rewrites the whole quarantine: a file that is missing in the listing would be lost."""
    table = warehouse / "logs"
    done(load_table(loader(), job(table, topic, BROKEN)))
    before = quarantine(table)
    with losing_a_file(TablePaths.of(table).quarantine):
        with pytest.raises(StorageUnavailable, match="the listing of their folder may be stale"):
            done(requarantine_table(loader(), job(table, topic, MENDED)))
    assert quarantine(table) == before
    (batch,) = done(requarantine_table(loader("again"), job(table, topic, MENDED)))
    assert (batch.rows, len(quarantine(table))) == (2, len(before) - 2)


@pytest.mark.long
async def test_a_lost_file_of_rows_is_not_committed_where_another_loader_marked_the_lines(
    loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    table = warehouse / "logs"
    done(load_table(loader(), job(table, topic, BROKEN)))
    with monkeypatch.context() as patch:
        patch.setattr(execute, "resolved_rows", die)
        with pytest.raises(LoaderDied):
            done(requarantine_table(loader("dies"), job(table, topic, MENDED)))
    with losing_a_file(table):
        with pytest.raises(LedgerBroken, match="2 lines of the quarantine can be read, but they make 0 rows"):
            done(load_table(loader("continues"), job(table, topic, BROKEN)))
    (ended,) = done(load_table(loader("again"), job(table, topic, BROKEN)))
    assert (ended.ours, ended.rows) == (True, 2)
    _, bad = check_each_line_once(table)
    assert bad == STAY


@pytest.mark.long
async def test_a_late_loader_that_has_read_the_batch(
    loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    """It has marked and parsed all lines when another loader writes the batch and two more. Its commit is refused."""
    table = warehouse / "logs"
    done(load_table(loader(), job(table, topic, BROKEN)))
    late: list[Any] = []

    def others_first(*given: Any) -> Any:
        monkeypatch.setattr(execute, "commit_files", commit_files)
        late.extend(done(requarantine_table(loader("fast"), job(table, topic, MENDED))))
        late.extend(done(requarantine_table(loader("fast"), job(table, topic, MENDED))))
        return commit_files(*given)

    monkeypatch.setattr(execute, "commit_files", others_first)
    (slow,) = done(requarantine_table(loader("slow"), job(table, topic, MENDED)))
    assert (slow.batch, slow.ours) == (1, False)
    assert [(batch.batch, batch.ours) for batch in late] == [(1, True), (2, True)]
    _, bad = check_each_line_once(table)
    assert bad == STAY
    marked = committed_batch(TablePaths.of(table).quarantine, 1, "slow")
    assert marked is not None
    assert marked.ours, "the mark was the slow one's"


async def test_a_planned_batch_is_parsed_as_it_was_planned(
    loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    """The parser is changed while a loader is dead in mid-batch: no line is sorted twice."""
    table = warehouse / "logs"
    with monkeypatch.context() as patch:
        patch.setattr(table_run, "do_batch", die)
        with pytest.raises(LoaderDied):
            done(load_table(loader("dies"), job(table, topic, BROKEN)))
    done(load_table(loader("continues"), job(table, topic, MENDED)))
    rows, _ = check_each_line_once(table)
    assert rows == Counter([b"INFO 1", b"INFO 4"])
    assert last_batch(open_table(table)) == 0


@pytest.mark.long
async def test_a_column_with_another_type_is_another_table(loader: Start, topic: Topic, warehouse: Location):
    table = warehouse / "logs"
    done(load_table(loader(), job(table, topic, BROKEN)))
    with pytest.raises(ForeignTable, match="has other columns than the job: n"):
        done(load_table(loader(), job(table, topic, {**BROKEN, "columns": {}})))


@pytest.mark.long
async def test_partitioned_by_days(loader: Start, topic: Topic, warehouse: Location):
    table = warehouse / "logs"
    await topic.write(chunks_of("b", b"2026-11-20T23:59:59 a\n2026-11-21T00:00:00 b\n"))
    parser = {
        "format": "regex",
        "pattern": r"(?<at>\S+) (?<what>.*)",
        "event_time": {"column": "at", "formats": ["iso"]},
    }
    days = {"path": table, "topics": [topic.name], "parser": parser, "partition_by": ["dc", "event_date"]}
    done(load_table(loader(), TableJob.model_validate(days)))
    assert {(row["what"], str(row["event_date"])) for row in stored(table)} == {
        ("a", "2026-11-20"),
        ("b", "2026-11-21"),
    }
    made = open_table(table)
    assert made is not None
    assert {file.split("/")[-3:-1][1] for file in made.file_uris()} == {
        "event_date=2026-11-20",
        "event_date=2026-11-21",
    }
    with pytest.raises(ForeignTable, match="partitioned by dc, event_date"):
        done(load_table(loader(), TableJob.model_validate({**days, "partition_by": []})))
