"""Which open transactions are completed: those that are older than the producer's fence, and no newer owner's."""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.kafka import error_codes, hanging_transactions
from logferry.gateway.kafka.hanging_transactions import (
    _PRODUCERS_ANSWER,
    DescribeProducersRequest,
    FencedProducer,
    NewerOwner,
    WriteTxnMarkersRequest,
    complete_hanging,
    open_transactions,
)
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.kafka.requests import _METADATA, read_metadata
from logferry.gateway.kafka.types import LaneIdentity

ID, OTHER = "logferry.gateway.dc1.lane-3", "logferry.gateway.dc1.lane-4"
LANE = LaneIdentity(3, ID, ("state", 3), lambda topic, _: topic == "dc1.t")
# Other tests may run for minutes between the import of this module and its own.
NOW_MS = int(time.time() * 1000) + 3_600_000
LONG_AGO_MS = NOW_MS - 2 * 3_600_000
COMMIT, ABORT = 2, 3
STILL_ENDING = "Kafka has not ended a transaction in it"


class OnePartition:
    """A broker with one partition, its open transactions, and the transaction log. ``marked``: the markers written."""

    def __init__(self, *opened: tuple[int, int, int], log: tuple[tuple[int, int, int, str], ...] = ()) -> None:
        self.opened, self.log, self.marked = opened, log, list[tuple[int, int, bool]]()
        self.marker_code = self.described_code = 0
        self.clock = BrokerClock()

    async def describe(self, topics: Any = None) -> Any:
        partition = SimpleNamespace(partition=0, leader=1, leader_epoch=4)
        return SimpleNamespace(topics={"dc1.t": SimpleNamespace(name="dc1.t", partitions=[partition])}, brokers={})

    async def describe_topic(self, topic: str) -> Any:
        return SimpleNamespace(partitions=[None])

    async def send(self, node: int, request: Any) -> Any:
        if isinstance(request, DescribeProducersRequest):
            producers: list[Any] = [(pid, epoch, 0, last_ms, 7, 10, {}) for pid, epoch, last_ms in self.opened]
            described: Any = (0, self.described_code, None, [] if self.described_code else producers, {})
            return _PRODUCERS_ANSWER.encode((0, [("dc1.t", [described], {})], {}))
        assert isinstance(request, WriteTxnMarkersRequest)
        [(producer_id, epoch, committed, _, _, _)] = request._fields[0]
        if not self.marker_code:
            self.marked.append((producer_id, epoch, committed))
        return SimpleNamespace(markers=[(producer_id, [("dc1.t", [(0, self.marker_code, {})], {})], {})])

    async def offset(self, topic: str, partition: int, time_ms: int) -> int:
        return len(self.log) if time_ms == -1 else 0

    async def fetch(self, topic: str, partition: int, position: int, *, max_bytes: int) -> Any:
        records = []
        for producer_id, epoch, status, name in self.log:
            key = struct.pack(">hh", 0, len(name)) + name.encode()
            records.append(KafkaRecord(0, 0, key, struct.pack(">hqhib", 1, producer_id, epoch, 15_000, status), []))
        return SimpleNamespace(records=records, next_offset=len(self.log))


async def complete(kafka: OnePartition, epoch: int, **options: Any) -> dict[tuple[str, int], str]:
    return await complete_hanging(kafka, LANE, [FencedProducer(ID, 2000, epoch)], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("status", "committed", "epoch"), [(COMMIT, True, 11), (ABORT, False, 8)])
async def test_an_older_transaction_ends_as_the_log_says(status: int, committed: bool, epoch: int) -> None:
    """A commit with the present epoch: the leader may have taken a batch of it meanwhile."""
    kafka = OnePartition((2000, 7, NOW_MS), log=((2000, 8, status, ID),))
    assert await complete(kafka, 11) == {}
    assert kafka.marked == [(2000, epoch, committed)]


async def test_a_leader_that_took_a_batch_of_the_running_transaction_does_not_abort_it() -> None:
    """It rejects the marker, and the running transaction is not committed: the two would end alike."""
    kafka = OnePartition((2000, 7, NOW_MS), log=((2000, 8, ABORT, ID),))
    kafka.marker_code = error_codes.INVALID_PRODUCER_EPOCH
    with pytest.raises(errors.KafkaError, match="InvalidProducerEpoch"):
        await complete(kafka, 9, only={("dc1.t", 0)})


async def test_the_transaction_in_flight_is_left_alone() -> None:
    kafka = OnePartition((2000, 9, NOW_MS), log=((2000, 10, COMMIT, ID),))
    assert await complete(kafka, 9) == {}
    assert kafka.marked == []


async def test_a_newer_owners_transaction_is_never_ended() -> None:
    """Its PREPARE_COMMIT is in the log already, and a late marker would be taken for that of its next transaction."""
    kafka = OnePartition((2000, 10, NOW_MS), log=((2000, 11, COMMIT, ID),))
    with pytest.raises(NewerOwner, match="epoch 10"):
        await complete(kafka, 9)
    assert kafka.marked == []


@pytest.mark.parametrize(
    ("last_ms", "only", "marked"),
    [(NOW_MS, None, True), (LONG_AGO_MS, {("dc1.t", 0)}, True), (NOW_MS, {("dc1.t", 0)}, False)],
    ids=["after the fence", "long ago", "it may be in flight"],
)
async def test_a_transaction_of_an_earlier_producer_id_of_the_lane_is_found(
    last_ms: int, only: set[tuple[str, int]] | None, marked: bool
) -> None:
    log = ((1000, 8, COMMIT, ID), (2000, 1, COMMIT, ID))
    kafka = OnePartition((1000, 7, last_ms), log=log)
    assert await complete(kafka, 2, only=only) == {}
    assert kafka.marked == [(1000, 8, True)] * marked


async def test_a_later_producer_id_of_the_lane_is_a_newer_owners() -> None:
    kafka = OnePartition((3000, 7, LONG_AGO_MS), log=((2000, 1, COMMIT, ID), (3000, 8, COMMIT, ID)))
    with pytest.raises(NewerOwner, match="3000"):
        await complete(kafka, 2)
    assert kafka.marked == []


@pytest.mark.parametrize("last_ms", [NOW_MS, LONG_AGO_MS], ids=["now", "long ago"])
async def test_the_transactions_of_other_lanes_are_left_alone(last_ms: int) -> None:
    kafka = OnePartition((4000, 7, last_ms), log=((4000, 8, COMMIT, OTHER), (2000, 1, COMMIT, ID)))
    assert await complete(kafka, 2) == {}
    assert kafka.marked == []


async def test_what_kafka_is_still_ending_is_left_to_it_and_not_written_to() -> None:
    kafka = OnePartition((1500, 7, NOW_MS), log=((1500, 8, ABORT, f"{ID}~1"),))
    assert await complete(kafka, 2, ending=frozenset({1500})) == {("dc1.t", 0): STILL_ENDING}
    assert kafka.marked == []


async def test_a_partition_that_takes_no_marker_now_is_not_written_to() -> None:
    kafka = OnePartition((2000, 7, NOW_MS), log=((2000, 8, ABORT, ID),))
    kafka.marker_code = error_codes.NOT_ENOUGH_REPLICAS
    assert await complete(kafka, 9) == {("dc1.t", 0): STILL_ENDING}


async def test_a_partition_that_may_not_be_described_is_not_written_to_and_the_lane_opens() -> None:
    kafka = OnePartition((2000, 7, NOW_MS), log=((2000, 8, ABORT, ID),))
    kafka.described_code = error_codes.TOPIC_AUTHORIZATION_FAILED
    assert await complete(kafka, 9) == {
        ("dc1.t", 0): "its producers cannot be described: grant Read on the topic",
    }
    assert kafka.marked == []


async def test_a_marker_that_this_user_may_not_write_leaves_its_partition_alone_unwritten() -> None:
    kafka = OnePartition((2000, 7, NOW_MS), log=((2000, 8, COMMIT, ID),))
    kafka.marker_code = error_codes.CLUSTER_AUTHORIZATION_FAILED
    [(tp, why)] = (await complete(kafka, 11)).items()
    assert (tp, "only a user with the right Alter on the cluster" in why) == (("dc1.t", 0), True)
    kafka.marker_code = 0  # it was granted
    assert await complete(kafka, 11, only={("dc1.t", 0)}) == {}
    assert kafka.marked == [(2000, 11, True)]


async def test_an_outcome_that_the_log_does_not_hold_is_not_guessed() -> None:
    with pytest.raises(errors.KafkaError, match="does not hold its outcome"):
        await complete(OnePartition((2000, 7, NOW_MS)), 9)


@pytest.mark.parametrize("producers", [1, 5])
async def test_the_loop_is_not_held_by_the_producers_of_many_partitions(producers: int) -> None:
    """In CPU time of the loop's thread: five in each of ten thousand partitions take 230 ms to decode."""
    idle: list[Any] = [(number, 3, 5, NOW_MS, 1, -1, {}) for number in range(producers - 1)]
    kafka = OnePartition()
    partitions: list[Any] = [
        (number, 0, None, [*idle, (2000, 9, 0, NOW_MS, 1, 10, {})], {}) for number in range(10_000)
    ]
    raw = bytes(_PRODUCERS_ANSWER.encode((0, [("dc1.t", partitions, {})], {})))
    response_type = DescribeProducersRequest([]).prepare({61: (0, 0)}).RESPONSE_TYPE

    async def send(node: int, request: Any) -> Any:
        return response_type.decode(BytesIO(raw))  # as aiokafka does, in the event loop

    kafka.send = send  # type: ignore[method-assign]
    gc.collect()  # what other tests left would be collected meanwhile
    began = time.thread_time()
    opened, missed = await open_transactions(kafka, LANE.may_write)  # type: ignore[arg-type]
    held_s = time.thread_time() - began
    assert (len(opened), missed) == (10_000, {})
    assert {(found.producer_id, found.epoch) for found in opened} == {(2000, 9)}
    assert held_s < 0.01


@pytest.mark.parametrize("silent", [None, 1, 3])
async def test_a_leader_that_was_replaced_while_it_was_frozen_is_not_believed(
    silent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker 1 names itself, and holds no transaction; since epoch 5 broker 2 leads, where one is open."""

    class WasFrozen(OnePartition):
        async def describe(self, topics: Any = None) -> Any:
            return read_metadata(BytesIO(metadata(1)))

        async def described_by(self, node: int, topics: Any) -> Any:
            return await asyncio.Event().wait() if node == silent else read_metadata(BytesIO(metadata(node)))

        async def send(self, node: int, request: Any) -> Any:
            opened, self.opened = self.opened, self.opened if node == 2 else ()
            try:
                return await super().send(node, request)
            finally:
                self.opened = opened

    def metadata(node: int) -> bytes:
        brokers: list[Any] = [(other, f"kafka{other}", 9092, None, {}) for other in (1, 2, 3)]
        leader, epoch = (1, 4) if node == 1 else (2, 5)
        parts: list[Any] = [(0, 0, leader, epoch, [1, 2, 3], [leader], [], {})]
        return bytes(_METADATA.encode((0, brokers, "c", 1, [(0, "dc1.t", bytes(16), False, parts, 0, {})], {})))

    monkeypatch.setattr(hanging_transactions, "ELECTION_S", 0.05)
    for _ in range(20):
        kafka = WasFrozen((2000, 7, NOW_MS), log=((2000, 8, COMMIT, ID),))
        assert await complete(kafka, 9) == {}
        assert kafka.marked == [(2000, 9, True)]


async def test_lanes_that_are_fenced_at_the_same_time_share_a_look_that_begins_after_their_fences() -> None:
    kafka = OnePartition((2000, 7, NOW_MS), log=((2000, 8, COMMIT, ID), (2001, 8, COMMIT, OTHER)))
    looks, began, go_on = list[int](), asyncio.Event(), asyncio.Event()
    send = kafka.send

    async def slow(node: int, request: Any) -> Any:
        if isinstance(request, DescribeProducersRequest):
            looks.append(len(looks))
            began.set()
            await go_on.wait()
        return await send(node, request)

    kafka.send = slow  # type: ignore[method-assign]
    first = asyncio.create_task(complete(kafka, 11))
    await began.wait()
    others = [asyncio.create_task(complete(kafka, 11)) for _ in range(7)]
    await asyncio.sleep(0)
    assert looks == [0]
    go_on.set()
    assert await asyncio.gather(first, *others) == [{}] * 8
    assert looks == [0, 1]


async def test_a_lane_hears_of_its_own_partitions_alone() -> None:
    kafka: Any = OnePartition((2000, 7, NOW_MS), log=((2000, 8, COMMIT, ID),))
    elsewhere = LANE._replace(may_write=lambda topic, _: topic == "dc1.other")
    of_lane, of_other = await asyncio.gather(
        complete(kafka, 11), complete_hanging(kafka, elsewhere, [FencedProducer(ID, 2000, 11)])
    )
    assert (of_lane, of_other, len(kafka.marked)) == ({}, {}, 1)
