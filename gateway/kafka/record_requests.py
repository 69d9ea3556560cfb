"""Kafka's Fetch and Produce requests, version 13, and fetch sessions: what carries records. Pure.

What they have over the versions that aiokafka knows:

* A topic is named by its id (KIP-516), so a fetch never reads another topic that has the name now, and a batch is never
  written into another topic that was created under its name meanwhile.
* A fetch holds the last epoch that was read (KIP-595), so the broker reports a log that was truncated meanwhile.
* Fetch sessions (KIP-227): the broker remembers the partitions. A request names only those that changed, and an answer
  only those with news. The broker also takes care that none of them starves.
* Produce adds its partitions to the transaction by itself (KIP-890).

Batches are never copied: they are sent in pieces, and stay in the buffer of an answer. The answer of a fetch is decoded
by hand, so ten thousand idle partitions cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import ClassVar, Final, NamedTuple

from logferry.gateway.contract.varint import read_tags, read_varint, varint
from logferry.gateway.kafka.requests import schema
from logferry.gateway.kafka.types import Piece, TopicIdPartition, grouped

_READ_COMMITTED: Final = 1
_CONSUMER: Final = -1
_ALL_IN_SYNC: Final = -1
_NO_TAGS: Final = b"\0"
_NO_RACK: Final = b"\x01"
# Replica, longest wait, least and most bytes, isolation level, session's id and epoch.
_FETCH: Final = struct.Struct(">iiiibii")
# Partition, leader epoch, fetch offset, last epoch that was read, log start offset, bytes.
_ASKED: Final = struct.Struct(">iiqiqi")
# Partition, error code, high watermark, last stable offset, log start offset.
_FOUND: Final = struct.Struct(">ihqqq")
# Pause, error code, session.
_ANSWER: Final = struct.Struct(">ihi")
_DIVERGING: Final = 0
# acks, time-out.
_HOW: Final = struct.Struct(">hi")
_PARTITION: Final = struct.Struct(">i")
_PRODUCED: Final = schema(
    "topics[topic_id:uuid partitions[partition:int32 error_code:int16 base_offset:int64 log_append_time_ms:int64 "
    "log_start_offset:int64 record_errors[index:int32 message:text] error_message:text]] throttle_time_ms:int32"
)


class FetchPosition(NamedTuple):
    """The position of a fetch of one partition. ``epoch``: of the last batch that was read; -1: none was."""

    offset: int
    epoch: int
    max_bytes: int


class FetchedPartition(NamedTuple):
    """One partition of the answer. ``diverged``: the log was truncated; its end in the last epoch that was read."""

    topic_id: bytes
    partition: int
    code: int
    high_watermark: int
    last_stable: int
    log_start: int
    aborted: list[tuple[int, int]]
    records: memoryview
    diverged: int | None

    @property
    def key(self) -> TopicIdPartition:
        return TopicIdPartition(self.topic_id, self.partition)


class FetchResponse(NamedTuple):
    code: int
    session_id: int
    found: list[FetchedPartition]


class FetchRequest:
    """Waits up to ``wait_ms`` for news of the partitions of its session."""

    API_KEY: ClassVar[int] = 1
    API_VERSION: ClassVar[int] = 13

    def __init__(
        self,
        wait_ms: int,
        max_bytes: int,
        session: tuple[int, int],
        wanted: Mapping[TopicIdPartition, FetchPosition],
        forgotten: Iterable[TopicIdPartition],
    ) -> None:
        head = _FETCH.pack(_CONSUMER, wait_ms, 1, max_bytes, _READ_COMMITTED, *session)
        asked = _by_topic(
            (topic_id, _ASKED.pack(number, -1, offset, epoch, -1, max_bytes) + _NO_TAGS)
            for (topic_id, number), (offset, epoch, max_bytes) in wanted.items()
        )
        gone = _by_topic((topic_id, _PARTITION.pack(number)) for topic_id, number in forgotten)
        self.throttle_ms = 0
        self._request = b"".join((head, asked, gone, _NO_RACK, _NO_TAGS))

    def pieces(self) -> tuple[bytes]:
        return (self._request,)

    def read(self, answer: memoryview) -> FetchResponse:
        """Records stay in its buffer."""
        self.throttle_ms, code, session_id = _ANSWER.unpack_from(answer)
        topics, at = read_varint(answer, _ANSWER.size)
        found: list[FetchedPartition] = []
        for _ in range(topics - 1):
            topic_id = bytes(answer[at : at + 16])
            partitions, at = read_varint(answer, at + 16)
            for _ in range(partitions - 1):
                at = _read_partition(answer, at, topic_id, found)
            at = read_tags(answer, at)[1]
        return FetchResponse(code, session_id, found)


def _by_topic(encoded: Iterable[tuple[bytes, bytes]]) -> bytes:
    topics = grouped(encoded)
    parts = [varint(len(topics) + 1)]
    for topic_id, partitions in topics.items():
        parts += (topic_id, varint(len(partitions) + 1), *partitions, _NO_TAGS)
    return b"".join(parts)


def _read_partition(raw: memoryview, at: int, topic_id: bytes, found: list[FetchedPartition]) -> int:
    number, code, high_watermark, last_stable, log_start = _FOUND.unpack_from(raw, at)
    count, at = read_varint(raw, at + _FOUND.size)
    aborted = []
    for _ in range(count - 1):
        aborted.append(struct.unpack_from(">qq", raw, at))
        at = read_tags(raw, at + 16)[1]
    length, at = read_varint(raw, at + 4)  # past the preferred replica
    size = max(0, length - 1)
    records = raw[at : at + size]
    tags, at = read_tags(raw, at + size)
    diverged = None
    if _DIVERGING in tags:
        diverged = struct.unpack_from(">iq", tags[_DIVERGING])[1]
    found.append(
        FetchedPartition(topic_id, number, code, high_watermark, last_stable, log_start, aborted, records, diverged)
    )
    return at


class FetchSession:
    """The partitions that the broker remembers of this reader, so that a request names only changes.

    ``wanted``: all partitions to fetch now. ``asked``: the positions in the last request for each.
    """

    def __init__(self) -> None:
        self.wanted: dict[TopicIdPartition, FetchPosition] = {}
        self.asked: dict[TopicIdPartition, FetchPosition] = {}
        self._id = self._epoch = 0
        self._changed: set[TopicIdPartition] = set()

    def want(self, key: TopicIdPartition, wanted: FetchPosition) -> None:
        self.wanted[key] = wanted
        self._changed.add(key)

    def drop(self, key: TopicIdPartition) -> None:
        if self.wanted.pop(key, None) is not None:
            self._changed.add(key)

    def request(self, wait_ms: int, max_bytes: int) -> FetchRequest:
        """The next request; there is one at a time."""
        changed = {key: self.wanted[key] for key in self._changed if key in self.wanted}
        gone = [key for key in self._changed if key not in self.wanted and key in self.asked]
        self._changed = set()
        self.asked.update(changed)
        for key in gone:
            del self.asked[key]
        return FetchRequest(wait_ms, max_bytes, (self._id, self._epoch), changed, gone)

    def answered(self, fetched: FetchResponse) -> bool:
        """Whether the answer is valid; otherwise the session restarts."""
        if fetched.code:
            self.lost()
            return False
        self._id = fetched.session_id
        if self._id:
            self._epoch = 1 if self._epoch == 2**31 - 1 else self._epoch + 1
        else:
            # The broker keeps no session for us: each request names everything.
            self._restart()
        return True

    def lost(self) -> None:
        """Restarts the session, also after a connection broke: the broker may or may not have the last request."""
        self._restart()
        self.asked = {}

    def _restart(self) -> None:
        self._id = self._epoch = 0
        self._changed = set(self.wanted)


class Produced(NamedTuple):
    """The result of one batch. ``code``: of `error_codes`."""

    code: int
    base_offset: int
    message: str | None


class ProduceRequest:
    """One batch for each of some partitions of one broker, in pieces that are sent without copying."""

    API_KEY: ClassVar[int] = 0
    API_VERSION: ClassVar[int] = 13

    def __init__(
        self, transactional_id: str, timeout_ms: int, batches: Mapping[TopicIdPartition, Sequence[Piece]]
    ) -> None:
        self._transactional_id, self._timeout_ms, self._batches = transactional_id.encode(), timeout_ms, batches
        self.throttle_ms = 0

    def pieces(self) -> list[Piece]:
        topics = grouped((topic_id, (partition, batch)) for (topic_id, partition), batch in self._batches.items())
        name = self._transactional_id
        found: list[Piece] = []
        # The bytes between the batches; a compact length is one more than the length.
        small = [varint(len(name) + 1), name, _HOW.pack(_ALL_IN_SYNC, self._timeout_ms), varint(len(topics) + 1)]
        for topic_id, written in topics.items():
            small += (topic_id, varint(len(written) + 1))
            for partition, batch in written:
                small += (_PARTITION.pack(partition), varint(sum(map(len, batch)) + 1))
                found += (b"".join(small), *batch)
                small = [_NO_TAGS]
            small.append(_NO_TAGS)
        return [*found, b"".join((*small, _NO_TAGS))]

    def read(self, answer: memoryview) -> dict[TopicIdPartition, Produced]:
        topics, self.throttle_ms, _tags = _PRODUCED.decode(BytesIO(answer))
        return {
            TopicIdPartition(topic_id, number): Produced(code, base_offset, message)
            for topic_id, partitions, _ in topics
            for number, code, base_offset, _append_ms, _log_start, _records, message, _ in partitions
        }
