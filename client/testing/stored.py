"""What the fake gateway keeps: topics with their partitions and sources, and the rule of a chunk.

Each request that writes takes one offset more than it has chunks, as Kafka's transactions do: offsets have gaps, and a
reader that counts on the next number being there fails here, too.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from typing import Any

from logferry.client.reading.decode import ReceivedChunk
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import TopicPartition, partition_of, printed_topic_id, split_topic
from logferry.gateway.errors import Problem

_RETENTION_MS = 604_800_000
LAPSE_S = 900  # the real one gives a session up that was silent for so long; tests are shorter


@dataclass
class FakeSource:
    """``is_used``: its session was used by its number."""

    source_id: str
    partition_key: str | None
    partition: int
    recorded: int | None = None
    base: int | None = None
    session: int = 0
    is_used: bool = False

    def open_session(self, now_ms: int) -> None:
        self.session, self.is_used = max(self.session + 1, now_ms), False

    def heartbeat(self, session: int | None) -> None:
        """Raises Problem ``superseded``."""
        self._check_session(session)
        self.is_used = self.is_used or bool(session)

    def take(self, chunks: list[Chunk], session: int | None, now_ms: int) -> list[Chunk]:
        """The chunks of one request that are new: all are recorded or, where it raises Problem, none."""
        self._check_session(session)
        recorded, base, fresh, last = self.recorded, self.base, list[Chunk](), -1
        for number, chunk in enumerate(chunks):
            seqno, prev = chunk.seqno, chunk.prev
            if seqno <= last:
                raise self._refused("out-of-order", f"chunk {number}: seqno {seqno} follows {last}")
            last = seqno
            if recorded is not None and seqno <= recorded:
                if base is not None and seqno <= base:
                    detail = f"chunk {number}: seqno {seqno} lies before the first recorded chunk, which follows {base}"
                    raise self._refused("gap", detail)
                continue
            self._check_outside(session)
            if recorded is None:
                base = prev
            elif prev is not None and prev != recorded:
                kind = "gap" if prev > recorded else "overlap"
                raise self._refused(kind, f"chunk {number}: prev {prev}, but {recorded} is recorded")
            recorded = seqno
            fresh.append(chunk)
        if session:
            self.is_used = True
        elif fresh and self.is_used:
            self.open_session(now_ms)
        if fresh:
            self.recorded, self.base = recorded, base
        return fresh

    def _check_session(self, session: int | None) -> None:
        if session is not None and session != self.session:
            newer = f"the newest is {self.session}" if self.session else "none is open"
            raise self._refused("superseded", f"session {session} is not the source's session; {newer}")

    def _check_outside(self, session: int | None) -> None:
        if not session and self.is_used:
            number = self.session
            detail = (
                f"session {number} writes the source; it ends when it is silent for another {LAPSE_S} s. Send "
                f"session={number}, or open a session: that ends it at once"
            )
            raise self._refused("superseded", detail)

    def _refused(self, kind: str, detail: str) -> Problem:
        return Problem(kind, detail, recorded_seqno=self.recorded)


class FakePartition:
    """``end``: the offset of the next chunk."""

    def __init__(self) -> None:
        self.chunks: list[ReceivedChunk] = []
        self.end = 0

    def since(self, offset: int) -> list[ReceivedChunk]:
        return [chunk for chunk in self.chunks if chunk.offset >= offset]


class FakeTopic:
    """``name``: in full. ``chunks``: of all partitions, in the order in which they were recorded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.partitions: list[FakePartition] = []
        self.sources: dict[tuple[str | None, str], FakeSource] = {}
        self.chunks: list[ReceivedChunk] = []
        self._id = printed_topic_id(os.urandom(16))

    def described(self) -> dict[str, Any]:
        dc, name = split_topic(self.name)
        ends = enumerate(self.partitions)
        offsets = [{"partition": number, "first": 0, "next": partition.end} for number, partition in ends]
        return {
            "topic": self.name,
            "id": self._id,
            "dc": dc,
            "name": name,
            "partitions": len(self.partitions),
            "retention_ms": _RETENTION_MS,
            "offsets": offsets,
        }

    def partition(self, number: int) -> FakePartition:
        """Raises Problem ``not-found``."""
        if number >= len(self.partitions):
            raise Problem("not-found", f"{self.name} has the partitions 0 to {len(self.partitions) - 1}")
        return self.partitions[number]

    def source(self, key: str | None, source_id: str) -> FakeSource:
        """The one that is known, or one that `keep` makes known. Sources with the same key share a partition."""
        found = self.sources.get((key, source_id))
        if found is None:
            both = source_id if key is None else key
            pins = (one.partition for (k, name), one in self.sources.items() if (name if k is None else k) == both)
            pin = next(pins, None)
            found = FakeSource(source_id, key, partition_of(both, len(self.partitions)) if pin is None else pin)
        return found

    def keep(self, source: FakeSource) -> None:
        self.sources[source.partition_key, source.source_id] = source

    def record(self, source: FakeSource, chunks: list[Chunk], now_ms: int) -> list[int] | None:
        """The offsets of the first and of the last chunk; None without one."""
        self.keep(source)
        if not chunks:
            return None
        partition = self.partitions[source.partition]
        first, dc = partition.end, split_topic(self.name)[0]
        for seqno, prev, created_ms, attributes, data in chunks:
            place = (dc, self.name, source.partition, partition.end, source.source_id)
            times = now_ms if created_ms is None else created_ms, now_ms
            partition.chunks.append(ReceivedChunk(*place, seqno, prev, *times, attributes, data))
            self.chunks.append(partition.chunks[-1])
            partition.end += 1
        partition.end += 1
        return [first, partition.end - 2]


def positions(offsets: dict[TopicPartition, int]) -> list[dict[str, Any]]:
    """As every answer writes them."""
    return [{"topic": topic, "partition": number, "offset": at} for (topic, number), at in sorted(offsets.items())]


def row_object(chunk: ReceivedChunk) -> dict[str, Any]:
    """The chunk with its keys; data that is not UTF-8 is in base64, under a key of its own."""
    found = chunk._asdict()
    data = found.pop("data")
    try:
        return {**found, "data": data.decode()}
    except UnicodeDecodeError:
        return {**found, "data_base64": base64.b64encode(data).decode()}
