"""A lane: the unit of ownership and fencing. It alone writes the chunks of its sources and knows their states.

The order that makes it safe, and the windows that it covers:

* open: fence first, replay second. The fence ends the older owner's transaction; only then is the state topic
  complete, and read up to its end it is what is in the log.
* write: one transaction at a time; what arrives meanwhile gathers for the next.
* killed before the commit: nothing of the transaction is in the log. Killed after it: all of it is, with the states.
* the commit's answer never came: the lane fences itself and replays, and each waiting request is answered from
  what the log says. Where the lane is lost meanwhile, the answer is "unknown".
* frozen and continued: the commit is refused by the fence, and the lane opens again only when the group confirms
  that it is still this worker's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.config import Config
from logferry.gateway.course import Course
from logferry.gateway.errors import LaneLost, Problem
from logferry.gateway.kafka import EARLIEST, LATEST, Kafka
from logferry.gateway.metrics import LaneMetrics
from logferry.gateway.producer import LaneProducer, NotCommitted, Offsets, OutcomeUnknown
from logferry.gateway.sources import Refusal, Source, SourceState, SourceTable
from logferry.gateway.topics import Topics
from logferry.gateway.transaction import Draft, Outcome, Request, Written, resolve

_REPLAY_FETCH_BYTES: Final = 1 << 20
_SCAN_SLICE: Final = 5000
_EXPIRED_A_TRANSACTION: Final = 200
_BACKOFF_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0)


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


@dataclass(slots=True, eq=False)
class Lane:
    """One lane as held by this worker. `run` keeps it until `close`, or until the group gives it away."""

    number: int
    config: Config
    kafka: Kafka
    topics: Topics
    metrics: LaneMetrics
    confirm_ownership: Callable[[int], Awaitable[None]]
    grace_s: float = 0.0
    course: Course = field(default_factory=Course)
    table: SourceTable = field(default_factory=SourceTable)
    queued_bytes: int = 0
    _queue: deque[Pending] = field(default_factory=deque)
    _expired: deque[bytes] = field(default_factory=deque)
    _in_flight: list[tuple[Pending, Outcome]] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _closing: bool = False
    _doubted: bool = False
    _producer: LaneProducer | None = None
    _confirming: set[asyncio.Task[None]] = field(default_factory=set)

    # ---- from outside -----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of `course.STATES`."""
        return self.course.state

    @property
    def why(self) -> str:
        """The reason of the state, for those who have to wait."""
        return self.course.why

    @property
    def is_open(self) -> bool:
        """Takes requests, though it may still be opening."""
        return not self._closing

    def submit(self, request: Request) -> asyncio.Future[Answered]:
        """Queues a request. Raises Problem when the lane is closing or full.

        The answer comes within the time-out of requests, if only to say that the outcome is not known.
        """
        if self._closing:
            raise Problem("not-owner-yet", f"lane {self.number} is moving to another worker")
        if self.queued_bytes + request.size_bytes > self.config.limits.lane_bytes:
            raise Problem("overloaded", f"lane {self.number} has {self.queued_bytes} bytes waiting: {self.why}")
        loop = asyncio.get_running_loop()
        pending = Pending(request, loop.create_future(), loop.time() + self.config.limits.request_timeout_s)
        self.queued_bytes += request.size_bytes
        self._queue.append(pending)
        self._wake.set()
        return pending.answer

    def expire(self, now_s: float) -> None:
        """Answers what waited too long with what is certain: surely not recorded, or not known."""
        expired = set[Source]()
        while self._queue and self._queue[0].deadline_s <= now_s:
            problem = Problem("kafka-unavailable", f"lane {self.number} is {self.state}: {self.why}")
            expired.add(self._queue[0].request.source)
            self._fail(self._queue.popleft(), problem)
        if expired:
            self._fail_queued(expired.__contains__)
        for pending, _ in self._in_flight:
            if pending.deadline_s <= now_s:
                problem = Problem("outcome-unknown", f"the commit is not answered yet: {self.why}")
                self._fail(pending, problem)

    def look_up(self, source: Source, topic_id: bytes) -> SourceState | None:
        """What was committed when it was last heard: a hint. A client decides on the answer of a session alone."""
        return self.table.get(source, topic_id)

    async def find_expired(self, now_ms: int) -> None:
        """Looks for sources that were not heard of for the retention; they are forgotten a few in a transaction."""
        if self.state != "serving" or self._expired:
            return
        before_ms = now_ms - self.config.source_retention_ms
        table, found = self.table, deque[bytes]()
        for count, key in enumerate(table.state_keys()):
            state = table.read(key)
            if state is not None and state.alive_ms < before_ms:
                found.append(key)
            if count % _SCAN_SLICE == 0:
                await asyncio.sleep(0)
        if found and self.table is table:
            self._expired = found
            self._wake.set()

    async def sources(self, topic: str, wants: Callable[[str], bool]) -> list[tuple[Source, SourceState]]:
        """The sources of a topic that are known to this lane, in no order. Raises Problem while it does not serve."""
        if self.state != "serving":
            raise Problem("not-owner-yet", f"lane {self.number} is {self.state}: {self.why}")
        table, found = self.table, []
        prefixes = (b"s%s\0" % topic.encode(), b"k%s\0" % topic.encode())
        for count, key in enumerate(table.state_keys()):
            if key.startswith(prefixes):
                source = Source.of_state_key(key)
                state = table.read(key) if wants(source.source_id) else None
                if state is not None:
                    found.append((source, state))
            if count % _SCAN_SLICE == 0:
                await asyncio.sleep(0)
        return found

    async def run(self) -> None:
        """Opens and serves, again after each failure, until closed. Whatever waits is answered before it ends."""
        try:
            await asyncio.sleep(self.grace_s)
            failures = 0
            while not (self._closing and not self._queue):
                try:
                    await self._open(first=self._producer is None and failures == 0)
                    failures = 0
                    await self._serve()
                except (NotCommitted, OutcomeUnknown, errors.KafkaError, OSError, TimeoutError) as error:
                    # Why in full is for the log: the text may name a topic that whoever asks must not know of.
                    self.course.fail(error)
                    log.event("warning", "lane_failed", lane=self.number, error=repr(error))
                    self.metrics.failed(error)
                    await self._drop_producer()
                    if self._closing:
                        return
                    await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                    failures += 1
                    await self._confirm()
        except LaneLost as error:
            self._closing = True
            self.course.enter("closed", str(error))
            log.event("info", "lane_lost", lane=self.number, why=str(error))
        finally:
            self._closing = True
            self.course.enter("closed")
            await self._drop_producer()
            self._answer_leftovers()
            self.metrics.closed()

    def close(self) -> None:
        """Stops accepting; `run` ends after the running transaction and what was queued before."""
        self._closing = True
        self.course.enter(self.state, "given away")
        self._wake.set()

    def doubt(self) -> None:
        """Another worker may have had the lane meanwhile: it is opened anew before the next request is judged."""
        self._doubted = True
        self._wake.set()

    # ---- opening ----------------------------------------------------------------------------------------------

    async def _confirm(self) -> None:
        """Lanes are opened again only by their owner of the present generation, or two would fence in turn."""
        while True:
            try:
                return await self.confirm_ownership(self.number)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                self.course.enter(self.state, f"the group does not answer: {error!r}")
                await asyncio.sleep(_BACKOFF_S[-1])

    async def _open(self, *, first: bool) -> None:
        if self._producer is not None:
            return
        started = time.monotonic()
        self._doubted = False
        self.course.enter("fencing")
        producer = LaneProducer(self.kafka, self.topics, self.config, self.number)
        self._producer = producer
        await producer.fence()
        fenced = time.monotonic()
        self.course.enter("replaying")
        self.table = await self._replay()
        self.course.enter("serving", "open")
        now = time.monotonic()
        self.metrics.opened(first=first, replay_s=now - fenced)
        log.event(
            "info",
            "lane_open",
            lane=self.number,
            sources=len(self.table),
            fence_ms=round((fenced - started) * 1000),
            replay_ms=round((now - fenced) * 1000),
        )
        self._settle_unresolved()

    async def _replay(self) -> SourceTable:
        topic, table = self.config.state_topic, SourceTable()
        end = await self.kafka.offset(topic, self.number, LATEST)
        position = await self.kafka.offset(topic, self.number, EARLIEST)
        while position < end:
            fetched = await self.kafka.fetch(topic, self.number, position, max_bytes=_REPLAY_FETCH_BYTES)
            for record in fetched.records:
                table.apply(record.key or b"", record.value)
            position = fetched.next_offset
        return table

    def _settle_unresolved(self) -> None:
        """After fence and replay: what the log holds is what happened."""
        for pending, outcome in self._in_flight:
            request = pending.request
            committed = resolve(outcome, self.table.get(request.source, request.topic.id))
            if committed:
                self._succeed(pending, Answered(outcome))
            elif committed is None:
                self._fail(
                    pending, Problem("outcome-unknown", "later sessions hide what happened; send the same again")
                )
            else:
                self._fail(pending, Problem("kafka-unavailable", "the transaction was not committed"))
        self._in_flight.clear()

    # ---- serving ----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            while not (self._queue or self._expired or self._doubted):
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
            if self._doubted:
                await self._drop_producer()
                await self._open(first=False)
                continue
            producer = self._producer
            if producer is None:
                raise LaneLost(f"lane {self.number} has no producer")
            await producer.settled()
            draft = self._draft()
            if draft.is_empty():
                continue
            started = time.monotonic()
            self.course.begin()
            try:
                offsets = await producer.transact(draft)
            except NotCommitted as failure:
                self._undo(draft, failure)
                raise
            except OutcomeUnknown:
                self._fail_queued(draft.touches)
                raise
            for key, raw in draft.states.items():
                self.table.apply(key, raw)
            self.course.commit()
            self.metrics.committed(time.monotonic() - started, draft.records)
            for pending, outcome in self._in_flight:
                self._succeed(pending, _answered(outcome, pending.request.source.topic, offsets))
            self._in_flight.clear()

    def _draft(self) -> Draft:
        """Puts the next transaction together; what does not have to wait for it is answered at once."""
        draft = Draft(self.table, int(time.time() * 1000), self.config.max_seqno_jump)
        limit = self.config.limits.transaction_bytes
        queue = self._queue
        while queue and draft.size_bytes < limit:
            pending = queue.popleft()
            outcome, must_wait = draft.add(pending.request)
            if must_wait:
                self._in_flight.append((pending, outcome))
            elif isinstance(outcome, Refusal) and outcome.kind != "superseded":
                self._succeed(pending, Answered(outcome))
            else:
                answer = self._answer_superseded if isinstance(outcome, Refusal) else self._answer_duplicates
                task = asyncio.create_task(answer(pending, outcome))
                self._confirming.add(task)
                task.add_done_callback(self._confirming.discard)
        for _ in range(min(len(self._expired), _EXPIRED_A_TRANSACTION)):
            draft.expire(self._expired.popleft(), draft.now_ms - self.config.source_retention_ms)
        return draft

    async def _answer_superseded(self, pending: Pending, outcome: Outcome) -> None:
        """A worker that slept must not tell the newest session, which another one opened, that there is a newer one."""
        judged_by = self.table
        try:
            await self.confirm_ownership(self.number)
        except LaneLost as error:
            return self._fail(pending, Problem("not-owner-yet", str(error)))
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return self._fail(pending, Problem("kafka-unavailable", f"the group does not answer: {error!r}"))
        if self.table is judged_by and not (self._doubted or self._closing):
            return self._succeed(pending, Answered(outcome))
        return self._fail(pending, Problem("not-owner-yet", f"lane {self.number} was opened anew; try again"))

    async def _answer_duplicates(self, pending: Pending, outcome: Outcome) -> None:
        """A duplicate is acknowledged when the topic still is the one that its original was recorded in."""
        topic = pending.request.topic
        try:
            partition = outcome.state.partition if isinstance(outcome, Written) else 0
            found = await self.topics.confirm([(topic.name, partition)])
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return self._fail(pending, Problem("kafka-unavailable", f"the topic cannot be looked at: {error!r}"))
        if found.get(topic.name) == topic.id:
            return self._succeed(pending, Answered(outcome))
        self.topics.forget(topic.name)
        return self._fail(pending, Problem("kafka-unavailable", f"{topic.name} was deleted meanwhile; try again"))

    # ---- answering --------------------------------------------------------------------------------------------

    def _succeed(self, pending: Pending, answered: Answered) -> None:
        if not pending.answer.done():
            self.queued_bytes -= pending.request.size_bytes
            pending.answer.set_result(answered)

    def _fail(self, pending: Pending, problem: Problem) -> None:
        if not pending.answer.done():
            self.queued_bytes -= pending.request.size_bytes
            pending.answer.set_exception(problem)

    def _undo(self, draft: Draft, failure: NotCommitted) -> None:
        for pending, _ in self._in_flight:
            why = str(failure) if failure.topic == pending.request.topic.name else type(failure.cause).__name__
            self._fail(pending, Problem("kafka-unavailable", f"the transaction failed: {why}"))
        self._in_flight.clear()
        self._fail_queued(draft.touches)

    def _fail_queued(self, touches: Callable[[Source], bool]) -> None:
        """Later chunks of a source whose earlier ones were undone, or waited too long, must not go first."""
        kept = deque[Pending]()
        for pending in self._queue:
            if touches(pending.request.source):
                self._fail(pending, Problem("kafka-unavailable", "an earlier chunk of the source was not recorded"))
            else:
                kept.append(pending)
        self._queue = kept

    def _answer_leftovers(self) -> None:
        for pending, _ in self._in_flight:
            problem = Problem("outcome-unknown", f"lane {self.number} was lost during the commit: {self.why}")
            self._fail(pending, problem)
        self._in_flight.clear()
        while self._queue:
            problem = Problem("not-owner-yet", f"lane {self.number} moved to another worker")
            self._fail(self._queue.popleft(), problem)

    async def _drop_producer(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await producer.discard()


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
