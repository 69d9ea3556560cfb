"""Reads Kafka for the audit: its topics, and every committed record up to an end that was taken before.

The ends are high watermarks, which include open transactions. Reading waits until these are decided (Kafka aborts a
transaction after its timeout). So one topic can be compared with another while the gateway continues to write, if both
are read in the right order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from aiokafka import errors
from logferry.gateway.config import KafkaSettings
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.aiokafka_internals import FetchRequest, start_or_explain
from logferry.gateway.kafka.client import EARLIEST, PASSING, KafkaClient
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.ops.audit.records.batches import CorruptRecords, StoredRecords, committed_records
from logferry.ops.cli.problems import Unavailable, UsageError

if TYPE_CHECKING:
    from logferry.ops.audit.log.partition import PartitionLog

_FETCH_BYTES: Final = 4 << 20
_WAIT_MS: Final = 500
_DECIDED_WITHIN_S: Final = 90.0
_ANSWER_S: Final = 50.0
_BACKOFF_S: Final = 0.1
_READ_COMMITTED: Final = 1

Views = Mapping[str, TopicMetadata]


@dataclass
class Centre:
    """A data centre whose log is read. ``settings``: of its Kafka, for other processes. ``views``: all its topics,
    ``topics``: those that are read, ``logs``: their partitions."""

    dc: str
    settings: KafkaSettings
    kafka: KafkaClient
    views: Views
    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    logs: dict[TopicPartition, PartitionLog] = field(default_factory=dict)

    @property
    def own_topics(self) -> dict[str, TopicMetadata]:
        """Those that its own gateway writes."""
        return {topic: view for topic, view in self.topics.items() if topic.startswith(f"{self.dc}.")}


@asynccontextmanager
async def connected(options: dict[str, Any]) -> AsyncIterator[KafkaClient]:
    """``options``: of Kafka's clients. Raises Unavailable when Kafka does not answer, now or later."""
    kafka = KafkaClient(options, "logferry-audit")
    try:
        try:
            await start_or_explain(kafka)
            yield kafka
        finally:
            await kafka.close()
    except (errors.KafkaError, TimeoutError, OSError, CorruptRecords) as error:
        where = options["bootstrap_servers"]
        raise Unavailable(f"Kafka at {where} cannot be read: {str(error) or type(error).__name__}") from error


async def fetch(
    kafka: KafkaClient, place: TopicPartition, offset: int, *, max_bytes: int = _FETCH_BYTES, wait_ms: int = 0
) -> StoredRecords:
    """The committed records from ``offset`` on, of one request, by the audit's own decoder.

    What lies before a damaged batch is returned, too. Raises CorruptRecords where there is nothing, and
    OffsetOutOfRangeError, KafkaError, TimeoutError.
    """
    topic, partition = place
    request = FetchRequest(wait_ms, 1, max_bytes, _READ_COMMITTED, [(topic, [(partition, offset, max_bytes)])])
    async with asyncio.timeout(_ANSWER_S):
        while True:
            with suppress(*PASSING):
                leader = await kafka.present_leader(topic, partition)
                if leader >= 0:
                    response = await kafka.send(leader, request)
                    # Over a quota Kafka answers with nothing (KIP-219).
                    await asyncio.sleep(response.throttle_time_ms / 1000)
                    if response.topics:
                        break
            kafka.forget_leader(topic, partition)
            await asyncio.sleep(_BACKOFF_S)
    _, code, _, last_stable, _, aborted, *_, raw = response.topics[0][1][0]
    if code:
        error = errors.for_code(code)
        if issubclass(error, PASSING):
            kafka.forget_leader(topic, partition)
            await asyncio.sleep(_BACKOFF_S)
            return StoredRecords([], offset, -1)
        raise error(f"{topic}-{partition} at {offset}")
    records, position, damage = committed_records(raw or b"", aborted or (), offset)
    if damage is not None and not records and position == offset:
        raise damage
    return StoredRecords(records, position, last_stable)


async def committed(
    kafka: KafkaClient, place: TopicPartition, start: int, end: int, overtaken: Callable[[int, int], None]
) -> AsyncIterator[StoredRecords]:
    """Everything committed in [start, end), and perhaps more at the end of the last fetch.

    The next fetch is under way while the caller works. ``overtaken`` is called with a range of offsets that retention
    removed before they could be read. Raises Unavailable when a transaction stays open in the range, and as `fetch`.
    """
    topic, partition = place
    position = start
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _DECIDED_WITHIN_S
    ahead: asyncio.Task[StoredRecords] | None = None
    try:
        while position < end:
            try:
                found = await (ahead or fetch(kafka, place, position, wait_ms=_WAIT_MS))
            except errors.OffsetOutOfRangeError:
                ahead, first = None, await kafka.offset(topic, partition, EARLIEST)
                if first <= position:
                    raise
                overtaken(position, first)
                position = first
                continue
            ahead = None
            if found.next_offset > position:
                position = found.next_offset
                if position < end:
                    ahead = asyncio.create_task(fetch(kafka, place, position, wait_ms=_WAIT_MS))
                    await asyncio.sleep(0)
                yield found
                deadline = loop.time() + _DECIDED_WITHIN_S
            elif found.last_stable >= end:
                return
            elif loop.time() > deadline:
                raise Unavailable(
                    f"{topic}-{partition}: a transaction at offset {found.last_stable} stays open; no record after it "
                    "can be read. End it (kafka-transactions.sh find-hanging) and run the audit again"
                )
    finally:
        if ahead is not None:
            ahead.cancel()
            with suppress(BaseException):
                await ahead


async def offset_at(
    home: str, centres: Mapping[str, Centre], place: TopicPartition, start: int, dc: str, prefix: str
) -> int | None:
    """The offset in the log of ``home`` at which that of ``dc`` has ``start``; None: unknown. Raises KafkaError."""
    owner = place[0].partition(".")[0]
    if start == 0 or dc == home:
        return start
    if dc not in (owner, *centres):
        return None
    try:
        if dc != owner:
            start = await OffsetTranslation(centres[dc].kafka, prefix, dc).to_original(place, start)
        if home == owner:
            return start
        return await OffsetTranslation(centres[home].kafka, prefix, home).to_here(place, start)
    except Problem as problem:
        # An offset that the history does not have any more is not in the log any more.
        return 0 if problem.kind == "out-of-range" else None


def only_dc(views: Views, prefix: str) -> str:
    """The data centre whose gateway stores its states in this cluster. Raises UsageError unless there is exactly one.

    A mirror also copies the states of other gateways; its own state topic names the data centre that it serves.
    """
    begin, end = f"{prefix}.gateway.", ".state"
    found = _named(views, begin, end)
    mirrored_to = [dc for dc in _named(views, f"{prefix}.mirror.", end) if dc in found]
    for dcs in (found, mirrored_to):
        if len(dcs) == 1:
            return dcs[0]
    if not found:
        raise UsageError(f"this Kafka has no state topic {begin}<dc>{end}; check --bootstrap and the prefix")
    raise UsageError(f"this Kafka serves the gateways of {', '.join(found)}; select one with --dc")


def _named(views: Views, begin: str, end: str) -> list[str]:
    return sorted(name[len(begin) : -len(end)] for name in views if name.startswith(begin) and name.endswith(end))


def state_topic_of(views: Views, dc: str, prefix: str) -> TopicMetadata:
    name = f"{prefix}.gateway.{dc}.state"
    if name not in views:
        raise UsageError(f"this Kafka has no state topic {name}; check --bootstrap, --dc and the prefix")
    return views[name]


def audited_topics(views: Views, dc: str, wanted: Sequence[str]) -> dict[str, TopicMetadata]:
    """By full name, sorted. ``wanted``: as writers name them, or full names; empty: all of the data centre."""
    begin = f"{dc}."
    names = {topic if topic.startswith(begin) else begin + topic for topic in wanted}
    names = names or {name for name in views if name.startswith(begin)}
    if not names:
        raise UsageError(f"this Kafka has no topics of {dc}; check --dc")
    if missing := sorted(names - views.keys()):
        raise UsageError(f"this Kafka has no topic {', '.join(missing)}; see `logferry topics list`")
    return {name: views[name] for name in sorted(names)}
