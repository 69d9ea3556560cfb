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
from dataclasses import dataclass, field
from typing import NamedTuple

from logferry.gateway.contract.chunk import Chunk

STATE_VERSION = 1
_STATE = struct.Struct(">BBI16sqqqq")
_HEARTBEAT = struct.Struct(">Bqqqq")
_HAS_RECORDED, _HAS_BASE, _HAS_HEARTBEAT = 1, 2, 4
_PACKED_BYTES = 22
_HAS_WATERMARK, _HAS_POSITION, _HAS_SIZE, _IS_FINISHED = 1, 2, 4, 8


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


class Heartbeat(NamedTuple):
    """What a source knows of itself though it has no new chunk. ``at_ms``: when the gateway recorded it.

    ``watermark_ms``: it has sent all that happened before. ``position`` and ``size``: bytes of its file.
    """

    at_ms: int
    watermark_ms: int | None = None
    position: int | None = None
    size: int | None = None
    finished: bool | None = None

    def encode(self) -> bytes:
        flags = (
            (self.watermark_ms is not None) * _HAS_WATERMARK
            | (self.position is not None) * _HAS_POSITION
            | (self.size is not None) * _HAS_SIZE
            | bool(self.finished) * _IS_FINISHED
        )
        return _HEARTBEAT.pack(flags, self.at_ms, self.watermark_ms or 0, self.position or 0, self.size or 0)

    @classmethod
    def decode(cls, raw: bytes) -> Heartbeat:
        flags, at_ms, watermark_ms, position, size = _HEARTBEAT.unpack(raw)
        return cls(
            at_ms,
            watermark_ms if flags & _HAS_WATERMARK else None,
            position if flags & _HAS_POSITION else None,
            size if flags & _HAS_SIZE else None,
            bool(flags & _IS_FINISHED),
        )


class SourceState(NamedTuple):
    """All that is recorded of a source. ``session`` 0: none was opened.

    ``written_ms``: the last chunk or session. ``heartbeat``: the last one, None if there was none.
    """

    topic_id: bytes
    partition: int
    recorded: int | None
    base: int | None
    session: int
    written_ms: int
    heartbeat: Heartbeat | None = None

    @property
    def alive_ms(self) -> int:
        """When the source was last heard of."""
        return self.written_ms if self.heartbeat is None else max(self.written_ms, self.heartbeat.at_ms)

    def encode(self) -> bytes:
        flags = (self.recorded is not None) * _HAS_RECORDED | (self.base is not None) * _HAS_BASE
        if self.heartbeat is not None:
            flags |= _HAS_HEARTBEAT
        fixed = _STATE.pack(
            STATE_VERSION,
            flags,
            self.partition,
            self.topic_id,
            self.recorded or 0,
            self.base or 0,
            self.session,
            self.written_ms,
        )
        return fixed if self.heartbeat is None else fixed + self.heartbeat.encode()

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
            Heartbeat.decode(raw[_STATE.size :]) if flags & _HAS_HEARTBEAT else None,
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


def superseded(state: SourceState, session: int | None) -> Refusal | None:
    """Only the newest session's number is accepted, and no number at all."""
    if session is None or session == state.session:
        return None
    newer = f"the newest is {state.session}" if state.session else "none is open"
    return Refusal("superseded", f"session {session} is not the source's session, {newer}", state.recorded)


def decide_write(
    state: SourceState, chunks: list[Chunk], session: int | None, now_ms: int, max_jump: int | None = None
) -> Advance | Refusal:
    """The rule of a chunk, for all chunks of one request: all are taken or none.

    ``state`` is what is recorded, or a fresh one for a source that is not known yet. ``max_jump``: a seqno so far
    above the recorded one is refused, since it would silence its source.
    """
    refusal = superseded(state, session)
    if refusal is not None:
        return refusal
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
        elif max_jump is not None and seqno - recorded > max_jump:
            detail = f"chunk {number}: seqno {seqno} is {seqno - recorded} above {recorded}; the limit is {max_jump}"
            return Refusal("bad-request", detail, state.recorded)
        recorded = seqno
        fresh.append(chunk)
    if not fresh:
        return Advance(state, fresh, len(chunks))
    after = SourceState(state.topic_id, state.partition, recorded, base, state.session, now_ms, state.heartbeat)
    return Advance(after, fresh, len(chunks) - len(fresh))


def open_session(state: SourceState, now_ms: int) -> SourceState:
    """A new session: its number is above every earlier one, also above those of an expired state."""
    return state._replace(session=max(state.session + 1, now_ms), written_ms=now_ms)


def beat(state: SourceState, new: Heartbeat) -> SourceState:
    """The state with a newer heartbeat; what the heartbeat does not say stays as it was said before."""
    old = state.heartbeat or Heartbeat(new.at_ms)
    merged = Heartbeat(
        new.at_ms,
        old.watermark_ms if new.watermark_ms is None else new.watermark_ms,
        old.position if new.position is None else new.position,
        old.size if new.size is None else new.size,
        bool(old.finished if new.finished is None else new.finished),
    )
    return state._replace(heartbeat=merged)


class _Ids:
    """Topic ids by number, so that a packed state needs one byte for its topic's.

    Packed: number of the topic id, flags, the low 2 bytes of the partition, and the low 6 of recorded, session and
    written_ms.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._ids: list[bytes] = []

    def packed(self, raw: bytes) -> bytes:
        """The encoded state in 22 bytes, or as it is where it does not fit."""
        high = raw[2:4] + raw[22:24] + raw[30:40] + raw[46:48]
        if len(raw) != _STATE.size or any(high):
            return raw
        topic_id = raw[6:22]
        number = self._numbers.get(topic_id)
        if number is None:
            if len(self._ids) == 256:
                return raw
            number = self._numbers[topic_id] = len(self._ids)
            self._ids.append(topic_id)
        return b"%c%b%b%b%b%b" % (number, raw[1:2], raw[4:6], raw[24:30], raw[40:46], raw[48:54])

    def unpacked(self, kept: bytes) -> SourceState:
        if len(kept) != _PACKED_BYTES:
            return SourceState.decode(kept)
        flags = kept[1]
        return SourceState(
            self._ids[kept[0]],
            int.from_bytes(kept[2:4]),
            int.from_bytes(kept[4:10]) if flags & _HAS_RECORDED else None,
            0 if flags & _HAS_BASE else None,
            int.from_bytes(kept[10:16]),
            int.from_bytes(kept[16:22]),
        )


@dataclass(slots=True)
class SourceTable:
    """The committed states of one lane, kept as bytes: a million sources must fit.

    The usual state (a base of zero or none, no heartbeat, numbers below 2^48) takes 22 bytes, see `_Ids`; any
    other stays encoded as in the state topic.
    """

    _states: dict[bytes, bytes] = field(default_factory=dict)
    _ids: _Ids = field(default_factory=_Ids)
    # Of sources with a key: topic and key → topic id, partition, how many sources have it.
    _pins: dict[tuple[str, str], tuple[bytes, int, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: object) -> bool:
        """Whether anything is known under the state key, of whatever incarnation of its topic."""
        return key in self._states

    def apply(self, key: bytes, raw: bytes | None) -> None:
        """Takes over a committed state, of a transaction or of the replay; None forgets the source.

        Raises ValueError on a format that is not known: the lane must stop rather than guess.
        """
        if raw is not None and (raw[0] != STATE_VERSION or key[:1] not in (b"s", b"k")):
            raise ValueError(f"state {key!r} of version {raw[0]} cannot be decoded")
        if key[:1] == b"k":
            self._apply_pin(Source.of_state_key(key), key not in self._states, raw)
        if raw is None:
            self._states.pop(key, None)
        else:
            self._states[key] = self._ids.packed(raw)

    def _apply_pin(self, source: Source, is_new: bool, raw: bytes | None) -> None:
        pin = (source.topic, source.key)
        _, _, count = self._pins.get(pin, (b"", 0, 0))
        if raw is not None:
            state = SourceState.decode(raw)
            self._pins[pin] = (state.topic_id, state.partition, count + is_new)
        elif not is_new:
            topic_id, partition, count = self._pins.pop(pin)
            if count > 1:
                self._pins[pin] = (topic_id, partition, count - 1)

    def get(self, source: Source, topic_id: bytes) -> SourceState | None:
        """What is recorded of the source in this incarnation of its topic; None: nothing."""
        state = self.read(source.state_key())
        return state if state is not None and state.topic_id == topic_id else None

    def pinned(self, topic: str, key: str, topic_id: bytes) -> int | None:
        """The partition of a key, by any living source that has it; None: not seen yet."""
        unkeyed = self.get(Source(topic, None, key), topic_id)
        if unkeyed is not None:
            return unkeyed.partition
        pin = self._pins.get((topic, key))
        return pin[1] if pin is not None and pin[0] == topic_id else None

    def state_keys(self) -> list[bytes]:
        """The state keys as of now."""
        return list(self._states)

    def read(self, key: bytes) -> SourceState | None:
        kept = self._states.get(key)
        return None if kept is None else self._ids.unpacked(kept)
