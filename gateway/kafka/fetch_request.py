"""Kafka's Fetch request, version 13, and what it takes to send it often for many partitions. Pure.

What it brings over the older ones that aiokafka knows:

* A topic is named by its id (KIP-516): what is fetched is never of another topic that has the name now.
* The last epoch that was read goes along (KIP-595): a log that was cut back meanwhile is told of, not read on from.
* Fetch sessions (KIP-227): the broker remembers the partitions, a request names only what changed, and an answer only
  what there is news of. The broker also takes care that none of them starves.

The answer is decoded by hand: batches stay where they arrived, and ten thousand idle partitions cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, NamedTuple

from aiokafka.protocol.types import UnsignedVarInt32

_READ_COMMITTED: Final = 1
_CONSUMER: Final = -1
_NO_TAGS: Final = b"\0"
_NO_RACK: Final = b"\x01"
# Replica, longest wait, least and most bytes, isolation level, session's id and epoch.
_FETCH: Final = struct.Struct(">iiiibii")
# Partition, leader epoch, fetch offset, last epoch that was read, log start offset, bytes.
_ASKED: Final = struct.Struct(">iiqiqi")
# Partition, error code, high watermark, last stable offset, log start offset.
_FOUND: Final = struct.Struct(">ihqqq")
_DIVERGING: Final = 0

NO_ERROR: Final = 0
OFFSET_OUT_OF_RANGE: Final = 1
UNKNOWN_TOPIC: Final = frozenset({3, 100, 103})
MOVED: Final = frozenset({5, 6, 9, 56, 74, 75, 76})


class Wanted(NamedTuple):
    """What is asked of one partition. ``epoch``: of the last batch that was read, -1: none was."""

    offset: int
    epoch: int
    max_bytes: int


TopicPartition = tuple[bytes, int]
"""Topic id, number."""


class Found(NamedTuple):
    """What the broker says of one partition. ``diverged``: its log was cut back, its end in the last epoch read."""

    topic_id: bytes
    partition: int
    code: int
    high_watermark: int
    last_stable: int
    log_start: int
    aborted: list[tuple[int, int]]
    records: memoryview
    diverged: int | None


class Fetched(NamedTuple):
    code: int
    session_id: int
    found: list[Found]


class FetchRequest:
    """Waits up to ``wait_ms`` for news of the partitions of its session."""

    API_KEY: ClassVar[int] = 1
    API_VERSION: ClassVar[int] = 13

    def __init__(
        self,
        wait_ms: int,
        max_bytes: int,
        session: tuple[int, int],
        wanted: Mapping[TopicPartition, Wanted],
        forgotten: Iterable[TopicPartition],
    ) -> None:
        head = _FETCH.pack(_CONSUMER, wait_ms, 1, max_bytes, _READ_COMMITTED, *session)
        self._request = b"".join((head, _asked(wanted), _forgotten(forgotten), _NO_RACK, _NO_TAGS))

    def pieces(self) -> tuple[bytes]:
        return (self._request,)

    def read(self, answer: memoryview) -> Fetched:
        return read_fetched(answer)


def _asked(wanted: Mapping[TopicPartition, Wanted]) -> bytes:
    topics: dict[bytes, list[bytes]] = {}
    for (topic_id, number), (offset, epoch, max_bytes) in wanted.items():
        topics.setdefault(topic_id, []).append(_ASKED.pack(number, -1, offset, epoch, -1, max_bytes) + _NO_TAGS)
    return _by_topic(topics)


def _forgotten(partitions: Iterable[TopicPartition]) -> bytes:
    topics: dict[bytes, list[bytes]] = {}
    for topic_id, number in partitions:
        topics.setdefault(topic_id, []).append(struct.pack(">i", number))
    return _by_topic(topics)


def _by_topic(topics: Mapping[bytes, list[bytes]]) -> bytes:
    parts = [_count(len(topics))]
    for topic_id, partitions in topics.items():
        parts += (topic_id, _count(len(partitions)), *partitions, _NO_TAGS)
    return b"".join(parts)


def _count(number: int) -> bytes:
    encoded: bytes = UnsignedVarInt32.encode(number + 1)
    return encoded


def read_fetched(raw: memoryview) -> Fetched:
    """The answer; records stay in the buffer that it came in."""
    _throttle_ms, code, session_id = struct.unpack_from(">ihi", raw)
    topics, at = _varint(raw, 10)
    found: list[Found] = []
    for _ in range(topics - 1):
        topic_id = bytes(raw[at : at + 16])
        partitions, at = _varint(raw, at + 16)
        for _ in range(partitions - 1):
            at = _read_partition(raw, at, topic_id, found)
        at = _read_tags(raw, at)[1]
    return Fetched(code, session_id, found)


def _read_partition(raw: memoryview, at: int, topic_id: bytes, found: list[Found]) -> int:
    number, code, high_watermark, last_stable, log_start = _FOUND.unpack_from(raw, at)
    count, at = _varint(raw, at + _FOUND.size)
    aborted = []
    for _ in range(count - 1):
        aborted.append(struct.unpack_from(">qq", raw, at))
        at = _read_tags(raw, at + 16)[1]
    length, at = _varint(raw, at + 4)  # past the preferred replica
    size = max(0, length - 1)
    records = raw[at : at + size]
    tags, at = _read_tags(raw, at + size)
    diverged = None
    if _DIVERGING in tags:
        diverged = struct.unpack_from(">iq", tags[_DIVERGING])[1]
    found.append(Found(topic_id, number, code, high_watermark, last_stable, log_start, aborted, records, diverged))
    return at


def _read_tags(raw: memoryview, at: int) -> tuple[dict[int, memoryview], int]:
    count, at = _varint(raw, at)
    tags = {}
    for _ in range(count):
        tag, at = _varint(raw, at)
        size, at = _varint(raw, at)
        tags[tag] = raw[at : at + size]
        at += size
    return tags, at


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7


class FetchSession:
    """What the broker remembers of this reader's partitions, so that a request says only what changed.

    ``wanted``: all that is of interest now. ``asked``: what the broker was last asked of each of them.
    """

    def __init__(self) -> None:
        self.wanted: dict[TopicPartition, Wanted] = {}
        self.asked: dict[TopicPartition, Wanted] = {}
        self._id = self._epoch = 0
        self._changed: set[TopicPartition] = set()

    def want(self, key: TopicPartition, wanted: Wanted) -> None:
        self.wanted[key] = wanted
        self._changed.add(key)

    def drop(self, key: TopicPartition) -> None:
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

    def answered(self, fetched: Fetched) -> bool:
        """Whether the answer counts; otherwise the session begins anew."""
        if fetched.code:
            self.lost()
            return False
        self._id = fetched.session_id
        if self._id:
            self._epoch = 1 if self._epoch == 2**31 - 1 else self._epoch + 1
        else:
            # The broker keeps no session for us: each request names everything.
            self._begin_anew()
        return True

    def lost(self) -> None:
        """Also after a connection broke: nobody knows whether the broker had the last request."""
        self._begin_anew()
        self.asked = {}

    def _begin_anew(self) -> None:
        self._id = self._epoch = 0
        self._changed = set(self.wanted)
