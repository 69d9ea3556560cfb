"""The requests of a lane on their way to an answer: queued, then in the running transaction.

* Each is answered once, whatever comes later.
* Nothing is overtaken: when a request of a source fails, those behind it of the same source fail with it, or a later
  chunk would be recorded and the earlier one be taken for a duplicate when it comes again.
* What fails while it is queued is surely not recorded. What fails in a transaction may be: only the log can say.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from logferry.gateway.errors import Moved, Problem
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.lanes.dedup import Source, SourceTable
from logferry.gateway.lanes.group_commit import Offsets
from logferry.gateway.lanes.transaction import Draft, Outcome, Request, Written, resolve


@dataclass(slots=True)
class Answered:
    """What a request is told: its outcome, and the offsets of its first and last record where they are known."""

    outcome: Outcome
    offsets: tuple[int, int] | None = None


@dataclass(slots=True, eq=False)
class Pending:
    """A request on its way to its answer."""

    request: Request
    answer: asyncio.Future[Answered]
    deadline_s: float


@dataclass(slots=True)
class Waiting:
    """Those of one lane. ``size_bytes``: of all that are not answered."""

    size_bytes: int = 0
    _queue: deque[Pending] = field(default_factory=deque)
    _in_flight: list[tuple[Pending, Outcome]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_queued(self) -> bool:
        """Something waits for a transaction."""
        return bool(self._queue)

    def add(self, request: Request, timeout_s: float) -> asyncio.Future[Answered]:
        """Queues it."""
        # Asked once: until Python 3.12 each asking is a system call, 5 % of a small request.
        loop = self._loop = self._loop or asyncio.get_running_loop()
        pending = Pending(request, loop.create_future(), loop.time() + timeout_s)
        self.size_bytes += request.size_bytes
        self._queue.append(pending)
        return pending.answer

    def take(self) -> Pending:
        """The next one of the queue, to be answered or given to `hold`."""
        return self._queue.popleft()

    def hold(self, pending: Pending, outcome: Outcome) -> None:
        """It is answered so when the running transaction is committed."""
        self._in_flight.append((pending, outcome))

    # ---- answers ----------------------------------------------------------------------------------------------

    def succeed(self, pending: Pending, answered: Answered) -> None:
        if not pending.answer.done():
            self.size_bytes -= pending.request.size_bytes
            pending.answer.set_result(answered)

    def fail(self, pending: Pending, problem: Problem) -> None:
        if not pending.answer.done():
            self.size_bytes -= pending.request.size_bytes
            pending.answer.set_exception(problem)

    def commit(self, offsets: Offsets) -> None:
        """The transaction is in the log, at these offsets."""
        for pending, outcome in self._in_flight:
            self.succeed(pending, _answered(outcome, pending.request.source.topic, offsets))
        self._in_flight.clear()

    def undo(self, draft: Draft, failure: NotCommitted) -> None:
        """The transaction of the draft is not in the log, and never will be."""
        for pending, _ in self._in_flight:
            why = str(failure) if failure.topic == pending.request.topic.name else type(failure.cause).__name__
            self.fail(pending, Problem("kafka-unavailable", f"the transaction failed: {why}"))
        self._in_flight.clear()
        self.fail_queued(draft.touches)

    def settle(self, table: SourceTable) -> None:
        """After fence and replay: what the log holds, the table, is what happened."""
        for pending, outcome in self._in_flight:
            request = pending.request
            committed = resolve(outcome, table.get(request.source, request.topic.id))
            if committed:
                self.succeed(pending, Answered(outcome))
            elif committed is None:
                self.fail(pending, Problem("outcome-unknown", "later sessions hide what happened; send the same again"))
            else:
                self.fail(pending, Problem("kafka-unavailable", "the transaction was not committed"))
        self._in_flight.clear()

    def fail_queued(self, touches: Callable[[Source], bool]) -> None:
        """Later chunks of a source whose earlier ones were undone, or waited too long, must not go first."""
        kept = deque[Pending]()
        for pending in self._queue:
            if touches(pending.request.source):
                self.fail(pending, Problem("kafka-unavailable", "an earlier chunk of the source was not recorded"))
            else:
                kept.append(pending)
        self._queue = kept

    def expire(self, now_s: float, queued: str, in_flight: str) -> None:
        """Answers what waited too long with what is certain: surely not recorded, or not known; and why."""
        expired = set[Source]()
        while self._queue and self._queue[0].deadline_s <= now_s:
            pending = self._queue.popleft()
            expired.add(pending.request.source)
            self.fail(pending, Problem("kafka-unavailable", queued))
        if expired:
            self.fail_queued(expired.__contains__)
        for pending, _ in self._in_flight:
            if pending.deadline_s <= now_s:
                self.fail(pending, Problem("outcome-unknown", in_flight))

    def end(self, queued: str, in_flight: str) -> None:
        """Answers everything: the lane is another worker's, and why."""
        for pending, _ in self._in_flight:
            self.fail(pending, Moved("outcome-unknown", in_flight))
        self._in_flight.clear()
        while self._queue:
            self.fail(self._queue.popleft(), Moved("not-owner-yet", queued))


def _answered(outcome: Outcome, topic: str, offsets: Offsets) -> Answered:
    if isinstance(outcome, Written) and outcome.span is not None:
        batches = offsets[topic, outcome.state.partition]
        if len(batches) == 1 and batches[0][1] >= 0:
            base = batches[0][1]
            return Answered(outcome, (base + outcome.span[0], base + outcome.span[1]))
        first, last = (_offset_of(index, batches) for index in outcome.span)
        if first >= 0 and last >= 0:
            return Answered(outcome, (first, last))
    return Answered(outcome)


def _offset_of(index: int, batches: list[tuple[int, int]]) -> int:
    """The offset of a record by its index in the partition's part of the transaction; -1: not known."""
    found = -1
    for first, base in batches:
        if first > index:
            break
        found = -1 if base < 0 else base + index - first
    return found
