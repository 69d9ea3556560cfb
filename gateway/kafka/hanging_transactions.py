"""Finds and completes hanging transactions (KIP-664): those that ended, but without a marker in every partition.

Kafka 4.1 to 4.3 takes a partition whose leader is away for a deleted one (KAFKA-20734): the coordinator ends the
transaction, and leaves it open in that partition. The next marker of the same producer there, of another transaction,
would end it, too: an aborted transaction would be committed, and an acknowledged one lost. So after each fence, when
no transaction of the lane can be in flight, every partition is searched for one that is still open, the transaction
log for its outcome, and the missing marker is written.

Invariants:

* A transaction is completed only if it is *older* than the fence of this producer, by its epoch, or by the order in
  which the transaction log names the producer ids. A newer one is another owner's: this producer is fenced.
* What the coordinator is still completing by itself is left to it.

If Kafka has ACLs, writing a marker needs CLUSTER_ACTION or ALTER on the cluster.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, ref

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka import error_codes
from logferry.gateway.kafka.client import EARLIEST, ELECTION_S, LATEST, PASSING, KafkaClient, raise_for
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.kafka.requests import ClusterMetadata, FlexibleRequest, read_answer, schema
from logferry.gateway.kafka.types import LaneIdentity, grouped

Wanted = Callable[[str, int], bool]
_Looked = tuple[list["OpenTransaction"], dict[TopicPartition, str]]
_TRANSACTION_LOG: Final = "__transaction_state"
# Version, producer id, epoch, time-out, status: the head of an entry, the same in versions 0 and 1.
_ENTRY: Final = struct.Struct(">hqhib")
_PREPARE_COMMIT, _PREPARE_ABORT = 2, 3
_FETCH_BYTES: Final = 1 << 20
_STILL_ENDING: Final = "Kafka has not ended a transaction in it"
MAY_NOT_DESCRIBE: Final = "its producers cannot be described: grant Read on the topic"
NO_WRITE: Final = "nothing may be written to it: grant Write on the topic"
MAY_NOT_END: Final = (
    "a transaction hangs in it, and only a user with the right Alter on the cluster may end it: grant that for a moment"
)
MAY_NOT: Final = (MAY_NOT_DESCRIBE, MAY_NOT_END)
# Else the log is searched for the producer id of a transaction that has been open for so long: longer than any may be.
_LONG_OPEN_MS: Final = 60_000
_PRODUCERS_ANSWER: Final = schema(
    "throttle_time_ms:int32 topics[topic:text partitions[partition:int32 error_code:int16 error_message:text "
    "producers[producer_id:int64 epoch:int32 last_sequence:int32 last_timestamp:int64 coordinator_epoch:int32 "
    "open_since:int64]]]"
)


class DescribeProducersRequest(
    FlexibleRequest, key=61, version=0, asked="topics[topic:text partitions:int32s]", answered=None
):
    """The producers that have written to partitions of the broker, and their open transactions there.

    Ten thousand partitions with five producers each take 230 ms to decode.
    """

    def __init__(self, tps: Iterable[TopicPartition]) -> None:
        super().__init__(_by_topic(tps))


class WriteTxnMarkersRequest(
    FlexibleRequest,
    key=27,
    version=1,
    asked="markers[producer_id:int64 epoch:int16 committed:bool topics[topic:text partitions:int32s] "
    "coordinator_epoch:int32]",
    answered="markers[producer_id:int64 topics[topic:text partitions[partition:int32 error_code:int16]]]",
):
    """A leader rejects one with an epoch below that of its last batch; version 2 may demand a higher one (KIP-1228)."""

    def __init__(self, opened: Iterable[OpenTransaction], epoch: int, *, committed: bool) -> None:
        super().__init__(
            [
                (one.producer_id, epoch, committed, _by_topic([one.tp]), max(0, one.coordinator_epoch), {})
                for one in opened
            ]
        )


class DescribeTransactionsRequest(
    FlexibleRequest,
    key=65,
    version=0,
    asked="transactional_ids:texts",
    answered="throttle_time_ms:int32 states[error_code:int16 transactional_id:text state:text timeout_ms:int32 "
    "start_ms:int64 producer_id:int64 epoch:int16 topics[topic:text partitions:int32s]]",
):
    """The states of transactional ids at their coordinator (KIP-664)."""


class OpenTransaction(NamedTuple):
    """A transaction that is open in a partition, from ``first_offset`` on. ``last_ms``: the time of its last batch."""

    tp: TopicPartition
    leader: int
    producer_id: int
    epoch: int
    coordinator_epoch: int
    last_ms: int
    first_offset: int


class FencedProducer(NamedTuple):
    """A producer of the lane after its fence. ``epoch``: the first that a transaction of it may have now."""

    transactional_id: str
    producer_id: int
    epoch: int


class NewerOwner(Exception):
    """A newer producer of the lane exists: the one that looked is fenced."""


async def complete_hanging(
    kafka: KafkaClient,
    lane: LaneIdentity,
    producers: Iterable[FencedProducer],
    only: set[TopicPartition] | None = None,
    *,
    ending: Collection[int] = (),
) -> dict[TopicPartition, str]:
    """Ends the open transactions of the lane's producers as the transaction log says; only after its fence.

    ``producers``: those of the lane. ``ending``: producer ids whose transaction the coordinator is still aborting.
    ``only``: these partitions, else all that the lane may have written to. Returns those that nothing may be written
    to before they are checked again, each with the reason. Raises NewerOwner, KafkaError.
    """
    known = {producer.producer_id: producer for producer in producers}
    if only is None:
        opened, missed = await _SHARED.setdefault(kafka, _SharedLook(kafka)).look(lane.may_write)
    else:
        opened, missed = await open_transactions(kafka, lambda *tp: tp in only, sorted({topic for topic, _ in only}))
    repair = _Repair(kafka, lane, missed)
    # Right after a fence (no ``only``), nothing of the lane can be in flight, however young it is.
    before_ms = kafka.clock.now_ms() - _LONG_OPEN_MS if only is not None else sys.maxsize
    for open_ in opened:
        producer = known.get(open_.producer_id)
        if open_.producer_id in ending:
            missed[open_.tp] = _STILL_ENDING
        elif producer is not None:
            if open_.epoch == producer.epoch:
                continue  # the transaction in flight
            if open_.epoch > producer.epoch:
                raise NewerOwner(f"{producer.transactional_id} has an open transaction of epoch {open_.epoch}")
            await repair.end(producer.transactional_id, open_, producer.epoch)
        elif open_.last_ms < before_ms:
            owner = await repair.owner(known.values(), open_)
            if owner is not None:
                await repair.end(owner, open_, open_.epoch + 1)
    return missed


@dataclass(slots=True)
class _Repair:
    kafka: KafkaClient
    lane: LaneIdentity
    missed: dict[TopicPartition, str]
    # Of each transactional id that was looked up.
    logs: dict[str, dict[tuple[int, int], bool]] = field(default_factory=dict)

    async def end(self, transactional_id: str, open_: OpenTransaction, present: int) -> None:
        """Writes the missing marker; the partition is ``missed`` if it takes none now.

        The leader may have taken a batch of the ``present`` epoch since it was asked, and holds both as one. What was
        committed is committed with that batch: acknowledged records must not be lost. The marker of an aborted one has
        the epoch after it, which none runs with, since a fence raises the epoch twice: the leader rejects it then, and
        the running transaction is not committed.
        """
        topic, number = open_.tp
        committed = (await self._ends(transactional_id)).get((open_.producer_id, open_.epoch))
        if committed is None:
            raise errors.KafkaError(
                f"{topic}-{number} holds an open transaction of {transactional_id}, producer {open_.producer_id}, "
                f"epoch {open_.epoch}, and the transaction log does not hold its outcome; examine it with "
                "kafka-transactions.sh and abort or commit it there"
            )
        epoch = present if committed else open_.epoch + 1
        response = await self.kafka.send(open_.leader, WriteTxnMarkersRequest([open_], epoch, committed=committed))
        code = response.markers[0][1][0][1][0][1]
        if code in error_codes.RETRIABLE:
            self.missed[open_.tp] = _STILL_ENDING
            return
        if code == error_codes.CLUSTER_AUTHORIZATION_FAILED:
            self.missed[open_.tp] = MAY_NOT_END
            return
        raise_for(code, f"writing a marker to {topic}-{number}")
        facts = {"lane": self.lane.number, "topic": topic, "partition": number, "epoch": open_.epoch}
        log.event("marker_written", **facts, commit=committed)

    async def owner(self, producers: Iterable[FencedProducer], open_: OpenTransaction) -> str | None:
        """The transactional id of the lane that had this producer id earlier; None: it is not the lane's.

        Kafka gives a transactional id another producer id when its epochs are used up, after 32,767 transactions.
        """
        for name, present, _ in producers:
            ids = list(dict.fromkeys(producer_id for producer_id, _ in await self._ends(name)))
            if open_.producer_id not in ids:
                continue
            if present in ids and ids.index(open_.producer_id) > ids.index(present):
                raise NewerOwner(f"{name} has the newer producer id {open_.producer_id}")
            return name
        return None

    async def _ends(self, name: str) -> dict[tuple[int, int], bool]:
        """Whether the id's transactions were committed, by producer id and epoch, in order, as far as the log goes."""
        if name in self.logs:
            return self.logs[name]
        number = java_hash(name) % len((await self.kafka.describe_topic(_TRANSACTION_LOG)).partitions)
        end = await self.kafka.offset(_TRANSACTION_LOG, number, LATEST)
        position = await self.kafka.offset(_TRANSACTION_LOG, number, EARLIEST)
        found: dict[tuple[int, int], bool] = {}
        while position < end:
            fetched = await self.kafka.fetch(_TRANSACTION_LOG, number, position, max_bytes=_FETCH_BYTES)
            found |= read_ends(fetched.records, name)
            position = fetched.next_offset
        return self.logs.setdefault(name, found)


async def open_transactions(
    kafka: KafkaClient, wanted: Wanted, topics: list[str] | None = None
) -> tuple[list[OpenTransaction], dict[TopicPartition, str]]:
    """Those in the wanted partitions of the topics (None: of all), and those that cannot be examined, and why."""
    by_leader = await _by_leader(kafka, wanted, topics)
    missed = dict.fromkeys(by_leader.pop(-1, ()), "it has no leader")
    asked = (kafka.send(leader, DescribeProducersRequest(tps)) for leader, tps in by_leader.items())
    answers = await asyncio.gather(*asked, return_exceptions=True)
    opened: list[OpenTransaction] = []
    for (leader, tps), answer in zip(by_leader.items(), answers, strict=True):
        if isinstance(answer, PASSING):
            missed |= dict.fromkeys(tps, f"its leader, broker {leader}, does not answer")
            continue
        if isinstance(answer, BaseException):
            raise answer
        opened_there, missed_there = await read_answer(answer, partial(_read_producers, leader))
        opened += opened_there
        missed |= missed_there
    return opened, missed


class _SharedLook:
    """A look at all partitions by the lanes of a process that are fenced at the same time.

    A worker that takes over eight lanes asks twice and not eight times, each of which takes seconds where there are
    many partitions. Whoever comes during one look shares the next: it begins after the fences of all who share it.
    """

    def __init__(self, kafka: KafkaClient) -> None:
        # Weakly: the client is the key of this.
        self._kafka, self._one_at_a_time = ref(kafka), asyncio.Lock()
        self._next: asyncio.Task[_Looked] | None = None
        self._sharers: list[Wanted] = []

    async def look(self, wanted: Wanted) -> _Looked:
        self._sharers.append(wanted)
        if self._next is None:
            self._next = asyncio.create_task(self._look())
        opened, missed = await asyncio.shield(self._next)
        return [one for one in opened if wanted(*one.tp)], {tp: why for tp, why in missed.items() if wanted(*tp)}

    async def _look(self) -> _Looked:
        async with self._one_at_a_time:
            sharers, self._sharers, self._next = self._sharers, [], None
            kafka = self._kafka()
            if kafka is None:
                raise errors.KafkaConnectionError("the client is closed")
            return await open_transactions(kafka, lambda *tp: any(wanted(*tp) for wanted in sharers))


_SHARED: Final = WeakKeyDictionary[KafkaClient, _SharedLook]()


async def _by_leader(kafka: KafkaClient, wanted: Wanted, topics: list[str] | None) -> dict[int, list[TopicPartition]]:
    """The wanted partitions by the newest leader that two brokers know, if so many answer; -1: there is none.

    A broker that was frozen takes itself for the leader for a while, and knows no transaction of the present one.
    """
    views = [await kafka.describe(topics)]
    for node in random.sample(list(views[0].brokers), len(views[0].brokers)):
        with suppress(TimeoutError, *PASSING):
            views.append(await asyncio.wait_for(kafka.described_by(node, topics), ELECTION_S))
        if len(views) > 2:
            break
    return await asyncio.to_thread(_newest_leaders, views, wanted)


def _newest_leaders(views: Iterable[ClusterMetadata], wanted: Wanted) -> dict[int, list[TopicPartition]]:
    topics = (topic for view in views for topic in view.topics.values())
    known = sorted((p.leader_epoch, topic.name, p.partition, p.leader) for topic in topics for p in topic.partitions)
    newest = {(name, number): leader for _, name, number, leader in known}
    return grouped((leader, tp) for tp, leader in newest.items() if wanted(*tp))


def _read_producers(leader: int, raw: BytesIO) -> tuple[list[OpenTransaction], dict[TopicPartition, str]]:
    opened, missed = list[OpenTransaction](), dict[TopicPartition, str]()
    _throttle_ms, topics, _ = _PRODUCERS_ANSWER.decode(raw)
    for topic, partitions, _ in topics:
        for number, code, _message, producers, _tags in partitions:
            tp = (topic, number)
            if code == error_codes.TOPIC_AUTHORIZATION_FAILED:
                missed[tp] = MAY_NOT_DESCRIBE
            elif code:
                missed[tp] = f"its leader, broker {leader}, answers with error code {code}"
            for producer_id, epoch, _sequence, last_ms, coordinator_epoch, first, _producer_tags in producers:
                if first >= 0:
                    opened.append(OpenTransaction(tp, leader, producer_id, epoch, coordinator_epoch, last_ms, first))
    return opened, missed


def read_ends(records: Iterable[KafkaRecord], transactional_id: str) -> dict[tuple[int, int], bool]:
    """Committed or not, by producer id and the epoch of the records, which is the one before that of the entry."""
    key = struct.pack(">hh", 0, len(transactional_id)) + transactional_id.encode()
    found = {}
    for record in records:
        if record.key == key and record.value:
            _, producer_id, epoch, _, status = _ENTRY.unpack_from(record.value)
            if status in (_PREPARE_COMMIT, _PREPARE_ABORT):
                found[producer_id, epoch - 1] = status == _PREPARE_COMMIT
    return found


def java_hash(text: str) -> int:
    """As Kafka chooses the partition of a transactional id: Java's hash of a string, its sign dropped as Kafka does."""
    number, raw = 0, text.encode("utf-16-be")
    for (unit,) in struct.iter_unpack(">H", raw):
        number = (31 * number + unit) & 0xFFFFFFFF
    signed = number - (1 << 32) if number & 0x80000000 else number
    return 0 if signed == -(1 << 31) else abs(signed)


def _by_topic(tps: Iterable[TopicPartition]) -> list[Any]:
    return [(topic, numbers, {}) for topic, numbers in grouped(tps).items()]
