"""What the fake gateway keeps: topics with their partitions and sources, and the rule of a chunk.

Each request that writes takes one offset more than it has chunks, as Kafka's transactions do: offsets have gaps, and a
reader that counts on the next number being there fails here, too.
"""

from __future__ import annotations

import base64
import os
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from logferry.client.reading.decode import ReceivedChunk
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import TopicPartition, partition_of, printed_topic_id, split_topic
from logferry.gateway.errors import Problem

SESSION_LAPSE_MS = 900_000
_MOST_UNCHAINED = 1 << 40


@dataclass
class FakeSource:
    """``beat``: of the last heartbeat. ``is_used``: its session was used by its number."""

    source_id: str
    partition_key: str | None
    partition: int
    written_ms: int
    recorded: int | None = None
    base: int | None = None
    session: int = 0
    is_used: bool = False
    beat: dict[str, Any] = field(default_factory=dict)

    @property
    def alive_ms(self) -> int:
        beat_ms: int = self.beat.get("heartbeat_ms", 0)
        return max(self.written_ms, beat_ms)

    @property
    def order(self) -> str:
        """Its place in lists."""
        key = "" if self.partition_key is None else " " + quote(self.partition_key, safe="")
        return quote(self.source_id, safe="") + key

    def row(self) -> dict[str, Any]:
        beat = {**dict.fromkeys(("heartbeat_ms", "watermark_ms", "position", "size")), "finished": False, **self.beat}
        return {
            "source_id": self.source_id,
            "partition_key": self.partition_key,
            "partition": self.partition,
            "recorded_seqno": self.recorded,
            "session": self.session or None,
            "written_ms": self.written_ms,
            **beat,
        }

    def open_session(self, now_ms: int) -> None:
        self.session, self.written_ms, self.is_used = max(self.session + 1, now_ms), now_ms, False
        self._continues()

    def heartbeat(self, session: int | None, said: dict[str, Any], now_ms: int) -> None:
        """Raises Problem ``superseded``."""
        self._check_session(session)
        self.is_used = self.is_used or bool(session)
        self.beat = {"finished": False, **self.beat, "heartbeat_ms": now_ms}
        self.beat.update((name, value) for name, value in said.items() if value is not None)

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
            self._check_outside(session, now_ms)
            if recorded is None:
                base = prev
            elif prev is not None and prev != recorded:
                kind = "gap" if prev > recorded else "overlap"
                raise self._refused(kind, f"chunk {number}: prev {prev}, but {recorded} is recorded")
            jump = seqno - (recorded or 0)
            if self.session and session is None and prev is None and jump > _MOST_UNCHAINED:
                detail = (
                    f"chunk {number}: seqno {seqno} is {jump} above what is recorded, outside of the source's session;"
                    " send the session's number, or prev"
                )
                raise self._refused("bad-request", detail)
            recorded = seqno
            fresh.append(chunk)
        if session:
            self.is_used = True
        elif fresh and self.is_used:
            self.open_session(now_ms)
        if fresh:
            self.recorded, self.base, self.written_ms = recorded, base, now_ms
            self._continues()
        return fresh

    def _continues(self) -> None:
        if self.beat:
            self.beat["finished"] = False

    def _check_session(self, session: int | None) -> None:
        if session is not None and session != self.session:
            newer = f"the newest is {self.session}" if self.session else "none is open"
            raise self._refused("superseded", f"session {session} is not the source's session; {newer}")

    def _check_outside(self, session: int | None, now_ms: int) -> None:
        left_ms = self.alive_ms + SESSION_LAPSE_MS - now_ms
        if not session and self.is_used and left_ms > 0:
            number, left_s = self.session, -(-min(left_ms, SESSION_LAPSE_MS) // 1000)
            detail = (
                f"session {number} writes the source; it ends when it is silent for another {left_s} s. Send "
                f"session={number}, or open a session: that ends it at once"
            )
            raise self._refused("superseded", detail)

    def _refused(self, kind: str, detail: str) -> Problem:
        return Problem(kind, detail, recorded_seqno=self.recorded)


class FakePartition:
    """``end``: the offset of the next chunk."""

    def __init__(self) -> None:
        self.chunks: list[ReceivedChunk] = []
        self._offsets: list[int] = []
        self.end = 0

    def start_at(self, start: object, time_ms: int | None = None) -> int:
        """The offset that is meant by an offset, an end, or a time."""
        if time_ms is not None:
            return next((chunk.offset for chunk in self.chunks if chunk.recorded_ms >= time_ms), self.end)
        return start if isinstance(start, int) else self.end if start == "latest" else 0

    def since(self, offset: int) -> list[ReceivedChunk]:
        return self.chunks[bisect_left(self._offsets, offset) :]

    def append(self, chunk: ReceivedChunk) -> None:
        self.chunks.append(chunk)
        self._offsets.append(self.end)
        self.end += 1


class FakeTopic:
    """``name``: in full. ``chunks``: of all partitions, in the order in which they were recorded."""

    def __init__(self, name: str, partitions: int, retention_ms: int | None = None) -> None:
        self.name = name
        self.partitions = [FakePartition() for _ in range(partitions)]
        self.sources: dict[tuple[str | None, str], FakeSource] = {}
        self.chunks: list[ReceivedChunk] = []
        self._id = printed_topic_id(os.urandom(16))
        self._retention_ms = 604_800_000 if retention_ms is None else retention_ms

    def described(self, at_ms: int | None, *, sizes: bool) -> dict[str, Any]:
        dc, name = split_topic(self.name)
        offsets: list[dict[str, Any]] = []
        for number, partition in enumerate(self.partitions):
            offsets.append({"partition": number, "first": 0, "next": partition.end})
            if at_ms is not None:
                late = (chunk.offset for chunk in partition.chunks if chunk.recorded_ms >= at_ms)
                offsets[-1]["at"] = next(late, None)
            if sizes:
                offsets[-1]["size_bytes"] = sum(len(chunk.data) for chunk in partition.chunks)
        return {
            "topic": self.name,
            "id": self._id,
            "dc": dc,
            "name": name,
            "partitions": len(self.partitions),
            "retention_ms": self._retention_ms,
            "offsets": offsets,
        }

    def grow(self, partitions: int) -> None:
        self.partitions += [FakePartition() for _ in range(partitions - len(self.partitions))]

    def partition(self, number: int) -> FakePartition:
        """Raises Problem ``not-found``."""
        if number >= len(self.partitions):
            raise Problem("not-found", f"{self.name} has the partitions 0 to {len(self.partitions) - 1}")
        return self.partitions[number]

    def source(self, key: str | None, source_id: str, now_ms: int) -> FakeSource:
        """The one that is known, or one that `keep` makes known. Sources with the same key share a partition."""
        found = self.sources.get((key, source_id))
        if found is None:
            both = source_id if key is None else key
            pins = (one.partition for (k, name), one in self.sources.items() if (name if k is None else k) == both)
            pin = next(pins, None)
            found = FakeSource(source_id, key, partition_of(both, len(self.partitions)) if pin is None else pin, now_ms)
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
            partition.append(ReceivedChunk(*place, seqno, prev, *times, attributes, data))
            self.chunks.append(partition.chunks[-1])
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
