"""Tables merged, tidied, and rid of old rows: which files and rows go, and that nothing else does. Without Spark."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from logferry.loaders.batches.dedup import create_moved, known_before
from logferry.loaders.commands.compact import drop_old, main
from logferry.loaders.errors import Overtaken
from logferry.loaders.parsing import rows as parse
from logferry.loaders.planning.plan import Range
from logferry.loaders.planning.segment_states import (
    ACTIVE,
    DROPPED,
    READY,
    Added,
    Look,
    Low,
    Recounted,
    Rules,
    Segment,
    add_rows,
    drop_before,
    look_at,
    replace_rows,
)
from logferry.loaders.standing import standing
from logferry.loaders.storage import compact as compacting
from logferry.loaders.storage import drop_rows as dropping
from logferry.loaders.storage.commit import replace_files
from logferry.loaders.storage.compact import batch_of, compact, removable
from logferry.loaders.storage.data_files import INDEXED, Written
from logferry.loaders.storage.drop_rows import Old, cutoff
from logferry.loaders.storage.ledger import (
    APP,
    DROP,
    Ledger,
    TablePaths,
    last_batch,
    new_entry,
    open_table,
    read_ledger,
)
from logferry.loaders.storage.rewrite import Rewriter, commit_rewritten, of_ranges
from logferry.loaders.storage.segment_table import create_segments, put_segments, read_segments

T = "dc1.nginx"
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
RULES = Rules()
_TIME = pa.timestamp("us", "UTC")
_PLACE = [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("dc", pa.string())]
_PLACE += [("source_id", pa.string()), ("seqno", pa.int64())]
MAIN = pa.schema([*_PLACE, ("recorded", _TIME), ("event_time", _TIME), ("text", pa.string())])
QUARANTINE = pa.schema(Schema.from_json(parse.QUARANTINE.json()).to_arrow())


def row(offset: int, event: datetime | None, recorded: datetime | None = None) -> dict[str, Any]:
    at = recorded or (event or NOON) + timedelta(minutes=1)
    place = {
        "topic": T,
        "partition": 0,
        "offset": offset,
        "dc": "dc1",
        "source_id": f"web{offset % 3}",
        "seqno": offset,
    }
    return {**place, "recorded": at, "event_time": event, "text": f"line {offset}"}


def commit(path: Path, batch: int, rows: Sequence[dict[str, Any]], schema: pa.Schema) -> None:
    properties = CommitProperties(app_transactions=[Transaction(APP, batch)])
    table = pa.Table.from_pylist(list(rows), schema=schema)
    write_deltalake(str(path), table, mode="append", commit_properties=properties)


class World:
    """A table whose batch n holds the rows given for it, one a file."""

    def __init__(self, folder: Path, partition_by: list[str] | None = None, *, segments: bool = True) -> None:
        self.paths = TablePaths.of(folder / "logs")
        Ledger(self.paths.ledger).create()
        # As a loader makes them: of other columns than these nothing is told.
        told = [name for name in INDEXED if name in MAIN.names and name not in (partition_by or ())]
        stats: dict[str, str | None] = {"delta.dataSkippingStatsColumns": ",".join(told)}
        main, beside = str(self.paths.main), str(self.paths.quarantine)
        DeltaTable.create(main, Schema.from_arrow(MAIN), partition_by=partition_by, configuration=stats)
        stats = {"delta.dataSkippingStatsColumns": "topic,partition,offset,recorded"}
        DeltaTable.create(beside, Schema.from_arrow(QUARANTINE), configuration=stats)
        self.batch, self.offset = -1, 0
        if segments:
            create_segments(self.paths.segments, RULES)

    def plan(self, rows: int) -> int:
        end = self.offset + rows
        ranges = [Range(T, 0, "id", self.offset, end)]
        Ledger(self.paths.ledger).put(new_entry(self.batch + 1, "dc1", "lines/1", "run", ranges))
        self.offset = end
        return self.batch + 1

    def load(self, *events: datetime | None, bad: Sequence[datetime] = ()) -> None:
        first = self.offset
        self.batch = self.plan(len(events))
        lines = [{**row(first, None, at), "bytes": b"?"} for at in bad]
        commit(self.paths.quarantine, self.batch, lines, QUARANTINE)
        rows = [row(first + i, event) for i, event in enumerate(events)]
        added: dict[datetime, Added] = {}
        for one in rows:
            if one["event_time"]:
                start = one["event_time"].replace(minute=0, second=0, microsecond=0)
                before = added.get(start, Added(0, 0, one["event_time"], one["event_time"]))
                added[start] = Added(
                    before.rows + 1, before.bytes + 6, before.first, max(before.last, one["event_time"])
                )
        if open_table(self.paths.segments):
            known = read_segments(self.paths.segments, self.batch - 1)
            put_segments(self.paths.segments, self.batch, "run", add_rows(known, added, self.batch, NOON).values())
        commit(self.paths.main, self.batch, rows, MAIN)

    @property
    def offsets(self) -> list[int]:
        return sorted(one["offset"] for one in DeltaTable(str(self.paths.main)).to_pyarrow_table().to_pylist())

    @property
    def quarantined(self) -> int:
        table = DeltaTable(str(self.paths.quarantine))
        stands = standing([field.name for field in table.schema().fields], last_batch(open_table(self.paths.main)))
        return int(table.to_pyarrow_dataset().count_rows(filter=stands))

    @property
    def states(self) -> dict[int, tuple[str, int, int]]:
        found = read_segments(self.paths.segments, last_batch(open_table(self.paths.main)))
        return {(start - NOON) // HOUR: (one.state, one.version, one.rows) for start, one in found.items()}


# ---- merging ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parted", [None, ["topic"]])
def test_files_are_merged_and_nothing_else_changes(tmp_path: Path, parted: list[str] | None):
    world = World(tmp_path, parted)
    for _ in range(6):
        world.load(NOON, NOON + HOUR, bad=[NOON])
    before = world.offsets, world.quarantined, world.states, read_ledger(world.paths.main)
    found = {tidied.path: tidied for tidied in compact(world.paths.main)}
    assert (found[world.paths.main].before, found[world.paths.main].after) == (6, 1)
    assert (found[world.paths.ledger].before, found[world.paths.ledger].after) == (6, 1)
    assert all(tidied.removed == 0 for tidied in found.values()), "pinned readers need what was merged"
    assert set(found) == {world.paths.main, world.paths.quarantine, world.paths.ledger, world.paths.segments}
    assert (world.offsets, world.quarantined, world.states, read_ledger(world.paths.main)) == before
    assert [last_batch(open_table(path)) for path in found] == [5] * 4
    pinned = DeltaTable(str(world.paths.main), version=6)
    assert len(pinned.file_uris()) == 6
    assert pinned.to_pyarrow_table().num_rows == 12
    # What nobody has named for so long goes; the log opens all the same.
    gone = {tidied.path: tidied for tidied in compact(world.paths.main, timedelta(0))}
    assert gone[world.paths.main].removed == 6
    assert (world.offsets, world.quarantined, world.states, read_ledger(world.paths.main)) == before
    world.load(NOON)
    assert len(world.offsets) == 13


def test_files_of_unfinished_batches_stay_however_old(tmp_path: Path):
    world = World(tmp_path)
    world.load(NOON)
    long_ago = time.time() - 365 * 86_400
    places = {}
    for batch, age in ((0, long_ago), (0, time.time()), (1, long_ago), (7, long_ago)):
        folder = world.paths.main / f"batch-{batch:08}-{'old' if age == long_ago else 'new'}"
        file = folder / "topic=x" / "part-1.parquet"
        file.parent.mkdir(parents=True)
        for name in (file, file.with_name(".part-1.parquet.crc"), file.parents[1] / "_temporary"):
            name.write_bytes(b"x")
            os.utime(name, (age, age))
        os.utime(folder, (age, age))
        places[batch, age == long_ago] = file
    world.plan(1)
    assert sum(tidied.removed for tidied in compact(world.paths.main)) > 0
    empty = world.paths.main / "batch-00000000-old"
    assert [file for file in empty.rglob("*") if file.is_file()] == []
    os.utime(empty, (long_ago, long_ago))
    assert len(list(compact(world.paths.main))) == 4
    assert not empty.exists()
    assert {key: file.exists() for key, file in places.items()} == {
        (0, True): False,
        (0, False): True,
        (1, True): True,
        (7, True): True,
    }
    assert world.offsets == [0]


def test_which_unneeded_files_may_go():
    names = [
        "part-1.parquet",
        "batch-00000004-ab/p.parquet",
        "batch-00000005-ab/topic=a/p.parquet",
        "dc=1/part.parquet",
    ]
    assert removable(names, 4) == [names[0], names[1], names[3]]
    assert [batch_of(name) for name in names] == [None, 4, 5, None]


def test_a_merge_that_loses_its_files_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World(tmp_path, segments=False)
    for _ in range(4):
        world.load(NOON, NOON)
    opened, times = compacting.open_table, []

    def rows_go_after_the_look(path: Path) -> DeltaTable | None:
        table = opened(path)
        if path == world.paths.main and not times:
            times.append(path)
            rule = of_ranges([Range(T, 0, "id", 3, 4)], "dc1")
            commit_rewritten(Written(path, (), 0), Rewriter(path, 4, rule), path, 4, "other")
        return table

    monkeypatch.setattr(compacting, "open_table", rows_go_after_the_look)
    tidied = compacting.tidy(world.paths.main, 3, timedelta(days=7))
    assert times
    assert tidied.after == 1
    assert world.offsets == [0, 1, 2, 4, 5, 6, 7]


# ---- rows out of files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parted", [None, ["topic", "dc"]])
def test_rows_go_and_the_others_stay_as_they_are(tmp_path: Path, parted: list[str] | None):
    world = World(tmp_path, parted, segments=False)
    for _ in range(3):
        world.load(NOON, None, NOON)
    whole = DeltaTable(str(world.paths.main)).to_pyarrow_table().sort_by("offset")
    untouched = set(DeltaTable(str(world.paths.main)).file_uris())
    path = world.paths.main
    rewriter = Rewriter(path, 3, of_ranges([Range(T, 0, "id", 1, 2), Range(T, 0, "id", 3, 6)], "dc1"))
    commit_rewritten(Written(path, (), 0), rewriter, path, 3, "run", parted or ())
    assert rewriter.taken == 4
    left = DeltaTable(str(path)).to_pyarrow_table().sort_by("offset")
    assert left.equals(whole.take([0, 2, 6, 7, 8]))
    assert len(untouched & set(DeltaTable(str(path)).file_uris())) == 1
    # Those that were loaded in another data centre have other offsets, as do other topics and partitions.
    for rule in (
        of_ranges([Range(T, 0, "id", 0, 9)], "dc2"),
        of_ranges([Range(T, 1, "id", 0, 9)], "dc1"),
        of_ranges([Range("dc1.other", 0, "id", 0, 9)], "dc1"),
    ):
        batch = last_batch(open_table(path)) + 1
        commit_rewritten(Written(path, (), 0), Rewriter(path, batch, rule), path, batch, "run", parted or ())
        assert world.offsets == [0, 2, 6, 7, 8]


def test_what_removes_files_takes_no_commit_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """delta-rs lets a removal pass whose file a compaction has replaced meanwhile: its rows would stand twice."""
    world = World(tmp_path, segments=False)
    for _ in range(3):
        world.load(NOON, NOON)
    path, times = world.paths.main, []
    looked = Rewriter.actions

    def merged_after_the_look(self: Rewriter, table: DeltaTable) -> Any:
        actions = looked(self, table)
        times.append(table.version())
        if len(times) == 1:
            DeltaTable(str(path)).optimize.compact()
        elif len(times) == 2:
            write_deltalake(str(path), pa.Table.from_pylist([], schema=MAIN), mode="append")
        return actions

    monkeypatch.setattr(Rewriter, "actions", merged_after_the_look)
    rewriter = Rewriter(path, 3, of_ranges([Range(T, 0, "id", 0, 3)], "dc1"))
    commit_rewritten(Written(path, (), 0), rewriter, path, 3, "run")
    assert len(times) == 3
    assert DeltaTable(str(path)).version() == times[-1] + 1, "what goes and what comes are one commit"
    assert world.offsets == [3, 4, 5]
    assert last_batch(open_table(path)) == 3


def test_what_takes_the_place_of_all_takes_no_commit_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World(tmp_path, segments=False)
    for _ in range(3):
        world.load(NOON, NOON)
    path, create, times = world.paths.main, DeltaTable.create_write_transaction, []

    def merged_first(self: DeltaTable, *given: Any, **more: Any) -> None:
        if not times:
            times.append(1)
            DeltaTable(str(path)).optimize.compact()
        create(self, *given, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", merged_first)
    replace_files(Written(path, (), 0), path, 3, "run")
    assert times
    assert world.offsets == []


# ---- dropping --------------------------------------------------------------------------------------------


def test_from_which_time_on_rows_are_kept():
    now = datetime(2026, 11, 20, 12, 34, tzinfo=UTC)
    day = timedelta(days=1)
    assert cutoff(now, 2 * day, 3600, by_days=False) == datetime(2026, 11, 18, 12, tzinfo=UTC)
    assert cutoff(now, 2 * day, None, by_days=False) == datetime(2026, 11, 18, tzinfo=UTC)
    assert cutoff(now, 2 * day, 3600, by_days=True) == datetime(2026, 11, 18, tzinfo=UTC)
    odd = cutoff(now, 2 * day, 7 * 3600, by_days=True)
    assert timedelta(0) <= datetime(2026, 11, 18, tzinfo=UTC) - odd < timedelta(hours=7)
    assert odd.timestamp() % (7 * 3600) == 0


def test_what_is_old_goes_exactly_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    world = World(tmp_path)
    old, new = NOON - timedelta(days=3), NOON - HOUR
    world.load(old, old + HOUR / 2, old + 2 * HOUR, bad=[old, new])
    world.load(old + HOUR, new, None, old + HOUR - timedelta(microseconds=1))
    world.load(new, new)
    ranges = read_ledger(world.paths.main)[-1].ranges
    create_moved(world.paths)
    known = known_before(world.paths, 3, "run")
    assert {key.source_id: (one.first_seqno, one.last_seqno) for key, one in known.items()} == {
        "web0": (0, 6),
        "web1": (1, 7),
        "web2": (2, 8),
    }
    entry, found = drop_old(world.paths.main, timedelta(days=3) - HOUR, now=NOON + timedelta(minutes=59))
    assert entry is not None
    assert known_before(world.paths, 4, "run") == known, "what is known of sources does not go with their rows"
    assert (entry.kind, entry.cutoff, found) == (DROP, old + HOUR, Old(3, 1, 1))
    assert world.offsets == [2, 3, 4, 5, 7, 8], "the row without an event was recorded later"
    assert world.quarantined == 1
    assert world.states == {-72: (DROPPED, 1, 0), -71: (ACTIVE, 1, 1), -70: (ACTIVE, 1, 1), -1: (ACTIVE, 1, 3)}
    (dropped,) = [s for s in read_segments(world.paths.segments, 3).values() if s.state == DROPPED]
    assert dropped.reason == "3 rows, 18 bytes, before 2026-11-17T13:00:00Z, by batch 3"
    stands = read_ledger(world.paths.main)[-1]
    assert (stands.cutoff, stands.ranges) == (old + HOUR, tuple(r._replace(start=r.end) for r in ranges))
    assert drop_old(world.paths.main, timedelta(days=3) - HOUR, now=NOON) == (None, Old(0, 0, 0)), (
        "no batch for nothing"
    )
    # What comes late is loaded, and goes with the next one; the window stays what it is.
    world.batch += 1
    world.load(old, new)
    assert world.states[-72] == (DROPPED, 1, 1)
    entry, found = drop_old(world.paths.main, timedelta(days=3) - HOUR, now=NOON)
    assert found == Old(1, 0, 1)
    assert world.states[-72] == (DROPPED, 1, 0)
    assert world.offsets == [2, 3, 4, 5, 7, 8, 10]
    assert main([str(world.paths.main), "--keep", "1", "--json"]) == 0
    assert '"cutoff": ' in capsys.readouterr().out
    assert world.offsets == []


@pytest.mark.parametrize("parted", [None, ["topic"]])
def test_whole_files_go_without_being_read(tmp_path: Path, parted: list[str] | None, monkeypatch: pytest.MonkeyPatch):
    world = World(tmp_path, parted, segments=False)
    world.load(NOON - timedelta(days=9), NOON - timedelta(days=8))
    world.load(NOON, NOON)

    def no_reading(*_: object) -> Any:
        raise AssertionError("its bounds tell enough")

    monkeypatch.setattr(Rewriter, "_count", no_reading)
    _, found = drop_old(world.paths.main, timedelta(days=5), now=NOON)
    assert found == Old(2, 0, 0)
    assert world.offsets == [2, 3]


def test_a_row_without_an_event_goes_by_when_it_was_recorded(tmp_path: Path):
    world = World(tmp_path, segments=False)
    world.load(NOON - timedelta(days=9), None)
    drop_old(world.paths.main, timedelta(days=5), now=NOON)
    assert world.offsets == [1]
    drop_old(world.paths.main, timedelta(days=5), now=NOON + timedelta(days=7))
    assert world.offsets == []


def test_a_planned_batch_comes_first(tmp_path: Path):
    world = World(tmp_path)
    world.load(NOON - timedelta(days=9), NOON)
    batch = world.plan(1)
    with pytest.raises(Overtaken, match=f"batch {batch} is planned and not loaded; nothing was dropped"):
        drop_old(world.paths.main, timedelta(days=5), now=NOON)
    assert world.offsets == [0, 1]


class _Dead(Exception):
    pass


@pytest.mark.parametrize("step", [0, 1])
def test_dead_in_between(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing has gone before the main table's commit; the next one ends it, by the cut-off that was planned."""
    world = World(tmp_path)
    world.load(NOON - timedelta(days=9), NOON - timedelta(days=5), NOON, bad=[NOON - timedelta(days=9)])
    before = world.offsets, world.quarantined, world.states
    real, calls = dropping.commit_rewritten, []

    def dies(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > step:
            raise _Dead
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(dropping, "commit_rewritten", dies)
        with pytest.raises(_Dead):
            drop_old(world.paths.main, timedelta(days=7), now=NOON)
    assert (world.offsets, world.quarantined, world.states) == before
    assert read_ledger(world.paths.main)[-1].kind == DROP
    entry, _ = drop_old(world.paths.main, timedelta(days=8), now=NOON)
    assert entry is None, "the one that was planned has taken it"
    assert (world.offsets, world.quarantined) == ([1, 2], 0)
    assert last_batch(open_table(world.paths.quarantine)) == last_batch(open_table(world.paths.main)) == 1


# ---- windows ---------------------------------------------------------------------------------------------


def window(hours: int, state: str, rows: int = 2, **more: Any) -> Segment:
    start = NOON + hours * HOUR
    facts = Segment(start, 1, state, rows, 10 * rows, start, start + HOUR / 2, 0, NOON, NOON, None, 3)
    return facts._replace(**more)


def test_a_dropped_window_stays_one():
    was = {NOON: window(0, READY), NOON + HOUR: window(1, ACTIVE), NOON + 2 * HOUR: window(2, READY)}
    gone = drop_before(was, NOON + 2 * HOUR, 9, NOON, RULES)
    assert {start: (s.state, s.rows, s.version, s.batch) for start, s in gone.items()} == {
        NOON: (DROPPED, 0, 1, 9),
        NOON + HOUR: (DROPPED, 0, 1, 9),
    }
    assert drop_before({**was, **gone}, NOON + 2 * HOUR, 10, NOON, RULES) == {}
    late = add_rows(gone, {NOON: Added(1, 5, NOON, NOON)}, 10, NOON)[NOON]
    assert (late.state, late.version, late.rows, late.late_rows, late.reason) == (DROPPED, 1, 1, 1, gone[NOON].reason)
    seen = look_at({NOON: late}, Look(NOON + 30 * HOUR, Low(NOON + 3 * HOUR, None)), 11, RULES)
    assert NOON not in seen
    assert set(drop_before({NOON: late}, NOON + HOUR, 12, NOON, RULES)) == {NOON}


def test_windows_whose_rows_are_replaced():
    was = {NOON: window(0, READY), NOON + HOUR: window(1, READY), NOON + 2 * HOUR: window(2, ACTIVE)}
    same, other = Added(2, 20, NOON, NOON + HOUR / 2), Added(3, 30, NOON, NOON)
    found = replace_rows(
        was,
        {
            NOON: Recounted(same, is_changed=False),
            NOON + HOUR: Recounted(other, is_changed=True),
            NOON + 2 * HOUR: Recounted(None, is_changed=True),
            NOON + 3 * HOUR: Recounted(other, is_changed=True),
            NOON + 4 * HOUR: Recounted(None, is_changed=False),
        },
        9,
        NOON + 9 * HOUR,
    )
    assert {(start - NOON) // HOUR: (s.state, s.version, s.rows, s.late_rows) for start, s in found.items()} == {
        1: (ACTIVE, 2, 3, 1),
        2: (ACTIVE, 1, 0, 0),
        3: (ACTIVE, 1, 3, 0),
    }
    assert (found[NOON + 2 * HOUR].first, found[NOON + 2 * HOUR].last) == (None, None)
    closed = {NOON: window(0, READY, rows=9)}
    counted = replace_rows(closed, {NOON: Recounted(same, is_changed=False)}, 9, NOON)
    assert (counted[NOON].rows, counted[NOON].version) == (2, 2), "its count was wrong: it is another version"
    dropped = {NOON: window(0, DROPPED, rows=0)}
    back = replace_rows(dropped, {NOON: Recounted(same, is_changed=True)}, 9, NOON)[NOON]
    assert (back.state, back.version, back.rows) == (DROPPED, 1, 2)
