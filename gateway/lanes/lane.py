"""A lane: the unit of ownership and fencing. It alone writes the chunks of its sources and knows their states.

The order that makes it safe, and the crash windows that it covers:

* open: fence first, replay second. The fence ends the older owner's transaction; only then is the state topic
  complete, and its replay up to the end gives the states that the log holds.
* write: one transaction at a time; requests that arrive meanwhile are gathered for the next.
* killed before the commit: nothing of the transaction is in the log. Killed after it: all of it is, with the states.
* the commit's answer is missing: the lane fences itself and replays, and each waiting request is answered from the
  log. If the lane is revoked meanwhile, the answer is ``outcome-unknown``.
* frozen and continued: the fence rejects the commit, and the lane opens again only when the group confirms that it is
  still this worker's.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.config import Config
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.errors import LaneLost, LaneMoved, Problem
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.transactional_producer import NotCommitted, OutcomeUnknown
from logferry.gateway.lanes.dedup import Refusal, SourceTable
from logferry.gateway.lanes.group_commit import Answered, GroupCommit, PendingRequest, PendingRequests
from logferry.gateway.lanes.lifecycle import STOPPED_S, LaneLifecycle
from logferry.gateway.lanes.replay import replay_states
from logferry.gateway.lanes.source_index import SourceOrder
from logferry.gateway.lanes.staging_topic import delete_before, end_of
from logferry.gateway.lanes.transaction import Draft, Outcome, RecordHeartbeat, Request, WriteOutcome
from logferry.gateway.lanes.uploads import Staging, UploadRules
from logferry.gateway.limits import FairShare
from logferry.gateway.metrics import LANES, count_written
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.gateway.topics.present_lanes import PresentLanes
from logferry.gateway.turns import Turns

# A table may hold a million sources: a scan asks after so many whether others should run.
_LOOK: Final = 64

_EXPIRED_A_TRANSACTION: Final = 200
_DELETE_AGAIN_S: Final = 60.0
_EXPIRED_AT_ONCE: Final = 100
# Refusals that hold whatever another worker may have recorded meanwhile, or that the caller may retry.
_CERTAIN_REFUSALS: Final = ("overlap", "out-of-order", "overloaded")


@dataclass(slots=True, eq=False, kw_only=True)
class Lane(LaneLifecycle[GroupCommit]):
    config: Config
    kafka: KafkaClient
    topics: TopicCatalog
    lanes: PresentLanes
    metrics: ClassVar = LANES
    table: SourceTable = field(default_factory=SourceTable)
    _order: SourceOrder | None = None
    _order_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: PendingRequests = field(default_factory=PendingRequests)
    _expired: deque[bytes] = field(default_factory=deque)
    _holds_expired: bool = False  # receipts or uploads that no longer count
    # Of the pieces of uploads; None: not known yet.
    staging: Staging | None = None
    _deleting: asyncio.Task[None] | None = None
    _deleted_to: int = 0
    _confirming: set[asyncio.Task[None]] = field(default_factory=set)
    _next_confirmation: asyncio.Task[None] | None = None
    _confirmation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._waiting.room.limit = self.config.limits.lane_bytes

    # ---- requests -----------------------------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Of the requests that are not answered yet."""
        return self._waiting.room.used

    def submit(self, request: Request) -> asyncio.Future[Answered]:
        """Queues a request. Raises Problem when the lane is full, and Moved when it is closing.

        The answer comes within the timeout of requests, at the latest as ``outcome-unknown``.
        """
        if self._closing:
            raise LaneMoved("not-owner-yet", f"lane {self.number} is moving to another worker")
        if self.state == "stopped":
            raise Problem("kafka-unavailable", f"lane {self.number} is stopped: {self.why}", retry_after_s=STOPPED_S)
        room = self._waiting.room
        if request.size_bytes > room.room(request.token):
            own = f", {room.of_token(request.token)} of this token" if request.token else ""
            raise Problem("overloaded", f"lane {self.number} has {room.used} bytes waiting{own}: {self.why}")
        answer = self._waiting.add(request, self.config.limits.request_timeout_s)
        self._wake.set()
        return answer

    def expire(self, now_s: float) -> None:
        """Answers the requests that waited too long: surely not recorded, or outcome unknown. Ends uploads."""
        queued = f"lane {self.number} is {self.state}: {self.why}"
        self._waiting.expire(now_s, queued, f"the commit is not answered yet: {self.why}")
        window_ms = self._repeat_window_ms
        if self.state != "serving" or window_ms is None or self._holds_expired:
            return
        if any(self.table.uploads.ended(self.kafka.clock.now_ms(), window_ms)):
            self._holds_expired = True
            self._wake.set()

    async def find_expired(self, now_ms: int) -> None:
        """Finds sources that were silent for the retention; each transaction forgets a few of them.

        A tenth of the sources at once at most: a wrong ``now_ms`` takes hours to do harm, and is reported before.
        """
        if self.state != "serving" or self._expired:
            return
        table, before_ms = self.table, now_ms - self.config.source_retention_ms
        found, turns = deque[bytes](), Turns()
        for count, (key, raw) in enumerate(table.states.items()):
            if SourceState.decode(raw).alive_ms < before_ms:
                found.append(key)
            if count % _LOOK == 0 and turns.over:
                await turns.give()
        at_once = max(_EXPIRED_AT_ONCE, len(table) // 10)
        if len(found) > at_once:
            log.event("many_sources_silent", lane=self.number, silent=len(found), sources=len(table), forgotten=at_once)
        if self.table is not table:
            return
        self._expired = deque(islice(found, at_once))
        window_ms = self._repeat_window_ms
        self._holds_expired = window_ms is not None and any(table.receipts.expired(now_ms - window_ms))
        if self.has_work:
            self._wake.set()

    async def sources(self, topic: str, start: str) -> AsyncIterator[tuple[SourceIdentity, SourceState]]:
        """The sources of a topic from a sort key on, in that order. Raises Problem while the lane does not serve."""
        if self.state != "serving":
            raise Problem("not-owner-yet", f"lane {self.number} is {self.state}: {self.why}")
        table, turns = self.table, Turns()
        async with self._order_lock:
            if self._order is None or self._order.states is not table.states:
                self._order = SourceOrder(table.states)
            order = self._order
            for _ in order.settle():
                if turns.over:
                    await turns.give()
        for key in order.walk(topic, start):
            state = table.read(key)
            if state is not None:
                yield SourceIdentity.of_state_key(key), state
            if turns.over:
                await turns.give()

    # ---- for `LaneLifecycle` ----------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return not self._waiting.is_queued

    @property
    def has_work(self) -> bool:
        return self._waiting.is_queued or bool(self._expired) or self._holds_expired

    def stopped(self) -> None:
        queued = f"lane {self.number} is stopped: {self.why}"
        self._waiting.end(queued, queued)

    def ended(self) -> None:
        if self._deleting is not None:
            self._deleting.cancel()
        moved = f"lane {self.number} moved to another worker"
        self._waiting.end(moved, f"lane {self.number} was lost during the commit: {self.why}")

    async def may_open(self) -> None:
        await self.unchanged(self.lanes)

    def make_producer(self) -> GroupCommit:
        return GroupCommit(self.kafka, self.topics, self.config, self.number, self._before)

    async def replay(self, producer: GroupCommit) -> None:
        table = SourceTable(FairShare(self.config.limits.lane_sources))
        table.receipts.shares.limit = self.config.receivers.lane_receipts
        archive = self.config.receivers.archive
        if archive is not None:
            table.uploads.count.limit, table.uploads.staged.limit = archive.lane_uploads, archive.lane_bytes
        self.staging = None
        # After the fence, and before the replay, which may find a newer one.
        table.count = await self.lanes.read()
        self.table = await replay(self.kafka, self.config.state_topic, self.number, table, producer.state_end)

    def opened(self) -> dict[str, Any]:
        self.lanes.take(self.table.count)
        self._waiting.move(self._has)
        self._waiting.settle(self.table)
        return {"sources": len(self.table)}

    # ---- serving ----------------------------------------------------------------------------------------------

    async def transact(self, producer: GroupCommit) -> None:
        draft = await self._draft()
        if draft.is_empty():
            return
        started, throttled_s = time.monotonic(), producer.throttled_s
        self.lane_state.begin()
        try:
            offsets = await producer.transact(draft)
        except NotCommitted as failure:
            self.topics.health.refuse({tp: why for tp, why in failure.unavailable.items() if tp != producer.lane.state})
            self._waiting.undo(draft, failure)
            raise
        except OutcomeUnknown:
            self._waiting.fail_queued(draft.touches)
            raise
        for key, raw in draft.states.items():
            self.table.apply(key, raw)
        throttled_s = producer.throttled_s - throttled_s
        self.lane_state.commit(throttled_s)
        self.metrics.committed(self.number, time.monotonic() - started, throttled_s)
        count_written(draft.chunks)
        self._waiting.commit(offsets)
        if draft.uploads.states and self.staging is not None:
            ends = [base + 1 for _, base in offsets.get(self.staging.tp, ())]
            self.staging = self.staging._replace(end=max([self.staging.end, *ends]))
            if self._deleting is None or self._deleting.done():
                self._deleting = asyncio.create_task(self._free_space())

    async def _draft(self) -> Draft:
        """Assembles the next transaction; requests that need not wait for it are answered at once.

        Others run in between: many requests of thousands of chunks may wait.
        """
        limits = self.config.limits
        health = self.topics.health
        lapse_ms = int(self.config.session_lapse_s * 1000)
        now_ms = self.kafka.clock.now_ms()
        draft = Draft(self.table, now_ms, self.config.max_seqno_jump, lapse_ms, health.why)
        draft.number, draft.repeat_window_ms = 1 + random.getrandbits(62), self._repeat_window_ms
        if (archive := self.config.receivers.archive) is not None:
            within_ms = int(archive.commit_within_s * 1000)
            draft.uploads.rules = UploadRules(within_ms, archive.file_bytes, archive.file_pieces)
            draft.uploads.staging, draft.uploads.refused = self.staging, health.why
        limit = limits.transaction_bytes
        waiting, doubtful = self._waiting, list[tuple[PendingRequest, Refusal]]()
        refused, turns = set[SourceIdentity](), Turns()
        while waiting.is_queued and draft.size_bytes < limit:
            if turns.over:
                await turns.give()
                continue
            pending = waiting.take()
            if not self._has(pending.request.source):
                waiting.fail(pending, LaneMoved("not-owner-yet", "the source belongs to another lane now"))
                continue
            if pending.request.source in refused and not isinstance(pending.request, RecordHeartbeat):
                waiting.fail(pending, Problem("kafka-unavailable", "an earlier chunk of the source was not recorded"))
                continue
            outcome, must_wait = draft.add(pending.request)
            if isinstance(outcome, Refusal) and outcome.kind == "kafka-unavailable":
                refused.add(pending.request.source)
                waiting.succeed(pending, Answered(outcome))
            elif must_wait:
                waiting.hold(pending, outcome)
            elif not isinstance(outcome, Refusal):
                self._confirm_by(self._answer_duplicates(pending, outcome))
            elif outcome.kind in _CERTAIN_REFUSALS:
                waiting.succeed(pending, Answered(outcome))
            else:
                doubtful.append((pending, outcome))
        if refused:
            waiting.fail_queued(refused.__contains__)
        if doubtful:
            self._confirm_by(self._answer_refused(doubtful))
        for _ in range(min(len(self._expired), _EXPIRED_A_TRANSACTION)):
            draft.expire(self._expired.popleft(), draft.now_ms - self.config.source_retention_ms)
        draft.expire_receipts(_EXPIRED_A_TRANSACTION)
        draft.expire_uploads(_EXPIRED_A_TRANSACTION)
        self._holds_expired = self._holds_expired and not draft.is_empty()
        return draft

    async def find_staging(self) -> None:
        """Learns where the staging topic ends. Raises KafkaError; the lane serves all else without it."""
        if self.staging is None:
            self.staging = await end_of(self.kafka, (self.config.staging_topic, self.number), self.lanes.number())

    async def _free_space(self) -> None:
        """Deletes in the staging topic what no upload needs, by the committed states alone: a fenced lane deletes
        nothing that its successor needs."""
        while self.staging is not None and self.is_open:
            needed = self.table.uploads.needed_from(self.staging.end)
            if needed <= self._deleted_to:
                return
            if await delete_before(self.kafka, self.staging.tp, needed):
                self._deleted_to = needed
            else:
                await asyncio.sleep(_DELETE_AGAIN_S)

    async def confirm(self, judged_by: SourceTable, key: str) -> None:
        """Returns when what the table says, also that it has nothing, of the key may be answered. Raises Problem."""
        problem = await self._judged_as_owner(judged_by)
        if problem is not None:
            raise problem()
        self.check_owns(key)

    def check_owns(self, key: str) -> None:
        """Raises LaneMoved where another lane has the states of the key, by the number of lanes that the replay found:
        the request was on its way here before the number changed."""
        if lane_of(key, self.table.count.lanes) != self.number:
            raise LaneMoved("not-owner-yet", "the source belongs to another lane now")

    def _has(self, source: SourceIdentity) -> bool:
        """Whether the lane has the state of the source, and writes it: by the number of lanes that its replay found."""
        return lane_of(source.key, self.table.count.lanes) == self.number

    @property
    def _repeat_window_ms(self) -> int | None:
        """None while the clocks of host and brokers differ: nobody knows then how old a receipt is."""
        return None if self.kafka.clock.stop is not None else int(self.config.receivers.repeat_window_s * 1000)

    def _confirm_by(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answering)
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)

    async def _judged_as_owner(self, judged_by: SourceTable) -> Callable[[], Problem] | None:
        """None after the group confirmed ownership; else the problem to answer with.

        A worker that was frozen may have missed a newer session, a recorded chunk, or that the source was forgotten:
        only the owner may refuse, or call a chunk a duplicate.
        """
        try:
            if self._next_confirmation is None:
                self._next_confirmation = asyncio.create_task(self._confirm_next())
            await asyncio.shield(self._next_confirmation)
        except LaneLost as error:
            return partial(LaneMoved, "not-owner-yet", str(error))
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return partial(Problem, "kafka-unavailable", f"the group does not answer: {error!r}")
        is_settled = self.state == "serving" and not (self._invalidated or self._closing)
        is_settled &= self.table.count.is_as(self.lanes.count)
        if self.table is not judged_by or not is_settled:
            return partial(LaneMoved, "not-owner-yet", f"lane {self.number} was reopened; try again")
        return None

    async def _confirm_next(self) -> None:
        """Those who ask during one confirmation share the next."""
        async with self._confirmation_lock:
            self._next_confirmation = None
            await self.confirm_ownership(self.number)
            # A lane that writes nothing hears of no fence.
            await self.lanes.read()

    async def _answer_refused(self, refused: list[tuple[PendingRequest, Refusal]]) -> None:
        problem = await self._judged_as_owner(self.table)
        for pending, outcome in refused:
            if problem is None:
                self._waiting.succeed(pending, Answered(outcome))
            else:
                self._waiting.fail(pending, problem())

    async def _answer_duplicates(self, pending: PendingRequest, outcome: Outcome) -> None:
        """Acknowledges a duplicate once its topic is confirmed to be the one that the original was recorded in."""
        topic, waiting = pending.request.topic, self._waiting
        problem = await self._judged_as_owner(self.table)
        if problem is not None:
            return waiting.fail(pending, problem())
        try:
            partition = outcome.state.partition if isinstance(outcome, WriteOutcome) else 0
            found = await self.topics.confirm([(topic.name, partition)])
        except (errors.KafkaError, OSError, TimeoutError) as error:
            return waiting.fail(pending, Problem("kafka-unavailable", f"the topic cannot be confirmed: {error!r}"))
        if found.get(topic.name) == topic.id:
            return waiting.succeed(pending, Answered(outcome))
        self.topics.forget(topic.name)
        return waiting.fail(pending, Problem("kafka-unavailable", f"{topic.name} was deleted meanwhile; try again"))


async def replay(
    kafka: KafkaClient, topic: str, partition: int, table: SourceTable | None = None, up_to: int = 0
) -> SourceTable:
    """The sources and receipts of the lane, in an empty table. Raises as `replay_states` does."""
    table = SourceTable() if table is None else table
    await replay_states(kafka, topic, partition, table.apply, up_to)
    return table
