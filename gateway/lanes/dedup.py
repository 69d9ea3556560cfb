"""Deduplication: the rule of a chunk, who may write a source, and the table of a lane's sources. Pure.

Invariants, kept here and nowhere else:

* ``recorded`` only grows. A chunk at or below it is a duplicate, because everything of the source up to it is in the
  log, except the part at or below ``base``: the ``prev`` of the first recorded chunk. That part was never received,
  so it is a gap and never a duplicate (acknowledging it would lose it).
* A state belongs to one incarnation of its topic (``topic_id``): a topic that was deleted and recreated is empty, and
  so are the states of its sources.
* Only the *equal* session number is accepted: after a state expired, numbers start from the clock again, and an old
  number is never "newer".
* The pin of a key is the partition in the states of its living sources: it lives as long as the youngest.
* The seqnos of a source are given by its writer or by the lane (`decide_append`), never by both: a seqno must mean one
  chunk, or another one with the same number would be taken for its duplicate.

**Authority**: of a session's token, and among its callers of the session's number. The rule, as a table, and why:
ops/docs/decisions/0024. It is decided in the lane, in the order of its transaction, by the brokers' time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.source_state import (
    RECEIPT_KIND,
    Heartbeat,
    SourceIdentity,
    SourceState,
    token_at,
)
from logferry.gateway.contract.upload_state import UPLOAD_KIND
from logferry.gateway.lanes.receipts import ReceiptTable, UploadTable, weight
from logferry.gateway.lanes.source_index import PackedStates
from logferry.gateway.limits import FairShare

SESSION_LAPSE_MS: Final = 900_000  # by default
# A chunk outside of the session may be so far above the recorded seqno, or above zero, without ``prev``: one TiB.
MAX_UNCHAINED_JUMP: Final = 1 << 40


class Refusal(NamedTuple):
    """Nothing of the request is written. ``kind``: a problem kind; ``recorded``: the seqno that the log holds."""

    kind: str
    detail: str
    recorded: int | None
    retry_after_s: int | None = None


def refuse_write(state: SourceState, session: int | None, token: str | None) -> Refusal | None:
    """Why a chunk or heartbeat is refused; None: it is not. Only the newest session's number is accepted, or none."""
    if _is_foreign(state, token):
        detail = "another token opened the source's session; when that is silent, a session can be opened instead"
        return Refusal("superseded", detail, state.recorded)
    if session is None or session == state.session:
        return None
    newer = f"the newest is {state.session}" if state.session else "none is open"
    return Refusal("superseded", f"session {session} is not the source's session; {newer}", state.recorded)


def refuse_outside(state: SourceState, session: int | None, now_ms: int, lapse_ms: int) -> Refusal | None:
    """Why no chunk may be recorded now without the session's number; None: it may."""
    left_ms = state.alive_ms + lapse_ms - now_ms
    if session or not state.is_used or left_ms <= 0:
        return None
    number, left_s = state.session, -(-min(left_ms, lapse_ms) // 1000)
    detail = (
        f"session {number} writes the source; it ends when it is silent for another {left_s} s. Send "
        f"session={number}, or open a session: that ends it at once"
    )
    return Refusal("superseded", detail, state.recorded)


def refuse_opening(
    state: SourceState, token: str | None, now_ms: int, lapse_ms: int, *, is_admin: bool
) -> Refusal | None:
    """Why a session may not be opened now; None: it may. ``lapse_ms``: after so long a silence a session has ended."""
    if state.appended_by:
        return _refuse_appended(state)
    left_ms = state.alive_ms + lapse_ms - now_ms
    if is_admin or left_ms <= 0 or not _is_foreign(state, token):
        return None
    left_s = -(-min(left_ms, lapse_ms) // 1000)
    detail = (
        f"the source has a session of another token; it ends when that token is silent for another {left_s} s. Stop "
        "that writer, use another source id, or let an administrator open the session or forget the source"
    )
    return Refusal("source-in-use", detail, state.recorded, left_s)


def refuse_jump(state: SourceState, chunk: Chunk, session: int | None, recorded: int | None) -> str | None:
    """Why a chunk may not jump so far; None: it may. ``recorded``: before this chunk, with those of its request."""
    if not state.session or session is not None or chunk.prev is not None:
        return None
    jump = chunk.seqno - (recorded or 0)
    if jump <= MAX_UNCHAINED_JUMP:
        return None
    return (
        f"seqno {chunk.seqno} is {jump} above what is recorded, outside of the source's session; send the session's "
        "number, or prev"
    )


def _refuse_appended(state: SourceState) -> Refusal:
    detail = "the source is appended to without seqnos, which are the gateway's; use another source id"
    return Refusal("conflict", detail, state.recorded)


def _is_foreign(state: SourceState, token: str | None) -> bool:
    return state.session != 0 and state.token is not None and state.token != token


_ONE_LANE: Final = LaneCount(1, 1, 0)
_FIELDS = {b"s": 1, b"k": 2}  # NULs in a state key, by its kind


@dataclass(frozen=True, slots=True)
class Advance:
    """The chunks to write (maybe none: all were duplicates) and the state of the source after them."""

    state: SourceState
    chunks: list[Chunk]
    duplicates: int


def decide_write(
    state: SourceState,
    chunks: list[Chunk],
    session: int | None,
    now_ms: int,
    max_jump: int | None = None,
    token: str | None = None,
    lapse_ms: int = SESSION_LAPSE_MS,
) -> Advance | Refusal:
    """The rule of a chunk, for all chunks of one request: all are taken or none.

    ``state`` is what is recorded, or a fresh one for a source that is not known yet. ``max_jump``: a seqno so far
    above the recorded one (of the first chunk: above its ``prev``) is refused, since it would silence its source.
    ``token``: the name of the caller's. ``lapse_ms``: a session that was silent for so long excludes nobody.
    """
    refusal = _refuse_appended(state) if state.appended_by else refuse_write(state, session, token)
    if refusal is not None:
        return refusal
    excluded = refuse_outside(state, session, now_ms, lapse_ms)
    recorded, base = state.recorded, state.base
    fresh: list[Chunk] = []
    last = -1
    for number, chunk in enumerate(chunks):
        seqno, prev = chunk.seqno, chunk.prev
        if seqno <= last:
            return Refusal("out-of-order", f"chunk {number}: seqno {seqno} follows {last}", state.recorded)
        last = seqno
        if recorded is not None and seqno <= recorded:
            if base is not None and seqno <= base:
                detail = f"chunk {number}: seqno {seqno} lies before the first recorded chunk, which follows {base}"
                return Refusal("gap", detail, state.recorded)
            continue
        if excluded is not None:
            return excluded
        if recorded is None:
            base = prev
        elif prev is not None and prev != recorded:
            kind = "gap" if prev > recorded else "overlap"
            return Refusal(kind, f"chunk {number}: prev {prev}, but {recorded} is recorded", state.recorded)
        before = recorded if recorded is not None else prev or 0
        if max_jump is not None and seqno - before > max_jump:
            detail = f"chunk {number}: seqno {seqno} is {seqno - before} above {before}; the limit is {max_jump}"
            return Refusal("bad-request", detail, state.recorded)
        jumps = refuse_jump(state, chunk, session, recorded)
        if jumps is not None:
            return Refusal("bad-request", f"chunk {number}: {jumps}", state.recorded)
        recorded = seqno
        fresh.append(chunk)
    if session:
        state = use_session(state)
    elif fresh and state.is_used:
        # It was silent and has ended: its writer must not take for its own what it does not know of.
        state = open_session(state, now_ms, state.token)
    if not fresh:
        return Advance(state, fresh, len(chunks))
    topic_id, partition, _, _, number, _, _, owner, is_used, _ = state
    after = SourceState(topic_id, partition, recorded, base, number, now_ms, _unfinished(state), owner, is_used)
    return Advance(after, fresh, len(chunks) - len(fresh))


def decide_append(
    state: SourceState, chunks: list[Chunk], now_ms: int, transaction: int, above: int = 0
) -> Advance | Refusal:
    """Gives the chunks the next seqnos, each with ``prev``; those that they have do not count.

    The first one of a source is the brokers' time in µs: above all that it had before it was forgotten, if it was, and
    exact as a number of JSON. ``transaction``: a number that no other transaction has. ``above``: the last seqno of the
    source that this transaction forgets, at the same time.
    """
    if not state.appended_by and (state.recorded is not None or state.session):
        detail = "the source is written with the seqnos of its writer; append to a source id of its own"
        return Refusal("conflict", detail, state.recorded)
    start = state.recorded if state.recorded is not None else max(now_ms * 1000, above)
    fresh = [chunk._replace(seqno=start + n, prev=start + n - 1) for n, chunk in enumerate(chunks, 1)]
    base = state.base if state.recorded is not None else start
    after = state._replace(
        recorded=start + len(fresh),
        base=base,
        written_ms=now_ms,
        heartbeat=_unfinished(state),
        appended_by=transaction,
    )
    return Advance(after, fresh, 0)


def use_session(state: SourceState) -> SourceState:
    """The state after a chunk or heartbeat with the number of its session."""
    return state if state.is_used else state._replace(is_used=True)


def open_session(state: SourceState, now_ms: int, token: str | None = None) -> SourceState:
    """A new session, of the token: its number is above every earlier one, also above those of an expired state."""
    number = max(state.session + 1, now_ms)
    return state._replace(session=number, written_ms=now_ms, heartbeat=_unfinished(state), token=token, is_used=False)


def _unfinished(state: SourceState) -> Heartbeat | None:
    """The heartbeat of a source that writes, or is about to: segments wait for it again, whatever it said before."""
    beat = state.heartbeat
    return beat._replace(finished=False) if beat is not None and beat.finished else beat


def beat(state: SourceState, new: Heartbeat) -> SourceState:
    """The state with a newer heartbeat; what the heartbeat does not say stays as it was said before."""
    old = state.heartbeat or Heartbeat(new.at_ms, finished=False)
    said = {name: value for name, value in new._asdict().items() if value is not None}
    return state._replace(heartbeat=old._replace(**said))


def _token(raw: bytes) -> str | None:
    """The name of the token in an encoded state; None: none. Raises ValueError where it cannot be decoded."""
    at = token_at(raw)
    return raw[at:].decode() if at < len(raw) else None


@dataclass(slots=True)
class SourceTable:
    """The committed states of one lane, kept as in the state topic: a million sources must fit.

    ``states``: of the sources. ``shares``: how many there are, by the token of each. ``receipts``: of requests without
    seqnos, and ``uploads``; they are no sources. ``count``: the number of lanes that all this belongs to.
    """

    shares: FairShare = field(default_factory=lambda: FairShare(sys.maxsize))
    receipts: ReceiptTable = field(default_factory=ReceiptTable)
    uploads: UploadTable = field(init=False)
    count: LaneCount = _ONE_LANE
    states: PackedStates = field(default_factory=PackedStates)
    # Of sources with a key: topic and key → topic id, partition, how many sources have it.
    _pins: dict[tuple[str, str], tuple[bytes, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uploads = UploadTable(self.receipts.shares)

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, key: object) -> bool:
        """Whether anything is known under the state key, of whatever incarnation of its topic."""
        return isinstance(key, bytes) and self.states.get(key) is not None

    def apply(self, key: bytes, raw: bytes | None) -> None:
        """Takes over a committed state or receipt, of a transaction or of the replay; None forgets it.

        Raises ValueError on a format that is not known: the lane must stop rather than guess.
        """
        if key[:1] == RECEIPT_KIND:
            return self.receipts.apply(key, raw)
        if key == COUNT_KEY:
            if raw is not None:
                self.count = max(self.count, LaneCount.decode(raw), key=attrgetter("epoch"))
            return None
        if key[:1] == UPLOAD_KIND:
            return self.uploads.apply(key, raw)
        if key.decode().count("\0") != _FIELDS.get(key[:1]):
            if raw is None:
                return None
            raise ValueError(f"state key {key!r} cannot be decoded")
        after = None if raw is None else _token(raw)
        kept = self.states.swap(key, raw)
        if key[:1] == b"k":
            self._apply_pin(SourceIdentity.of_state_key(key), kept is None, raw)
        before = None if kept is None else _token(kept)
        if kept is not None and (raw is None or before != after):
            self.shares.give(before, weight(key))
        if raw is not None and (kept is None or before != after):
            self.shares.take(after, weight(key))
        return None

    def _apply_pin(self, source: SourceIdentity, is_new: bool, raw: bytes | None) -> None:
        pin = (source.topic, source.key)
        _, _, count = self._pins.get(pin, (b"", 0, 0))
        if raw is not None:
            state = SourceState.decode(raw)
            self._pins[pin] = (state.topic_id, state.partition, count + is_new)
        elif not is_new:
            topic_id, partition, count = self._pins.pop(pin)
            if count > 1:
                self._pins[pin] = (topic_id, partition, count - 1)

    def get(self, source: SourceIdentity, topic_id: bytes) -> SourceState | None:
        """What is recorded of the source in this incarnation of its topic; None: nothing."""
        state = self.read(source.state_key())
        return state if state is not None and state.topic_id == topic_id else None

    def pinned(self, topic: str, key: str, topic_id: bytes) -> int | None:
        """The partition of a key, by any living source that has it; None: not seen yet."""
        unkeyed = self.get(SourceIdentity(topic, None, key), topic_id)
        if unkeyed is not None:
            return unkeyed.partition
        pin = self._pins.get((topic, key))
        return pin[1] if pin is not None and pin[0] == topic_id else None

    def state_keys(self) -> list[bytes]:
        """The state keys as of now."""
        return [key for key, _ in self.states.items()]

    def read(self, key: bytes) -> SourceState | None:
        kept = self.states.get(key)
        return None if kept is None else SourceState.decode(kept)
