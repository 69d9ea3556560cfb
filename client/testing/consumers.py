"""The consumers of the fake gateway: their positions, and how their live sessions share the partitions."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from logferry.client.reading.decode import ReceivedChunk
from logferry.client.testing.call import FakeStore
from logferry.client.testing.stored import positions, row_object
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem

_GRACE_S = 1.0  # what a reader commits in this time after `revoked` does not come again
_PAGE = 1000
Frame = dict[str, Any]


@dataclass
class FakeSession:
    """``starts``: of the partitions of its last assignment; ``is_held``: the reader counts on that one."""

    wanted: frozenset[str]
    prefix: str
    attributes: Mapping[str, str]
    is_packed: bool
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    generation: int | None = None
    is_held: bool = False
    granted: list[TopicPartition] | None = None
    starts: dict[TopicPartition, int] = field(default_factory=dict)
    reached: dict[TopicPartition, int] = field(default_factory=dict)
    owed: dict[TopicPartition, int] = field(default_factory=dict)
    announced: dict[TopicPartition, int] = field(default_factory=dict)

    def wants(self, topic: str) -> bool:
        return any(fnmatchcase(topic, one) for one in self.wanted)

    def passes(self, chunk: ReceivedChunk) -> bool:
        return chunk.source_id.startswith(self.prefix) and self.attributes.items() <= chunk.attributes.items()


class FakeConsumer:
    """Everything about one consumer; the caller holds the lock of the store."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.committed: dict[TopicPartition, int] = {}
        self.sessions: dict[str, FakeSession] = {}
        self._generation = 0
        self._moves_until: float | None = None

    @property
    def state(self) -> str:
        if not self.sessions:
            return "Empty" if self._generation or self.committed else "Dead"
        return "Stable" if self._moves_until is None else "PreparingRebalance"

    def join(self, session: FakeSession) -> None:
        self.sessions[session.id] = session
        self.reassign()

    def leave(self, session: FakeSession) -> None:
        del self.sessions[session.id]
        self.reassign()

    def reassign(self) -> None:
        """All sessions give their partitions back, and get others once the chunks are committed, or after a grace."""
        self._moves_until = time.monotonic() + _GRACE_S if self.sessions else None
        self._store.changed.notify_all()

    def frames(self, session: FakeSession) -> list[Frame]:
        """What the session's reader is to receive now."""
        found: list[Frame] = []
        if session.is_held and (self._moves_until is not None or session.granted is not None):
            session.is_held = False
            gone = [{"topic": topic, "partition": number} for topic, number in sorted(session.starts)]
            found.append({"frame": "revoked", "generation": session.generation, "partitions": gone})
        if self._moves_until is not None and not self._assign():
            return found
        if session.granted is not None:
            session.starts = {tp: self.committed.get(tp, 0) for tp in session.granted}
            session.granted, session.is_held, session.generation = None, True, self._generation
            session.reached, session.owed, session.announced = dict(session.starts), {}, {}
            partitions = positions(session.starts)
            found.append({"frame": "assigned", "generation": self._generation, "partitions": partitions})
        return found + self._chunks(session) if session.is_held else found

    def _assign(self) -> bool:
        sessions = list(self.sessions.values())
        is_late = self._moves_until is not None and time.monotonic() >= self._moves_until
        if not is_late and any(one.is_held or one.owed for one in sessions):
            return False
        for one in sessions:
            one.granted = []
        topics = sorted(self._store.topics.items())
        turn = 0
        for partition in [(name, number) for name, topic in topics for number in range(len(topic.partitions))]:
            takers = [one for one in sessions[turn:] + sessions[:turn] if one.wants(partition[0])]
            if takers and takers[0].granted is not None:
                takers[0].granted.append(partition)
                turn = (sessions.index(takers[0]) + 1) % len(sessions)
        self._generation, self._moves_until = self._generation + 1, None
        self._store.changed.notify_all()
        return True

    def _chunks(self, session: FakeSession) -> list[Frame]:
        found: list[Frame] = []
        caught_up: dict[TopicPartition, int] = {}
        for tp, at in session.reached.items():
            partition = self._store.topics[tp[0]].partitions[tp[1]]
            some = partition.since(at)[:_PAGE]
            for chunk in filter(session.passes, some):
                found.append({"frame": "chunk", **(chunk._asdict() if session.is_packed else row_object(chunk))})
                session.owed[tp] = chunk.offset + 1
            is_at_end = len(some) < _PAGE
            session.reached[tp] = partition.end if is_at_end else some[-1].offset + 1
            if is_at_end and session.announced.get(tp) != partition.end:
                session.announced[tp] = caught_up[tp] = partition.end
        return [*found, {"frame": "caught_up", "partitions": positions(caught_up)}] if caught_up else found

    def commit(self, session_id: str, generation: int, offsets: dict[TopicPartition, int]) -> None:
        """Raises Problem ``superseded`` or ``out-of-range``."""
        session = self.sessions[session_id]
        for topic, number in offsets:
            if (topic, number) not in session.starts:
                raise Problem("superseded", f"{topic}, partition {number} is not assigned to this session")
        if not generation == session.generation == self._generation:
            raise Problem("superseded", f"generation {generation} is no longer the group's")
        for (topic, number), offset in offsets.items():
            end = self._store.topics[topic].partitions[number].end
            if offset > end:
                detail = f"position {offset} of {topic}, partition {number} is outside the retained offsets 0 to {end}"
                raise Problem("out-of-range", detail, topic=topic, partition=number, offset=offset, first=0, next=end)
        self.committed.update(offsets)
        session.owed = {tp: owed for tp, owed in session.owed.items() if offsets.get(tp, 0) < owed}
        self._store.changed.notify_all()

    def start_at_latest(self, name: str, topics: frozenset[str]) -> None:
        """Raises Problem ``conflict`` where sessions are alive."""
        missing = topics - {topic for topic, _ in self.committed}
        if missing and self.sessions:
            detail = f"{name} has live sessions and no position in {min(missing)} yet; from=latest sets it without them"
            raise Problem("conflict", detail)
        for topic in missing:
            for number, partition in enumerate(self._store.topics[topic].partitions):
                self.committed[topic, number] = partition.end

    def lag(self, tp: TopicPartition) -> dict[str, Any]:
        offset, partition = self.committed.get(tp), self._store.topics[tp[0]].partitions[tp[1]]
        unread = partition.since(offset or 0)
        age_ms = self._store.now_ms() - unread[0].recorded_ms if unread else None
        return {
            "topic": tp[0],
            "partition": tp[1],
            "offset": offset,
            "first": 0,
            "next": partition.end,
            "out_of_range": (offset or 0) > partition.end,
            "lag_records": partition.end - unread[0].offset if unread else 0,
            "lag_bytes": sum(len(chunk.data) for chunk in unread),
            "lag_seconds": None if age_ms is None else max(0.0, age_ms / 1000),
        }
