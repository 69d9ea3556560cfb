"""The lane's partition of the staging topic: where it ends, the pieces of an upload, and the space of those that ended.

The lane alone writes there. A piece stands at the offset of its state or a little behind it, and its digest proves it:
wherever it is read from, it is the piece that was acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.contract.upload_state import StagedPiece, UploadState, next_digest, piece_key
from logferry.gateway.kafka.aiokafka_internals import admin
from logferry.gateway.kafka.client import LATEST, KafkaClient, raise_for
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.lanes.uploads import Staging

_FETCH_BYTES: Final = 1 << 20
_READ_S: Final = 15.0
_WAIT_MS: Final = 250
_PAUSE_S: Final = 0.1
_DELETE_MS: Final = 5000


async def end_of(kafka: KafkaClient, tp: TopicPartition, lanes: int) -> Staging:
    """The partition as it is now, with so many lanes. Raises KafkaError."""
    view = await grown(kafka, tp[0], lanes)
    return Staging(tp, view.id, await kafka.offset(*tp, LATEST))


async def grown(kafka: KafkaClient, topic: str, lanes: int) -> TopicMetadata:
    """The topic with a partition for each lane. It has fewer if a worker created it while the number of lanes changed.

    Raises KafkaError; it takes the right to alter the topic then.
    """
    async with asyncio.timeout(_READ_S):
        while len((view := await kafka.describe_topic(topic)).partitions) < lanes:
            with suppress(errors.InvalidPartitionsError):  # another worker was first
                await kafka.grow_topic(topic, lanes)
                log.event("staging_topic_grown", topic=topic, lanes=lanes)
            await asyncio.sleep(_PAUSE_S)
    return view


@dataclass(slots=True)
class RecentPieces:
    """The pieces that this process stored last, by the digest after them: for ``within_s``, up to ``limit_bytes``.

    A digest is of one piece and all before it, so a piece is right for any upload that has its digest. Whatever is not
    here is in Kafka.
    """

    limit_bytes: int
    within_s: float
    used_bytes: int = 0
    _kept: OrderedDict[bytes, tuple[float, bytes]] = field(default_factory=OrderedDict)
    _timer: asyncio.TimerHandle | None = None

    def keep(self, digest: bytes, data: bytes) -> None:
        """``digest``: after it. The oldest pieces make room."""
        loop = asyncio.get_running_loop()
        self.drop(digest)
        self._kept[digest] = loop.time() + self.within_s, data
        self.used_bytes += len(data)
        while self.used_bytes > self.limit_bytes:
            self.drop(next(iter(self._kept)))
        if self._timer is None:
            self._timer = loop.call_later(self.within_s, self._drop_old)

    def first_of(self, upload: UploadState) -> list[bytes]:
        """Its pieces up to the first that is not here."""
        found = list[bytes]()
        for piece in upload.pieces:
            kept = self._kept.get(piece.digest)
            if kept is None:
                break
            found.append(kept[1])
        return found

    def drop(self, digest: bytes) -> None:
        found = self._kept.pop(digest, None)
        if found is not None:
            self.used_bytes -= len(found[1])

    def _drop_old(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        for digest, (until_s, _) in list(self._kept.items()):
            if until_s > loop.time():
                self._timer = loop.call_at(until_s, self._drop_old)
                return
            self.drop(digest)


async def read_pieces(
    kafka: KafkaClient, tp: TopicPartition, source_id: str, upload: UploadState, recent: RecentPieces
) -> list[bytes]:
    """The pieces of the upload, proven by their digests: those that are not among the recent ones from Kafka.

    Raises KafkaError, or TimeoutError where one is missing.
    """
    found = recent.first_of(upload)
    digest, position = upload.digest_after(len(found)), 0

    def take(records: list[KafkaRecord]) -> bytes:
        """Returns the digest after the pieces found so far."""
        after = digest
        for record in records:
            count = len(found)
            if count == len(upload.pieces) or record.key != piece_key(source_id, count + 1):
                continue
            candidate = next_digest(after, record.value or b"")
            # A piece of the same number may be one of an upload that was not committed in time.
            if candidate == upload.pieces[count].digest:
                found.append(record.value or b"")
                after = candidate
        return after

    async with asyncio.timeout(_READ_S):
        while len(found) < len(upload.pieces):
            position = max(position, upload.pieces[len(found)].at_least)
            stop = _size_of_run(upload.pieces[len(found) :])
            fetched = await kafka.fetch(*tp, position, max_bytes=_FETCH_BYTES, stop_bytes=stop, wait_ms=_WAIT_MS)
            digest = await asyncio.to_thread(take, fetched.records)
            position = fetched.next_offset
    return found


def _size_of_run(pieces: Sequence[StagedPiece]) -> int:
    """The bytes of the first piece, and of those that stand right after it: what follows is of other uploads."""
    size = pieces[0].size_bytes
    for before, piece in pairwise(pieces):
        if piece.at_least > before.at_least + 1:
            break
        size += piece.size_bytes
    return size


async def delete_before(kafka: KafkaClient, tp: TopicPartition, offset: int) -> int:
    """Lets Kafka free the space before the offset. Returns it, or 0 where that failed: the next end asks again."""
    topic, number = tp
    try:
        leader = await kafka.present_leader(topic, number)
        answer = await kafka.send(leader, admin.DeleteRecordsRequest([(topic, [(number, offset)])], _DELETE_MS))
        code = answer.topics[0][1][0][2]
        raise_for(code, f"{topic}-{number}")
    except (errors.KafkaError, OSError, TimeoutError) as error:
        kafka.forget_leader(topic, number)
        log.event("staging_not_freed", topic=topic, partition=number, offset=offset, error=repr(error))
        return 0
    return offset
