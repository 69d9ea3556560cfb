"""The table of segments without Spark: what counts of it, and that it stays small; what gateways say of sources."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ForeignTable
from logferry.loaders.known import SNAPSHOT_EVERY
from logferry.loaders.planning.segment_states import ACTIVE, READY, Added, Rules, Segment, window_of
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey
from logferry.loaders.runs.notify import announce, window_name
from logferry.loaders.runs.segment_check import Heard, views
from logferry.loaders.storage.data_files import Written
from logferry.loaders.storage.ledger import TablePaths, open_table
from logferry.loaders.storage.segment_table import (
    _added,
    added_by,
    create_segments,
    put_segments,
    read_segments,
    window_s,
)

START = datetime(2026, 11, 20, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)


def segment(batch: int, hour: int = 0, **changes: Any) -> Segment:
    plain = Segment(START + hour * HOUR, 1, ACTIVE, batch, 10, START, START, 0, None, START, None, batch)
    return plain._replace(**changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t_segments"
    create_segments(path, Rules())
    return path


def test_rows_of_a_batch_that_the_table_does_not_hold_do_not_count(path: Path):
    put_segments(path, 0, "run", [segment(0)])
    put_segments(path, 1, "run", [segment(1, state=READY), segment(1, hour=1)])
    assert read_segments(path, 1) == {START: segment(1, state=READY), START + HOUR: segment(1, hour=1)}
    assert read_segments(path, 0) == {START: segment(0)}
    assert read_segments(path, -1) == {}


def test_the_first_that_is_written_stands(path: Path):
    put_segments(path, 0, "one", [segment(0)])
    put_segments(path, 0, "two", [segment(0, rows=99)])
    assert read_segments(path, 0)[START].rows == 0


def test_it_stays_small_and_keeps_what_stood_before_the_newest_batch(path: Path):
    for batch in range(SNAPSHOT_EVERY + 1):
        put_segments(path, batch, "run", [segment(batch, hour=batch % 3)])
    table = open_table(path)
    assert table is not None
    assert len(table.file_uris()) == 1
    newest = {one.batch for one in read_segments(path, SNAPSHOT_EVERY).values()}
    assert newest == {SNAPSHOT_EVERY, SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY - 2}
    before = {one.batch for one in read_segments(path, SNAPSHOT_EVERY - 1).values()}
    assert before == {SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY - 2, SNAPSHOT_EVERY - 3}


def test_another_length_is_another_table(path: Path):
    assert window_s(path) == 3600
    create_segments(path, Rules())
    with pytest.raises(ForeignTable, match="windows of 3600 s, the job says 60"):
        create_segments(path, Rules(window_s=60))
    assert window_s(path.with_name("nothing")) is None


_MOST = 200 * 365 * 24 * 3600 * 1_000_000
EVENTS = st.lists(st.integers(-_MOST // 4, _MOST).map(lambda us: START + timedelta(microseconds=us)), min_size=1)


@given(EVENTS, st.sampled_from([60, 3600, 86400, 604800]))
def test_counts_are_those_of_plain_python(times: list[datetime], length: int):
    rules = Rules(window_s=length)
    texts = ["ä" * i for i in range(len(times))]
    rows = pa.table({"event_time": pa.array(times, pa.timestamp("us", "UTC")), "text": texts})
    want: dict[datetime, Added] = {}
    for i, time in enumerate(times):
        start = window_of(time, rules)
        before = want.get(start, Added(0, 0, time, time))
        want[start] = Added(before.rows + 1, before.bytes + 2 * i, min(before.first, time), max(before.last, time))
    assert _added(rows, rules) == want


def test_files_of_a_table_that_is_partitioned_by_topic(tmp_path: Path):
    folder = tmp_path / "batch-1" / "topic=dc1.a"
    folder.mkdir(parents=True)
    at = pa.array([START, START + HOUR], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"source_id": ["a", "a"], "event_time": at, "text": ["x", "yz"]}), folder / "p.parquet")

    class Add:
        path = "batch-1/topic=dc1.a/p.parquet"

    added, newest = added_by(Written(tmp_path / "batch-1", (Add(),), 2), Rules())  # type: ignore[arg-type]
    assert {start: one.bytes for start, one in added.items()} == {START: 1, START + HOUR: 2}
    assert newest == {SourceKey("dc1.a", "a"): START + HOUR}


def test_names_of_windows():
    names = {
        "2026-11-20T10": START,
        "2026-11-20T10:15": START.replace(minute=15),
        "2026-11-20T00": START.replace(hour=0),
    }
    assert {window_name(segment(0, start=start)): start for start in names.values()} == names


def test_of_several_loaders_one_tells_and_another_when_it_has_died(tmp_path: Path):
    paths = TablePaths.of(tmp_path / "t")
    create_segments(paths.segments, Rules())
    put_segments(paths.segments, 0, "run", [segment(0, state=READY), segment(0, hour=1)])
    settings = {"success": tmp_path / "ready"}
    parser = {"format": "access"}
    job = TableJob.model_validate({"path": paths.main, "topics": ["dc1.a"], "parser": parser, "segments": settings})
    told = paths.segments / "_told"
    told.mkdir()
    (told / "2026-11-20T10-1.claim").touch()
    done = tmp_path / "ready" / "2026-11-20T10" / "_SUCCESS"
    assert announce(job, paths, 0) == []
    assert not done.exists(), "another one is at it"
    os.utime(told / "2026-11-20T10-1.claim", (0, 0))
    assert announce(job, paths, 0) == []
    assert json.loads(done.read_text())["version"] == 1
    done.unlink()
    assert announce(job, paths, 0) == []
    assert not done.exists(), "once for each version"
    assert [file.name for file in (tmp_path / "ready").iterdir()] == ["2026-11-20T10"]


# ---- what gateways say --------------------------------------------------------------------------------------

KEY = SourceKey("dc1.a", "web1")
FACTS = SourceFacts(1, 100, START, START - HOUR)


def heard(seqno: int | None, **changes: Any) -> Heard:
    return Heard(seqno, START + HOUR, None, None, False)._replace(**changes)


def test_more_recorded_than_loaded_is_owed():
    (owes,) = views({KEY: FACTS}, {KEY: heard(101)}, ["dc1.a"])
    (even,) = views({KEY: FACTS}, {KEY: heard(100)}, ["dc1.a"])
    (never,) = views({}, {KEY: heard(1)}, ["dc1.a"])
    (nothing,) = views({}, {KEY: heard(None)}, ["dc1.a"])
    assert (owes.owes, even.owes, never.owes, nothing.owes) == (True, False, True, False)
    assert (owes.heard, owes.event) == (START + HOUR, START - HOUR)
    assert never.mark is None


def test_a_source_that_no_gateway_tells_of_is_known_by_what_it_wrote():
    (view,) = views({KEY: FACTS, KEY._replace(topic="dc1.b"): FACTS}, {}, ["dc1.a"])
    assert (view.topic, view.mark, view.heard, view.owes) == ("dc1.a", START - HOUR, START, False)
