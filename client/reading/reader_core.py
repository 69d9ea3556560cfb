"""What `Reader` and `AsyncReader` share: everything but waits and I/O.

Each operation is a generator of steps. A face carries out a step and sends back its result, or throws in the error
that it raised (`RetryLater`, `LogferryError`). The chunks fetched ahead are in a `PartitionScheduler` (no consumer) or
a `GroupMembership` (with one). Nothing is locked here: a face advances one generator at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Callable, NamedTuple, TypeVar, Union

from logferry.client.errors import Closed, LogferryError, OutOfRange, OwnProcess, Superseded, Unknown
from logferry.client.reading.decode import Line, ReceivedChunk
from logferry.client.reading.duplicates import DuplicateFilter, spans_data_centres
from logferry.client.reading.prefetch import GroupMembership, PartitionScheduler, PartitionsRevoked, has_news
from logferry.client.reading.requests import (
    RetryLater,
    content_of,
    cursors_of,
    document_of,
    full_topics,
    lags_of,
    resolve_cursors,
    start_positions,
    translated_offset,
)
from logferry.client.reading.subscription import Cursors, Partition, Position, ReaderOptions, ReadOffset
from logferry.client.transport.cluster import TroubleLog, left_s
from logferry.client.transport.connections import Reply

_T = TypeVar("_T")
LOOK_INTERVAL_S = 30.0


class Ask(NamedTuple):
    """One request → its `Reply`; for a page of chunks → these, and the next offset."""

    path: str
    body: bytes | None = None
    is_page: bool = False


class HoldSession(NamedTuple):
    """A consumer's session, to its end, its frames to `ReaderCore.feeding`."""

    topics: list[str]


class CallRevoked(NamedTuple):
    """The program's ``on_revoked``."""


class Wait(NamedTuple):
    """Until `ReaderCore.notify`, or so long."""

    seconds: float | None


class StartWorkers(NamedTuple):
    """A thread or task for each."""

    workers: Sequence[Generator[Any, Any, None]]


Step = Union[Ask, HoldSession, CallRevoked, Wait, StartWorkers]
Steps = Generator[Step, Any, _T]


class ReaderCore:
    """The state of a reader. ``notify``: wakes all that wait, since something has changed."""

    def __init__(self, options: ReaderOptions, drop_copies: bool, notify: Callable[[], None]) -> None:
        self.options = options
        self.notify = notify
        self.process = OwnProcess("a reader of its own")
        self.is_closed = False
        self.failure: LogferryError | None = None
        self._left = options.max_chunks
        self._duplicates = DuplicateFilter() if drop_copies and spans_data_centres(options.topics) else None
        self._source: PartitionScheduler | GroupMembership = PartitionScheduler(0)  # until it is open
        self._is_open = False
        self._next_look = 0.0
        self._has_begun = False  # the session, with more than its opening
        self._moves = 0
        self._trouble = TroubleLog("reader")

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return not self.is_closed and self.failure is None

    @property
    def is_over(self) -> bool:
        return self._left == 0 or (self._is_open and self._source.is_over)

    @property
    def position(self) -> Position:
        return self._source.position

    def check_open(self) -> None:
        if self.is_closed:
            raise Closed("the reader is closed: open another one")

    def fail(self, error: Exception) -> None:
        """The first error counts; the caller gets it after the chunks that came before it."""
        known = error if isinstance(error, LogferryError) else LogferryError(repr(error))
        self.failure = self.failure or known
        self.notify()

    # ---- in the caller ---------------------------------------------------------------------------------------

    def opening(self, deadline: float | None) -> Steps[None]:
        """Finds the topics and where to begin; nothing where it was open already."""
        self.check_open()
        if self._is_open:
            return
        self.options = yield from self._follow(resolve_cursors(self.options), deadline)
        if self.options.consumer is not None:
            topics = yield from self._follow(full_topics(self.options), deadline)
            self._source, self._is_open = GroupMembership(self.options.stored(), self.options.follow), True
            yield StartWorkers([self._holding_sessions(topics)])
            return
        scheduler = PartitionScheduler(self.options.connections)
        for start in (yield from self._follow(start_positions(self.options), deadline)):
            scheduler.add(*start)
        self._source, self._is_open, self._next_look = scheduler, True, time.monotonic() + LOOK_INTERVAL_S
        yield StartWorkers([self._fetching(scheduler) for _ in range(self.options.connections)])

    def next_chunk(self, deadline: float | None) -> Steps[ReceivedChunk | None]:
        """The next chunk; None at the end, or at the deadline. `deliver` or `lines_of` follows. Opens if need be."""
        if self._left == 0:
            return None
        if not self._is_open:
            yield from self.opening(deadline)
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
        self._source.reach(chunk, ReadOffset(chunk.offset + 1))

    def lines_of(self, chunk: ReceivedChunk) -> Iterator[Line]:
        """The lines that were not handed out before. `position` counts each before it is handed out."""
        found, moves = chunk.lines(), self._moves
        at = self._source.at(chunk)
        for number in range(at.lines if at.offset == chunk.offset else 0, len(found)):
            if number + 1 < len(found):
                self._source.reach(chunk, ReadOffset(chunk.offset, number + 1))
            else:
                self.deliver(chunk)
            yield Line(chunk.source_id, chunk.seqno, number, found[number], chunk)
            if moves != self._moves:
                return
        self.deliver(chunk)

    def cursors(self, deadline: float | None) -> Steps[Cursors]:
        return self._follow(cursors_of(self.options, self.position), deadline)

    def translate(
        self, partition: Partition, offset: int, from_dc: str, to_dc: str, deadline: float | None
    ) -> Steps[int]:
        return self._follow(translated_offset(self.options, partition, offset, from_dc, to_dc), deadline)

    def lags(self, deadline: float | None) -> Steps[dict[Partition, int | None]]:
        return self._follow(lags_of(self.options, self.position), deadline)

    def seeking(self, to: str | Position, deadline: float | None) -> Steps[None]:
        """Every partition that the position names is read from there on."""
        wanted = replace(self.options, start=to)
        if not isinstance(wanted.start, Position):
            raise ValueError(f"seek: {to!r} is no position")
        yield from self.opening(deadline)
        scheduler = self._pages("seek")
        wanted = yield from self._follow(resolve_cursors(wanted), deadline)
        places = wanted.stored()
        self._check_known("seek", places)
        for partition, at in places.items():
            scheduler.move(partition, at)
        self._moves += 1
        self.notify()

    def pausing(self, partitions: Iterable[Partition] | None, is_paused: bool, deadline: float | None) -> Steps[None]:
        """None: all."""
        yield from self.opening(deadline)
        scheduler = self._pages("pause")
        wanted = list(self.position if partitions is None else partitions)
        self._check_known("pause", wanted)
        for partition in wanted:
            scheduler.pause(partition, is_paused)
        self.notify()

    def _pages(self, call: str) -> PartitionScheduler:
        if isinstance(self._source, PartitionScheduler):
            return self._source
        raise ValueError(
            f"{call}: the gateway sends a consumer its chunks; to set it elsewhere, use PUT"
            " /v1/consumers/{consumer}/offsets"
        )

    def _check_known(self, call: str, partitions: Iterable[Partition]) -> None:
        strange = [f"{topic}:{number}" for topic, number in partitions if (topic, number) not in self.position]
        if strange:
            raise ValueError(f"{call}: {', '.join(strange)} is not read by this reader")

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
                before, path = path, steps.send((yield from self._insist(Ask(path), deadline)))
                if path == before and deadline is not None and time.monotonic() >= deadline:
                    raise Unknown(f"{path}: a partition has no leader")
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
                start, page_bytes = f"offset={request.offset}", self.options.page_bytes
                path = self.options.page_path(request.partition, start, page_bytes, request.wait_ms)
                chunks, next_offset = yield Ask(path, is_page=True)
            except RetryLater as again:
                self._trouble.failed(now, again)
                scheduler.fail(request, again, time.monotonic())
            except OutOfRange as error:  # the response does not name the partition
                if not scheduler.is_current(request):
                    scheduler.take(request, (), request.offset)
                    continue
                raise OutOfRange(str(error), *request.partition, error.first, error.next) from None
            else:
                self._trouble.worked()
                scheduler.take(request, chunks, next_offset)
                self.notify()

    def _look_for_partitions(self, scheduler: PartitionScheduler) -> Steps[None]:
        """Adds partitions that the topics have gained. A failure does no harm: the next look comes."""
        with suppress(LogferryError, RetryLater):
            for topic in self.options.topics:
                document = document_of((yield Ask(self.options.topic_path(topic))))
                for one in document["offsets"]:
                    if self.options.reads(one["partition"]) and one["first"] is not None:
                        partition = str(document["topic"]), int(one["partition"])
                        scheduler.add(partition, ReadOffset(int(one["first"])), None)

    def _holding_sessions(self, topics: list[str]) -> Steps[None]:
        """Session after session, until an error that the next one would meet, too."""
        failures = 0
        while self.is_running:
            again, began = RetryLater("the session ended"), time.monotonic()
            self._has_begun = False
            try:
                yield HoldSession(topics)
            except RetryLater as error:
                again = error
            if self._has_begun:
                self._trouble.worked()
            else:
                self._trouble.failed(began, again)
            failures = 1 if self._has_begun else failures + 1
            yield from self._pause(again.pause_s(failures), lambda: self.is_running)

    def feeding(self, frames: Sequence[Any]) -> Steps[bool]:
        """Takes frames of a session once those before are handed out. Returns whether more are wanted."""
        if isinstance(self._source, GroupMembership):
            while self._source.frames and self.is_running:
                yield Wait(None)
            self._source.feed(frames)
            self._has_begun = self._has_begun or has_news(frames)
            self.notify()
        return self.is_running
