"""The table of segments without Spark: its valid rows, its bounded size, and the gateways' facts of sources."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ForeignTable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import TopicPartition
from logferry.loaders.planning.segment_states import ACTIVE, READY, Segment, SegmentRules
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey
from logferry.loaders.runs.segment_check import ReportedSource, notify_ready, source_views
from logferry.loaders.storage.claims import claim
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.files import delete_folder, open_table
from logferry.loaders.storage.ledger import create_table, read_rows
from logferry.loaders.storage.side_tables import (
    _SEGMENTS,
    SNAPSHOT_EVERY,
    create_segments,
    exclude,
    put_segments,
    read_excluded,
    read_segments,
    segment_length,
)

START = datetime(2026, 11, 20, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


def segment(batch: int, hour: int = 0, **changes: Any) -> Segment:
    plain = Segment(START + hour * HOUR, 1, ACTIVE, batch, 10, START, START, 0, None, START, None, batch)
    return plain._replace(**changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t_segments"
    create_segments(Location.of(path), SegmentRules())
    return path


def test_rows_of_a_batch_that_the_table_does_not_hold_do_not_count(path: Path):
    put_segments(Location.of(path), 0, "run", [segment(0)])
    put_segments(Location.of(path), 1, "run", [segment(1, state=READY), segment(1, hour=1)])
    assert read_segments(Location.of(path), 1) == {START: segment(1, state=READY), START + HOUR: segment(1, hour=1)}
    assert read_segments(Location.of(path), 0) == {START: segment(0)}
    assert read_segments(Location.of(path), -1) == {}


def test_the_first_that_is_written_stands(path: Path):
    put_segments(Location.of(path), 0, "one", [segment(0)])
    put_segments(Location.of(path), 0, "two", [segment(0, rows=99)])
    assert read_segments(Location.of(path), 0)[START].rows == 0


def test_it_stays_small_and_keeps_the_segments_before_the_newest_batch(path: Path):
    for batch in range(SNAPSHOT_EVERY + 1):
        put_segments(Location.of(path), batch, "run", [segment(batch, hour=batch % 3)])
    table = open_table(Location.of(path))
    assert table is not None
    assert len(table.file_uris()) == 1
    newest = {one.batch for one in read_segments(Location.of(path), SNAPSHOT_EVERY).values()}
    assert newest == {SNAPSHOT_EVERY, SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY - 2}
    before = {one.batch for one in read_segments(Location.of(path), SNAPSHOT_EVERY - 1).values()}
    assert before == {SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY - 2, SNAPSHOT_EVERY - 3}


def test_another_length_is_another_table(path: Path):
    assert segment_length(Location.of(path)) == 3600
    create_segments(Location.of(path), SegmentRules())
    with pytest.raises(ForeignTable, match="segments of 3600 s, the job 60 s"):
        create_segments(Location.of(path), SegmentRules(window_s=60))
    assert segment_length(Location.of(path.with_name("nothing"))) is None


_MOST = 200 * 365 * 24 * 3600 * 1_000_000
EVENTS = st.lists(st.integers(-_MOST // 4, _MOST).map(lambda us: START + timedelta(microseconds=us)), min_size=1)


def test_names_of_segments():
    names = {
        "2026-11-20T10": START,
        "2026-11-20T10:15": START.replace(minute=15),
        "2026-11-20T00": START.replace(hour=0),
    }
    assert {segment(0, start=start).name: start for start in names.values()} == names


def test_one_of_several_loaders_notifies_and_another_one_when_it_has_died(tmp_path: Path):
    paths = TablePaths.of(tmp_path / "t")
    create_segments(paths.segments, SegmentRules())
    put_segments(paths.segments, 0, "run", [segment(0, state=READY), segment(0, hour=1)])
    settings = {"success": tmp_path / "ready"}
    parser = {"format": "access"}
    job = TableJob.model_validate({"path": paths.main, "topics": ["dc1.a"], "parser": parser, "segments": settings})
    told = paths.segments / "_told"
    mark = told / "2026-11-20T10-1.claim"
    assert claim(mark, 60)
    assert not claim(mark, 60), "a second one"
    done = tmp_path / "ready" / "2026-11-20T10" / "_SUCCESS"
    assert notify_ready(job, paths, 0) == []
    assert not done.exists(), "another one is at it"
    assert not claim(mark, 60, now=time.time() + 59)
    delete_folder(mark)
    assert claim(mark, 60, now=time.time() - 61)
    assert notify_ready(job, paths, 0) == []
    assert json.loads(done.read_text())["version"] == 1
    done.unlink()
    assert notify_ready(job, paths, 0) == []
    assert not done.exists(), "once for each version"
    assert [file.name for file in (tmp_path / "ready").iterdir()] == ["2026-11-20T10"]


# ---- what gateways say --------------------------------------------------------------------------------------

KEY = SourceKey("dc1.a", "web1")
FACTS = SourceFacts(1, 100, START, START - HOUR)


def heard(seqno: int | None, **changes: Any) -> ReportedSource:
    return ReportedSource(seqno, START + HOUR, None, None, False)._replace(**changes)


def test_a_source_owes_the_chunks_that_are_recorded_and_not_loaded():
    (owes,) = source_views({KEY: FACTS}, {KEY: heard(101)}, ["dc1.a"])
    (even,) = source_views({KEY: FACTS}, {KEY: heard(100)}, ["dc1.a"])
    (never,) = source_views({}, {KEY: heard(1)}, ["dc1.a"])
    (nothing,) = source_views({}, {KEY: heard(None)}, ["dc1.a"])
    assert (owes.owes, even.owes, never.owes, nothing.owes) == (True, False, True, False)
    assert (owes.last_seen, owes.event) == (START + HOUR, START - HOUR)
    assert never.mark is None


def test_nobody_owes_what_kafka_no_longer_has():
    """The table has passed all that the partition held after the report."""
    here, there = TopicPartition("dc1.a", 3), TopicPartition("dc1.a", 4)
    report = heard(101, partitions=frozenset({3}))
    (cut,) = source_views({KEY: FACTS}, {KEY: report}, ["dc1.a"], {here})
    (new_table,) = source_views({}, {KEY: report}, ["dc1.a"], {here})
    (open_transaction,) = source_views({}, {KEY: report}, ["dc1.a"], {there})
    (two,) = source_views({}, {KEY: heard(101, partitions=frozenset({3, 4}))}, ["dc1.a"], {here})
    (unknown,) = source_views({}, {KEY: heard(101)}, ["dc1.a"], {here})
    assert [(v.owes, v.is_lost) for v in (cut, new_table)] == [(False, False), (False, True)]
    assert [(v.owes, v.is_lost) for v in (open_transaction, two, unknown)] == [(True, False)] * 3


OTHER = SourceKey("dc1.a", "web2")
LATER = {
    # The report of the other source, its facts in the table, and whether chunks of the first one are known to be gone.
    "a chunk of hours later is loaded": (heard(9, partitions=frozenset({3})), 9, 4, True),
    "more is loaded than was reported": (heard(8, partitions=frozenset({3})), 9, 4, True),
    "a chunk of minutes later is loaded": (heard(9, partitions=frozenset({3})), 9, 1.5, False),
    "the last chunk of the other is not loaded": (heard(10, partitions=frozenset({3})), 9, 4, False),
    "the other one writes into another partition": (heard(9, partitions=frozenset({4})), 9, 4, False),
    "its partition is not known": (heard(9), 9, 4, False),
    "it has two partitions": (heard(9, partitions=frozenset({3, 4})), 9, 4, False),
    "nothing of it is recorded": (heard(None, partitions=frozenset({3})), 9, 4, False),
}


@pytest.mark.parametrize("case", LATER)
def test_a_later_chunk_of_its_partition_shows_that_chunks_are_gone(case: str):
    """In the copy of a topic of another data centre, nothing else shows it."""
    report, seqno, hours, is_gone = LATER[case]
    sources = {KEY: heard(101, partitions=frozenset({3})), OTHER: report}
    other = {OTHER: SourceFacts(0, seqno, START + hours * HOUR)}
    cut, _ = source_views({KEY: FACTS, **other}, sources, ["dc1.a"])
    new_table, _ = source_views(other, sources, ["dc1.a"])
    assert [(v.owes, v.is_lost) for v in (cut, new_table)] == [(not is_gone, False), (not is_gone, is_gone)]


def test_a_source_that_begins_above_0_owes_nothing_below():
    """As the one of a renamed host, which begins behind the bytes that were sent under the old name."""
    begun = heard(5000, partitions=frozenset({3}))
    (opened,) = source_views({}, {KEY: heard(None, partitions=frozenset({3}))}, ["dc1.a"])
    (sent,) = source_views({}, {KEY: begun}, ["dc1.a"])
    (loaded,) = source_views({KEY: SourceFacts(5000, 5000, START + HOUR, START)}, {KEY: begun}, ["dc1.a"])
    assert [(view.owes, view.is_lost) for view in (opened, sent, loaded)] == [
        (False, False),
        (True, False),
        (False, False),
    ]


def test_a_table_of_an_older_loader_gets_the_new_columns(tmp_path: Path):
    path = tmp_path / "old_segments"
    old = segment(0)._asdict()
    for name in ("sources", "silent_sources", "watermark"):
        del old[name]
    columns = [field for field in _SEGMENTS if field.name in old]
    create_table(Location.of(path), pa.schema(columns), "logferry segments of 3600 s")
    commit_rows(pa.Table.from_pylist([old], schema=pa.schema(columns)), Location.of(path), 0, "run")
    assert read_segments(Location.of(path), 0) == {START: segment(0)}
    ready = segment(1, state=READY, sources=3, silent_sources=1, watermark=START + HOUR)
    put_segments(Location.of(path), 1, "run", [ready])
    assert read_segments(Location.of(path), 1) == {START: ready}


def test_decisions_of_operators(tmp_path: Path):
    path = tmp_path / "t_excluded"
    assert read_excluded(Location.of(path)) == []
    exclude(Location.of(path), ["web7:*", "b"], START, "eve", is_excluded=True)
    # The clock of the host of the first decision was ahead.
    exclude(Location.of(path), ["b"], START - HOUR, "adam", is_excluded=False)
    assert read_excluded(Location.of(path)) == ["web7:*"]
    assert sorted(
        (row["at"], row["by"], row["source_id"], row["excluded"]) for row in read_rows(Location.of(path))
    ) == [
        (START, "eve", "b", "yes"),
        (START, "eve", "web7:*", "yes"),
        (START + timedelta(microseconds=1), "adam", "b", "no"),
    ]


def test_a_source_without_facts_of_a_gateway_is_known_by_its_chunks():
    (view,) = source_views({KEY: FACTS, KEY._replace(topic="dc1.b"): FACTS}, {}, ["dc1.a"])
    assert (view.topic, view.mark, view.last_seen, view.owes) == ("dc1.a", START - HOUR, START, False)
