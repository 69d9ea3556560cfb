"""Read sessions: a stream of committed chunks to one reader, which is a member of the consumer's group in Kafka.

* Kafka divides the partitions among the live sessions of a consumer. The gateway itself commits nothing: the reader
  does, so a chunk that it did not commit is delivered again after any interruption.
* Positions come from the group alone, in every new generation, and are never reset: a position outside the retained
  offsets ends the session with an ``error`` frame.
* A topic that is deleted and recreated is another topic: the session ends, and no position in the older one is
  committed for the new one. The next session begins at its start.
* Partitions without a leader, and those with a record that cannot be decoded, stop alone (`StoppedPartitions`).
* A reader that is slower than Kafka is waited for. Meanwhile its session holds at most about ``session_bytes`` of
  batches as Kafka stores them, one batch unpacked, and one write. A reader that takes nothing for ``session_stall_s``
  is disconnected.
* A session whose connection is gone leaves the group at once, so that others get its partitions.
* When partitions are reassigned, a reader that has chunks to commit gets up to `_GRACE_S` for it after its
  ``revoked``: chunks that it commits in that time are not delivered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import aiokafka
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, errors
from logferry.gateway import log
from logferry.gateway.config import Config
from logferry.gateway.contract.names import TopicPartition, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.aiokafka_internals import (
    RoundRobinPartitionAssignor,
    group_member,
    leave_group,
    limit_fetches,
)
from logferry.gateway.kafka.client import EARLIEST, ELECTION_S, LATEST, KafkaClient
from logferry.gateway.kafka.consumer_groups import CommitRefused, ConsumerGroups
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.limits import ReadLimit
from logferry.gateway.metrics import READ_BYTES
from logferry.gateway.reading import formats
from logferry.gateway.reading.assignment import (
    HeldPartitions,
    SessionAssignment,
    Subscription,
    next_count,
    out_of_range,
    recreated,
    unknown_topic,
)
from logferry.gateway.reading.consumer_offsets import CLIENT_ID_PREFIX, check_retained
from logferry.gateway.reading.formats import Frame, row_of
from logferry.gateway.reading.stopped_partitions import StoppedPartitions
from logferry.gateway.reading.stream import FrameStream, ReaderGone

_TICK_MS: Final = 500
_WRITE_BYTES: Final = 1 << 20
_MOST_RECORDS: Final = 2000
_INLINE_RECORDS: Final = 50
_INLINE_BYTES: Final = 1 << 16
# Counted for each header of a record: aiokafka decodes it in the event loop.
_HEADER_BYTES: Final = 200
_METADATA_AGE_MS: Final = 10_000
_LEAVE_DEADLINE_S: Final = 15.0
_GRACE_S: Final = 1.0
_NEVER_MS: Final = 2**31 - 1

Batch = dict[aiokafka.TopicPartition, list[Any]]


class _Undecodable(Exception):
    """aiokafka cannot decode a record of some partition."""


class ReadSession(ConsumerRebalanceListener):  # type: ignore[misc]
    """One read session, from its first frame to its last. ``topics``: the existing topics with their ids."""

    def __init__(
        self,
        session_id: str,
        wanted: Subscription,
        out: FrameStream,
        config: Config,
        kafka: KafkaClient,
        topics: Callable[[], Mapping[str, bytes]],
        session_bytes: int,
        quota: Callable[[], ReadLimit | None] = lambda: None,
    ) -> None:
        self.id, self.wanted, self.out, self._session_bytes = session_id, wanted, out, session_bytes
        self._kafka, self._groups, self._topics = kafka, ConsumerGroups(kafka), topics
        self._assignment = SessionAssignment()
        self._consumer = AIOKafkaConsumer(
            group_id=wanted.consumer,
            # One strategy alone: aiokafka joins once for each.
            partition_assignment_strategy=[RoundRobinPartitionAssignor],
            session_timeout_ms=config.session_timeout_ms,
            rebalance_timeout_ms=config.session_timeout_ms,
            heartbeat_interval_ms=config.session_timeout_ms // 4,
            max_poll_interval_ms=_NEVER_MS,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_max_bytes=session_bytes,
            max_partition_fetch_bytes=session_bytes,
            metadata_max_age_ms=_METADATA_AGE_MS,
            **{**kafka.options, "client_id": f"{CLIENT_ID_PREFIX}{session_id}"},
        )
        self._quota = quota
        self._count = 1
        self._subscribed: frozenset[str] = frozenset()
        self._seen: Mapping[str, bytes] = {}
        self._ids: dict[str, bytes] = {}
        self._missing = 0
        self._stopping = False
        self._ended = False
        self._committed = asyncio.Event()
        self._stopped: StoppedPartitions | None = None
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- calls from the group and from the worker ----------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[aiokafka.TopicPartition]) -> None:
        """The group waits for this to return; heartbeats continue meanwhile."""
        self._assignment.revoke()
        self._wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                while not self._assignment.is_settled and not self._ended:
                    self._committed.clear()
                    await self._committed.wait()

    def on_partitions_assigned(self, assigned: Iterable[aiokafka.TopicPartition]) -> None:
        self._assignment.grant(group_member(self._consumer), ((p.topic, p.partition) for p in assigned))
        self._wake()

    def stop(self) -> None:
        """Ends the stream after the current write."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        if not self._changed.done():
            self._changed.set_result(None)

    async def commit(self, generation: int, offsets: dict[TopicPartition, int]) -> None:
        """Commits positions for the group. Raises Problem ``superseded``, ``out-of-range``, ``unknown-topic``."""
        assignment = self._assignment.may_commit(generation, offsets)
        # Kafka would accept positions of a deleted topic for a new one of its name.
        now = await self._kafka.ids_at_leaders(offsets)
        for topic, _ in offsets:
            if topic not in now:
                raise unknown_topic(topic)
            if now[topic] != self._ids.get(topic, now[topic]):
                raise recreated(topic)
        ahead = {partition: offset for partition, offset in offsets.items() if offset > assignment.reached[partition]}
        if ahead:
            partitions = list(ahead)
            firsts = await self._kafka.offsets(partitions, EARLIEST)
            await check_retained(self._kafka, ahead, firsts, await self._kafka.offsets(partitions, LATEST))
        try:
            await self._groups.commit(self.wanted.consumer, assignment.member, offsets)
        except CommitRefused:
            raise Problem("superseded", f"generation {generation} is no longer the group's") from None
        assignment.commit(offsets)
        self._committed.set()

    # ---- the stream -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when the reader is gone, the worker stops, or the session ended with an ``error`` frame."""
        try:
            await self.out.send_frames([formats.session(self.id, self.wanted.consumer)])
            await self._consumer.start()
            await self._stream()
        except ReaderGone as error:
            log.event("session_reader_gone", session=self.id, reason=str(error))
        except Problem as problem:
            await self._end_with(problem)
        except (errors.KafkaError, TimeoutError) as error:
            await self._end_with(await self._problem(error))

    async def close(self) -> None:
        """Leaves the group and frees what the session holds; bounded in time."""
        self._ended = True
        self._committed.set()
        try:
            async with asyncio.timeout(_LEAVE_DEADLINE_S):
                await leave_group(self._consumer)
        except (errors.KafkaError, TimeoutError) as error:
            # Kafka misses the member after the session timeout.
            log.event("session_leave_failed", session=self.id, error=repr(error))

    async def _stream(self) -> None:
        taking: asyncio.Task[tuple[HeldPartitions | None, Batch]] | None = None
        try:
            while not self._stopping:
                self._subscribe()
                quota = self._quota()
                if taking is None and (quota is None or quota.wait_s() == 0):
                    taking = asyncio.create_task(self._take())
                waits: set[asyncio.Future[Any]] = {self._changed} if taking is None else {taking, self._changed}
                await asyncio.wait(waits, timeout=_TICK_MS / 1000, return_when=asyncio.FIRST_COMPLETED)
                if self._changed.done():
                    self._changed = asyncio.get_running_loop().create_future()
                await self._position()
                await self.out.send_frames(self._assignment.due())
                stopped = self._stopped
                if stopped is not None and stopped.held is self._assignment.held:
                    await self.out.send_frames(stopped.step())
                if taking is not None and taking.done():
                    is_damaged = isinstance(taking.exception(), _Undecodable)
                    held, batch = (self._assignment.held, {}) if is_damaged else taking.result()
                    taking = None
                    if is_damaged and stopped is not None and stopped.held is held:
                        stopped.set_aside()
                        self._count = 1
                    if held is not None and held is self._assignment.held:
                        await self._deliver(held, batch)
                        await self.out.send_frames(await self._caught_up(held))
                await self.out.keep_alive()
        finally:
            if self._stopped is not None:
                self._stopped.close()
            if taking is not None:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    def _subscribe(self) -> None:
        """Follows the topics that match the patterns. Raises Problem when a named topic, or the right, is gone."""
        topics = self._topics()
        if topics is self._seen:
            return
        self._seen = topics
        for topic, topic_id in self._ids.items():
            if topics.get(topic, topic_id) != topic_id:
                raise recreated(topic)
        gone = self.wanted.topics - topics.keys()
        # A broker may not have heard of a topic yet that another one knows.
        self._missing = self._missing + 1 if gone else 0
        if self._missing > 1:
            raise unknown_topic(min(gone))
        found = self.wanted.among(topics) | self.wanted.topics
        if not all(map(self.wanted.may_read, found or self._subscribed)):
            raise Problem("forbidden", "the token no longer has the right to read this")
        known = self._ids.keys() | topics.keys()
        self._ids = {topic: self._ids.get(topic) or topics[topic] for topic in found & known}
        if found and found != self._subscribed:
            self._subscribed = found
            self._assignment.revoke()
            self._consumer.subscribe(sorted(found), listener=self)

    async def _take(self) -> tuple[HeldPartitions | None, Batch]:
        """The records that aiokafka has, with the assignment of that very moment: nothing runs in between."""
        try:
            batch = await self._consumer.getmany(timeout_ms=_TICK_MS, max_records=self._count)
        except errors.NoOffsetForPartitionError:
            # aiokafka looked for a position before `_position` had set it.
            batch = {}
        except errors.CorruptRecordException as error:
            raise _Undecodable from error
        except (errors.KafkaError, MemoryError):
            raise
        except Exception as error:  # each codec has errors of its own
            raise _Undecodable from error
        held = self._assignment.held
        # One that waited for its leader has no start yet.
        return held, {p: found for p, found in batch.items() if held is None or (p.topic, p.partition) in held.starts}

    async def _position(self) -> None:
        """Finds where granted partitions start and goes there; from then on they are held."""
        granted = self._assignment.granted
        if granted is None:
            return
        partitions = sorted(granted.partitions)
        committed = await self._groups.committed(self.wanted.consumer)
        # Those without a leader wait for it.
        firsts = await self._kafka.offsets(partitions, EARLIEST, give_up_s=ELECTION_S)
        ends = await self._kafka.offsets(sorted(firsts), LATEST, give_up_s=ELECTION_S)
        # Without a committed position at the first retained chunk.
        starts = {partition: committed.get(partition, firsts[partition]) for partition in ends}
        await check_retained(self._kafka, starts, firsts, ends)
        leaderless = granted.partitions - starts.keys()
        if (held := self._assignment.hold(granted, starts, leaderless)) is not None:
            if self._stopped is not None:
                self._stopped.close()
            self._stopped = StoppedPartitions(self.id, held, leaderless, self._kafka, self._consumer)
            # Each partition has one buffer, and all of them together are to stay within the limit.
            share = max(1, self._session_bytes // max(1, len(partitions)))
            limit_fetches(self._consumer, share)
            for (topic, number), offset in starts.items():
                self._consumer.seek(aiokafka.TopicPartition(topic, number), offset)

    async def _deliver(self, held: HeldPartitions, batch: Batch) -> None:
        records = sum(map(len, batch.values()))
        held_bytes = sum(len(record.value or b"") for found in batch.values() for record in found)
        if records <= _INLINE_RECORDS and held_bytes <= _INLINE_BYTES:
            data, size, ends, read_bytes = self._encoded(batch)
        else:
            data, size, ends, read_bytes = await asyncio.to_thread(self._encoded, batch)
        if (quota := self._quota()) is not None:
            quota.settle(0, read_bytes)
        for partition, end in ends.items():
            held.deliver(partition, end)
        if self._stopped is None or not self._stopped.is_one_by_one:
            self._count = next_count(self._count, records, size, _WRITE_BYTES, _MOST_RECORDS)
        if data:
            await self.out.write(data)
        for (topic, number), found in batch.items():
            held.reach((topic, number), found[-1].offset + 1)

    def _encoded(self, batch: Batch) -> tuple[bytes, int, dict[TopicPartition, int], int]:
        """The chunks that pass the filters, the work that the records were, the position after each last chunk, and the
        bytes of these chunks."""
        parts, size, ends, read_bytes = [], 0, {}, 0
        for (topic, number), found in batch.items():
            dc, _ = split_topic(topic)
            passed = 0
            for record in found:
                value = record.value or b""
                size += len(value) + _HEADER_BYTES * len(record.headers)
                ours = KafkaRecord(record.offset, record.timestamp, record.key, value, record.headers)
                row = row_of(dc, topic, number, ours)
                if row is not None and self.wanted.passes(row[4], row[9]):
                    parts.append(self.out.encoding.chunk(row))
                    passed += len(value)
                    ends[topic, number] = record.offset + 1
            READ_BYTES.labels(topic).inc(passed)
            read_bytes += passed
        return b"".join(parts), size, ends, read_bytes

    async def _caught_up(self, held: HeldPartitions) -> list[Frame]:
        reached = {}
        for partition in held.starts:
            kafka_partition = aiokafka.TopicPartition(*partition)
            if self._assignment.held is not held:
                return []
            end = self._consumer.last_stable_offset(kafka_partition)
            position = await self._consumer.position(kafka_partition)
            if end is not None and held.caught_up(partition, position, end):
                reached[partition] = position
        return [formats.caught_up(reached)] if reached else []

    # ---- the end ----------------------------------------------------------------------------------------------

    async def _end_with(self, problem: Problem) -> None:
        log.event("session_ended", session=self.id, consumer=self.wanted.consumer, problem=str(problem))
        with suppress(ReaderGone):
            await self.out.send_frames([*self._assignment.due(), formats.error(problem)])

    async def _problem(self, error: Exception) -> Problem:
        """Kafka's error as the problem that the reader receives."""
        if isinstance(error, errors.UnknownTopicOrPartitionError):
            return unknown_topic(str(error))
        if isinstance(error, errors.InconsistentGroupProtocolError):
            detail = f"members of the group {self.wanted.consumer} are not read sessions and use another protocol"
            return Problem("conflict", detail)
        if isinstance(error, errors.OffsetOutOfRangeError) and error.args and isinstance(error.args[0], dict):
            (topic, number), offset = next(iter(error.args[0].items()))
            try:
                first = await self._kafka.offset(topic, number, EARLIEST)
                return out_of_range((topic, number), offset, first, await self._kafka.offset(topic, number, LATEST))
            except (errors.KafkaError, TimeoutError) as later:
                error = later
        return Problem("kafka-unavailable", f"Kafka does not answer: {error!r}")
