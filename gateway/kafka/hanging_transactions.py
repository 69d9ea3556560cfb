"""The markers that Kafka did not write: before a lane is read, its ended transactions are ended in every partition.

Kafka 4.1 to 4.3 takes a partition whose leader is away for a deleted one (KAFKA-20734): the coordinator ends the
transaction, and leaves it open in that partition. The next marker of the same producer there, of another transaction,
would end it, too: what was aborted would be committed, and what was acknowledged would be lost. So after each fence,
when no transaction of the lane can be under way, every partition is asked for one that is still open, the log of
transactions for how it ended, and the missing marker is written.

Where Kafka checks rights, that takes the right to alter the cluster (CLUSTER_ACTION or ALTER), if a marker is missing.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields
from logferry.gateway import log
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.identity import LaneIdentity, Place
from logferry.gateway.kafka.client import EARLIEST, LATEST, PASSING, Kafka, raise_for

_TRANSACTION_LOG: Final = "__transaction_state"
# Version, producer id, epoch, time-out, status: the head of an entry, the same in versions 0 and 1.
_ENTRY: Final = struct.Struct(">hqhib")
_PREPARE_COMMIT, _PREPARE_ABORT = 2, 3
_FETCH_BYTES: Final = 1 << 20

_TOPICS: Final = CompactArray(
    ("topic", CompactString("utf-8")), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)
)


class DescribeProducersResponse_v0(Response):
    API_KEY = 61
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", CompactString("utf-8")),
                        (
                            "producers",
                            CompactArray(
                                ("producer_id", Int64),
                                ("epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("open_since", Int64),
                                ("tags", TaggedFields),
                            ),
                        ),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class DescribeProducersRequest_v0(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 61
    API_VERSION = 0
    RESPONSE_TYPE = DescribeProducersResponse_v0
    SCHEMA = Schema(("topics", _TOPICS), ("tags", TaggedFields))


class WriteTxnMarkersResponse_v1(Response):
    API_KEY = 27
    API_VERSION = 1
    SCHEMA = Schema(
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                (
                    "topics",
                    CompactArray(
                        ("topic", CompactString("utf-8")),
                        (
                            "partitions",
                            CompactArray(("partition", Int32), ("error_code", Int16), ("tags", TaggedFields)),
                        ),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class WriteTxnMarkersRequest_v1(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 27
    API_VERSION = 1
    RESPONSE_TYPE = WriteTxnMarkersResponse_v1
    SCHEMA = Schema(
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                ("epoch", Int16),
                ("committed", Boolean),
                ("topics", _TOPICS),
                ("coordinator_epoch", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class DescribeProducersRequest(Request[DescribeProducersRequest_v0]):
    """Which producers have written to partitions that the broker leads, and which transactions are open there."""

    API_KEY = 61

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = places

    def build(self, request_struct_class: type[DescribeProducersRequest_v0]) -> DescribeProducersRequest_v0:
        return request_struct_class(_by_topic(self._places), {})


class WriteTxnMarkersRequest(Request[WriteTxnMarkersRequest_v1]):
    """Ends a transaction in one partition."""

    API_KEY = 27

    def __init__(self, producer_id: int, open_: OpenTransaction, *, committed: bool) -> None:
        topics = _by_topic([open_.place])
        # Kafka's own markers have the epoch after that of the records.
        self._marker: tuple[Any, ...] = (
            producer_id,
            open_.epoch + 1,
            committed,
            topics,
            max(0, open_.coordinator_epoch),
            {},
        )

    def build(self, request_struct_class: type[WriteTxnMarkersRequest_v1]) -> WriteTxnMarkersRequest_v1:
        return request_struct_class([self._marker], {})


class OpenTransaction(NamedTuple):
    """A transaction that is open in a partition. ``epoch``: of its records."""

    place: Place
    leader: int
    epoch: int
    coordinator_epoch: int


async def mend(
    kafka: Kafka, lane: LaneIdentity, producer: tuple[int, int], only: set[Place] | None = None
) -> set[Place]:
    """Ends what is open of the lane's producer, as the log of transactions says; only after its fence.

    ``producer``: its id, and the epoch of the transaction that may be under way. ``only``: these partitions, else all
    that the lane may have written to. Returns those without a leader, which could not be looked at: nothing may be
    written to them before they were. Raises KafkaError.
    """
    producer_id, present = producer
    opened, missed = await _open_transactions(kafka, lane, producer_id, only)
    opened = [open_ for open_ in opened if open_.epoch != present]
    if opened:
        transactional_id = lane.transactional_id
        ends = await _ends(kafka, transactional_id, producer_id)
        for open_ in opened:
            topic, number = open_.place
            if open_.epoch not in ends:
                raise errors.KafkaError(
                    f"{topic}-{number} holds an open transaction of {transactional_id}, producer {producer_id}, epoch "
                    f"{open_.epoch}, and the transaction log does not say how it ended; look at it with "
                    "kafka-transactions.sh, and end it"
                )
            committed = ends[open_.epoch]
            response = await kafka.send(open_.leader, WriteTxnMarkersRequest(producer_id, open_, committed=committed))
            raise_for(response.markers[0][1][0][1][0][1], f"writing a marker to {topic}-{number}")
            log.event(
                "warning",
                "marker_written",
                lane=lane.number,
                topic=topic,
                partition=number,
                epoch=open_.epoch,
                commit=committed,
            )
    return missed


async def _open_transactions(
    kafka: Kafka, lane: LaneIdentity, producer_id: int, only: set[Place] | None
) -> tuple[list[OpenTransaction], set[Place]]:
    view = await kafka.describe(None if only is None else sorted({topic for topic, _ in only}))
    by_leader: dict[int, list[Place]] = {}
    for topic in view.topics.values():
        for partition in topic.partitions:
            place = (topic.name, partition.partition)
            if place in only if only is not None else lane.may_write(*place):
                by_leader.setdefault(partition.leader, []).append(place)
    missed = set(by_leader.pop(-1, ()))
    asked = (kafka.send(leader, DescribeProducersRequest(places)) for leader, places in by_leader.items())
    answers = await asyncio.gather(*asked, return_exceptions=True)
    opened = []
    for (leader, places), answer in zip(by_leader.items(), answers, strict=True):
        if isinstance(answer, PASSING):
            missed.update(places)
            continue
        if isinstance(answer, BaseException):
            raise answer
        for topic_name, partitions, _ in answer.topics:
            for number, code, _message, producers, _tags in partitions:
                if code:
                    missed.add((topic_name, number))
                for found_id, epoch, _sequence, _timestamp, coordinator_epoch, open_since, _producer_tags in producers:
                    if found_id == producer_id and open_since >= 0:
                        opened.append(OpenTransaction((topic_name, number), leader, epoch, coordinator_epoch))
    return opened, missed


async def _ends(kafka: Kafka, transactional_id: str, producer_id: int) -> dict[int, bool]:
    """How the transactions of the producer ended, by the epoch of their records, as far as Kafka's log goes back."""
    partitions = len((await kafka.describe_topic(_TRANSACTION_LOG)).partitions)
    number = java_hash(transactional_id) % partitions
    end = await kafka.offset(_TRANSACTION_LOG, number, LATEST)
    position = await kafka.offset(_TRANSACTION_LOG, number, EARLIEST)
    found: dict[int, bool] = {}
    while position < end:
        fetched = await kafka.fetch(_TRANSACTION_LOG, number, position, max_bytes=_FETCH_BYTES)
        found.update(read_ends(fetched.records, transactional_id, producer_id))
        position = fetched.next_offset
    return found


def read_ends(records: Iterable[KafkaRecord], transactional_id: str, producer_id: int) -> dict[int, bool]:
    """Committed or not, by the epoch of the records, which is the one before that of the entry."""
    key = struct.pack(">hh", 0, len(transactional_id)) + transactional_id.encode()
    found = {}
    for record in records:
        if record.key == key and record.value:
            _, its_id, epoch, _, status = _ENTRY.unpack_from(record.value)
            if its_id == producer_id and status in (_PREPARE_COMMIT, _PREPARE_ABORT):
                found[epoch - 1] = status == _PREPARE_COMMIT
    return found


def java_hash(text: str) -> int:
    """As Kafka chooses the partition of a transactional id: Java's hash of a string, its sign dropped as Kafka does."""
    number, raw = 0, text.encode("utf-16-be")
    for (unit,) in struct.iter_unpack(">H", raw):
        number = (31 * number + unit) & 0xFFFFFFFF
    signed = number - (1 << 32) if number & 0x80000000 else number
    return 0 if signed == -(1 << 31) else abs(signed)


def _by_topic(places: Iterable[Place]) -> list[Any]:
    topics: dict[str, list[int]] = {}
    for topic, number in places:
        topics.setdefault(topic, []).append(number)
    return [(topic, numbers, {}) for topic, numbers in topics.items()]
