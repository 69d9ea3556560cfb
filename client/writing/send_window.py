"""The chunks of a writer's session between `put` and their acknowledgement. Pure: no clock, no lock.

`RequestWindow` keeps the protocol; here are the chunks, how they are gathered into batches, and what ends the session:

* A chunk's bytes and ``prev`` are fixed when it is taken, and sent again unchanged. A batch of chunks is halved only if
  it is too large.
* A batch that is refused ends the session, but only when everything before it is acknowledged.

A session may be superseded by itself: if the answer to an opening was lost, that opening may take place late. So for
`OWN_OPENING_S` after such an opening the session is opened once more, if only this writer's chunks are recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from logferry.client.errors import Rejected, Superseded, Unknown
from logferry.client.transport.request_window import RequestWindow, Slot
from logferry.client.transport.source_request import NO_ANSWER, GatewayAnswer, NextStep, Outcome, next_step
from logferry.gateway.contract.chunk import Chunk, pack_chunk
from logferry.gateway.contract.names import MAX_SEQNO, check_attributes

OWN_OPENING_S = 60.0
CHUNK_OVERHEAD_BYTES = 200  # of the objects that hold it


class Limits(NamedTuple):
    """``batch_bytes``: of a request, unless one chunk is larger. ``buffer_bytes``: of all chunks not recorded yet."""

    batch_bytes: int = 1 << 20
    batch_chunks: int = 5000
    buffer_bytes: int = 16 << 20
    in_flight: int = 4


class ChunkReceipt(NamedTuple):
    """A chunk is recorded. ``topic``: in full; ``offset``: of its record in the partition.

    What no answer named is None: where a chunk was recorded before, or where its answer was lost.
    """

    seqno: int
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


Heard = Callable[[ChunkReceipt], None]


class PackedChunk(NamedTuple):
    """A chunk as it is sent. ``heard``: to be called with its receipt."""

    seqno: int
    wire: bytes
    heard: Heard | None = None

    @property
    def size(self) -> int:
        return len(self.wire) + CHUNK_OVERHEAD_BYTES


class SendBatch(NamedTuple):
    """The chunks of one request."""

    chunks: tuple[PackedChunk, ...]

    @property
    def last(self) -> int:
        return self.chunks[-1].seqno

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    def body(self) -> bytes:
        return b"".join(chunk.wire for chunk in self.chunks)


class SendJob(NamedTuple):
    """One request: a batch, or None for an opening. ``url``: the owner, if known; None: a given URL.

    ``direct``: the gateway may redirect; else it forwards.
    """

    slot: Slot[SendBatch] | None
    session: int | None
    url: str | None
    direct: bool

    @property
    def batch(self) -> SendBatch | None:
        return None if self.slot is None else self.slot.batch


class SendWindow:
    """The chunks of one source between `put` and their acknowledgement."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.failure: GatewayAnswer | None = None
        self.buffered_bytes = 0
        self.put_count = 0
        self.settled_count = 0
        self._window: RequestWindow[SendBatch] = RequestWindow(limits.in_flight)
        self._unknown_to: int | None = None
        self._last: int | None = None
        self._pending: deque[PackedChunk] = deque()
        self._pending_bytes = 0
        self._batch_bytes = limits.batch_bytes
        self._is_opening = False
        self._opening_lost = False
        self._opened_at = 0.0
        self._is_again = False
        self._trouble = "no gateway has answered yet"
        self._owed: set[Slot[SendBatch]] = set()  # recorded, and their own answer is still to come

    @property
    def session(self) -> int | None:
        return self._window.session

    @property
    def recorded(self) -> int | None:
        """Everything up to it is recorded."""
        return self._window.recorded

    # ---- chunks in -------------------------------------------------------------------------------------------

    def has_room(self, size_bytes: int) -> bool:
        """A chunk that is larger than the buffer is taken alone."""
        needed = size_bytes + CHUNK_OVERHEAD_BYTES
        return self.buffered_bytes == 0 or self.buffered_bytes + needed <= self.limits.buffer_bytes

    def put(
        self,
        data: bytes,
        seqno: int | None,
        created_ms: int,
        attributes: Mapping[str, str],
        heard: Heard | None = None,
    ) -> int:
        """Takes a chunk, once the session is open; returns its seqno. Raises ValueError.

        ``heard`` is called with its receipt, within `take`.
        """
        prev = self._last
        if seqno is None:
            seqno = max(-1 if prev is None else prev, 0 if self.recorded is None else self.recorded) + 1
        if not isinstance(seqno, int) or not 0 <= seqno <= MAX_SEQNO:
            raise ValueError(f"seqno {seqno!r} is not a whole number from 0 to {MAX_SEQNO}")
        if prev is not None and seqno <= prev:
            raise ValueError(f"seqno {seqno} does not follow {prev}, which was written before it")
        if self.recorded is not None and seqno > self.recorded > (-1 if prev is None else prev):
            prev = self.recorded  # what was written before it is a duplicate
        check_attributes(dict(attributes))
        packed = PackedChunk(seqno, pack_chunk(Chunk(seqno, prev, created_ms, dict(attributes), data)), heard)
        self._last = seqno
        self._pending.append(packed)
        self._pending_bytes += packed.size
        self.buffered_bytes += packed.size
        self.put_count += 1
        return seqno

    @property
    def has_work(self) -> bool:
        """Whether the chunks that `put` took justify a request."""
        return not self._window.slots or self._pending_bytes >= self._batch_bytes

    # ---- requests out ----------------------------------------------------------------------------------------

    def next_job(self, now: float) -> SendJob | None:
        """The next request, now under way; None: there is none before `due`."""
        window = self._window
        if self.failure is not None:
            return None
        if window.session is None:
            if self._is_opening or now < window.not_before:
                return None
            self._is_opening = True
            return SendJob(None, None, None, False)
        slot = window.next_slot(now, self._cut)
        if slot is None:
            return None
        window.leave(slot, now)
        return SendJob(slot, window.session, window.url, slot.is_direct)

    def _cut(self) -> SendBatch | None:
        if self._window.slots and self._pending_bytes < self._batch_bytes:
            return None
        chunks: list[PackedChunk] = []
        size = 0
        while self._pending and len(chunks) < self.limits.batch_chunks:
            size += self._pending[0].size
            if chunks and size > self._batch_bytes:
                break
            chunks.append(self._pending.popleft())
        if not chunks:
            return None
        batch = SendBatch(tuple(chunks))
        self._pending_bytes -= batch.size
        return batch

    def due(self) -> float | None:
        """When to call `next_job` again if nothing happens; None: not at all."""
        window = self._window
        if self.failure is not None:
            return None
        if window.session is None:
            return None if self._is_opening else window.not_before
        # The batches behind the first wait for its answer.
        waits = not window.slots[0].is_sent if window.slots else bool(self._pending)
        return window.not_before if waits else None

    def sent(self, job: SendJob) -> None:
        """The job's body has left."""
        if job.slot is not None:
            self._window.left(job.slot)

    # ---- answers in ------------------------------------------------------------------------------------------

    def take(self, job: SendJob, outcome: Outcome, now: float) -> None:
        """The outcome of a job of `next_job`."""
        answer, do = outcome.answer, next_step(outcome.answer)
        if do is not NextStep.ADVANCE:
            self._trouble = str(answer)
        if job.slot is None:
            self._take_opening(answer, do, outcome, now)
            return
        settled = self._window.take(job.slot, outcome, now)
        if job.slot in self._owed:
            self._owed.remove(job.slot)
            _tell(job.slot.batch, answer if do is NextStep.ADVANCE else None)
        self._settle(settled, job.slot, answer)
        if self._window.refused is not None and self.failure is None:
            self._take_refusal(self._window.refused, now)

    def _take_opening(self, answer: GatewayAnswer, do: NextStep, outcome: Outcome, now: float) -> None:
        self._is_opening = False
        window = self._window
        if do is NextStep.ADVANCE:
            ours = [window.recorded, *(slot.batch.last for slot in window.slots if slot.is_maybe or slot.is_sent)]
            if self._is_again and answer.recorded_seqno not in ours:
                self._fail(GatewayAnswer(409, "superseded", f"others wrote up to {answer.recorded_seqno}"))
                return
            window.opened(answer.session, outcome.url, answer.recorded_seqno)
            self._opened_at = now
            if answer.recorded_seqno is not None:
                self._settle(window.advance(answer.recorded_seqno))
        elif do in (NextStep.AGAIN, NextStep.WAIT):
            self._opening_lost = self._opening_lost or do is NextStep.AGAIN
            window.repeat(answer, now, was_direct=False)
        else:
            self._fail(answer)

    def _take_refusal(self, answer: GatewayAnswer, now: float) -> None:
        """The first batch was refused, and nothing before it is under way."""
        window, do = self._window, next_step(answer)
        first = window.slots[0].batch
        if do is NextStep.SMALLER and len(first.chunks) > 1:
            half = len(first.chunks) // 2
            self._batch_bytes = max(first.size // 2, 1)
            window.replace_first(SendBatch(first.chunks[:half]), SendBatch(first.chunks[half:]))
        elif do is NextStep.REOPEN and self._opening_lost and now - self._opened_at < OWN_OPENING_S:
            window.close_session()
            window.retry(now)
            self._opening_lost, self._is_again = False, True
        else:
            self._fail(answer)

    def _settle(
        self, slots: list[Slot[SendBatch]], own: Slot[SendBatch] | None = None, answer: GatewayAnswer | None = None
    ) -> None:
        """``answer``: to the request of ``own``. Another one whose request is under way gets its own, perhaps."""
        for slot in slots:
            self.buffered_bytes -= slot.batch.size
            self.settled_count += len(slot.batch.chunks)
            if slot is not own and slot.is_sent:
                self._owed.add(slot)
            else:
                _tell(slot.batch, answer if slot is own else None)

    # ---- the end ---------------------------------------------------------------------------------------------

    def release_owed(self) -> None:
        """No more answers are waited for: the receipts of what is recorded say no more than that."""
        while self._owed:
            _tell(self._owed.pop().batch, None)

    def break_off(self, why: str) -> None:
        """Ends the session for a reason that no gateway gave."""
        if self.failure is None:
            self._fail(GatewayAnswer(NO_ANSWER, "internal", why))

    def _fail(self, answer: GatewayAnswer) -> None:
        self._unknown_to = self.unknown_to()
        self.failure = answer

    def unknown_to(self) -> int | None:
        """Up to here chunks may be recorded without acknowledgement; None: none above `recorded` is."""
        if self.failure is not None:
            return self._unknown_to
        found = None
        for slot in self._window.slots:
            if not (slot.is_sent or slot.is_maybe):
                break
            found = slot.batch.last
        return found

    def error(self) -> Rejected | None:
        """The error of `failure` for the caller."""
        answer = self.failure
        if answer is None:
            return None
        kind = Superseded if answer.type == "superseded" else Rejected
        text = f"{answer.type or answer.status}: {answer.detail}; {self.progress()}"
        return kind(text, answer.type, answer.status, self.recorded, self.unknown_to())

    def unknown(self, what: str) -> Unknown:
        """The error for a caller whose timeout has ended."""
        text = f"{what}; {self.progress()}; the last problem: {self._trouble}"
        return Unknown(text, self.recorded, self.unknown_to())

    def progress(self) -> str:
        """How much is recorded, in words."""
        maybe = self.unknown_to()
        text = "nothing is recorded" if self.recorded is None else f"everything up to seqno {self.recorded} is recorded"
        return text if maybe is None else f"{text}; up to {maybe} the outcome is unknown"


def _tell(batch: SendBatch, answer: GatewayAnswer | None) -> None:
    """The receipts of a batch that is recorded. ``answer``: that of its request, if it came."""
    for number, chunk in enumerate(batch.chunks):
        if chunk.heard is not None:
            chunk.heard(_receipt(batch, number, answer))


def _receipt(batch: SendBatch, number: int, answer: GatewayAnswer | None) -> ChunkReceipt:
    seqno = batch.chunks[number].seqno
    if answer is None or answer.partition is None:
        return ChunkReceipt(seqno)
    offset, written = None, len(batch.chunks) - answer.duplicates
    nth = number - answer.duplicates
    if answer.offsets is not None and nth >= 0:
        first, last = answer.offsets
        if nth == 0 or last - first + 1 == written:
            offset = first + nth
        elif nth == written - 1:
            offset = last
    return ChunkReceipt(seqno, answer.topic, answer.partition, offset)
