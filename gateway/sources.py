"""What a lane knows of its sources, and the rule of a chunk. Pure: no I/O, no clock.

Invariants, kept here and nowhere else:

* ``recorded`` only grows. A chunk at or below it is a duplicate, because everything of the source up to it is
  in the log, except what lies at or below ``base``: the ``prev`` of the first recorded chunk. That part was
  never seen, so it is a gap and never a duplicate (acknowledging it would lose it).
* A state belongs to one incarnation of its topic (``topic_id``): a topic deleted and created anew is empty, and
  so is what is known of its sources.
* Only the *equal* session number is accepted: after a state expired, numbers begin anew from the clock, and an
  old number is never "newer".
* The pin of a key is the partition in the states of its living sources: it lives as long as the youngest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from logferry.gateway.contract import Chunk

STATE_VERSION = 1
_STATE = struct.Struct(">BBI16sqqqq")
_HAS_RECORDED, _HAS_BASE = 1, 2


class Source(NamedTuple):
    """The identity of a source. ``topic`` is the full name (``dc1.nginx``); the key is part of the identity."""

    topic: str
    partition_key: str | None
    source_id: str

    @property
    def key(self) -> str:
        """What decides lane and partition."""
        return self.source_id if self.partition_key is None else self.partition_key

    def state_key(self) -> bytes:
        """The key of its record in the state topic. NUL parts the fields: it is in none of them."""
        if self.partition_key is None:
            return b"s%s\0%s" % (self.topic.encode(), self.source_id.encode())
        return b"k%s\0%s\0%s" % (self.topic.encode(), self.partition_key.encode(), self.source_id.encode())

    @classmethod
    def of_state_key(cls, raw: bytes) -> Source:
        parts = raw[1:].decode().split("\0")
        if raw[:1] == b"s" and len(parts) == 2:
            return cls(parts[0], None, parts[1])
        if raw[:1] == b"k" and len(parts) == 3:
            return cls(parts[0], parts[1], parts[2])
        raise ValueError(f"state key {raw!r} cannot be decoded")


class SourceState(NamedTuple):
    """All that is recorded of a source. ``session`` 0: none was opened. ``written_ms``: the last change."""

    topic_id: bytes
    partition: int
    recorded: int | None
    base: int | None
    session: int
    written_ms: int

    def encode(self) -> bytes:
        flags = (self.recorded is not None) * _HAS_RECORDED | (self.base is not None) * _HAS_BASE
        return _STATE.pack(
            STATE_VERSION,
            flags,
            self.partition,
            self.topic_id,
            self.recorded or 0,
            self.base or 0,
            self.session,
            self.written_ms,
        )

    @classmethod
    def decode(cls, raw: bytes) -> SourceState:
        if raw[0] != STATE_VERSION:
            raise ValueError(f"state of version {raw[0]}; this logferry reads version {STATE_VERSION}")
        _, flags, partition, topic_id, recorded, base, session, written_ms = _STATE.unpack_from(raw)
        return cls(
            topic_id,
            partition,
            recorded if flags & _HAS_RECORDED else None,
            base if flags & _HAS_BASE else None,
            session,
            written_ms,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing of the request is written. ``kind`` is a problem type; ``recorded`` what the log holds."""

    kind: str
    detail: str
    recorded: int | None


@dataclass(frozen=True, slots=True)
class Advance:
    """The chunks to write (maybe none: all were duplicates) and the state of the source after them."""

    state: SourceState
    chunks: list[Chunk]
    duplicates: int


def decide_write(state: SourceState, chunks: list[Chunk], session: int | None, now_ms: int) -> Advance | Refusal:
    """The rule of a chunk, for all chunks of one request: all are taken or none.

    ``state`` is what is recorded, or a fresh one for a source that is not known yet.
    """
    if session is not None and session != state.session:
        newer = f"the newest is {state.session}" if state.session else "none is open"
        return Refusal("superseded", f"session {session} is not the source's session, {newer}", state.recorded)
    recorded, base = state.recorded, state.base
    fresh: list[Chunk] = []
    last = -1
    for number, chunk in enumerate(chunks):
        seqno, prev = chunk.seqno, chunk.prev
        if seqno <= last:
            return Refusal("out-of-order", f"chunk {number}: seqno {seqno} follows {last}", state.recorded)
        last = seqno
        if recorded is None:
            base = prev
        elif seqno <= recorded:
            if base is not None and seqno <= base:
                detail = f"chunk {number}: seqno {seqno} lies before the first recorded chunk, which follows {base}"
                return Refusal("gap", detail, state.recorded)
            continue
        elif prev is not None and prev != recorded:
            kind = "gap" if prev > recorded else "overlap"
            return Refusal(kind, f"chunk {number}: prev {prev}, but {recorded} is recorded", state.recorded)
        recorded = seqno
        fresh.append(chunk)
    if not fresh:
        return Advance(state, fresh, len(chunks))
    after = SourceState(state.topic_id, state.partition, recorded, base, state.session, now_ms)
    return Advance(after, fresh, len(chunks) - len(fresh))


def open_session(state: SourceState, now_ms: int) -> SourceState:
    """A new session: its number is above every earlier one, also above those of an expired state."""
    return state._replace(session=max(state.session + 1, now_ms), written_ms=now_ms)


@dataclass(slots=True)
class SourceTable:
    """The committed states of one lane, kept encoded as in the state topic: a million sources must fit."""

    _states: dict[bytes, bytes] = field(default_factory=dict)
    _pins: dict[tuple[str, str], tuple[bytes, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, key: bytes, raw: bytes | None) -> None:
        """Takes over a committed state, of a transaction or of the replay; None forgets the source.

        Raises ValueError on a format that is not known: the lane must stop rather than guess.
        """
        if raw is None:
            self._states.pop(key, None)
        else:
            self._states[key] = raw
            if key[:1] == b"k":
                source, state = Source.of_state_key(key), SourceState.decode(raw)
                self._pins[source.topic, source.key] = (state.topic_id, state.partition)
            elif key[:1] != b"s" or raw[0] != STATE_VERSION:
                raise ValueError(f"state {key!r} of version {raw[0]} cannot be decoded")

    def get(self, source: Source, topic_id: bytes) -> SourceState | None:
        """What is recorded of the source in this incarnation of its topic; None: nothing."""
        raw = self._states.get(source.state_key())
        if raw is None:
            return None
        state = SourceState.decode(raw)
        return state if state.topic_id == topic_id else None

    def pinned(self, topic: str, key: str, topic_id: bytes) -> int | None:
        """The partition of a key, by any living source that has it; None: not seen yet."""
        unkeyed = self.get(Source(topic, None, key), topic_id)
        if unkeyed is not None:
            return unkeyed.partition
        pin = self._pins.get((topic, key))
        return pin[1] if pin is not None and pin[0] == topic_id else None

    def items(self) -> Iterator[tuple[Source, SourceState]]:
        for key, raw in self._states.items():
            yield Source.of_state_key(key), SourceState.decode(raw)
