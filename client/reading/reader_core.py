"""What `Reader` and `AsyncReader` share: everything but waits and I/O.

Each operation is a generator of steps. A face carries out a step and sends back its result, or throws in the error
that it raised (`RetryLater`, `LogferryError`). The chunks fetched ahead are in a `PartitionScheduler` (no consumer) or
a `GroupMembership` (with one). Nothing is locked here: a face advances one generator at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, Callable, NamedTuple, TypeVar, Union

from logferry.client.errors import Closed, LogferryError, OutOfRange, Superseded, Unknown
from logferry.client.reading.decode import Line, ReceivedChunk
from logferry.client.reading.duplicates import DuplicateFilter, spans_data_centres
from logferry.client.reading.group_membership import GroupMembership, PartitionsRevoked
from logferry.client.reading.partition_scheduler import PageRequest, PartitionScheduler
from logferry.client.reading.position import Cursors, Partition, Position, ReadOffset
from logferry.client.reading.requests import RetryLater, content_of
from logferry.client.reading.start_positions import (
    LOOK_INTERVAL_S,
    cursors_of,
    full_topics,
    new_partitions,
    resolve_cursors,
    start_positions,
    translated_offset,
)
from logferry.client.reading.subscription import ReaderOptions
from logferry.client.transport.backoff import TroubleLog, left_s
from logferry.client.transport.connections import Reply

_T = TypeVar("_T")


class Ask(NamedTuple):
    """One request → its `Reply`."""

    path: str
    body: bytes | None = None


class FetchPage(NamedTuple):
    """One page of a partition → its chunks and the next offset."""

    request: PageRequest


class HoldSession(NamedTuple):
    """A consumer's session, to its end, its frames to `ReaderCore.feeding` → whether there was more than an opening."""

    topics: list[str]


class CallRevoked(NamedTuple):
    """The program's ``on_revoked``."""


class Wait(NamedTuple):
    """Until `ReaderCore.notify`, or so long."""

    seconds: float | None


Step = Union[Ask, FetchPage, HoldSession, CallRevoked, Wait]
Steps = Generator[Step, Any, _T]


class ReaderCore:
    """The state of a reader. ``notify``: wakes all that wait, since something has changed."""

    def __init__(self, options: ReaderOptions, drop_copies: bool, notify: Callable[[], None]) -> None:
        self.options = options
        self.notify = notify
        self.is_closed = False
        self.failure: LogferryError | None = None
        self._left = options.max_chunks
        self._duplicates = DuplicateFilter() if drop_copies and spans_data_centres(options.topics) else None
        self._source: PartitionScheduler | GroupMembership | None = None
        self._next_look = 0.0
        self._trouble = TroubleLog("reader")

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return not self.is_closed and self.failure is None

    @property
    def is_open(self) -> bool:
        return self._source is not None

    @property
    def is_over(self) -> bool:
        return self._left == 0 or (self._source is not None and self._source.is_over)

    @property
    def has_reached_limit(self) -> bool:
        """``max_chunks`` were handed out."""
        return self._left == 0

    @property
    def position(self) -> Position:
        return Position({}) if self._source is None else self._source.position

    def check_open(self) -> None:
        if self.is_closed:
            raise Closed("the reader is closed: open another one")

    def fail(self, error: Exception) -> None:
        """The first error counts; the caller gets it after the chunks that came before it."""
        known = error if isinstance(error, LogferryError) else LogferryError(repr(error))
        self.failure = self.failure or known
        self.notify()

    # ---- in the caller ---------------------------------------------------------------------------------------

    def opening(self, deadline: float | None) -> Steps[Sequence[Steps[None]]]:
        """Finds the topics and where to begin. Returns the workers to start: none where it was open already."""
        self.check_open()
        if self.is_open:
            return ()
        self.options = yield from self._follow(resolve_cursors(self.options), deadline)
        if self.options.consumer is not None:
            topics = yield from self._follow(full_topics(self.options), deadline)
            self._source = GroupMembership(self.options.stored(), self.options.follow)
            return (self._holding_sessions(topics),)
        scheduler = PartitionScheduler(self.options.connections)
        for start in (yield from self._follow(start_positions(self.options), deadline)):
            scheduler.add(*start)
        self._source, self._next_look = scheduler, time.monotonic() + LOOK_INTERVAL_S
        return [self._fetching(scheduler) for _ in range(self.options.connections)]

    def next_chunk(self, deadline: float | None) -> Steps[ReceivedChunk | None]:
        """The next chunk; None at the end, or at the deadline. `deliver` or `lines_of` follows."""
        while True:
            try:
                chunk = self._poll()
            except PartitionsRevoked:
                yield CallRevoked()
                continue
            except LogferryError as error:
                self.fail(error)
                raise
            if chunk is not None or self.is_over:
                return chunk
            left = left_s(deadline)
            if left is not None and left <= 0:
                return None
            yield Wait(left)

    def _poll(self) -> ReceivedChunk | None:
        """None: no chunk is there now. Raises `PartitionsRevoked`, and errors for the caller."""
        self.check_open()
        source = self._source
        if source is None:
            raise Closed("the reader is not open")
        while True:
            freed = source.freed
            try:
                chunk = source.next_chunk()
            except RetryLater:
                continue  # another session follows
            finally:
                if source.freed != freed:
                    self.notify()  # there is room for more
            if chunk is None:
                if self.failure is not None:
                    raise self.failure
                return None
            if self._duplicates is not None and self._duplicates.is_duplicate(chunk):
                self.deliver(chunk)
                continue
            if self._left is not None:
                self._left -= 1
            return chunk

    def deliver(self, chunk: ReceivedChunk) -> None:
        """All of the chunk is handed out."""
        self._reach(chunk, ReadOffset(chunk.offset + 1))

    def lines_of(self, chunk: ReceivedChunk) -> Iterator[Line]:
        """The lines that were not handed out before. `position` counts each before it is handed out."""
        found = chunk.lines()
        at = None if self._source is None else self._source.at(chunk)
        for number in range(at.lines if at is not None and at.offset == chunk.offset else 0, len(found)):
            if number + 1 < len(found):
                self._reach(chunk, ReadOffset(chunk.offset, number + 1))
            else:
                self.deliver(chunk)
            yield Line(chunk.source_id, chunk.seqno, number, found[number], chunk)
        self.deliver(chunk)

    def _reach(self, chunk: ReceivedChunk, at: ReadOffset) -> None:
        if self._source is not None:
            self._source.reach(chunk, at)

    def cursors(self, deadline: float | None) -> Steps[Cursors]:
        return self._follow(cursors_of(self.options, self.position), deadline)

    def translate(
        self, partition: Partition, offset: int, from_dc: str, to_dc: str, deadline: float | None
    ) -> Steps[int]:
        return self._follow(translated_offset(self.options, partition, offset, from_dc, to_dc), deadline)

    def commit(self, deadline: float | None) -> Steps[None]:
        if self.options.consumer is None:
            raise ValueError("commit: a reader without a consumer has nowhere to commit; store its position")
        if not isinstance(self._source, GroupMembership):
            return
        body = self._source.to_commit()
        if body is not None:
            path = self.options.commit_path(self._source.session)
            yield from self._insist(Ask(path, json.dumps(body).encode()), deadline)
            self._source.committed(body)
        lost = self._source.lost()
        if lost:
            named = ", ".join(f"{topic}:{number}" for topic, number in lost)
            raise Superseded(
                f"superseded: {named} moved to another reader before this; what was not committed comes again"
            )

    def _follow(self, steps: Generator[str, Reply, _T], deadline: float | None) -> Steps[_T]:
        try:
            path = next(steps)
            while True:
                path = steps.send((yield from self._insist(Ask(path), deadline)))
        except StopIteration as result:
            found: _T = result.value
            return found

    def _insist(self, ask: Ask, deadline: float | None) -> Steps[Reply]:
        """Asks until a good response comes. Raises errors for the caller, and `Unknown` at the deadline."""
        failures, began, trouble = 0, time.monotonic(), TroubleLog("reader")
        while True:
            try:
                reply: Reply = yield ask
                content_of(reply)
                return reply
            except RetryLater as again:
                failures += 1
                trouble.failed(began, again)
                pause_s = again.pause_s(failures)
                if deadline is not None and time.monotonic() + pause_s >= deadline:
                    raise Unknown(f"no answer in time: {again}") from None
            yield from self._pause(pause_s, lambda: not self.is_closed)
            self.check_open()

    def _pause(self, seconds: float, goes: Callable[[], bool]) -> Steps[None]:
        until = time.monotonic() + seconds
        while goes() and (left := until - time.monotonic()) > 0:
            yield Wait(left)

    # ---- in the workers --------------------------------------------------------------------------------------

    def _fetching(self, scheduler: PartitionScheduler) -> Steps[None]:
        """Fetches the pages that the scheduler wants; now and then looks for new partitions."""
        follow = self.options.follow
        while self.is_running and not scheduler.is_over:
            now = time.monotonic()
            if follow and now >= self._next_look:
                self._next_look = now + LOOK_INTERVAL_S
                yield from self._look_for_partitions(scheduler)
                continue
            request = scheduler.next_request(now)
            if request is None:
                times = [at for at in (scheduler.due(now), self._next_look if follow else None) if at]
                yield Wait(max(min(times) - now, 0.0) if times else None)
                continue
            try:
                chunks, next_offset = yield FetchPage(request)
            except RetryLater as again:
                self._trouble.failed(now, again)
                pause_s = again.pause_s(scheduler.fail(request))
                scheduler.hold(request, time.monotonic() + pause_s)
            except OutOfRange as error:  # the response does not name the partition
                raise OutOfRange(str(error), *request.partition, error.first, error.next) from None
            else:
                self._trouble.worked()
                scheduler.take(request, chunks, next_offset)
                self.notify()

    def _look_for_partitions(self, scheduler: PartitionScheduler) -> Steps[None]:
        """A failure does no harm: the next look comes."""
        steps = new_partitions(self.options, scheduler)
        with suppress(StopIteration, LogferryError, RetryLater):
            path = next(steps)
            while True:
                path = steps.send((yield Ask(path)))

    def _holding_sessions(self, topics: list[str]) -> Steps[None]:
        """Session after session, until an error that the next one would meet, too."""
        failures = 0
        while self.is_running:
            again, began = RetryLater("the session ended"), time.monotonic()
            try:
                has_begun = yield HoldSession(topics)
            except RetryLater as error:
                has_begun, again = False, error
            if has_begun:
                self._trouble.worked()
            else:
                self._trouble.failed(began, again)
            failures = 1 if has_begun else failures + 1
            yield from self._pause(again.pause_s(failures), lambda: self.is_running)

    def feeding(self, frames: Sequence[Any]) -> Steps[bool]:
        """Takes frames of a session once those before are handed out. Returns whether more are wanted."""
        if isinstance(self._source, GroupMembership):
            while self._source.has_frames and self.is_running:
                yield Wait(None)
            self._source.feed(frames)
            self.notify()
        return self.is_running
