"""Rows loaded again: what was damaged by hand, or read by a wrong parser, is replaced by what Kafka holds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from logferry.gateway.contract.chunk import record_headers
from logferry.loaders.batches import execute as batches
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.batches.reload import offsets_of
from logferry.loaders.commands import move as moving_job
from logferry.loaders.commands import reset as resetting
from logferry.loaders.commands.reload import Means, reload_table
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ConfigError, KafkaAway, LedgerBroken, TopicChanged
from logferry.loaders.notes import read_notes
from logferry.loaders.planning import reset_plan as reset
from logferry.loaders.planning.reload_plan import Span, Target
from logferry.loaders.planning.segment_states import ACTIVE, READY
from logferry.loaders.runs.table_run import load_table, requarantine_table
from logferry.loaders.storage.ledger import RELOAD, TablePaths, last_batch, open_table, read_ledger
from logferry.loaders.storage.segment_table import read_segments
from logferry.ops.stack.kafka_cluster import Cluster

from tests.support.loader import Topic, check_exact, chunks_of, quarantine, stored

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]

BROKEN = {"format": "regex", "pattern": r"(?<level>[A-Z]+) (?<n>\d+).*", "columns": {"n": "int"}}
MENDED = {"format": "regex", "pattern": r"(?<level>[A-Za-z]+) (?<n>-?\d+)( (?<more>.*))?", "columns": {"n": "int"}}


@pytest.fixture
async def topic(kafka: Cluster, topic_name: str) -> Topic:
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create()
    return topic


def job(table: Path, topic: Topic | str, **settings: Any) -> TableJob:
    name = topic if isinstance(topic, str) else topic.name
    return TableJob.model_validate({"path": table, "topics": [name], **settings})


def done(events: Any) -> list[BatchDone]:
    return [event for event in events if isinstance(event, BatchDone)]


def again(loader: Loader, job: TableJob, *texts: str) -> tuple[BatchDone, Means]:
    means: list[Means] = []

    def agreed(said: Means) -> bool:
        means.append(said)
        return True

    found = reload_table(loader, job, [Target.parse(text) for text in texts], agreed)
    assert found is not None
    return found, means[0]


def state(table: Path) -> tuple[list[str], list[str]]:
    """(rows, rows that stand in the quarantine), with all that is in them."""
    marks = ("resolved", "since")
    found = [
        [{name: value for name, value in row.items() if name not in marks and value is not None} for row in rows]
        for rows in (stored(table), quarantine(table))
    ]
    return sorted(map(repr, found[0])), sorted(map(repr, found[1]))


def damage(table: Path) -> None:
    """Rows and lines of the quarantine gone, a row altered, another one twice."""
    main, beside = str(table), str(TablePaths.of(table).quarantine)
    DeltaTable(main).delete("seqno % 3 = 0")
    DeltaTable(main).update(updates={"text": "'forged'"}, predicate="line = 1 and seqno % 3 = 1")
    twice = DeltaTable(main).to_pyarrow_table(filters=[("line", "=", 0)])
    write_deltalake(main, twice, mode="append")
    DeltaTable(beside).delete("seqno % 2 = 0")


LINES = [b"one %d\ntwo\n\xff bad\nlast" % n for n in range(40)]


@pytest.mark.parametrize("parted", [[], pytest.param(["topic", "recorded_date"], marks=pytest.mark.long)])
async def test_what_was_damaged_by_hand_is_as_kafka_holds_it(
    parted: list[str], loader: Start, topic: Topic, tmp_path: Path
):
    table, paths = tmp_path / "logs", TablePaths.of(tmp_path / "logs")
    await topic.write(chunks_of("a", *LINES))
    await topic.write_raw(b"not a chunk\n", b"stranger", [])
    work = job(table, topic, max_records=17, partition_by=parted)
    done(load_table(loader(), work))
    exact, positions = state(table), read_ledger(table)[-1].ranges
    damage(table)
    assert state(table) != exact
    # A part: what is beside it stays as it is, wrong or not.
    found, means = again(loader(), work, f"{topic.name}:0=0..5", f"{topic.name}:0=8..20", f"{topic.name}:0=10..12")
    assert [(r.start, r.end) for r in means.ranges] == [(0, 5), (8, 20)]
    assert means.rows == sum(row["offset"] in {*range(5), *range(8, 20)} for row in stored(table)) + means.rows - 51
    assert (found.rows, found.quarantined) == (51, 17)
    mended = [row for row in exact[0] if any(f"'offset': {n}," in row for n in (*range(5), *range(8, 20)))]
    assert set(mended) <= set(state(table)[0])
    assert state(table) != exact
    # All of it, and a load that goes on.
    await topic.write(chunks_of("b", b"new\n\xfe\n"))
    version = DeltaTable(str(table)).version()
    again(loader(), work, topic.name)
    assert state(table) == exact
    assert DeltaTable(str(table)).version() == version + 1, "in one transaction"
    entry = read_ledger(table)[-1]
    assert (entry.kind, entry.ranges) == (RELOAD, tuple(r._replace(start=r.end) for r in positions))
    assert [(r.start, r.end) for r in entry.reload] == [(0, positions[0].end)]
    (more,) = done(load_table(loader(), work))
    assert (more.rows, more.quarantined) == (1, 1)
    assert len(quarantine(table)) == 42
    assert last_batch(open_table(paths.quarantine)) == last_batch(open_table(paths.main))
    written = [one for one in quarantine(table) if one["line"] is None]
    assert [one["bytes"] for one in written] == [b"not a chunk\n"]


class _Dead(Exception):
    pass


def _die(*_: object, **__: object) -> Any:
    raise _Dead


WINDOWS = ["read", "replace_quarantined", "_commit", "replace_main"]


@pytest.mark.parametrize("window", [pytest.param(w, marks=[pytest.mark.long] * (w != "replace_main")) for w in WINDOWS])
async def test_dead_in_between(
    window: str, loader: Start, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing changes before the commit, neither rows nor quarantine; any loader ends what was begun, as planned."""
    table = tmp_path / "logs"
    await topic.write(chunks_of("a", b"INFO 1\nwarn 2\nINFO -3\n", b"INFO 4 x\n", b"none\nINFO 5\n"))
    done(load_table(loader(), job(table, topic, parser=BROKEN)))
    before = state(table)
    with monkeypatch.context() as patch:
        patch.setattr(batches, window, _die)
        with pytest.raises(_Dead):
            again(loader("dies"), job(table, topic, parser=MENDED), f"{topic.name}:0=0..2")
    assert state(table) == before
    await topic.write(chunks_of("b", b"INFO 6\n"))
    ended, more = done(load_table(loader("goes on"), job(table, topic, parser=BROKEN)))
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
    done(load_table(loader(), job(table, topic, parser=BROKEN)))
    done(requarantine_table(loader(), job(table, topic, parser={**MENDED, "pattern": r"(?<level>\w+)( (?<n>\d+))?"})))
    assert len(stored(table)) == 7
    assert quarantine(table) == []


@pytest.mark.long
async def test_a_compaction_comes_between_the_look_and_the_commit(
    loader: Start, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It replaces the very files that the reload takes rows out of: those are looked for again, and no row is twice."""
    table, paths = tmp_path / "logs", TablePaths.of(tmp_path / "logs")
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic, max_records=17)
    done(load_table(loader(), work))
    exact = state(table)
    damage(table)
    create, times = DeltaTable.create_write_transaction, []

    def compact_first(self: DeltaTable, *given: Any, **more: Any) -> None:
        if len(times) < 2:
            for path in (paths.main, paths.quarantine):
                write_deltalake(str(path), DeltaTable(str(path)).to_pyarrow_table(), mode="overwrite")
                DeltaTable(str(path)).optimize.compact()
            times.append(self)
        create(self, *given, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", compact_first)
    again(loader(), work, topic.name)
    assert len(times) == 2
    assert state(table) == exact


@pytest.mark.long
@pytest.mark.parametrize("died", ["read", "_commit"])
async def test_a_planned_one_that_kafka_cannot_give_any_more_is_given_up(
    died: str, loader: Start, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By somebody, for all loaders; but not where its quarantine is changed already."""
    table = tmp_path / "logs"
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic)
    done(load_table(loader(), work))
    end = read_ledger(table)[-1].ranges[0].end
    damage(table)
    with monkeypatch.context() as patch:
        patch.setattr(batches, died, _die)
        with pytest.raises(_Dead):
            again(loader("dies"), work, topic.name)
    damaged = state(table)
    await topic.remove_before(0, 10)
    with pytest.raises(TopicChanged, match="can be given up, the rows stay as they are: --reset TOPIC:PARTITION=POSI"):
        done(load_table(loader(), work))
    target = reset.Target.parse(f"{topic.name}:0={end}")
    if died == "_commit":
        with pytest.raises(LedgerBroken, match="cannot be given up: its quarantine is changed"):
            resetting.reset_table(loader(), work, [target], lambda _: True)
        assert state(table) == damaged
        return
    late: list[Any] = []
    commit = batches.replace_quarantined

    def given_up_first(*given: Any) -> Any:
        batches.replace_quarantined = commit
        late.append(resetting.reset_table(loader("gives up"), work, [target], lambda _: True))
        return commit(*given)

    # One that has read before it was removed comes too late, too.
    planned = read_ledger(table)[-1]
    shorter = planned._replace(reload=tuple(r._replace(start=10) for r in planned.reload))
    with monkeypatch.context() as patch:
        patch.setattr(batches, "replace_quarantined", given_up_first)
        slow = batches.do_batch(loader("slow"), TablePaths.of(table), shorter)
    assert len(late) == 1
    assert (slow.ours, state(table)) == (False, damaged)
    await topic.write(chunks_of("b", b"new\n"))
    assert [one.rows for one in done(load_table(loader(), work))] == [1]
    assert read_ledger(table)[-1].ranges[0].start == end


@pytest.mark.long
async def test_a_move_from_a_dead_place_gives_a_planned_one_up(
    loader: Start, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table = tmp_path / "logs"
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic)
    done(load_table(loader(), work))
    damage(table)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "read", _die)
        with pytest.raises(_Dead):
            again(loader("dies"), work, topic.name)
    damaged, planned = state(table), read_ledger(table)[-1]

    def away(*_: object) -> Any:
        raise KafkaAway("nobody is there")

    monkeypatch.setattr(moving_job, "kafka_topics", away)
    books: Any = None
    moving = moving_job.Moving(loader("moves", dc="dc2"), work, "logferry", books)
    found = moving_job._finish(moving, planned)
    assert (found.batch, found.ours, found.rows) == (planned.batch, True, 0)
    assert last_batch(open_table(table)) == planned.batch
    assert state(table) == damaged


@pytest.mark.long
async def test_what_is_refused_changes_nothing(loader: Start, topic: Topic, tmp_path: Path):
    table = tmp_path / "logs"
    await topic.write(chunks_of("a", *LINES))
    work = job(table, topic)
    done(load_table(loader(), work))
    end = read_ledger(table)[-1].ranges[0].end
    await topic.remove_before(0, 10)
    before = state(table)
    with pytest.raises(ConfigError, match=f"is loaded up to {end}"):
        again(loader(), work, f"{topic.name}:0=20..{end + 1}")
    with pytest.raises(TopicChanged, match="from 10 on, so 9 to 9 cannot be read again"):
        again(loader(), work, f"{topic.name}:0=9..20")
    with pytest.raises(TopicChanged, match="from 10 on, so 0 to 9 cannot"):
        again(loader(), work, topic.name)
    with pytest.raises(TopicChanged, match="may be of that time, too"):
        again(loader(), work, "2020-01-01..2099-01-01")
    assert reload_table(loader(), work, [Target.parse(f"{topic.name}:0=10..20")], lambda _: False) is None
    assert (state(table), len(read_ledger(table))) == (before, 1)
    again(loader(), work, f"{topic.name}:0=10..{end}")
    assert state(table) == before
    await topic.delete()
    await topic.create()
    await topic.write(chunks_of("a", *LINES))
    with pytest.raises(TopicChanged, match="created anew"):
        again(loader(), work, f"{topic.name}:0=10..20")
    assert state(table) == before


@pytest.mark.long
async def test_a_span_of_time_holds_every_record_of_it(loader: Start, topic: Topic, tmp_path: Path):
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
    one, work = loader(), job(tmp_path / "logs", topic)
    done(load_table(one, work))
    ranges = read_ledger(tmp_path / "logs")[-1].ranges
    places = {r.key: r.end for r in ranges}
    offsets = {row["text"]: row["offset"] for row in stored(tmp_path / "logs")}
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
        span = Span(base + timedelta(minutes=start), base + timedelta(minutes=end))
        inside = [offsets[f"line {m}"] for m in minutes if start <= m < end]
        found = list(offsets_of(one.spark, one.kafka, places, span).values())
        if inside:
            # From the first record that is not too old, up to the last one.
            first = min(offsets[f"line {m}"] for m in minutes if start <= m)
            assert found == [(first, max(inside) + 1)], (start, end)
        assert len(found) <= 1
    hour = f"{base:%Y-%m-%dT%H}..{base + timedelta(hours=1):%Y-%m-%dT%H}"
    exact = state(tmp_path / "logs")
    damage(tmp_path / "logs")
    again(one, work, hour)
    in_span = [f"'text': 'line {m}'" for m in minutes if m < 60]
    have = [row for row in state(tmp_path / "logs")[0] if any(text in row for text in in_span)]
    assert have == [row for row in exact[0] if any(text in row for text in in_span)]


@pytest.mark.long
async def test_copies_stay_left_out_and_those_that_are_none_any_more_come_in(
    loader: Start, kafka: Cluster, topic_name: str, tmp_path: Path
):
    here, there = (Topic(kafka.bootstrap, f"dc{n}.{topic_name}") for n in (1, 2))
    for topic in (here, there):
        await topic.create()
    table, work = tmp_path / "logs", job(tmp_path / "logs", f"*.{topic_name}")
    chunks = chunks_of("a", *(b"line %d\n" % n for n in range(6)))
    await there.write(chunks[:4])
    done(load_table(loader(), work))
    await here.write(chunks)
    done(load_table(loader(), work))

    def noted() -> list[tuple[str, int]]:
        found = read_notes(TablePaths.of(table).moved, last_batch(open_table(table)))
        return [(note.topic, note.seqno) for note in found]

    left_out = [(here.name, one.chunk.seqno) for one in chunks[:4]]
    assert noted() == left_out
    check_exact(table, chunks)
    again(loader(), work, here.name)
    check_exact(table, chunks)
    assert noted() == left_out
    # Both at once: the first topic's stay, the notes change sides.
    again(loader(), work, here.name, there.name)
    check_exact(table, chunks)
    assert noted() == [(there.name, one.chunk.seqno) for one in chunks[:4]]
    # Somebody has removed the rows of the one: the other's come in.
    DeltaTable(str(table)).delete(f"topic = '{here.name}' and text = 'line 2'")
    again(loader(), work, there.name)
    check_exact(table, chunks)
    assert (there.name, chunks[2].chunk.seqno) not in noted()
    assert len(noted()) == 3


@pytest.mark.long
async def test_windows_get_right_counts_and_a_new_version_where_rows_change(
    loader: Start, topic: Topic, tmp_path: Path
):
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    first, second, third = (now - timedelta(hours=n) for n in (6, 5, 4))

    def lines(*times: datetime) -> bytes:
        return b"".join(f"{at.isoformat()} at {at.minute}\n".encode() for at in times)

    at = [hour + timedelta(minutes=m) for hour in (first, second, third) for m in (1, 20, 59)]
    await topic.write(chunks_of("a", lines(*at[:3]), lines(*at[3:6]), lines(*at[6:])))
    parser = {
        "format": "regex",
        "pattern": r"(?<at>\S+) (?<what>.*)",
        "event_time": {"column": "at", "formats": ["iso"]},
    }
    rules = {"wait_s": 0, "idle_s": 3600}
    table, work = tmp_path / "logs", job(tmp_path / "logs", topic, parser=parser, segments=rules)
    for _ in range(4):
        done(load_table(loader(), work))

    def segments() -> dict[datetime, Any]:
        return read_segments(TablePaths.of(table).segments, last_batch(open_table(table)))

    before = segments()
    assert [before[hour].state for hour in (first, second, third)] == [READY, READY, ACTIVE]
    # Nothing is wrong: nothing opens anew.
    again(loader(), work, topic.name)
    assert segments() == before
    DeltaTable(str(table)).delete(f"event_time = '{(second + timedelta(minutes=59)).isoformat()}'")
    DeltaTable(str(table)).update(
        updates={"what": "'forged'"}, predicate=f"event_time = '{(first + timedelta(minutes=1)).isoformat()}'"
    )
    again(loader(), work, f"{topic.name}:0=0..1")

    def told() -> list[tuple[str, int, int]]:
        return [(s.state, s.version, s.rows) for s in (segments()[first], segments()[second])]

    assert told() == [(ACTIVE, 2, 3), (READY, 1, 3)]
    again(loader(), work, topic.name)
    # The windows' counts were right before, the rows were not: those that came back make it another version.
    assert told() == [(ACTIVE, 2, 3), (ACTIVE, 2, 3)]
    for _ in range(3):
        done(load_table(loader(), work))
    assert told() == [(READY, 2, 3), (READY, 2, 3)]
    # A parser that reads another time out of the lines moves rows from window to window.
    other = {**parser, "pattern": r"(?<date>\d+-\d+-\d+)T(?<h>\d+)(?<rest>\S+) (?<what>.*)"}
    other["event_time"] = {"column": "date", "formats": ["yyyy-MM-dd"]}
    again(loader(), job(table, topic, parser=other, segments=rules), f"{topic.name}:0=1..2")
    found = segments()
    assert (found[second].rows, found[second].first, found[second].version) == (0, None, 3)
    counted = {start: s.rows for start, s in found.items() if s.rows}
    rows: dict[datetime, int] = {}
    for row in stored(table):
        start = row["event_time"].replace(minute=0, second=0, microsecond=0)
        rows[start] = rows.get(start, 0) + 1
    assert counted == rows
