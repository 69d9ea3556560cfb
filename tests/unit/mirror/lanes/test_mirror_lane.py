"""What one lane of the mirror does by itself when partitions take nothing, and when one is resumed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.contract.mirror_state import checkpoint_key, mirror_lane_of
from logferry.gateway.errors import LaneUnreadable
from logferry.gateway.kafka.record_batch import CorruptBatch, FetchedRecords, KafkaRecord
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.lanes.lifecycle import now_ms
from logferry.gateway.topics import health
from logferry.mirror.lanes.stops import CannotResume
from logferry.mirror.lanes.transaction import read_lane

from tests.support.mirror_lane import TOPIC, MemoryCluster, MirrorWorld, topic, until
from tests.unit.mirror.copy.test_batch_rewrite import encoded, record


async def test_a_new_producer_knows_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.lane.invalidate()
        await until(lambda: len(world.producers) == 2)
        assert world.before == [{}, world.producers[0].producers]


async def test_a_partition_that_takes_nothing_pauses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LOOK_S", 0)
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.unavailable[TOPIC, 0] = "it has no leader"
        world.link.write(0, 3)
        await until(lambda: world.stops() == {0: "target-unavailable"})
        producers = len(world.producers)
        for count in range(20):
            world.link.write(0, 1)
            world.link.write(1, 1)
            await until(partial(lambda wanted: world.copied(1) == wanted, count + 1))
        assert (len(world.producers), world.copied(0)) == (producers, 0)
        stop = world.partition(0).stop
        assert stop is not None
        assert "it has no leader" in stop.detail
        # Mended: it ends by itself.
        del world.unavailable[TOPIC, 0]
        world.targets.health.accept([(TOPIC, 0)])
        world.lane.retry_stops()
        await until(lambda: world.copied(0) == 23 and world.stops() == {})
        assert world.budget.used_bytes == 0


async def test_a_partition_that_metadata_shows_to_take_nothing_costs_no_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.unavailable[TOPIC, 0] = "too few replicas"
        world.targets.health.refuse({(TOPIC, 0): "1 of its replicas are in sync"})
        world.link.write(0, 1)
        world.link.write(1, 1)
        await until(lambda: world.copied(1) == 1 and world.stops() == {0: "target-unavailable"})
        assert len(world.producers) == 1


async def test_a_lane_that_opens_again_before_the_first_commit_passes_nothing_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first commit fails, and retention in the remote removes the records before the next one."""
    monkeypatch.setattr(health, "_LOOK_S", 0)
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.unavailable[TOPIC, 0] = "it has no leader"
        world.link.write(0, 2)
        await until(lambda: world.stops() == {0: "target-unavailable"} and len(world.producers) > 1)
        del world.unavailable[TOPIC, 0]
        world.targets.health.accept([(TOPIC, 0)])
        world.lane.retry_stops()
        world.partition(0).out_of_range(5, 9)
        assert world.stops() == {0: "records-removed"}


async def test_the_lane_waits_for_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints have no other place: no partition is to blame."""
    world = MirrorWorld()
    async with world.running(monkeypatch):
        state = (world.config.state_topic, 0)
        world.unavailable[state] = "it has no leader"
        world.link.write(0, 1)
        await until(lambda: len(world.producers) > 2)
        assert (world.stops(), world.targets.health.refused()) == ({}, {})
        del world.unavailable[state]
        await until(lambda: world.copied(0) == 1)


async def test_a_resume_drops_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records 1 and 2 wait, because a commit is under way, when the partition stops and is resumed behind a hole."""
    world = MirrorWorld()
    world.there.ranges[TOPIC, 0] = (3, 6)
    async with world.running(monkeypatch):
        partition, resumed = world.partition(0), list[asyncio.Task[int]]()

        def stop(tp: object) -> None:
            if tp == (TOPIC, 0) and not resumed:
                world.link.write(0, 2)
                world.link.deliver_now(partition)
                partition.halt("records-removed", "the remote log no longer has offset 3")
                resumed.append(asyncio.create_task(world.lane.resume((TOPIC, 0), 4)))

        world.fails = stop
        world.link.write(0, 1)
        await until(lambda: resumed)
        world.link.logs[TOPIC, 0] = [encoded(offset, [record(offset)]) for offset in range(6)]
        async with asyncio.timeout(60):
            assert await resumed[0] == 4
        assert world.copied(0) == 3
        world.link.deliver(world.partition(0))
        await until(lambda: world.copied(0) == 5)
        assert world.budget.used_bytes == 0


@pytest.mark.parametrize("before", [0, 2], ids=["its first transaction", "a later one"])
async def test_a_topic_that_is_recreated_there_while_its_transaction_commits(
    monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """The partition that takes the place of the one that is committed knows what was, and stops."""
    world = MirrorWorld()
    recreated = {TOPIC: topic(TOPIC, 2, "-2")}
    world.there.ranges[TOPIC, 0] = (0, 9)
    async with world.running(monkeypatch):
        world.link.write(0, before)
        await until(lambda: world.copied(0) == before)

        def recreate(tp: object) -> None:
            if tp == (TOPIC, 0) and world.link.topics != recreated:
                world.link.topics = recreated
                world.lane.adopt(world.link, recreated)

        world.fails = recreate
        world.link.write(0, 1)
        await until(lambda: world.stops().get(0) == "source-recreated" and world.copied(0) == before + 1)
        checkpoint = world.partition(0).checkpoint
        assert checkpoint is not None
        assert checkpoint.source_next == before + 1
        assert world.budget.used_bytes == 0


async def test_what_is_answered_late_stops_no_partition_that_took_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.link.write(0, 1)
        await until(lambda: world.copied(0) == 1)
        before, recreated = world.partition(0), {TOPIC: topic(TOPIC, 2, "-2")}
        world.link.topics = recreated
        world.lane.adopt(world.link, recreated)
        before.halt("fetch-rejected", "its topic id is not known")
        assert world.stops() == {0: "source-recreated"}
        world.lane.invalidate()  # a new producer begins with the stops that are to be retried
        await until(lambda: len(world.producers) == 2 and world.lane.state == "serving")
        assert world.stops() == {0: "source-recreated"}


async def test_only_one_resume_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MirrorWorld()
    world.there.ranges[TOPIC, 0] = (0, 9)
    async with world.running(monkeypatch):
        world.partition(0).halt("unreadable-batch", "offset 0")
        asked = [asyncio.create_task(world.lane.resume((TOPIC, 0), at)) for at in (1, 2)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [int, CannotResume]


@pytest.mark.parametrize(
    ("side", "error"),
    [
        ("here", errors.PolicyViolationError("retention is over the limit")),
        ("there", errors.TopicAuthorizationFailedError("its settings cannot be read")),
    ],
)
async def test_a_topic_that_cannot_be_created_stops_alone_and_by_name(
    monkeypatch: pytest.MonkeyPatch, side: str, error: errors.KafkaError
) -> None:
    world = MirrorWorld()
    refuses = getattr(world, side).refuses
    world.there.add(topic("dc1.a", 1))
    world.link.topics = dict(world.there.topics)
    refuses["dc1.a"] = error
    async with world.running(monkeypatch):
        world.link.write(0, 1)
        await until(lambda: world.copied(0) == 1)
        stop = world.partition(0, "dc1.a").stop
        assert stop is not None
        assert stop.kind == "target-not-created"
        assert error.args[0] in stop.detail
        del refuses["dc1.a"]
        world.targets.invalidate()
        await world.targets.ensure(world.there, world.link.topics)
        world.lane.adopt(world.link, world.link.topics)
        assert world.stops() == {}
        world.link.write(0, 1, "dc1.a")
        await until(lambda: world.written.get(("dc1.a", 0)) == 1)


async def test_a_copy_that_may_not_be_read_stops_alone_until_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint the mirror has to see that the copy is empty; of the others in the transaction it does."""
    world = MirrorWorld()
    world.here.records[TOPIC, 0] = [KafkaRecord(0, 0, None, b"of another program", [])]
    world.here.unreadable[TOPIC, 0] = errors.TopicAuthorizationFailedError("no right to read it")
    async with world.running(monkeypatch):
        for number in range(2):
            world.link.write(number, 2)
        await until(lambda: world.copied(1) == 2 and world.stops() == {0: "target-unreadable"})
        stop = world.partition(0).stop
        assert stop is not None
        assert "no right to read it" in stop.detail
        assert (len(world.producers), world.copied(0)) == (1, 0)
        # It is looked at again after a minute.
        del world.here.unreadable[TOPIC, 0]
        world.lane.retry_stops()
        assert world.stops() == {0: "target-unreadable"}
        world.lane._retried.clock_ms = lambda: now_ms() + 61_000
        world.lane.retry_stops()
        retried = world.partition(0)
        assert (retried.stop, retried.last_stop, retried.state) == (None, stop, "stopped")
        await until(lambda: world.stops() == {0: "target-not-empty"})
        assert retried.last_stop is retried.stop
        assert world.budget.used_bytes == 0


async def test_a_stop_is_reported_until_its_retry_commits_something(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MirrorWorld()
    world.here.records[TOPIC, 0] = [KafkaRecord(0, 0, None, b"of another program", [])]
    world.here.unreadable[TOPIC, 0] = errors.TopicAuthorizationFailedError("no right to read it")
    async with world.running(monkeypatch):
        world.link.write(0, 2)
        await until(lambda: world.stops() == {0: "target-unreadable"})
        del world.here.records[TOPIC, 0]
        world.lane._retried.clock_ms = lambda: now_ms() + 61_000
        world.lane.retry_stops()
        assert world.stops() == {}
        assert world.partition(0).state == "stopped"
        await until(lambda: world.copied(0) == 2 and world.partition(0).last_stop is None)
        assert world.partition(0).state != "stopped"


async def test_a_partition_that_is_rejected_has_one_stop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not unavailable, too: its stop would change to and fro."""
    world = MirrorWorld()

    def refuse(tp: tuple[str, int]) -> None:
        if tp == (TOPIC, 0):
            error = errors.TopicAuthorizationFailedError("grant Read on the topic")
            raise NotCommitted(error, refused=tp, unavailable={tp: "grant Read on the topic"})

    world.fails = refuse
    async with world.running(monkeypatch):
        for number in range(2):
            world.link.write(number, 2)
        await until(lambda: world.stops() == {0: "write-rejected"} and world.copied(1) == 2)
        assert world.targets.health.refused() == {}
        world.lane._retried.clock_ms = lambda: now_ms() + 61_000
        world.lane.retry_stops()
        stop = world.partition(0).last_stop
        assert stop is not None
        assert stop.kind == "write-rejected"
        await until(lambda: world.stops() == {0: "write-rejected"})


async def test_all_partitions_without_a_right_stop_by_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure is a fence, for which the rest of the lane waits."""
    world = MirrorWorld()
    lacking = {(TOPIC, number): "grant Write on the topic" for number in range(2)}

    def refuse(tp: tuple[str, int]) -> None:
        if tp in lacking:
            raise NotCommitted(errors.TopicAuthorizationFailedError(), refused=tp, unavailable=lacking)

    world.fails = refuse
    async with world.running(monkeypatch):
        for number in range(2):
            world.link.write(number, 2)
        await until(lambda: world.stops() == {0: "write-rejected", 1: "write-rejected"} and len(world.producers) == 2)
        assert world.targets.health.refused() == {}
        assert world.partition(1).last_stop == world.partition(1).stop
        assert world.lane._uncoalesced == set()


async def test_a_topic_that_is_hidden_stops_by_another_name_than_a_deleted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.link.write(0, 2)
        await until(lambda: world.copied(0) == 2)
        world.lane.adopt(world.link, {}, {TOPIC})
        assert world.stops() == {0: "fetch-rejected", 1: "fetch-rejected"}
        world.lane._retried.clock_ms = lambda: now_ms() + 6_000
        world.lane.retry_stops()
        world.lane.adopt(world.link, world.link.topics)
        world.link.write(0, 2)
        await until(lambda: world.copied(0) == 4 and world.stops() == {})


async def test_a_retry_ends_the_stop_of_a_partition_with_nothing_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the remote answers is the last batch alone, to be compared; then it is silent."""
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.link.write(0, 2)
        await until(lambda: world.copied(0) == 2)
        world.partition(0).halt("fetch-rejected", "no right")
        world.lane._retried.clock_ms = lambda: now_ms() + 61_000
        world.lane.retry_stops()
        assert world.partition(0).state == "stopped"
        await until(lambda: world.partition(0).state == "caught-up")
        assert world.lane._retried.tried
        world.lane.retry_stops()
        assert not world.lane._retried.tried


async def test_an_original_that_turned_compacted_was_not_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction changes the last batch that was mirrored; a lane that opens again compares with it."""
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.link.write(0, 3)
        await until(lambda: world.copied(0) == 3)
        world.there.settings[TOPIC]["cleanup.policy"] = "compact"
        world.link.logs[TOPIC, 0] = [encoded(number, [record(number)], "gzip") for number in range(4)]
        world.lane.invalidate()
        await until(lambda: world.stops() == {0: "log-truncated"})
        assert world.link.refreshes > 0
        await world.targets.ensure(world.there, world.link.topics)
        world.lane.adopt(world.link, world.link.topics)
        await until(lambda: world.copied(0) == 4)
        assert world.stops() == {}


async def test_a_truncated_original_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MirrorWorld()
    async with world.running(monkeypatch):
        world.link.write(0, 3)
        await until(lambda: world.copied(0) == 3)
        world.link.logs[TOPIC, 0] = [encoded(number, [record(number)], "gzip") for number in range(4)]
        world.lane.invalidate()
        await until(lambda: world.stops() == {0: "log-truncated"})
        await world.targets.ensure(world.there, world.link.topics)
        world.lane.adopt(world.link, world.link.topics)
        assert world.stops() == {0: "log-truncated"}


class BrokenState(MemoryCluster):
    async def fetch(self, name: str, number: int, position: int, *, max_bytes: int) -> FetchedRecords:
        raise CorruptBatch("the batch at offset 0 has a wrong checksum")


@pytest.mark.parametrize("damage", ["batch", "checkpoint"])
async def test_a_state_that_cannot_be_read_stops_its_lane_alone(damage: str) -> None:
    here: Any = (BrokenState if damage == "batch" else MemoryCluster)("here")
    here.records["state", 2] = [KafkaRecord(0, 0, checkpoint_key(TOPIC, 0), b"\x09 of a newer version", [])]
    with pytest.raises(LaneUnreadable, match="state-2"):
        await read_lane(here, "state", 2)


async def test_a_later_checkpoint_replaces_one_that_cannot_be_read() -> None:
    here: Any = MemoryCluster("here")
    key = checkpoint_key(TOPIC, 0)
    here.records["state", 2] = [KafkaRecord(0, 0, key, b"\x09", []), KafkaRecord(1, 0, key, None, [])]
    assert (await read_lane(here, "state", 2)).checkpoints == {}


async def test_a_record_of_the_state_that_an_operator_forgot_is_nothing() -> None:
    """Also where the key names no partition."""
    here: Any = MemoryCluster("here")
    here.records["state", 2] = [KafkaRecord(0, 0, b"?", b"\x09", []), KafkaRecord(1, 0, b"?", None, [])]
    assert (await read_lane(here, "state", 2)).checkpoints == {}
    here.records["state", 2].pop()
    with pytest.raises(LaneUnreadable, match=r"logferry lanes --mirror --config FILE --forget 2:0"):
        await read_lane(here, "state", 2)


async def test_an_original_recreated_with_fewer_partitions_stops_each_of_its_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is not there any more has nothing to catch up with, but it is not caught up either."""
    world = MirrorWorld(partitions=2)
    async with world.running(monkeypatch):
        for number in range(2):
            world.link.write(number, 2)
        await until(lambda: world.copied(0) == world.copied(1) == 2)
        world.there.add(topic(TOPIC, 1, "-new"))
        world.link.topics = dict(world.there.topics)
        world.lane.adopt(world.link, world.link.topics)
        assert world.stops() == {0: "source-recreated", 1: "source-deleted"}
        # It grows again: both are partitions of the new one.
        world.there.add(topic(TOPIC, 2, "-new"))
        world.link.topics = dict(world.there.topics)
        world.lane.adopt(world.link, world.link.topics)
        assert world.stops() == {0: "source-recreated", 1: "source-recreated"}


async def test_a_lane_that_is_one_too_many_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are fewer now, and the group has not taken it away yet. Another lane copies the same records."""
    world = MirrorWorld(number=2)
    world.here.records[world.config.state_topic, 2] = []
    async with world.running(monkeypatch):
        assert world.lane.partitions == {}
        world.lane.adopt(world.link, world.link.topics)
        assert world.lane.partitions == {}


async def test_a_partition_of_the_history_that_takes_nothing_stops_the_copies_that_write_there_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane writes to several of them, since the number of lanes has changed."""
    world = MirrorWorld()
    history = world.config.history_topic
    world.here.topics[history] = topic(history, 2)
    at_fault, other = sorted(range(2), key=lambda number: -mirror_lane_of(TOPIC, number, 2))
    async with world.running(monkeypatch):
        world.unavailable[history, 1] = "it has no leader"
        world.link.write(at_fault, 1)
        await until(lambda: world.stops() == {at_fault: "target-unavailable"})
        producers = len(world.producers)
        world.link.write(at_fault, 1)
        world.link.write(other, 1)
        await until(lambda: world.copied(other) == 1)
        assert (len(world.producers), world.copied(at_fault)) == (producers, 0)
        del world.unavailable[history, 1]
        world.targets.health.accept([(TOPIC, at_fault)])
        world.lane.retry_stops()
        await until(lambda: world.copied(at_fault) == 2 and world.stops() == {})
