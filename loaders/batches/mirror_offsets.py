"""What the mirror of a data centre keeps in its Kafka: which place of a copy is which of the original. Read only.

Exact or nothing: a place is told only when the books speak of everything before it. They are read by the gateway's own
code for cursors, on a thread of its own, and opened with the first question; every question may be asked again.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from aiokafka import errors
from logferry.gateway.contract.offset_history import Damaged
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.topics.offset_translation import Translation
from logferry.loaders.errors import KafkaAway
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.storage.ledger import Original

_FETCH_BYTES: Final = 1 << 20
_LOOK_AGAIN_S: Final = 0.05
_DEADLINE_S: Final = 30.0
# Of a data centre without a mirror nothing is asked for so long.
_NO_MIRROR_S: Final = 30.0
_NOT_MIRRORED: Final = "not-mirrored"

_T = TypeVar("_T")


class Here(NamedTuple):
    """The place in the copy that an original's position is. ``offset`` None: it is not known, see ``why``.

    ``topic_id``: of the copy; empty where no record of the partition came. ``behind``: the mirror has not brought all
    before the position; it has up to ``reached``, of the original.
    """

    offset: int | None
    topic_id: str = ""
    behind: bool = False
    reached: int = 0
    why: str = ""


class Books:
    """Of the mirror in the data centre ``dc``, whose Kafka this is. ``prefix``: the mirror's."""

    def __init__(self, bootstrap_servers: str, prefix: str, dc: str) -> None:
        self._options = {"bootstrap_servers": bootstrap_servers}
        self._prefix, self._dc = prefix, dc
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._kafka: Kafka | None = None
        self._translation: Translation | None = None
        self._no_mirror_until = 0.0

    def close(self) -> None:
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._hang_up(), loop).result(_DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def originals(self, ranges: Iterable[Range], within_s: float) -> list[Original]:
        """Where the ranges, of copies, end in the originals; those are missing of which that is not known by then.

        Never raises: who does not know it now may ask again later.
        """
        wanted = list(ranges)
        if not wanted or time.monotonic() < self._no_mirror_until:
            return []
        found: list[Original] = []
        with suppress(KafkaAway):
            self._call(self._originals(wanted, found, within_s), within_s + _DEADLINE_S)
        return found

    def here(self, positions: Iterable[Original]) -> dict[TopicPartition, Here]:
        """Where the positions are in the copies. Raises KafkaAway."""
        return self._call(self._all_here(list(positions)), 2 * _DEADLINE_S)

    # ---- on the thread ---------------------------------------------------------------------------------------

    async def _originals(self, ranges: list[Range], found: list[Original], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                translation = await self._open()
                if not await self._has_mirror():
                    return
                for r in ranges:
                    original = await self._original(translation, r)
                    if original is not None:
                        found.append(original)
        except TimeoutError:
            return

    async def _original(self, translation: Translation, r: Range) -> Original | None:
        place = (r.topic, r.partition)
        while True:
            try:
                progress = await translation.progress(place)
                if printed(progress.local_id) != r.topic_id:
                    return None
                # A copy's record is committed with the word of it, but markers come to the partitions one by one.
                if r.end <= progress.local_next or not await self._has_record(place, progress.local_next, r.end):
                    offset = await translation.to_original(place, r.end)
                    return Original(*place, printed(progress.original.id), offset)
            except (Problem, Damaged, errors.OffsetOutOfRangeError):
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

    async def _has_record(self, place: tuple[str, int], start: int, end: int) -> bool:
        """Whether a committed record is in [start, end), all of which is decided."""
        assert self._kafka is not None
        position = start
        while position < end:
            fetched = await self._kafka.fetch(*place, position, max_bytes=_FETCH_BYTES)
            if any(record.offset < end for record in fetched.records):
                return True
            if fetched.next_offset <= position:
                # Others have not heard of its end yet.
                await asyncio.sleep(_LOOK_AGAIN_S)
            position = fetched.next_offset
        return False

    async def _all_here(self, positions: list[Original]) -> dict[TopicPartition, Here]:
        async with asyncio.timeout(_DEADLINE_S):
            translation = await self._open()
            return {at.key: await self._here(translation, at) for at in positions}

    async def _here(self, translation: Translation, at: Original) -> Here:
        place = (at.topic, at.partition)
        try:
            progress = await translation.progress(place)
            if printed(progress.original.id) != at.topic_id:
                why = f"the mirror in {self._dc} copies another topic of that name: it was created anew"
                return Here(None, why=why)
            offset = await translation.to_here(place, at.offset)
            reached = progress.original.next_offset
            return Here(offset, printed(progress.local_id), offset is None, reached)
        except Problem as problem:
            if problem.kind == _NOT_MIRRORED and at.offset == 0:
                # Nothing is before it, there or here.
                return Here(0)
            return Here(None, why=problem.detail)
        except Damaged as error:
            return Here(None, why=str(error))

    async def _open(self) -> Translation:
        if self._translation is None:
            kafka = Kafka(self._options, "logferry-load-books")
            try:
                await kafka.start()
            except BaseException:
                await kafka.close()
                raise
            self._kafka, self._translation = kafka, Translation(kafka, self._prefix, self._dc)
        return self._translation

    async def _hang_up(self) -> None:
        if self._kafka is not None:
            await self._kafka.close()

    def _call(self, question: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Asks on the thread; one question at a time. Raises KafkaAway."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="books", daemon=True)
                self._thread.start()
            try:
                return asyncio.run_coroutine_threadsafe(question, self._loop).result(timeout_s)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                servers = self._options["bootstrap_servers"]
                raise KafkaAway(f"the books of the mirror in {self._dc}, at {servers}: {error!r}") from error


def printed(topic_id: bytes) -> str:
    """A topic's id as Kafka's tools print it, and the ledger holds it."""
    return base64.urlsafe_b64encode(topic_id).decode().rstrip("=")


__all__ = ["Books", "Here", "printed"]
