"""What a reload does to the tables beside the rows: the left-out chunks, and the segments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from logferry.loaders.batches.execute import Loader
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import ACTIVE, READY
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import existing_table, last_batch
from logferry.loaders.storage.side_tables import read_left_out, read_segments
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Topic, check_exact, chunks_of, stored
from tests.support.table_loads import done, job, reload

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]


@pytest.fixture
async def topic(topic: Topic) -> Topic:
    await topic.create()
    return topic


@pytest.mark.long
async def test_copies_stay_left_out_and_chunks_without_a_copy_come_in(
    loader: Start, kafka: KafkaCluster, topic_name: str, warehouse: Location
):
    here, there = (Topic(kafka.bootstrap, f"dc{n}.{topic_name}") for n in (1, 2))
    for topic in (here, there):
        await topic.create()
    table, work = warehouse / "logs", job(warehouse / "logs", f"*.{topic_name}")
    chunks = chunks_of("a", *(b"line %d\n" % n for n in range(6)))
    await there.write(chunks[:4])
    done(load_table(loader(), work))
    await here.write(chunks)
    done(load_table(loader(), work))

    def noted() -> list[tuple[str, int]]:
        found = read_left_out(TablePaths.of(table).left_out, last_batch(open_table(table)))
        return [(note.topic, note.seqno) for note in found]

    left_out = [(here.name, one.chunk.seqno) for one in chunks[:4]]
    assert noted() == left_out
    check_exact(table, chunks)
    reload(loader(), work, here.name)
    check_exact(table, chunks)
    assert noted() == left_out
    # Both at once: the first topic's stay, the notes change sides.
    reload(loader(), work, here.name, there.name)
    check_exact(table, chunks)
    assert noted() == [(there.name, one.chunk.seqno) for one in chunks[:4]]
    # The operator has removed rows of the one: the other's come in.
    existing_table(table).delete(f"topic = '{here.name}' and text = 'line 2'")
    reload(loader(), work, there.name)
    check_exact(table, chunks)
    assert (there.name, chunks[2].chunk.seqno) not in noted()
    assert len(noted()) == 3


@pytest.mark.long
async def test_segments_get_exact_counts_and_a_new_version_where_rows_change(
    loader: Start, topic: Topic, warehouse: Location
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
    rules = {"late_wait_s": 0, "source_idle_s": 3600}
    table, work = warehouse / "logs", job(warehouse / "logs", topic.name, parser=parser, segments=rules)
    for _ in range(4):
        done(load_table(loader(), work))

    def segments() -> dict[datetime, Any]:
        return read_segments(TablePaths.of(table).segments, last_batch(open_table(table)))

    before = segments()
    assert [before[hour].state for hour in (first, second, third)] == [READY, READY, ACTIVE]
    # No row changes: no segment opens again.
    reload(loader(), work, topic.name)
    assert segments() == before
    existing_table(table).delete(f"event_time = '{(second + timedelta(minutes=59)).isoformat()}'")
    existing_table(table).update(
        updates={"what": "'forged'"}, predicate=f"event_time = '{(first + timedelta(minutes=1)).isoformat()}'"
    )
    reload(loader(), work, f"{topic.name}:0=0..1")

    def told() -> list[tuple[str, int, int]]:
        return [(s.state, s.version, s.rows) for s in (segments()[first], segments()[second])]

    assert told() == [(ACTIVE, 2, 3), (READY, 1, 3)]
    reload(loader(), work, topic.name)
    # The windows' counts were right before, the rows were not: those that came back make it another version.
    assert told() == [(ACTIVE, 2, 3), (ACTIVE, 2, 3)]
    for _ in range(3):
        done(load_table(loader(), work))
    assert told() == [(READY, 2, 3), (READY, 2, 3)]
    # A parser that reads another time out of the lines moves rows from window to window.
    other = {**parser, "pattern": r"(?<date>\d+-\d+-\d+)T(?<h>\d+)(?<rest>\S+) (?<what>.*)"}
    other["event_time"] = {"column": "date", "formats": ["yyyy-MM-dd"]}
    reload(loader(), job(table, topic.name, parser=other, segments=rules), f"{topic.name}:0=1..2")
    found = segments()
    assert (found[second].rows, found[second].first, found[second].version) == (0, None, 3)
    counted = {start: s.rows for start, s in found.items() if s.rows}
    rows: dict[datetime, int] = {}
    for row in stored(table):
        start = row["event_time"].replace(minute=0, second=0, microsecond=0)
        rows[start] = rows.get(start, 0) + 1
    assert counted == rows
