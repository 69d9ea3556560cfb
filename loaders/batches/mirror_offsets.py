"""Translates offsets of copies to their originals and back, by the offset history of a mirror. Read only.

Exact or nothing: an offset is translated only when the history covers everything before it. The gateway's own code
reads it, on a separate thread that starts with the first call; every call may be repeated.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from aiokafka import errors
from logferry.gateway.config import ConfigError, KafkaSettings
from logferry.gateway.contract.names import printed_topic_id
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.aiokafka_internals import start_or_explain
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.loaders.errors import KafkaUnavailable
from logferry.loaders.planning.ledger_entry import OriginOffset
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.planning.position_plan import PositionAnswer, origin_dc

_FETCH_BYTES: Final = 1 << 20
_LOOK_AGAIN_S: Final = 0.05
_DEADLINE_S: Final = 30.0
# After a data centre turned out to have no mirror, it is not asked again for this long.
_NO_MIRROR_S: Final = 30.0

_T = TypeVar("_T")


class MirrorOffsets:
    """The offset history of the mirror in the data centre ``dc``, whose Kafka this is. ``prefix``: the mirror's."""

    def __init__(self, settings: KafkaSettings, prefix: str, dc: str) -> None:
        self._settings, self._prefix, self._dc = settings, prefix, dc
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._kafka: KafkaClient | None = None
        self._translation: OffsetTranslation | None = None
        self._no_mirror_until = 0.0
        self.problem = ""

    def close(self) -> None:
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        if self._kafka is not None:
            asyncio.run_coroutine_threadsafe(self._kafka.close(), loop).result(_DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def originals(self, ranges: Iterable[Range], within_s: float) -> list[OriginOffset]:
        """The originals of the ends of ranges of copies; ends that are unknown by then are missing.

        Never raises: the caller may ask again later. ``problem``: why Kafka did not answer, else empty.
        """
        self.problem = ""
        wanted = list(ranges)
        if not wanted or time.monotonic() < self._no_mirror_until:
            return []
        found: list[OriginOffset] = []
        try:
            self._call(self._originals(wanted, found, within_s), within_s + _DEADLINE_S)
        except KafkaUnavailable as error:
            self.problem = str(error)
        return found

    def here(self, positions: Iterable[OriginOffset]) -> dict[TopicPartition, PositionAnswer]:
        """The offsets of the positions in the copies. Raises KafkaUnavailable.

        ``topic_id``: the copy's; empty where no record of the partition was copied.
        """
        return self._call(self._all_here(list(positions)), 2 * _DEADLINE_S)

    # ---- on the thread ---------------------------------------------------------------------------------------

    async def _originals(self, ranges: list[Range], found: list[OriginOffset], within_s: float) -> None:
        async with asyncio.timeout(within_s):
            translation = await self._open()
            for r in ranges if await self._has_mirror() else ():
                if (original := await self._original(translation, r)) is not None:
                    found.append(original)

    async def _original(self, translation: OffsetTranslation, r: Range) -> OriginOffset | None:
        tp = (r.topic, r.partition)
        while True:
            try:
                checkpoint = await translation.checkpoint(tp)
                if printed_topic_id(checkpoint.local_id) != r.topic_id:
                    return None
                # A copied record and its history are committed together, but markers reach the partitions one by one.
                if r.end <= checkpoint.local_next or not await self._has_record(tp, checkpoint.local_next, r.end):
                    offset = await translation.to_original(tp, r.end)
                    return OriginOffset(*tp, printed_topic_id(checkpoint.original.id), offset)
            except (Problem, errors.OffsetOutOfRangeError):
                return None
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _has_mirror(self) -> bool:
        assert self._kafka is not None
        try:
            await self._kafka.describe_topic(f"{self._prefix}.mirror.{self._dc}.state")
        except errors.UnknownTopicOrPartitionError:
            self._no_mirror_until = time.monotonic() + _NO_MIRROR_S
            return False
        return True

    async def _has_record(self, tp: tuple[str, int], start: int, end: int) -> bool:
        """Whether a committed record is in [start, end), which holds no open transaction."""
        assert self._kafka is not None
        position = start
        while position < end:
            fetched = await self._kafka.fetch(*tp, position, max_bytes=_FETCH_BYTES)
            if any(record.offset < end for record in fetched.records):
                return True
            if fetched.next_offset <= position:
                # The end of the transaction has not reached this replica yet.
                await asyncio.sleep(_LOOK_AGAIN_S)
            position = fetched.next_offset
        return False

    async def _all_here(self, positions: list[OriginOffset]) -> dict[TopicPartition, PositionAnswer]:
        async with asyncio.timeout(_DEADLINE_S):
            translation = await self._open()
            return {at.key: await self._here(translation, at) for at in positions}

    async def _here(self, translation: OffsetTranslation, at: OriginOffset) -> PositionAnswer:
        tp = (at.topic, at.partition)
        try:
            checkpoint = await translation.checkpoint(tp)
            if printed_topic_id(checkpoint.original.id) != at.topic_id:
                why = f"the mirror in {self._dc} copies another topic of that name: it was recreated"
                return PositionAnswer(None, why=why)
            offset = await translation.to_here(tp, at.offset)
            reached = f"{checkpoint.original.next_offset} of {origin_dc(at.topic)}"
            why = f"the mirror has copied up to {reached}, the table is at {at.offset}" if offset is None else ""
            return PositionAnswer(offset, printed_topic_id(checkpoint.local_id), offset is None, why)
        except Problem as problem:
            if problem.kind == "not-mirrored" and at.offset == 0:
                # Nothing is before it, there or here.
                return PositionAnswer(0)
            return PositionAnswer(None, why=problem.detail)

    async def _open(self) -> OffsetTranslation:
        if self._translation is None:
            kafka = KafkaClient(kafka_options(self._settings), "logferry-load-mirror")
            try:
                await start_or_explain(kafka)
            except BaseException:
                await kafka.close()
                raise
            self._kafka, self._translation = kafka, OffsetTranslation(kafka, self._prefix, self._dc)
        return self._translation

    def _call(self, question: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Runs on the thread, one call at a time. Raises KafkaUnavailable."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="mirror-offsets", daemon=True)
                self._thread.start()
            try:
                return asyncio.run_coroutine_threadsafe(question, self._loop).result(timeout_s)
            except (errors.KafkaError, OSError, TimeoutError, ConfigError) as error:
                history = f"the offset history of the mirror in {self._dc}, at {self._settings.bootstrap_servers}"
                raise KafkaUnavailable(f"{history}: {error!r}") from error
