"""The send window of a writer's session: its next request, and the effect of each answer. Pure: no clock, no lock.

Invariants, kept here and nowhere else:

* A chunk's bytes and ``prev`` are fixed when it is taken, and sent again unchanged. A batch of chunks is halved only if
  it is too large.
* Every chunk names the one before it as ``prev``; the first chunk of a new source has none. So batches that overtake
  each other are refused as ``gap``, never recorded out of order. Until the session's first acknowledgement one request
  is under way at a time.
* A batch is begun when the one before it has left this machine (`sent`), so that they seldom overtake each other. When
  they were begun at once, half of the requests were refused for that, and sent again.
* A batch that was not recorded, or whose outcome is unknown, is sent again alone, before anything behind it.
* A batch that is refused ends the session, but only when everything before it is acknowledged: the first error is
  reported first. Nothing behind it can have been recorded.

A session may be superseded by itself: if the answer to an opening was lost, that opening may take place late. So for
`OWN_OPENING_S` after such an opening the session is opened once more, if only this writer's chunks are recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from logferry.client.errors import Rejected, Superseded, Unknown
from logferry.client.transport.cluster import RETRY_S, pause_s
from logferry.client.transport.source_request import FORWARDED_S, NO_ANSWER, GatewayAnswer, NextStep, Outcome, next_step
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


class PackedChunk(NamedTuple):
    """A chunk as it is sent."""

    seqno: int
    wire: bytes

    @property
    def size(self) -> int:
        return len(self.wire) + CHUNK_OVERHEAD_BYTES


@dataclass(eq=False)
class SendBatch:
    """``is_sent``: a request is under way; ``is_out``: its body has left. ``is_maybe``: the outcome of an attempt is
    unknown. ``is_late``: it overtook the batch before it.
    """

    chunks: tuple[PackedChunk, ...]
    is_sent: bool = False
    is_out: bool = False
    is_maybe: bool = False
    is_late: bool = False
    not_before: float = 0.0
    refused: GatewayAnswer | None = None

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

    ``direct``: the gateway may redirect; else it forwards. ``is_first``: everything before it is acknowledged.
    """

    batch: SendBatch | None
    session: int | None
    url: str | None
    direct: bool
    is_first: bool


class SendWindow:
    """The chunks of one source between `put` and their acknowledgement."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.session: int | None = None
        self.recorded: int | None = None
        self.failure: GatewayAnswer | None = None
        self.buffered_bytes = 0
        self.put_count = 0
        self.settled_count = 0
        self._unknown_to: int | None = None
        self._last: int | None = None
        self._pending: deque[PackedChunk] = deque()
        self._pending_bytes = 0
        self._batch_bytes = limits.batch_bytes
        self._batches: deque[SendBatch] = deque()
        self._url: str | None = None
        self._is_opening = False
        self._is_begun = False  # the session has had an acknowledgement
        self._opening_lost = False
        self._opened_at = 0.0
        self._is_again = False
        self._failures = 0
        self._not_before = 0.0
        self._direct_from = 0.0
        self._trouble = "no gateway has answered yet"

    # ---- chunks in -------------------------------------------------------------------------------------------

    def has_room(self, size_bytes: int) -> bool:
        """A chunk that is larger than the buffer is taken alone."""
        needed = size_bytes + CHUNK_OVERHEAD_BYTES
        return self.buffered_bytes == 0 or self.buffered_bytes + needed <= self.limits.buffer_bytes

    def put(self, data: bytes, seqno: int | None, created_ms: int, attributes: Mapping[str, str]) -> int:
        """Takes a chunk, once the session is open; returns its seqno. Raises ValueError."""
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
        packed = PackedChunk(seqno, pack_chunk(Chunk(seqno, prev, created_ms, dict(attributes), data)))
        self._last = seqno
        self._pending.append(packed)
        self._pending_bytes += packed.size
        self.buffered_bytes += packed.size
        self.put_count += 1
        return seqno

    @property
    def has_work(self) -> bool:
        """Whether the chunks that `put` took justify a request."""
        return not self._batches or self._pending_bytes >= self._batch_bytes

    # ---- requests out ----------------------------------------------------------------------------------------

    def next_job(self, now: float) -> SendJob | None:
        """The next request, now under way; None: there is none before `due`."""
        if self.failure is not None:
            return None
        direct = now >= self._direct_from
        if self.session is None:
            if self._is_opening or now < self._not_before:
                return None
            self._is_opening = True
            return SendJob(None, None, None, False, True)
        batch = self._next_batch(now)
        if batch is None:
            return None
        batch.is_sent, batch.is_out, batch.is_late = True, False, False
        return SendJob(batch, self.session, self._url, direct, batch is self._batches[0])

    def _next_batch(self, now: float) -> SendBatch | None:
        if sum(batch.is_sent for batch in self._batches) >= self.limits.in_flight:
            return None
        for number, batch in enumerate(self._batches):
            if number and not self._is_begun:
                return None
            if batch.is_sent and batch.is_out:
                continue
            if batch.is_sent:
                return None
            is_blocked = batch.refused is not None or now < batch.not_before
            is_alone = batch.is_late or batch.is_maybe or batch.not_before > 0
            return None if is_blocked or (number and is_alone) else batch
        if self._batches and not (self._is_begun and self._pending_bytes >= self._batch_bytes):
            return None
        return self._cut()

    def _cut(self) -> SendBatch | None:
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
        self._batches.append(batch)
        return batch

    def due(self) -> float | None:
        """When to call `next_job` again if nothing happens; None: not at all."""
        if self.failure is not None:
            return None
        if self.session is None:
            return None if self._is_opening else self._not_before
        first = self._batches[0] if self._batches else None
        # The batches behind the first wait for its answer, whatever their own time is.
        return first.not_before if first is not None and first.not_before and not first.is_sent else None

    def sent(self, job: SendJob) -> None:
        """The job's body has left."""
        if job.batch is not None:
            job.batch.is_out = True

    # ---- answers in ------------------------------------------------------------------------------------------

    def take(self, job: SendJob, outcome: Outcome, now: float) -> None:
        """The outcome of a job of `next_job`."""
        answer, do = outcome.answer, next_step(outcome.answer)
        if do is not NextStep.ADVANCE:
            self._trouble = str(answer)
        if job.batch is None:
            self._take_opening(answer, do, outcome, now)
        else:
            job.batch.is_sent = False
            if job.batch in self._batches and self.failure is None:
                self._take_batch(job, job.batch, do, outcome, now)
        refused = self._batches[0].refused if self._batches else None
        if refused is not None and self.failure is None:
            self._fail(refused)

    def _take_opening(self, answer: GatewayAnswer, do: NextStep, outcome: Outcome, now: float) -> None:
        self._is_opening = False
        if do is NextStep.ADVANCE:
            ours = [self.recorded, *(batch.last for batch in self._batches if batch.is_maybe or batch.is_sent)]
            if self._is_again and answer.recorded_seqno not in ours:
                self._fail(GatewayAnswer(409, "superseded", f"others wrote up to {answer.recorded_seqno}"))
                return
            self.session, self._url, self._opened_at = answer.session, outcome.url, now
            self._is_begun, self._failures = False, 0
            self._advance(answer.recorded_seqno)
        elif do in (NextStep.AGAIN, NextStep.WAIT):
            self._opening_lost = self._opening_lost or do is NextStep.AGAIN
            self._not_before = self._later(answer, now)
        else:
            self._fail(answer)

    def _take_batch(self, job: SendJob, batch: SendBatch, do: NextStep, outcome: Outcome, now: float) -> None:
        answer = outcome.answer
        if do is NextStep.ADVANCE and (answer.recorded_seqno or 0) >= batch.last:
            self._url = outcome.url
            if job.session == self.session:
                self._is_begun, self._failures = True, 0
            self._advance(batch.last)
        elif job.session != self.session:
            batch.is_maybe = batch.is_maybe or do in (NextStep.AGAIN, NextStep.ADVANCE)
        elif do in (NextStep.AGAIN, NextStep.ADVANCE):
            batch.is_maybe, self._url = True, None  # the owner may be gone or out of reach: a given URL forwards
            if answer.status == NO_ANSWER and job.direct:
                self._direct_from = now + FORWARDED_S
            batch.not_before = self._later(answer, now)
        elif do is NextStep.WAIT:
            batch.not_before = self._later(answer, now)
        elif do is NextStep.ASK:
            self._url, self._direct_from = None, now + FORWARDED_S
            batch.not_before = self._later(answer, now)
        elif do is NextStep.SMALLER and len(batch.chunks) > 1:
            self._halve(batch)
        elif do is NextStep.RECUT and answer.type == "gap" and not job.is_first:
            batch.is_late = True
        elif do is NextStep.REOPEN and self._opening_lost and now - self._opened_at < OWN_OPENING_S:
            self.session, self._opening_lost, self._is_again, self._not_before = None, False, True, now
        else:
            batch.refused = answer

    def _later(self, answer: GatewayAnswer, now: float) -> float:
        self._failures += 1
        return now + pause_s(self._failures, RETRY_S, answer.retry_after_s)

    def _halve(self, batch: SendBatch) -> None:
        half = len(batch.chunks) // 2
        self._batch_bytes = max(batch.size // 2, 1)
        place = self._batches.index(batch)
        self._batches[place] = SendBatch(batch.chunks[:half], is_maybe=batch.is_maybe)
        self._batches.insert(place + 1, SendBatch(batch.chunks[half:], is_maybe=batch.is_maybe))

    def _advance(self, recorded: int | None) -> None:
        """All of this writer's chunks up to ``recorded`` are recorded: ``prev`` allows none without those before it."""
        if recorded is None:
            return
        self.recorded = recorded if self.recorded is None else max(recorded, self.recorded)
        while self._batches and self._batches[0].last <= recorded:
            batch = self._batches.popleft()
            self.buffered_bytes -= batch.size
            self.settled_count += len(batch.chunks)

    # ---- the end ---------------------------------------------------------------------------------------------

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
        for batch in self._batches:
            if not (batch.is_sent or batch.is_maybe):
                break
            found = batch.last
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
