"""Read sessions: a stream of committed chunks to one reader, who is a member of the consumer's group at Kafka.

* Kafka divides the partitions among the live sessions of a consumer. The gateway commits nothing by itself: the
  reader does, so what it did not commit comes again after any break.
* Positions come from the group alone, in every new generation, and are never reset: one outside of what is retained
  ends the session with an ``error`` frame.
* A topic that is deleted and created anew is another one: the session ends, and no position in the older one is
  committed for it. Kafka forgets the older positions, so the next session begins at its start.
* A reader that is slower than Kafka is waited for. Meanwhile its session holds at most about ``session_bytes`` of
  batches as Kafka keeps them, one batch unpacked, and one write. One that takes nothing for ``session_stall_s`` is
  cut off.
* A session whose connection is gone leaves the group at once, so that others get its partitions.
* When the partitions are to be divided anew, a reader that has chunks to commit gets up to `_GRACE_S` for it after its
  ``revoked``: what it commits in that time does not come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition, errors
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from logferry.gateway import log
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.kafka.consumer_groups import Groups, Refused
from logferry.gateway.links import leave
from logferry.gateway.metrics import READ_BYTES
from logferry.gateway.reading import formats as frames
from logferry.gateway.reading.assignment import Assignment, Member, Standing, next_count, out_of_range, start_positions
from logferry.gateway.reading.consumer_offsets import check_retained
from logferry.gateway.reading.formats import Encoding, Frame, Partition
from logferry.gateway.reading.stream import Gone, Outlet, Reader
from logferry.gateway.rows import row_of
from logferry.gateway.selection import Wanted, unknown_topic

_TICK_MS: Final = 500
_WRITE_BYTES: Final = 1 << 20
_MOST_RECORDS: Final = 2000
_METADATA_AGE_MS: Final = 10_000
_LEAVE_DEADLINE_S: Final = 15.0
_GRACE_S: Final = 1.0
_NEVER_MS: Final = 2**31 - 1

Batch = dict[TopicPartition, list[Any]]


class Session(ConsumerRebalanceListener):  # type: ignore[misc]
    """One read session, from its first frame to its last. ``topics``: those that exist, and their ids, as seen last."""

    def __init__(
        self,
        session_id: str,
        wanted: Wanted,
        encoding: Encoding,
        reader: Reader,
        config: Config,
        kafka: Kafka,
        topics: Callable[[], Mapping[str, bytes]],
    ) -> None:
        self.id, self.wanted = session_id, wanted
        self._encoding, self._limits = encoding, config.limits
        self._out = Outlet(reader, encoding, config.limits.session_stall_s)
        self._kafka, self._groups, self._topics = kafka, Groups(kafka), topics
        self._standing = Standing()
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
            fetch_max_bytes=config.limits.session_bytes,
            max_partition_fetch_bytes=config.limits.session_bytes,
            metadata_max_age_ms=_METADATA_AGE_MS,
            **{**kafka.options, "client_id": f"logferry-{session_id}"},
        )
        self._count = 1
        self._subscribed: frozenset[str] = frozenset()
        self._seen: Mapping[str, bytes] = {}
        self._ids: dict[str, bytes] = {}
        self._missing = 0
        self._stopping = False
        self._ended = False
        self._committed = asyncio.Event()
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- the group's word, and others' ------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """The group waits for this to return; heartbeats go on meanwhile."""
        self._standing.revoke()
        self._wake()
        deadline = asyncio.get_running_loop().time() + _GRACE_S
        while not self._standing.is_settled and not self._ended:
            self._committed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._committed.wait()
            except TimeoutError:
                return

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        coordinator = self._consumer._coordinator
        member = Member(coordinator.generation, coordinator.member_id)
        self._standing.grant(member, ((p.topic, p.partition) for p in assigned))
        self._wake()

    def stop(self) -> None:
        """Ends the stream after what is being written."""
        self._stopping = True
        self._wake()

    def cut(self) -> None:
        self._out.cut()

    def _wake(self) -> None:
        if not self._changed.done():
            self._changed.set_result(None)

    async def commit(self, generation: int, offsets: dict[Partition, int]) -> None:
        """Commits positions for the group. Raises Problem ``superseded``, ``out-of-range``, ``unknown-topic``."""
        assignment = self._standing.may_commit(generation, offsets)
        # Kafka would take the positions of a topic that is gone for those of a new one of its name.
        now = await self._kafka.ids_at_leaders(offsets)
        for topic, _ in offsets:
            if topic not in now:
                raise unknown_topic(topic)
            if now[topic] != self._ids.get(topic, now[topic]):
                raise _created_anew(topic)
        ahead = {partition: offset for partition, offset in offsets.items() if offset > assignment.reached[partition]}
        if ahead:
            partitions = list(ahead)
            firsts = await self._kafka.offsets(partitions, EARLIEST)
            await check_retained(self._kafka, ahead, firsts, await self._kafka.offsets(partitions, LATEST))
        try:
            await self._groups.commit(self.wanted.consumer, assignment.member, offsets)
        except Refused:
            raise Problem("superseded", f"generation {generation} is not the group's any more") from None
        assignment.commit(offsets)
        self._committed.set()

    # ---- the stream -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when the reader is gone, the worker stops, or the session cannot go on and has said why."""
        try:
            await self._out.tell([frames.session(self.id, self.wanted.consumer)])
            await self._consumer.start()
            await self._stream()
        except Gone as error:
            log.event("info", "session_reader_gone", session=self.id, reason=str(error))
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
                await leave(self._consumer)
        except (errors.KafkaError, TimeoutError) as error:
            # Kafka misses the member after the session timeout.
            log.event("warning", "session_did_not_leave", session=self.id, error=repr(error))

    async def _stream(self) -> None:
        taking: asyncio.Task[tuple[Assignment | None, Batch]] | None = None
        try:
            while not self._stopping:
                self._subscribe()
                if taking is None:
                    taking = asyncio.create_task(self._take())
                waits: set[asyncio.Future[Any]] = {taking, self._changed}
                await asyncio.wait(waits, timeout=_TICK_MS / 1000, return_when=asyncio.FIRST_COMPLETED)
                if self._changed.done():
                    self._changed = asyncio.get_running_loop().create_future()
                await self._position()
                await self._out.tell(self._standing.due())
                if taking.done():
                    held, batch = taking.result()
                    taking = None
                    if held is not None and held is self._standing.held:
                        await self._deliver(held, batch)
                        await self._out.tell(await self._caught_up(held))
                await self._out.keep_alive()
        finally:
            if taking is not None:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    def _subscribe(self) -> None:
        """Follows the topics that the patterns mean. Raises Problem when one that was named, or the right, is gone."""
        topics = self._topics()
        if topics is self._seen:
            return
        self._seen = topics
        for topic, topic_id in self._ids.items():
            if topics.get(topic, topic_id) != topic_id:
                raise _created_anew(topic)
        gone = self.wanted.topics - topics.keys()
        # A broker may not have heard of a topic yet that another one knows.
        self._missing = self._missing + 1 if gone else 0
        if self._missing > 1:
            raise unknown_topic(min(gone))
        found = self.wanted.among(topics) | self.wanted.topics
        if not all(map(self.wanted.may_read, found or self._subscribed)):
            raise Problem("forbidden", "the right to read this was taken away meanwhile")
        known = self._ids.keys() | topics.keys()
        self._ids = {topic: self._ids.get(topic) or topics[topic] for topic in found & known}
        if found and found != self._subscribed:
            self._subscribed = found
            self._standing.revoke()
            self._consumer.subscribe(sorted(found), listener=self)

    async def _take(self) -> tuple[Assignment | None, Batch]:
        """What aiokafka has, with the assignment that holds at that very moment: nothing runs in between."""
        try:
            batch = await self._consumer.getmany(timeout_ms=_TICK_MS, max_records=self._count)
        except errors.NoOffsetForPartitionError:
            # aiokafka looked for a position before `_position` had set it.
            batch = {}
        return self._standing.held, batch

    async def _position(self) -> None:
        """Finds where granted partitions start and goes there; from then on they are held."""
        granted = self._standing.granted
        if granted is None:
            return
        partitions = sorted(granted.partitions)
        committed = await self._groups.committed(self.wanted.consumer)
        firsts = await self._kafka.offsets(partitions, EARLIEST)
        starts = start_positions(partitions, committed, firsts)
        await check_retained(self._kafka, starts, firsts, await self._kafka.offsets(partitions, LATEST))
        if self._standing.hold(granted, starts):
            # Each partition has one buffer, and all of them together are to stay within the limit.
            share = max(1, self._limits.session_bytes // max(1, len(partitions)))
            self._consumer._fetcher._max_partition_fetch_bytes = share
            for (topic, number), offset in starts.items():
                self._consumer.seek(TopicPartition(topic, number), offset)

    async def _deliver(self, held: Assignment, batch: Batch) -> None:
        parts, records, size = [], 0, 0
        for (topic, number), found in batch.items():
            dc, _ = split_topic(topic)
            passed = 0
            for record in found:
                value = record.value or b""
                size += len(value)
                row = row_of(
                    dc, topic, number, KafkaRecord(record.offset, record.timestamp, record.key, value, record.headers)
                )
                if row is not None and self.wanted.passes(row[4], row[9]):
                    parts.append(self._encoding.chunk(row))
                    passed += len(value)
                    held.deliver((topic, number), record.offset + 1)
            records += len(found)
            READ_BYTES.labels(topic).inc(passed)
        self._count = next_count(self._count, records, size, _WRITE_BYTES, _MOST_RECORDS)
        if parts:
            await self._out.write(b"".join(parts))
        for (topic, number), found in batch.items():
            held.reach((topic, number), found[-1].offset + 1)

    async def _caught_up(self, held: Assignment) -> list[Frame]:
        reached = {}
        for partition in held.starts:
            kafka_partition = TopicPartition(*partition)
            if self._standing.held is not held:
                return []
            end = self._consumer.last_stable_offset(kafka_partition)
            position = await self._consumer.position(kafka_partition)
            if end is not None and held.caught_up(partition, position, end):
                reached[partition] = position
        return [frames.caught_up(reached)] if reached else []

    # ---- the end ----------------------------------------------------------------------------------------------

    async def _end_with(self, problem: Problem) -> None:
        log.event("warning", "session_ended", session=self.id, consumer=self.wanted.consumer, problem=str(problem))
        try:
            await self._out.tell([*self._standing.due(), frames.error(problem)])
        except Gone:
            return

    async def _problem(self, error: Exception) -> Problem:
        """What Kafka's error means to the reader."""
        if isinstance(error, errors.UnknownTopicOrPartitionError):
            return unknown_topic(str(error))
        if isinstance(error, errors.InconsistentGroupProtocolError):
            return Problem("conflict", f"others use the group {self.wanted.consumer} in a way that is not a session's")
        if isinstance(error, errors.OffsetOutOfRangeError) and error.args and isinstance(error.args[0], dict):
            (topic, number), offset = next(iter(error.args[0].items()))
            try:
                first = await self._kafka.offset(topic, number, EARLIEST)
                return out_of_range((topic, number), offset, first, await self._kafka.offset(topic, number, LATEST))
            except (errors.KafkaError, TimeoutError) as later:
                error = later
        return Problem("kafka-unavailable", f"Kafka does not answer: {error!r}")


def _created_anew(topic: str) -> Problem:
    detail = f"{topic} was deleted and created anew: positions in the older one mean nothing in it; open a new session"
    return Problem("unknown-topic", detail, topic=topic)
