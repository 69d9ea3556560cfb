"""Group commit: the pending requests of a lane (queued, in the running transaction, answered), and the writing of one.

* Each request is answered once, whatever happens later.
* No request overtakes another of its source: when one fails, those behind it fail with it. Otherwise a later chunk
  would be recorded, and the earlier one would be taken for a duplicate when it is sent again.
* A request that fails while queued is surely not recorded. One that fails in a transaction may be: only the log tells.
* The chunks and the states of their sources are written together.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from aiokafka import errors
from logferry.gateway.config import Config
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.contract.upload_state import upload_key
from logferry.gateway.errors import LaneMoved, Problem
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.hanging_transactions import FencedProducer
from logferry.gateway.kafka.record_batch import CODECS, batches
from logferry.gateway.kafka.transactional_producer import NotCommitted, PartitionBatches, TransactionalProducer
from logferry.gateway.kafka.types import Record
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.resolution import resolve, resolve_upload
from logferry.gateway.lanes.transaction import AppendChunks, Draft, Outcome, Request, WriteOutcome
from logferry.gateway.lanes.uploads import UploadOutcome
from logferry.gateway.limits import FairShare
from logferry.gateway.topics.catalog import TopicCatalog
from logferry.gateway.topics.present_lanes import change_identity

_BATCH_BYTES: Final = 1 << 20
# The encoding of so many bytes takes a few ms at most, whatever they are.
_INLINE_BYTES: Final = 1 << 16
_INLINE_STATES: Final = 500

Offsets = dict[tuple[str, int], list[tuple[int, int]]]


@dataclass(slots=True)
class Answered:
    """The answer to a request: its outcome, and the offsets of its first and last record where they are known."""

    outcome: Outcome
    offsets: tuple[int, int] | None = None


@dataclass(slots=True, eq=False)
class PendingRequest:
    request: Request
    answer: asyncio.Future[Answered]
    deadline_s: float


@dataclass(slots=True)
class PendingRequests:
    """The requests of one lane. ``room``: the bytes of all that are not answered, shared by the tokens."""

    room: FairShare = field(default_factory=lambda: FairShare(sys.maxsize))
    _queue: deque[PendingRequest] = field(default_factory=deque)
    _in_flight: list[tuple[PendingRequest, Outcome]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_queued(self) -> bool:
        return bool(self._queue)

    def add(self, request: Request, timeout_s: float) -> asyncio.Future[Answered]:
        # Asked once: until Python 3.12 each asking is a system call, 5 % of a small request.
        loop = self._loop = self._loop or asyncio.get_running_loop()
        pending = PendingRequest(request, loop.create_future(), loop.time() + timeout_s)
        self.room.take(request.token, request.size_bytes)
        self._queue.append(pending)
        return pending.answer

    def take(self) -> PendingRequest:
        """The next one of the queue, to be answered or given to `hold`."""
        return self._queue.popleft()

    def hold(self, pending: PendingRequest, outcome: Outcome) -> None:
        """It is answered so when the running transaction is committed."""
        self._in_flight.append((pending, outcome))

    def succeed(self, pending: PendingRequest, answered: Answered) -> None:
        if not pending.answer.done():
            self.room.give(pending.request.token, pending.request.size_bytes)
            pending.answer.set_result(answered)

    def fail(self, pending: PendingRequest, problem: Problem) -> None:
        if not pending.answer.done():
            self.room.give(pending.request.token, pending.request.size_bytes)
            pending.answer.set_exception(problem)

    def commit(self, offsets: Offsets) -> None:
        """The transaction is in the log, at these offsets."""
        for pending, outcome in self._in_flight:
            self.succeed(pending, _answered(outcome, pending.request.source.topic, offsets))
        self._in_flight.clear()

    def undo(self, draft: Draft, failure: NotCommitted) -> None:
        """The transaction of the draft is not in the log, and never will be.

        Where the partitions to blame are known, only what needs them fails: the rest is queued again, in its order.
        """
        in_flight, self._in_flight = self._in_flight, []
        if failure.unavailable:
            failed = {p.request.source for p, outcome in in_flight if _partition(p, outcome) in failure.unavailable}
        else:
            failed = {pending.request.source for pending, _ in in_flight}
        again = []
        for pending, _ in in_flight:
            if pending.request.source not in failed:
                again.append(pending)
                continue
            is_named = failure.topic == pending.request.topic.name or failure.unavailable
            # The text of an error may name a topic that the caller must not know of; a text of our own does not.
            is_told = is_named or isinstance(failure.cause, str)
            why = str(failure) if is_told else type(failure.cause).__name__
            self.fail(pending, Problem("kafka-unavailable", f"the transaction failed: {why}"))
        self.fail_queued(failed.__contains__ if failure.unavailable else draft.touches)
        self._queue.extendleft(reversed(again))

    def settle(self, table: SourceTable) -> None:
        """After fence and replay: what the log holds, the table, is what happened."""
        for pending, outcome in self._in_flight:
            request, receipt = pending.request, None
            if isinstance(outcome, UploadOutcome):
                found = resolve_upload(outcome, table.uploads.get(upload_key(request.source.source_id)))
                committed, outcome = (None, outcome) if found is None else (True, found)
            else:
                if isinstance(request, AppendChunks) and request.receipt_key is not None:
                    receipt = table.receipts.get(request.receipt_key)
                committed = resolve(outcome, table.get(request.source, request.topic.id), receipt)
            if committed:
                if receipt is not None and isinstance(outcome, WriteOutcome):
                    outcome = replace(outcome, receipt=receipt)  # another attempt's, maybe
                self.succeed(pending, Answered(outcome))
            elif committed is None:
                detail = "a later session or request hides the outcome; send the same request again"
                self.fail(pending, Problem("outcome-unknown", detail))
            else:
                self.fail(pending, Problem("kafka-unavailable", "the transaction was not committed"))
        self._in_flight.clear()

    def move(self, is_here: Callable[[SourceIdentity], bool]) -> None:
        """The states of the other sources are in other lanes now, which alone know what became of their requests."""
        kept = []
        for pending, outcome in self._in_flight:
            if is_here(pending.request.source):
                kept.append((pending, outcome))
            else:
                self.fail(pending, LaneMoved("outcome-unknown", "the source moved to another lane meanwhile"))
        self._in_flight = kept

    def fail_queued(self, touches: Callable[[SourceIdentity], bool]) -> None:
        """Later chunks of a source whose earlier ones were undone, or waited too long, must not go first."""
        kept = deque[PendingRequest]()
        for pending in self._queue:
            if touches(pending.request.source):
                self.fail(pending, Problem("kafka-unavailable", "an earlier chunk of the source was not recorded"))
            else:
                kept.append(pending)
        self._queue = kept

    def expire(self, now_s: float, queued: str, in_flight: str) -> None:
        """Answers what waited too long with what is certain: surely not recorded, or not known; and why."""
        expired = set[SourceIdentity]()
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
            self.fail(pending, LaneMoved("outcome-unknown", in_flight))
        self._in_flight.clear()
        while self._queue:
            self.fail(self._queue.popleft(), LaneMoved("not-owner-yet", queued))


def _answered(outcome: Outcome, topic: str, offsets: Offsets) -> Answered:
    if isinstance(outcome, WriteOutcome) and outcome.span is not None:
        batches = offsets[topic, outcome.state.partition]
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


def _partition(pending: PendingRequest, outcome: Outcome) -> TopicPartition | None:
    """The partition that the request writes chunks to; None: it writes none."""
    if isinstance(outcome, UploadOutcome):
        return outcome.place
    if not isinstance(outcome, WriteOutcome) or outcome.span is None:
        return None
    return pending.request.source.topic, outcome.state.partition


class GroupCommit(TransactionalProducer):
    def __init__(
        self,
        kafka: KafkaClient,
        topics: TopicCatalog,
        config: Config,
        lane: int,
        before: Mapping[str, FencedProducer] | None = None,
    ) -> None:
        super().__init__(kafka, config.lane(lane), before, change_identity(config))
        self._topics = topics
        self._codec = CODECS[config.codec]

    async def transact(self, draft: Draft) -> Offsets:
        """Writes and commits the draft. Returns, by partition, (index of the first record, its offset) of each batch.

        Raises NotCommitted or OutcomeUnknown; the producer must be discarded then.
        """
        is_small = draft.size_bytes <= _INLINE_BYTES and len(draft.states) <= _INLINE_STATES
        parts = self._parts(draft) if is_small else await asyncio.to_thread(self._parts, draft)
        try:
            await self.write(parts)
            await self._check_topics(draft)
        except NotCommitted as failure:
            if failure.topic is not None:
                # The request to blame shows when all are sent again and checked against fresh facts.
                self._topics.forget(failure.topic)
            raise
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise NotCommitted(error) from error
        await self.commit()
        return {part.tp: part.offsets for part in parts}

    def _parts(self, draft: Draft) -> list[PartitionBatches]:
        states: list[Record] = [(key, value, []) for key, value in draft.states.items()]
        written = batches(states, _BATCH_BYTES, draft.now_ms, self._codec)
        parts = [PartitionBatches(*self.lane.state, self.state_topic_id, deque(written))]
        uploads = draft.uploads
        if uploads.pieces and uploads.staging is not None:
            written = batches(uploads.pieces, _BATCH_BYTES, draft.now_ms, self._codec)
            parts.append(PartitionBatches(*uploads.staging.tp, uploads.staging.topic_id, deque(written)))
        for topic, number in draft.chunks:
            facts = draft.topics[topic]
            written = batches(
                draft.records((topic, number)), min(_BATCH_BYTES, facts.max_message_bytes), draft.now_ms, self._codec
            )
            parts.append(PartitionBatches(topic, number, facts.id, deque(written)))
        return parts

    async def _check_topics(self, draft: Draft) -> None:
        """Checks that the topics are those that the draft was decided for; the ones written to were named by id."""
        ids = {topic: draft.topics[topic].id for topic, _ in draft.chunks}
        unwritten = draft.topics.keys() - ids.keys()
        if unwritten:
            ids.update(await self._topics.confirm((topic, 0) for topic in unwritten))
        changed = draft.changed_topic(ids)
        if changed is not None:
            raise NotCommitted(errors.UnknownTopicOrPartitionError(f"{changed} was deleted meanwhile"), changed)
