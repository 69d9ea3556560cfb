"""Old rows dropped from a table: which rows go, in which order, and what a loader that died leaves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.batches import drop_rows
from logferry.loaders.batches.drop_rows import OldRows
from logferry.loaders.batches.row_counts import table_sources
from logferry.loaders.commands.compact import Session, drop_old
from logferry.loaders.commands.table import main
from logferry.loaders.errors import ClockAhead, Overtaken
from logferry.loaders.planning.ledger_entry import DROP
from logferry.loaders.planning.segment_states import ACTIVE, DROPPED
from logferry.loaders.storage.commit import commit_files
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.loaders.storage.retention import cutoff
from logferry.loaders.storage.side_tables import create_side_tables, known_before, read_segments
from pyspark.sql import SparkSession

from tests.support.loaded_table import HOUR, NOON, LoadedTable

pytestmark = pytest.mark.spark


@pytest.fixture
def session(spark: SparkSession) -> Session:
    return lambda: spark


def test_from_which_time_on_rows_are_kept():
    now = datetime(2026, 11, 20, 12, 34, tzinfo=UTC)
    day = timedelta(days=1)
    assert cutoff(now, 2 * day, 3600, by_days=False) == datetime(2026, 11, 18, 12, tzinfo=UTC)
    assert cutoff(now, 2 * day, None, by_days=False) == datetime(2026, 11, 18, tzinfo=UTC)
    assert cutoff(now, 2 * day, 3600, by_days=True) == datetime(2026, 11, 18, tzinfo=UTC)
    odd = cutoff(now, 2 * day, 7 * 3600, by_days=True)
    assert timedelta(0) <= datetime(2026, 11, 18, tzinfo=UTC) - odd < timedelta(hours=7)
    assert odd.timestamp() % (7 * 3600) == 0


def test_exactly_the_old_rows_go_and_are_reported(session: Session, tmp_path: Path):
    logs = LoadedTable(tmp_path)
    old, new = NOON - timedelta(days=3), NOON - HOUR
    logs.load(old, old + HOUR / 2, old + 2 * HOUR, bad=[old, new])
    logs.load(old + HOUR, new, None, old + HOUR - timedelta(microseconds=1))
    logs.load(new, new)
    ranges = read_ledger(logs.paths.main)[-1].ranges
    create_side_tables(logs.paths)
    known = known_before(logs.paths, 3, "run", partial(table_sources, session()))
    assert {key.source_id: (one.first_seqno, one.last_seqno) for key, one in known.items()} == {
        "web0": (0, 6),
        "web1": (1, 7),
        "web2": (2, 8),
    }
    entry, found = drop_old(session, logs.paths.main, timedelta(days=3) - HOUR, now=NOON + timedelta(minutes=59))
    assert entry is not None
    assert known_before(logs.paths, 4, "run", nothing) == known, "what is known of sources does not go with their rows"
    assert (entry.kind, entry.cutoff, found) == (DROP, old + HOUR, OldRows(3, 1, 1))
    assert logs.offsets == [2, 3, 4, 5, 7, 8], "the row without an event was recorded later"
    assert logs.quarantined == 1
    assert logs.states == {-72: (DROPPED, 1, 0), -71: (ACTIVE, 1, 1), -70: (ACTIVE, 1, 1), -1: (ACTIVE, 1, 3)}
    (dropped,) = [s for s in read_segments(logs.paths.segments, 3).values() if s.state == DROPPED]
    assert dropped.reason == "3 rows, 18 bytes, before 2026-11-17T13:00:00Z, by batch 3"
    stands = read_ledger(logs.paths.main)[-1]
    assert (stands.cutoff, stands.ranges) == (old + HOUR, tuple(r._replace(start=r.end) for r in ranges))
    assert drop_old(session, logs.paths.main, timedelta(days=3) - HOUR, now=NOON) == (None, OldRows(0, 0, 0)), (
        "no batch for nothing"
    )
    # What comes late is loaded, and goes with the next one; the window stays what it is.
    logs.batch += 1
    logs.load(old, new)
    assert logs.states[-72] == (DROPPED, 1, 1)
    entry, found = drop_old(session, logs.paths.main, timedelta(days=3) - HOUR, now=NOON)
    assert found == OldRows(1, 0, 1)
    assert logs.states[-72] == (DROPPED, 1, 0)
    assert logs.offsets == [2, 3, 4, 5, 7, 8, 10]
    assert drop_old(session, logs.paths.main, timedelta(days=1), now=NOON + timedelta(days=3), is_idle=True)[0]
    assert logs.offsets == []


@pytest.mark.long
def test_a_clock_that_is_ahead_drops_nothing(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A month ahead is refused, a week is not: rows then go a week too early. One that is behind keeps them longer."""
    day = timedelta(days=1)
    logs = LoadedTable(tmp_path)
    logs.load(NOON - 80 * day, NOON - 31 * day, NOON)
    with pytest.raises(ClockAhead, match=r"says 2026-12-20T12:00:00Z, but .* the newest row at 2026-11-20T12:01:00Z"):
        drop_old(session, logs.paths.main, 60 * day, now=NOON + 30 * day)
    assert drop_old(session, logs.paths.main, 60 * day, now=NOON - 30 * day) == (None, OldRows(0, 0, 0))
    assert logs.offsets == [0, 1, 2]
    assert drop_old(session, logs.paths.main, 60 * day, now=NOON + 7 * day)[1] == OldRows(1, 0, 1)
    assert drop_old(session, logs.paths.main, 60 * day, now=NOON + 30 * day, is_idle=True)[1] == OldRows(1, 0, 1)
    other = LoadedTable(tmp_path / "other")
    other.load(datetime.now(UTC) - 9 * day)
    assert main(["compact", str(other.paths.main), "--retain-days", "5"]) == 1
    assert "Correct the clock; if the table gets no rows any more, repeat with --idle" in capsys.readouterr().err


def nothing(*_: object) -> Any:
    raise AssertionError("its bounds tell enough")


@pytest.mark.parametrize("parted", [None, ["topic"]])
def test_whole_files_go_without_being_read_and_without_spark(tmp_path: Path, parted: list[str] | None):
    logs = LoadedTable(tmp_path, parted, segments=False)
    logs.load(NOON - timedelta(days=9), NOON - timedelta(days=8))
    logs.load(NOON, NOON)
    _, found = drop_old(nothing, logs.paths.main, timedelta(days=5), now=NOON)
    assert found == OldRows(2, 0, 0)
    assert logs.offsets == [2, 3]


def test_a_row_without_an_event_goes_by_when_it_was_recorded(session: Session, tmp_path: Path):
    logs = LoadedTable(tmp_path, segments=False)
    logs.load(NOON - timedelta(days=9), None)
    drop_old(session, logs.paths.main, timedelta(days=5), now=NOON)
    assert logs.offsets == [1]
    drop_old(session, logs.paths.main, timedelta(days=5), now=NOON + timedelta(days=7))
    assert logs.offsets == []


def test_a_planned_batch_comes_first(session: Session, tmp_path: Path):
    logs = LoadedTable(tmp_path)
    logs.load(NOON - timedelta(days=9), NOON)
    batch = logs.plan(1)
    with pytest.raises(Overtaken, match=f"batch {batch} is planned and not loaded; nothing was dropped"):
        drop_old(session, logs.paths.main, timedelta(days=5), now=NOON)
    assert logs.offsets == [0, 1]


class _Dead(Exception):
    pass


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_loader_that_dies_in_between(session: Session, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No row goes before the commit of the main table. The next run finishes the drop with the planned cutoff."""
    logs = LoadedTable(tmp_path)
    logs.load(NOON - timedelta(days=9), NOON - timedelta(days=5), NOON, bad=[NOON - timedelta(days=9)])
    before = logs.offsets, logs.quarantined, logs.states
    calls: list[Any] = []

    def dies(*given: Any, **more: Any) -> Any:
        calls.append(given)
        if len(calls) > step:
            raise _Dead
        return commit_files(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(drop_rows, "commit_files", dies)
        with pytest.raises(_Dead):
            drop_old(session, logs.paths.main, timedelta(days=7), now=NOON)
    assert (logs.offsets, logs.quarantined, logs.states) == before
    assert read_ledger(logs.paths.main)[-1].kind == DROP
    entry, _ = drop_old(session, logs.paths.main, timedelta(days=8), now=NOON)
    assert entry is None, "the one that was planned has taken it"
    assert (logs.offsets, logs.quarantined) == ([1, 2], 0)
    assert last_batch(open_table(logs.paths.quarantine)) == last_batch(open_table(logs.paths.main)) == 1


@pytest.mark.long
def test_rows_of_a_dead_clock_are_as_old_as_their_recording(session: Session, tmp_path: Path):
    """Events of 1970 that were recorded today stay, those recorded long ago go, and the segments count them."""
    logs = LoadedTable(tmp_path)
    dead, old = datetime(1970, 1, 1, 5, tzinfo=UTC), NOON - 100 * timedelta(days=1)
    logs.load(old, NOON)
    logs.load(dead, dead, dead, recorded=[NOON, NOON, old])
    entry, found = drop_old(session, logs.paths.main, timedelta(days=30), now=NOON)
    assert entry is not None
    assert found == OldRows(2, 0, 2)
    assert logs.offsets == [1, 2, 3]
    segments = read_segments(logs.paths.segments, entry.batch)
    assert (segments[dead].state, segments[dead].rows, segments[dead].bytes) == (DROPPED, 2, 12)
    assert segments[dead].reason.startswith("1 rows, 6 bytes, before 2026-10-21")
    assert drop_old(session, logs.paths.main, timedelta(days=30), now=NOON) == (None, OldRows(0, 0, 0)), (
        "and nothing more"
    )
    last, _ = drop_old(session, logs.paths.main, timedelta(days=1), now=NOON + timedelta(days=3))
    assert last is not None
    assert logs.offsets == [], "a month after their recording"


@pytest.mark.long
def test_rows_of_a_clock_that_is_ahead_are_as_old_as_their_recording(session: Session, tmp_path: Path):
    """Events of 2099 go a day after others of their recording; later segments count what stays and keep their state."""
    day, far = timedelta(days=1), datetime(2099, 1, 1, 5, tzinfo=UTC)
    cut = datetime(2026, 10, 21, 12, tzinfo=UTC)
    logs = LoadedTable(tmp_path)
    logs.load(far, far, NOON, recorded=[NOON - 400 * day, NOON, NOON])
    logs.load(far + HOUR, far + HOUR, recorded=[cut - day - HOUR, cut - day])
    logs.load(far + 2 * HOUR, cut, recorded=[cut - 9 * day, cut - 2 * day])
    logs.load(far - HOUR, far - HOUR, recorded=[cut, NOON])
    entry, found = drop_old(session, logs.paths.main, NOON - cut, now=NOON)
    assert entry is not None
    assert (entry.cutoff, found) == (cut, OldRows(4, 0, 0))
    assert logs.offsets == [1, 2, 4, 7, 8]
    segments = read_segments(logs.paths.segments, entry.batch)
    assert {s.start: (s.state, s.version, s.rows, s.bytes, s.last) for s in segments.values()} == {
        far - HOUR: (ACTIVE, 1, 2, 12, far - HOUR),
        far: (ACTIVE, 1, 1, 6, far),
        far + HOUR: (ACTIVE, 1, 1, 6, far + HOUR),
        far + 2 * HOUR: (ACTIVE, 1, 0, 0, None),
        cut: (ACTIVE, 1, 0, 0, None),
        NOON: (ACTIVE, 1, 1, 6, NOON),
    }
    assert drop_old(session, logs.paths.main, NOON - cut, now=NOON) == (None, OldRows(0, 0, 0))


@pytest.mark.parametrize("parted", [None, ["topic"]])
def test_files_of_a_clock_that_is_ahead_go_by_the_bounds_of_their_recording(tmp_path: Path, parted: list[str] | None):
    cut, day, far = datetime(2026, 11, 15, tzinfo=UTC), timedelta(days=1), datetime(2099, 1, 1, tzinfo=UTC)
    logs = LoadedTable(tmp_path, parted, segments=False)
    logs.load(far, far + HOUR, recorded=[cut - 400 * day, cut - day - HOUR])
    logs.load(far, NOON, recorded=[cut - day, NOON])
    assert drop_old(nothing, logs.paths.main, NOON - cut, now=NOON)[1] == OldRows(2, 0, 0)
    assert logs.offsets == [2, 3]


@pytest.mark.parametrize("parted", [None, ["topic"]])
def test_a_file_of_rows_without_events_goes_only_where_all_were_recorded_before(
    session: Session, tmp_path: Path, parted: list[str] | None
):
    """Its bounds leave nothing of the event time to compare with."""
    cut, hour = datetime(2026, 11, 15, tzinfo=UTC), timedelta(hours=1)
    logs = LoadedTable(tmp_path, parted, segments=False)
    logs.load(None, None, recorded=[cut + hour, cut + 2 * hour])
    logs.load(None, None, recorded=[cut - hour, cut + hour])
    logs.load(None, None, recorded=[cut - hour, cut - 2 * hour])
    assert drop_old(session, logs.paths.main, NOON - cut, now=NOON)[1] == OldRows(3, 0, 0)
    assert logs.offsets == [0, 1, 3]
