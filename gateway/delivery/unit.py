"""A unit at work: it plans batches of its partition, sends them one after the other, and follows its subscription.

Two tasks share the state: one plans ahead, one sends. Each change of ``wanted`` is a transition of `progress`; the lane
commits it, and `committed` says so. Whatever an operator changes raises `_turn`, so that work which began before that
is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.delivery import progress
from logferry.gateway.delivery.batch import BatchShape, DeadLetter, DeliveryBatch, dead_letter
from logferry.gateway.delivery.metrics import BATCHES, BYTES, CHUNKS
from logferry.gateway.delivery.pages import BatchRoom, PlannedRows, TopicPages, next_batch, rows_between
from logferry.gateway.delivery.sender import BatchSender, DeliveryOutcome, backoff_s
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.record_batch import CorruptBatch
from logferry.gateway.reading.formats import Row
from logferry.gateway.subscriptions import NumberedReplay, PushSubscription, StoredSubscription

_RETRY_S: Final = 1.0
# An error that lasts is written again after so long.
_ERROR_MS: Final = 10_000
_PASSED_S: Final = 5.0
# A longer wait keeps no batch in memory.
_KEEP_S: Final = 1.0
# So many batches are planned without room: it comes when one of them is done.
_ROOMLESS: Final = 2
# Plans wait so long for the next one, to share its commit.
_TOGETHER_S: Final = 0.05


class UnitServices(NamedTuple):
    """What all units of a worker share. ``position``: where a replay begins; ``letters``: whether the dead-letter topic
    takes records now, None: it does, else why not."""

    kafka: KafkaClient
    pages: TopicPages
    room: BatchRoom
    position: Callable[[NumberedReplay, TopicPartition], Awaitable[int]]
    letters: Callable[[str], Awaitable[str | None]]


@dataclass(slots=True, eq=False)
class DeliveryUnit:
    """``mark``: tells the lane that there is something to commit; `may_wait`, whether now."""

    key: UnitKey
    subscription: StoredSubscription
    sender: BatchSender
    services: UnitServices
    topic_id: bytes
    wanted: DeliveryState
    committed: DeliveryState
    mark: Callable[[DeliveryUnit], None]
    letters: list[DeadLetter] = field(default_factory=list)
    waits_for: str = "opening"
    _turn: int = 0
    _ahead: PlannedRows = field(init=False)
    _scanned: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _shapes: dict[str, BatchShape] = field(default_factory=dict)
    _defined: tuple[PushSubscription, str] | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _cutting: asyncio.Task[tuple[int, list[Row]]] | None = None
    # The next batch is cut without a wait for data, and soon.
    _is_planning: bool = False
    _failures: int = 0
    _passed_s: float = 0.0

    def __post_init__(self) -> None:
        self._ahead = PlannedRows(self.services.room, self.key.subscription)

    @property
    def tp(self) -> TopicPartition:
        return self.key.topic, self.key.partition

    @property
    def now_ms(self) -> int:
        return self.services.kafka.clock.now_ms()

    @property
    def lag_records(self) -> int | None:
        end = self.services.pages.ends.get(self.tp)
        return None if end is None else max(0, end - self.wanted.position)

    @property
    def may_wait(self) -> bool:
        """Whether its commit may wait for others."""
        return not self.letters and progress.may_wait(self.wanted, self.committed, is_planning=self._is_planning)

    # ---- for the lane ----------------------------------------------------------------------------------------------

    def start(self, ended: Callable[[asyncio.Task[None]], None]) -> None:
        self.services.pages.follow(self.tp)
        self.mark(self)
        self._tasks = [asyncio.create_task(work) for work in (self._plan(), self._send(), self._follow())]
        for task in self._tasks:
            task.add_done_callback(ended)

    async def stop(self) -> None:
        """Ends all work: a batch under way may have arrived, and is sent again, the same, by whoever is next."""
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._ahead.drop()
            self.services.pages.unfollow(self.tp)

    def is_committed(self, state: DeliveryState) -> None:
        self.committed = state
        self._wake()

    def change(self, subscription: StoredSubscription, sender: BatchSender, topic_id: bytes) -> None:
        """The subscription or the topic may be another one."""
        if (subscription, sender, topic_id) != (self.subscription, self.sender, self.topic_id):
            self.subscription, self.sender, self.topic_id = subscription, sender, topic_id
            self._wake()

    def halt(self, kind: str, detail: str) -> None:
        """Stops by name until an operator acts."""
        if self.wanted.stop is None:
            log.event("delivery_stopped", **self._facts(), stop=kind, detail=detail)
            self._begin_turn()
            self._set(progress.stopped(self.wanted, kind, detail, self.now_ms))

    def drop_plans(self) -> None:
        """Forgets what was planned and is not committed."""
        self._begin_turn()
        self.wanted = progress.unplanned(self.wanted, self.committed)

    def _facts(self) -> dict[str, object]:
        return {"subscription": self.key.subscription, "topic": self.key.topic, "partition": self.key.partition}

    # ---- the state -------------------------------------------------------------------------------------------------

    def _set(self, state: DeliveryState) -> None:
        self.wanted = state
        self.mark(self)
        self._wake()

    def _pass(self, end: int) -> None:
        """Nothing was found up to there. Written with the next batch, or after a while: it would only be read again."""
        self.wanted = progress.passed(self.wanted, end)
        loop = asyncio.get_running_loop()
        if loop.time() - self._passed_s > _PASSED_S:
            self._passed_s = loop.time()
            self.mark(self)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _shape(self, text: str) -> BatchShape:
        shape = self._shapes.get(text)
        if shape is None:
            self._shapes = {text: (shape := BatchShape(text, self.key.shard))}
        return shape

    @property
    def _shape_now(self) -> str:
        """Of the subscription as it is now. Kept, since it is looked at for every batch."""
        definition = self.subscription.definition
        if self._defined is None or self._defined[0] is not definition:
            self._defined = definition, definition.shape
        return self._defined[1]

    @property
    def _is_idle(self) -> bool:
        return self.subscription.is_resting or self.wanted.stop is not None or self._replay is not None

    @property
    def _replay(self) -> NumberedReplay | None:
        """The last one for this partition that was not followed yet."""
        for replay in reversed(self.subscription.replays):
            if replay.number <= self.wanted.replay:
                return None
            if replay.position.fits(*self.tp):
                return replay
        return None

    async def _follow(self) -> None:
        """Follows what operators do: resumptions, replays, topics that were recreated."""
        while True:
            changed = self._changed
            if self.topic_id != self.wanted.topic_id and self._replay is None and self.wanted.stop is None:
                self.halt("topic-recreated", f"{self.key.topic} was deleted and recreated")
            if self.subscription.resumed > self.wanted.resumed:
                self._set(progress.resumed(self.wanted, self.subscription.resumed))
            replay = self._replay
            if replay is not None:
                await self._begin_replay(replay)
                continue
            await changed.wait()

    async def _begin_replay(self, replay: NumberedReplay) -> None:
        try:
            position = await self.services.position(replay, self.tp)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            self.waits_for = f"the position of a replay: {error!r}"
            await asyncio.sleep(_RETRY_S)
            return
        self._begin_turn()
        self._scanned = 0
        log.event("delivery_replayed", **self._facts(), position=position)
        self._set(progress.replayed(self.wanted, replay.number, self.topic_id, position))

    # ---- planning ---------------------------------------------------------------------------------------------------

    async def _plan(self) -> None:
        while True:
            text = self._shape_now
            if self._is_idle or not progress.may_plan(self.wanted, text) or not self._has_room:
                self._planning_waits()
                await self._changed.wait()
                continue
            self._is_planning = True
            turn, start = self._turn, max(progress.next_start(self.wanted), self._scanned)
            definition, shape, waits = self.subscription.definition, self._shape(text), self._planning_waits
            limits = definition.max_bytes, definition.max_wait_ms / 1000
            self._cutting = asyncio.create_task(next_batch(self.services.pages, self.tp, start, shape, *limits, waits))
            # A filter that lets little pass, a broker that is slow: what is planned does not wait for it.
            late = asyncio.get_running_loop().call_later(_TOGETHER_S, waits)
            try:
                await asyncio.wait({self._cutting})
                if self._cutting.cancelled():
                    continue
                end, rows = self._cutting.result()
            except (errors.KafkaError, OSError, TimeoutError) as error:
                self._planning_waits()
                await self._read_failed(error)
                continue
            finally:
                late.cancel()
                self._cutting.cancel()
            if turn != self._turn or self._is_idle or text != self._shape_now:
                continue
            if not rows:
                self._scanned = end
                self._pass(end)
            elif progress.may_plan(self.wanted, text):
                if not self._ahead.keep(end, rows) and len(self.wanted.ends) >= _ROOMLESS:
                    self._planning_waits()
                    await self._changed.wait()
                    continue
                self._set(progress.planned(self.wanted, end, text))

    def _planning_waits(self) -> None:
        """No plan follows at once: those that waited for it are committed."""
        self._is_planning = False
        if not self.may_wait:
            self.mark(self)

    @property
    def _has_room(self) -> bool:
        """Further ahead is planned only what stays in memory: else it is read twice."""
        return len(self.wanted.ends) < _ROOMLESS or self._ahead.has_room(self.subscription.definition.max_bytes)

    async def _read_failed(self, error: BaseException) -> None:
        pages = self.services.pages
        if isinstance(error, errors.OffsetOutOfRangeError):
            end = pages.ends.get(self.tp)
            start = progress.next_start(self.wanted)
            kind = "out-of-range" if end is not None and start > end else "records-removed"
            return self.halt(kind, f"offset {start} is not retained")
        self.waits_for = str(error) if isinstance(error, CorruptBatch) else f"Kafka does not answer: {error!r}"
        await asyncio.sleep(_RETRY_S)
        return None

    def _begin_turn(self) -> None:
        """What began before this is dropped."""
        self._turn += 1
        self._ahead.drop()
        if self._cutting is not None:
            self._cutting.cancel()

    # ---- sending ----------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            self.waits_for = "records" if not self.wanted.ends else "the commit of its plan"
            await self._until(lambda: not self._is_idle and progress.is_sendable(self.wanted, self.committed))
            turn, state = self._turn, self.wanted
            try:
                rows = await self._rows(state)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                await self._read_failed(error)
                continue
            wait_s = 0.0
            try:
                if rows and turn == self._turn:
                    batch = await self._batch(state, rows)
                    wait_s = await self._deliver(turn, state, batch)
                elif turn == self._turn:
                    self._set(progress.delivered(self.wanted))
            finally:
                if wait_s and wait_s <= _KEEP_S and turn == self._turn:
                    self._ahead.put_back(state.ends[0], rows)
                else:
                    self._ahead.give(rows)
            if wait_s:
                await self._pause(wait_s, turn)

    async def _rows(self, state: DeliveryState) -> list[Row]:
        """The chunks of the first planned batch; their bytes are taken from the room."""

        async def read() -> list[Row]:
            shape, end = self._shape(state.shape), state.ends[0]
            rows = await rows_between(self.services.pages, self.tp, state.position, end, shape)
            # It was read again, so it may be of a topic that was recreated meanwhile.
            ids = await self.services.kafka.ids_at_leaders([self.tp])
            if ids.get(self.key.topic) != state.topic_id:
                raise errors.UnknownTopicOrPartitionError(f"{self.key.topic} was deleted or recreated")
            self.waits_for = "memory"
            return rows

        return await self._ahead.get(state.ends[0], read)

    async def _batch(self, state: DeliveryState, rows: list[Row]) -> DeliveryBatch:
        shape = self._shape(state.shape)
        pieces = shape.pieces(rows) if shape.is_quick(rows) else await asyncio.to_thread(shape.pieces, rows)
        return DeliveryBatch(state.position, state.ends[0], rows, pieces)

    async def _deliver(self, turn: int, state: DeliveryState, batch: DeliveryBatch) -> float:
        """One attempt. Returns how long to wait before the next one; 0: it is settled."""
        name, sender = self.key.subscription, self.sender
        self.waits_for = f"one of {self.subscription.definition.max_in_flight} batches under way"
        async with sender.in_flight:
            self.waits_for = "the receiver"
            if turn != self._turn or self.subscription.is_resting or sender is not self.sender:
                return 0.0
            outcome = await sender.attempt(self.key, batch, self._shape(state.shape), state.epoch, state.replay)
        BATCHES.labels(name, outcome.kind).inc()
        if turn != self._turn:
            return 0.0
        if outcome.kind == "done":
            self._failures = 0
            CHUNKS.labels(name).inc(len(batch.rows))
            BYTES.labels(name).inc(batch.size_bytes)
            self._set(progress.delivered(self.wanted))
            return 0.0
        if outcome.kind == "rejected":
            return await self._reject(batch, outcome)
        self._failures += 1
        return self._again(outcome.detail, outcome.after_s)

    def _again(self, why: str, asked_s: float | None) -> float:
        """The attempt failed. Returns how long to wait."""
        error, wait_s = self.wanted.error, backoff_s(max(1, self._failures), asked_s)
        self.waits_for = f"{wait_s:.1f} s after: {why}"
        if error is None or self.now_ms - error.at_ms >= _ERROR_MS:
            self._set(progress.failed(self.wanted, why, self.now_ms))
        return wait_s

    async def _pause(self, wait_s: float, turn: int) -> None:
        """Ends early when an operator changes something."""
        before = self.subscription
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._until(lambda: turn != self._turn or self.subscription is not before)

    async def _reject(self, batch: DeliveryBatch, outcome: DeliveryOutcome) -> float:
        """What the subscription says for a rejected batch. Returns how long to wait; 0: it is settled."""
        definition = self.subscription.definition
        if definition.on_rejection == "split" and len(batch.rows) > 1:
            self._set(progress.halved(self.wanted, batch.middle()))
            return 0.0
        topic = definition.dead_letter_topic
        if definition.on_rejection == "stop" or topic is None:
            self.halt("rejected", f"offsets {batch.first} to {batch.last}: {outcome.detail}")
            return 0.0
        turn = self._turn
        why = await self.services.letters(topic)
        if turn != self._turn:
            return 0.0
        if why is not None:
            self._failures += 1
            return self._again(f"{outcome.detail}; the dead-letter topic {topic}: {why}", None)
        self._failures = 0
        self.letters += [dead_letter(topic, self.key, row, outcome.detail) for row in batch.rows]
        log.event("delivery_set_aside", **self._facts(), chunks=len(batch.rows), detail=outcome.detail)
        self._set(progress.delivered(self.wanted))
        return 0.0
