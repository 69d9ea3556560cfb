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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.config import Config
from logferry.gateway.errors import LaneLost, Moved, Problem
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.transactional_producer import NotCommitted, OutcomeUnknown
from logferry.gateway.lanes.dedup import Refusal, Source, SourceState, SourceTable
from logferry.gateway.lanes.group_commit import LaneProducer
from logferry.gateway.lanes.lifecycle import KeptLane
from logferry.gateway.lanes.pending import Answered, Pending, Waiting
from logferry.gateway.lanes.transaction import Draft, Outcome, Request, Written
from logferry.gateway.metrics import LaneMetrics
from logferry.gateway.replay import replay, silent_since, sources_of
from logferry.gateway.topics.catalog import Topics

_EXPIRED_A_TRANSACTION: Final = 200
# Refusals that hold whatever another worker may have recorded meanwhile, or that may be tried again.
_TRUE_FOR_EVER: Final = ("overlap", "out-of-order", "overloaded")


@dataclass(slots=True, eq=False, kw_only=True)
class Lane(KeptLane):
    """One lane of the gateway."""

    config: Config
    kafka: Kafka
    topics: Topics
    metrics: LaneMetrics
    table: SourceTable = field(default_factory=SourceTable)
    _waiting: Waiting = field(default_factory=Waiting)
    _expired: deque[bytes] = field(default_factory=deque)
    _producer: LaneProducer | None = None
    _confirming: set[asyncio.Task[None]] = field(default_factory=set)

    # ---- from outside -----------------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Of the requests that are not answered yet."""
        return self._waiting.size_bytes

    def submit(self, request: Request) -> asyncio.Future[Answered]:
        """Queues a request. Raises Problem when the lane is full, and Moved when it is closing.

        The answer comes within the time-out of requests, if only to say that the outcome is not known.
        """
        if self._closing:
            raise Moved("not-owner-yet", f"lane {self.number} is moving to another worker")
        if self.queued_bytes + request.size_bytes > self.config.limits.lane_bytes:
            raise Problem("overloaded", f"lane {self.number} has {self.queued_bytes} bytes waiting: {self.why}")
        answer = self._waiting.add(request, self.config.limits.request_timeout_s)
        self._wake.set()
        return answer

    def expire(self, now_s: float) -> None:
        """Answers what waited too long with what is certain: surely not recorded, or not known."""
        queued = f"lane {self.number} is {self.state}: {self.why}"
        self._waiting.expire(now_s, queued, f"the commit is not answered yet: {self.why}")

    def look_up(self, source: Source, topic_id: bytes) -> SourceState | None:
        """What was committed when it was last heard: a hint. A client decides on the answer of a session alone."""
        return self.table.get(source, topic_id)

    async def find_expired(self, now_ms: int) -> None:
        """Looks for sources that were not heard of for the retention; they are forgotten a few in a transaction."""
        if self.state != "serving" or self._expired:
            return
        table = self.table
        found = await silent_since(table, now_ms - self.config.source_retention_ms)
        if found and self.table is table:
            self._expired = found
            self._wake.set()

    async def sources(self, topic: str, wants: Callable[[str], bool]) -> list[tuple[Source, SourceState]]:
        """The sources of a topic that are known to this lane, in no order. Raises Problem while it does not serve."""
        if self.state != "serving":
            raise Problem("not-owner-yet", f"lane {self.number} is {self.state}: {self.why}")
        return await sources_of(self.table, topic, wants)

    # ---- as it is kept ----------------------------------------------------------------------------------------

    @property
    def producer(self) -> LaneProducer | None:
        return self._producer

    @property
    def is_done(self) -> bool:
        return not self._waiting.is_queued

    def failed(self, error: BaseException) -> None:
        self.metrics.failed(error)

    def ended(self) -> None:
        moved = f"lane {self.number} moved to another worker"
        self._waiting.end(moved, f"lane {self.number} was lost during the commit: {self.why}")
        self.metrics.closed()

    async def drop_producer(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await producer.discard()

    async def open(self, *, first: bool) -> None:
        if self._producer is not None:
            return
        started = time.monotonic()
        self.course.enter("fencing", "another worker may have had it" if self._doubted else None)
        self._doubted = False
        producer = LaneProducer(self.kafka, self.topics, self.config, self.number)
        self._producer = producer
        await producer.fence()
        fenced = time.monotonic()
        self.course.enter("replaying")
        self.table = await replay(self.kafka, self.config.state_topic, self.number)
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
        self._waiting.settle(self.table)

    # ---- serving ----------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        while True:
            while not (self._waiting.is_queued or self._expired or self._doubted):
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
            if self._doubted:
                await self.drop_producer()
                await self.open(first=False)
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
                self._waiting.undo(draft, failure)
                raise
            except OutcomeUnknown:
                self._waiting.fail_queued(draft.touches)
                raise
            for key, raw in draft.states.items():
                self.table.apply(key, raw)
            self.course.commit()
            self.metrics.committed(time.monotonic() - started, draft.records)
            self._waiting.commit(offsets)
            if producer.is_troubled:
                await self.drop_producer()
                await self.open(first=False)

    def _draft(self) -> Draft:
        """Puts the next transaction together; what does not have to wait for it is answered at once."""
        limits = self.config.limits
        draft = Draft(self.table, int(time.time() * 1000), self.config.max_seqno_jump, limits.lane_sources)
        limit = limits.transaction_bytes
        waiting, doubtful = self._waiting, list[tuple[Pending, Refusal]]()
        while waiting.is_queued and draft.size_bytes < limit:
            pending = waiting.take()
            outcome, must_wait = draft.add(pending.request)
            if must_wait:
                waiting.hold(pending, outcome)
            elif not isinstance(outcome, Refusal):
                self._confirm_by(self._answer_duplicates(pending, outcome))
            elif outcome.kind in _TRUE_FOR_EVER:
                waiting.succeed(pending, Answered(outcome))
            else:
                doubtful.append((pending, outcome))
        if doubtful:
            self._confirm_by(self._answer_refused(doubtful))
        for _ in range(min(len(self._expired), _EXPIRED_A_TRANSACTION)):
            draft.expire(self._expired.popleft(), draft.now_ms - self.config.source_retention_ms)
        return draft

    def _confirm_by(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answering)
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)

    async def _answer_refused(self, refused: list[tuple[Pending, Refusal]]) -> None:
        """A worker that slept knows too little: of the newest session, which another one opened, that it is the newest,
        and of a chunk that is recorded meanwhile. What would be refused for that is refused by the owner alone.
        """
        judged_by = self.table
        problem: Callable[[], Problem] | None = None
        try:
            await self.confirm_ownership(self.number)
        except LaneLost as error:
            problem = partial(Moved, "not-owner-yet", str(error))
        except (errors.KafkaError, OSError, TimeoutError) as error:
            problem = partial(Problem, "kafka-unavailable", f"the group does not answer: {error!r}")
        is_settled = self.state == "serving" and not (self._doubted or self._closing)
        if problem is None and (self.table is not judged_by or not is_settled):
            problem = partial(Moved, "not-owner-yet", f"lane {self.number} was opened anew; try again")
        for pending, outcome in refused:
            if problem is None:
                self._waiting.succeed(pending, Answered(outcome))
            else:
                self._waiting.fail(pending, problem())

    async def _answer_duplicates(self, pending: Pending, outcome: Outcome) -> None:
        """A duplicate is acknowledged when the topic still is the one that its original was recorded in."""
        topic, waiting = pending.request.topic, self._waiting
        try:
            partition = outcome.state.partition if isinstance(outcome, Written) else 0
            found = await self.topics.confirm([(topic.name, partition)])
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return waiting.fail(pending, Problem("kafka-unavailable", f"the topic cannot be looked at: {error!r}"))
        if found.get(topic.name) == topic.id:
            return waiting.succeed(pending, Answered(outcome))
        self.topics.forget(topic.name)
        return waiting.fail(pending, Problem("kafka-unavailable", f"{topic.name} was deleted meanwhile; try again"))
