"""A table moves between data centres: positions are translated exactly, and every row is in it once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from logferry.gateway.config import KafkaSettings
from logferry.loaders.batches.execute import Loader
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.commands import move as commands_move
from logferry.loaders.config import SegmentSettings, TableJob
from logferry.loaders.errors import CannotMove, LedgerBroken, MirrorBehind
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import MOVE, TablePaths
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.query.realtime_view import realtime
from logferry.loaders.runs import table_run
from logferry.loaders.runs.table_facts import table_facts
from logferry.loaders.storage.ledger import read_ledger
from logferry.loaders.storage.side_tables import read_segments, read_sources
from logferry.ops.stack.stack import Stack
from pyspark.sql import SparkSession

from tests.support.loader import Sent, Topic, check_exact, chunks_of, quarantine, stored
from tests.support.mirror import PREFIX, Places, both_ways, loader_at, read_log
from tests.support.table_loads import LoaderDied, die

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

At = Callable[..., Loader]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("centres"), dcs=("dc1", "dc2"), mirrors=1) as stack:
        yield stack


@pytest.fixture
def at(spark: SparkSession, stack: Stack) -> Iterator[At]:
    """``at("dc1")``: a loader there."""
    with ExitStack() as opened:
        yield lambda dc, run="run", notes=True: opened.enter_context(loader_at(spark, stack, dc, run, notes=notes))


@pytest.fixture
async def places(stack: Stack, topic_name: str, warehouse: Location) -> Places:
    found = Places(stack, topic_name[-40:].lstrip("-"), warehouse / "logs")
    await both_ways(found, partitions=2)
    return found


async def write(places: Places, dc: str, round_: int) -> None:
    """A chunk of each of four sources, and one that is aborted: so offsets differ between the data centres."""
    topic, start = places.topics[dc], round_ * 1000
    chunks = [one for source in "abcd" for one in chunks_of(f"{dc}-{source}", b"line %d\n\xff\n" % round_, start=start)]
    await topic.write(chunks[:2], partitions=2)
    aborted = [one for source in "xy" for one in chunks_of(f"{dc}-{source}", b"aborted\n", b"aborted\n")]
    await topic.write(aborted, partitions=2, commit=False)
    await topic.write(chunks[2:], partitions=2)


async def test_a_table_moves_there_and_back(at: At, places: Places, spark: SparkSession):
    for round_ in range(3):
        await write(places, "dc1", round_)
        await write(places, "dc2", round_)
    await places.mirrored()
    one, two = at("dc1"), at("dc2")
    # Not to the end: positions lie in the midst of records.
    (first,) = places.load(one, offsets=30)
    await write(places, "dc1", 10)
    await write(places, "dc2", 10)

    said = places.move(two, wait_s=30)
    assert said is not None
    assert {move.topic for move in said} == {topic.name for topic in places.topics.values()}
    assert all(move.before != move.after for move in said), "offsets that are alike would show nothing"
    with pytest.raises(LedgerBroken, match="holds offsets of dc2, this is dc1"):
        places.load(one)
    facts = table_facts(Location.of(places.table))
    assert (facts["last"]["kind"], facts["last"]["dc"]) == ("move", "dc2")
    assert places.move(two) is None, "it is there already"
    (move,) = (entry for entry in read_ledger(Location.of(places.table)) if entry.kind == MOVE)
    assert {at.topic for at in move.originals} == {places.topics["dc1"].name}, "it could go back from a dead dc2"

    await places.mirrored()
    assert realtime(spark, places.table).count() == len(places.sent), "one line of two is no row"
    rest = sum(batch.records for batch in places.load(two))
    assert 0 < first.records < rest + first.records == len(places.sent), "what was not loaded, and no more"
    check_exact(places.table, places.sent)

    # Back, in the old place nothing is known of what was read in the new one.
    await write(places, "dc2", 11)
    await places.mirrored()
    assert places.move(one, wait_s=30) is not None
    await write(places, "dc1", 12)
    assert sum(batch.records for batch in places.load(one)) == 8
    check_exact(places.table, places.sent)
    assert {row["dc"] for row in stored(places.table)} == {"dc1", "dc2"}
    assert [entry.dc for entry in read_ledger(Location.of(places.table)) if entry.kind == MOVE] == ["dc2", "dc1"]


async def test_every_position_is_translated_exactly(at: At, stack: Stack, places: Places):
    """Any offset has equally many records before it in both data centres, by the history of either."""
    for round_ in range(6):
        await write(places, "dc1", round_)
    await places.mirrored()
    topic = places.topics["dc1"].name
    there, here = [await read_log(stack.cluster(dc).bootstrap, topic) for dc in ("dc1", "dc2")]
    original_id, copy_id = (at(dc).kafka.ids([topic])[topic] for dc in ("dc1", "dc2"))
    with closing(
        MirrorOffsets(KafkaSettings(bootstrap_servers=stack.cluster("dc2").bootstrap), PREFIX, "dc2")
    ) as books:
        for number in (0, 1):
            ours, theirs = ([offset for offset, _ in log[number]] for log in (here, there))
            place = TopicPartition(topic, number)
            for offset in range(ours[-1] + 2):
                (found,) = books.originals([Range(*place, copy_id, offset, offset)], 5)
                before = sum(one < offset for one in ours)
                assert sum(one < found.offset for one in theirs) == before
                assert found.topic_id == original_id
                back = books.here([found])[place].offset
                assert back is not None
                assert sum(one < back for one in ours) == before
            beyond = books.here([found._replace(offset=theirs[-1] + 100)])[place]
            assert (beyond.offset, beyond.behind) == (None, True)
            other = books.here([found._replace(topic_id=copy_id)])[place]
            assert (other.offset, other.behind) == (None, False)
            assert "recreated" in other.why


@pytest.mark.long
async def test_a_mirror_that_is_behind(at: At, stack: Stack, places: Places):
    await write(places, "dc1", 0)
    await places.mirrored()
    one, two = at("dc1"), at("dc2")
    stack.kill("dc2/mirror-0", signal.SIGSTOP)
    try:
        await write(places, "dc1", 1)
        places.load(one)
        with pytest.raises(MirrorBehind, match=r"has copied up to \d+ of dc1, the table is at \d+"):
            places.move(two)
        assert table_facts(Location.of(places.table))["last"]["dc"] == "dc1"
        await write(places, "dc1", 2)
        places.load(one)
    finally:
        stack.kill("dc2/mirror-0", signal.SIGCONT)
    assert places.move(two, wait_s=60, yes=False) is not None
    assert table_facts(Location.of(places.table))["last"]["dc"] == "dc1", "it was not agreed to"
    places.move(two, wait_s=60)
    assert sum(batch.records for batch in places.load(two)) == 0
    check_exact(places.table, places.sent)


@pytest.mark.long
async def test_topics_that_are_not_mirrored_further_are_left_out_by_name(at: At, stack: Stack, places: Places):
    """Named partitions get the given positions, the others are translated. The next load reads the rest."""
    topic = places.topics["dc1"].name
    await write(places, "dc1", 0)
    await places.mirrored()
    one, two = at("dc1"), at("dc2")
    places.load(one)
    await write(places, "dc2", 1)
    await places.mirrored()
    stack.kill("dc2/mirror-0", signal.SIGSTOP)
    try:
        await write(places, "dc1", 1)
        places.load(one)
        with pytest.raises(MirrorBehind, match=f"{topic} 1: "):
            places.move(two, f"{topic}:0=latest")
        assert places.move(two, f"{topic}:0=latest", f"{topic}:1=latest") is not None
        await write(places, "dc2", 2)
        places.load(two)
        check_exact(places.table, places.sent)
    finally:
        stack.kill("dc2/mirror-0", signal.SIGCONT)


@pytest.mark.long
async def test_a_planned_batch_is_finished_where_it_was_planned(
    at: At, places: Places, monkeypatch: pytest.MonkeyPatch
):
    await write(places, "dc1", 0)
    await write(places, "dc2", 0)
    await places.mirrored()
    one, two = at("dc1"), at("dc2")
    with monkeypatch.context() as patch:
        patch.setattr(table_run, "do_batch", die)
        with pytest.raises(LoaderDied):
            places.load(one)
    places.move(two, wait_s=30)
    assert {row["dc"] for row in stored(places.table)} == {"dc1"}
    assert sum(batch.records for batch in places.load(two)) == 0
    check_exact(places.table, places.sent)


@pytest.mark.long
@pytest.mark.parametrize("dies", ["never", "before the entry"])
async def test_a_planned_batch_of_a_dead_data_centre_is_finished_in_the_new_one(
    dies: str, at: At, places: Places, monkeypatch: pytest.MonkeyPatch
):
    await write(places, "dc1", 0)
    await write(places, "dc2", 0)
    await places.mirrored()
    one, two = at("dc1"), at("dc2")
    places.load(one)
    await write(places, "dc1", 1)
    await write(places, "dc2", 1)
    await places.mirrored()
    # The ledger names a Kafka that does not answer.
    one.kafka.bootstrap_servers, alive = "127.0.0.1:1", one.kafka.bootstrap_servers
    with monkeypatch.context() as patch:
        patch.setattr(table_run, "do_batch", die)
        with pytest.raises(LoaderDied):
            places.load(one)
    one.kafka.bootstrap_servers = alive
    if dies != "never":
        with monkeypatch.context() as patch:
            patch.setattr(commands_move, "new_entry", die)
            with pytest.raises(LoaderDied):
                places.move(two)
    places.move(two)
    rows = stored(places.table)
    assert {(row["dc"], row["seqno"] // 1000) for row in rows} == {("dc1", 0), ("dc2", 1)}
    move = read_ledger(Location.of(places.table))[-1]
    assert move.reads == ()
    ranges = {r.key: r for r in move.ranges}
    for row in (row for row in rows if row["dc"] == "dc2"):
        r = ranges[TopicPartition(row["topic"], row["partition"])]
        assert row["offset"] in range(r.start, r.end), "the ledger says what it was read by"
    await write(places, "dc1", 2)
    await places.mirrored()
    places.load(two)
    check_exact(places.table, places.sent)


@pytest.mark.long
async def test_topics_that_are_not_mirrored_are_abandoned_by_name_only(at: At, places: Places):
    await write(places, "dc1", 0)
    await places.mirrored()
    alone = Topic(places.topics["dc1"].bootstrap, places.topics["dc1"].name.replace("dc1.", "dc3."))
    await alone.create()
    await alone.write(chunks_of("alone", b"line\n"))
    one, two = at("dc1"), at("dc2")
    places.load(one)
    with pytest.raises(CannotMove, match=f"positions of {alone.name} are known as offsets of dc1 only"):
        places.move(two)
    assert table_facts(Location.of(places.table))["last"]["dc"] == "dc1"
    said = places.move(two, f"{alone.name}=forget", wait_s=30)
    assert said is not None
    assert [move.after for move in said if move.topic == alone.name] == [None]
    await write(places, "dc1", 1)
    await places.mirrored()
    places.load(two)
    check_exact(places.table, [*places.sent, *alone.committed])


@pytest.mark.long
async def test_positions_without_a_note_are_asked_for(at: At, places: Places):
    """As in ledgers of older loaders."""
    await write(places, "dc1", 0)
    await write(places, "dc2", 0)
    await places.mirrored()
    places.load(at("dc1", notes=False))
    assert not any(entry.originals for entry in read_ledger(Location.of(places.table)))
    places.move(at("dc2"), wait_s=30)
    await write(places, "dc2", 1)
    places.load(at("dc2"))
    check_exact(places.table, places.sent)


def _job(places: Places, letters: str) -> TableJob:
    """Lines are a time and a letter, one of these; others go to the quarantine."""
    parser = {
        "format": "regex",
        "pattern": f"(?<at>\\d+) (?<what>[{letters}]\\d*)",
        "event_time": {"column": "at", "formats": ["epoch_s"]},
    }
    segments = SegmentSettings(window_s=60, late_wait_s=0, source_idle_s=1)
    return TableJob.model_validate({**places.job.model_dump(), "parser": parser, "segments": segments.model_dump()})


@pytest.mark.long
async def test_the_side_tables_move_with_the_table(at: At, places: Places):
    """Quarantine, segments, what is known of sources, and of chunks that came by two data centres."""

    def chunks(round_: int, *sources: str) -> list[Sent]:
        lines = b"".join(b"%d %c%d\n" % (1_700_000_000 + round_, letter, round_) for letter in b"ab")
        return [one for source in sources for one in chunks_of(source, lines, start=round_ * 1000)]

    twice = chunks(5, "moves")
    await places.topics["dc1"].write([*chunks(1, "one"), *twice], partitions=2)
    await places.topics["dc2"].write(chunks(1, "two"), partitions=2)
    await places.mirrored()
    one, two = at("dc1"), at("dc2")
    places.job = _job(places, "a")
    places.load(one)
    places.move(two, wait_s=30)
    # The copy of a chunk that was loaded in the other place, and what is new.
    await places.topics["dc2"].write([*twice, *chunks(6, "moves")], partitions=2)
    await places.topics["dc1"].write(chunks(2, "one"), partitions=2)
    await places.mirrored()
    assert sum(batch.left_out for batch in places.load(two)) == 1
    assert len(stored(places.table)) == len(quarantine(places.table)) == 5

    places.job = _job(places, "ab")
    assert sum(1 for _ in table_run.requarantine_table(two, places.job)) == 1
    rows = [(row["source_id"], row["seqno"], row["line"]) for row in stored(places.table)]
    assert len(rows) == len(set(rows)) == 10
    assert quarantine(places.table) == []
    paths = TablePaths.of(places.table)
    held = read_segments(paths.segments, table_facts(Location.of(places.table))["last"]["batch"])
    assert sum(segment.rows for segment in held.values()) == 10
    assert {key.source_id for key in read_sources(paths.sources)} == {"one", "two", "moves"}
