"""Rows loaded again: damaged rows, and rows of a wrong parser, are replaced by the records of Kafka."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from logferry.gateway.contract.chunk import record_headers
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import Loader
from logferry.loaders.batches.replace_rows import offsets_of, replace_quarantined
from logferry.loaders.commands import move as commands_move
from logferry.loaders.commands import repair as commands_repair
from logferry.loaders.commands.repair import reload_table
from logferry.loaders.errors import KafkaUnavailable, LedgerBroken, LoaderConfigError, TopicChanged
from logferry.loaders.location import Location
from logferry.loaders.planning import position_plan
from logferry.loaders.planning.ledger_entry import RELOAD, TablePaths
from logferry.loaders.planning.reload_plan import ReloadTarget, TimeSpan
from logferry.loaders.runs.table_run import load_table, requarantine_table
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import existing_table, last_batch, read_ledger

from tests.support.loader import Topic, chunks_of, quarantine, stored
from tests.support.table_loads import LoaderDied, die, done, job, reload

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]

BROKEN = {"format": "regex", "pattern": r"(?<level>[A-Z]+) (?<n>\d+).*", "columns": {"n": "int"}}
MENDED = {"format": "regex", "pattern": r"(?<level>[A-Za-z]+) (?<n>-?\d+)( (?<more>.*))?", "columns": {"n": "int"}}


@pytest.fixture
async def topic(topic: Topic) -> Topic:
    await topic.create()
    return topic


def state(table: Location) -> tuple[list[str], list[str]]:
    """(rows, rows that stand in the quarantine), with all that is in them."""
    marks = ("resolved", "since")
    found = [
        [{name: value for name, value in row.items() if name not in marks and value is not None} for row in rows]
        for rows in (stored(table), quarantine(table))
    ]
    return sorted(map(repr, found[0])), sorted(map(repr, found[1]))


def damage(table: Location) -> None:
    """Rows and lines of the quarantine gone, a row altered, another one twice."""
    main, beside = table, TablePaths.of(table).quarantine
    existing_table(main).delete("seqno % 3 = 0")
    existing_table(main).update(updates={"text": "'forged'"}, predicate="line = 1 and seqno % 3 = 1")
    twice = existing_table(main).to_pyarrow_table(filters=[("line", "=", 0)])
    write_deltalake(existing_table(main), twice, mode="append")
    existing_table(beside).delete("seqno % 2 = 0")


LINES = [b"one %d\ntwo\n\xff bad\nlast" % n for n in range(40)]


@pytest.mark.long
@pytest.mark.parametrize("parted", [[], ["topic", "recorded_date"]])
async def test_rows_damaged_by_hand_are_replaced_by_the_records_of_kafka(
    parted: list[str], loader: Start, topic: Topic, warehouse: Location
):
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    await topic.write(chunks_of("a", *LINES))
    await topic.write_raw(b"not a chunk\n", b"stranger", [])
    work = job(table, topic.name, max_records=17, partition_by=parted)
    done(load_table(loader(), work))
    exact, positions = state(table), read_ledger(table)[-1].ranges
    damage(table)
    assert state(table) != exact
    # A part: what is beside it stays as it is, wrong or not.
    found, means = reload(loader(), work, f"{topic.name}:0=0..5", f"{topic.name}:0=8..20", f"{topic.name}:0=10..12")
    assert [(r.start, r.end) for r in means.ranges] == [(0, 5), (8, 20)]
    assert means.rows == sum(row["offset"] in {*range(5), *range(8, 20)} for row in stored(table)) + means.rows - 51
    assert (found.rows, found.quarantined) == (51, 17)
    mended = [row for row in exact[0] if any(f"'offset': {n}," in row for n in (*range(5), *range(8, 20)))]
    assert set(mended) <= set(state(table)[0])
    assert state(table) != exact
    # All of it, and a load that continues.
    await topic.write(chunks_of("b", b"new\n\xfe\n"))
    version = existing_table(table).version()
    reload(loader(), work, topic.name)
    assert state(table) == exact
    assert existing_table(table).version() == version + 1, "in one transaction"
    entry = read_ledger(table)[-1]
    assert (entry.kind, entry.ranges) == (RELOAD, tuple(r._replace(start=r.end) for r in positions))
    assert [(r.start, r.end) for r in entry.reload] == [(0, positions[0].end)]
    (more,) = done(load_table(loader(), work))
    assert (more.rows, more.quarantined) == (1, 1)
    assert len(quarantine(table)) == 42
    assert last_batch(open_table(paths.quarantine)) == last_batch(open_table(paths.main))
    written = [one for one in quarantine(table) if one["line"] is None]
    assert [one["bytes"] for one in written] == [b"not a chunk\n"]


WINDOWS = ["read", "replace_quarantined", "_commit", "replace_main"]


@pytest.mark.parametrize("window", [pytest.param(w, marks=[pytest.mark.long] * (w != "replace_main")) for w in WINDOWS])
async def test_a_loader_that_dies_in_between(
    window: str, loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    """Nothing changes before the commit, neither rows nor quarantine; any loader ends what was begun, as planned."""
    table = warehouse / "logs"
    await topic.write(chunks_of("a", b"INFO 1\nwarn 2\nINFO -3\n", b"INFO 4 x\n", b"none\nINFO 5\n"))
    done(load_table(loader(), job(table, topic.name, parser=BROKEN)))
    before = state(table)
    with monkeypatch.context() as patch:
        patch.setattr(execute, window, die)
        with pytest.raises(LoaderDied):
            reload(loader("dies"), job(table, topic.name, parser=MENDED), f"{topic.name}:0=0..2")
    assert state(table) == before
    await topic.write(chunks_of("b", b"INFO 6\n"))
    ended, more = done(load_table(loader("continues"), job(table, topic.name, parser=BROKEN)))
    assert (ended.batch, ended.ours, ended.rows, ended.quarantined, more.rows) == (1, True, 4, 0, 1)
    rows = {row["text"]: (row["level"], row["n"], row["more"]) for row in stored(table)}
    assert rows == {
        "INFO 1": ("INFO", 1, ""),
        "warn 2": ("warn", 2, ""),
        "INFO -3": ("INFO", -3, ""),
        "INFO 4 x": ("INFO", 4, "x"),
        "INFO 5": ("INFO", 5, None),
        "INFO 6": ("INFO", 6, None),
    }
    assert [row["bytes"] for row in quarantine(table)] == [b"none"]
    done(load_table(loader(), job(table, topic.name, parser=BROKEN)))
    loose = {**MENDED, "pattern": r"(?<level>\w+)( (?<n>\d+))?"}
    done(requarantine_table(loader(), job(table, topic.name, parser=loose)))
    assert len(stored(table)) == 7
    assert quarantine(table) == []


@pytest.mark.long
async def test_a_compaction_comes_between_the_read_and_the_commit(
    loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    """It replaces the files that the reload takes rows out of. The reload searches again, and no row is doubled."""
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic.name, max_records=17)
    done(load_table(loader(), work))
    exact = state(table)
    damage(table)
    create = DeltaTable.create_write_transaction
    times: list[DeltaTable] = []

    def compact_first(self: DeltaTable, *given: Any, **more: Any) -> None:
        if len(times) < 2:
            for path in (paths.main, paths.quarantine):
                write_deltalake(existing_table(path), existing_table(path).to_pyarrow_table(), mode="overwrite")
                existing_table(path).optimize.compact()
            times.append(self)
        create(self, *given, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", compact_first)
    reload(loader(), work, topic.name)
    assert len(times) == 2
    assert state(table) == exact


@pytest.mark.long
@pytest.mark.parametrize("died", ["read", "_commit"])
async def test_a_planned_reload_of_removed_records_is_abandoned(
    died: str, loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    """By one loader, for all; but not where its quarantine is changed already."""
    table = warehouse / "logs"
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic.name)
    done(load_table(loader(), work))
    end = read_ledger(table)[-1].ranges[0].end
    damage(table)
    with monkeypatch.context() as patch:
        patch.setattr(execute, died, die)
        with pytest.raises(LoaderDied):
            reload(loader("dies"), work, topic.name)
    damaged = state(table)
    await topic.remove_before(0, 10)
    with pytest.raises(
        TopicChanged, match=r"to abandon this reload .* `logferry table reset --to TOPIC:PARTITION=POSI"
    ):
        done(load_table(loader(), work))
    target = position_plan.ResetTarget.parse(f"{topic.name}:0={end}")
    if died == "_commit":
        with pytest.raises(LedgerBroken, match="cannot be abandoned: its quarantine is changed"):
            commands_repair.reset_table(loader(), work, [target], lambda _: True)
        assert state(table) == damaged
        return
    late: list[Any] = []

    def given_up_first(*given: Any) -> Any:
        patch.setattr(execute, "replace_quarantined", replace_quarantined)
        late.append(commands_repair.reset_table(loader("gives up"), work, [target], lambda _: True))
        return replace_quarantined(*given)

    # One that has read before it was removed comes too late, too.
    planned = read_ledger(table)[-1]
    shorter = planned._replace(reload=tuple(r._replace(start=10) for r in planned.reload))
    with monkeypatch.context() as patch:
        patch.setattr(execute, "replace_quarantined", given_up_first)
        slow = execute.do_batch(loader("slow"), TablePaths.of(table), shorter)
    assert len(late) == 1
    assert (slow.ours, state(table)) == (False, damaged)
    await topic.write(chunks_of("b", b"new\n"))
    assert [one.rows for one in done(load_table(loader(), work))] == [1]
    assert read_ledger(table)[-1].ranges[0].start == end


@pytest.mark.long
async def test_a_move_from_a_dead_data_centre_abandons_a_planned_reload(
    loader: Start, topic: Topic, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    table = warehouse / "logs"
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic.name)
    done(load_table(loader(), work))
    damage(table)
    with monkeypatch.context() as patch:
        patch.setattr(execute, "read", die)
        with pytest.raises(LoaderDied):
            reload(loader("dies"), work, topic.name)
    damaged, planned = state(table), read_ledger(table)[-1]

    def away(*_: object) -> Any:
        raise KafkaUnavailable("nobody is there")

    monkeypatch.setattr(commands_move, "kafka_topics", away)
    books: Any = None
    moving = commands_move.TableMove(loader("moves", dc="dc2"), work, "logferry", books)
    found = commands_move._finish(moving, planned)
    assert (found.batch, found.ours, found.rows) == (planned.batch, True, 0)
    assert last_batch(open_table(table)) == planned.batch
    assert state(table) == damaged


@pytest.mark.long
async def test_a_refused_reload_changes_nothing(loader: Start, topic: Topic, warehouse: Location):
    table = warehouse / "logs"
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic.name)
    done(load_table(loader(), work))
    end = read_ledger(table)[-1].ranges[0].end
    await topic.remove_before(0, 10)
    before = state(table)
    with pytest.raises(LoaderConfigError, match=f"is loaded up to {end}"):
        reload(loader(), work, f"{topic.name}:0=20..{end + 1}")
    with pytest.raises(TopicChanged, match="from 10 on, so 9 to 9 cannot be read again"):
        reload(loader(), work, f"{topic.name}:0=9..20")
    with pytest.raises(TopicChanged, match="from 10 on, so 0 to 9 cannot"):
        reload(loader(), work, topic.name)
    with pytest.raises(TopicChanged, match="may be of that time, too"):
        reload(loader(), work, "2020-01-01..2099-01-01")
    assert reload_table(loader(), work, [ReloadTarget.parse(f"{topic.name}:0=10..20")], lambda _: False) is None
    assert (state(table), len(read_ledger(table))) == (before, 1)
    reload(loader(), work, f"{topic.name}:0=10..{end}")
    assert state(table) == before
    await topic.delete()
    await topic.create()
    await topic.write(chunks_of("a", *LINES))
    with pytest.raises(TopicChanged, match="recreated"):
        reload(loader(), work, f"{topic.name}:0=10..20")
    assert state(table) == before


@pytest.mark.long
async def test_a_span_of_time_holds_every_record_of_it(loader: Start, topic: Topic, warehouse: Location):
    """Record times go to and fro, as clocks of several gateways do, with control records in between."""
    base = datetime(2026, 11, 20, 10, tzinfo=UTC)
    minutes = [0, 5, 4, 9, 30, 28, 31, 29, 60, 45, 62, 110, 180]
    producer = await topic._producer()
    try:
        for number, minute in enumerate(minutes):
            async with producer.transaction():
                at = int((base + timedelta(minutes=minute)).timestamp() * 1000)
                sent = chunks_of("a", b"line %d\n" % minute, start=number * 100)[0].chunk
                await producer.send_and_wait(
                    topic.name, sent.data, key=b"a", partition=0, timestamp_ms=at, headers=record_headers(sent)
                )
    finally:
        await producer.stop()
    one, work = loader(), job(warehouse / "logs", topic.name)
    done(load_table(one, work))
    ranges = read_ledger(Location.of(warehouse / "logs"))[-1].ranges
    places = {r.key: r.end for r in ranges}
    offsets = {row["text"]: row["offset"] for row in stored(warehouse / "logs")}
    for start, end in (
        (-20, 5),
        (4, 5),
        (5, 29),
        (28, 46),
        (30, 60),
        (61, 62),
        (63, 110),
        (0, 181),
        (-9, 0),
        (181, 200),
    ):
        span = TimeSpan(base + timedelta(minutes=start), base + timedelta(minutes=end))
        inside = [offsets[f"line {m}"] for m in minutes if start <= m < end]
        found = list(offsets_of(one.spark, one.kafka, places, span).values())
        if inside:
            # From the first record that is not too old, up to the last one.
            first = min(offsets[f"line {m}"] for m in minutes if start <= m)
            assert found == [(first, max(inside) + 1)], (start, end)
        assert len(found) <= 1
    hour = f"{base:%Y-%m-%dT%H}..{base + timedelta(hours=1):%Y-%m-%dT%H}"
    exact = state(warehouse / "logs")
    damage(warehouse / "logs")
    reload(one, work, hour)
    in_span = [f"'text': 'line {m}'" for m in minutes if m < 60]
    have = [row for row in state(warehouse / "logs")[0] if any(text in row for text in in_span)]
    assert have == [row for row in exact[0] if any(text in row for text in in_span)]
