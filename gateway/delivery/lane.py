"""A lane of `deliver`: the units that fall to it, and the transactions that write their states.

The order that makes it exact is the gateway's: fence first, then read the state of each unit, then continue there. A
batch is sent after the state that plans it is committed, and a dead letter is in the transaction of the state that is
past its batch. All units that have news share a transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.contract.names import TopicPartition, partition_of
from logferry.gateway.delivery import progress
from logferry.gateway.delivery.batch import DeadLetter
from logferry.gateway.delivery.catalog import SubscriptionView
from logferry.gateway.delivery.config import DeliverConfig
from logferry.gateway.delivery.metrics import REGISTRY
from logferry.gateway.delivery.unit import DeliveryUnit, UnitServices
from logferry.gateway.kafka.record_batch import CODECS, batches
from logferry.gateway.kafka.transactional_producer import NotCommitted, PartitionBatches, TransactionalProducer
from logferry.gateway.kafka.types import Record, grouped
from logferry.gateway.lanes.lifecycle import LaneLifecycle
from logferry.gateway.lanes.replay import replay_states
from logferry.gateway.metrics import LaneMetrics

_BATCH_BYTES: Final = 1 << 20
_CODEC: Final = CODECS["zstd"]
# What may wait for another commit is committed after so long.
_LATER_S: Final = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class DeliveryLane(LaneLifecycle[TransactionalProducer]):
    metrics: ClassVar = LaneMetrics("logferry_delivery", REGISTRY)
    config: DeliverConfig
    services: UnitServices
    view: SubscriptionView
    units: dict[UnitKey, DeliveryUnit] = field(default_factory=dict)
    _states: dict[UnitKey, DeliveryState] = field(default_factory=dict)
    _marked: dict[DeliveryUnit, None] = field(default_factory=dict)
    _forgotten: dict[UnitKey, None] = field(default_factory=dict)
    _starting: dict[UnitKey, asyncio.Task[None]] = field(default_factory=dict)
    _broken: BaseException | None = None
    # Whether what is marked is committed now; else when the timer says so.
    _is_due: bool = False
    _timer: asyncio.TimerHandle | None = None

    # ---- for `LaneLifecycle` ----------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return not self._marked or self._producer is None

    @property
    def has_work(self) -> bool:
        return bool((self._marked and self._is_due) or self._forgotten or self._broken)

    def make_producer(self) -> TransactionalProducer:
        return TransactionalProducer(self.services.kafka, self.config.lane(self.number), self._before)

    async def replay(self, producer: TransactionalProducer) -> None:
        states: dict[UnitKey, DeliveryState] = {}

        def apply(raw: bytes, value: bytes | None) -> None:
            key = UnitKey.decode(raw)
            if value is None:
                states.pop(key, None)
            else:
                states[key] = DeliveryState.decode(value)

        kafka, topic = self.services.kafka, self.config.state_topic
        await replay_states(kafka, topic, self.number, apply, producer.state_end, "logferry lanes --deliver")
        self._states = states

    def opened(self) -> dict[str, Any]:
        self.adopt()
        return {"units": len(self._states)}

    def stopped(self) -> None:
        pass

    def ended(self) -> None:
        pass

    def close(self) -> None:
        """What is done is committed; what is under way is sent again by the next owner."""
        LaneLifecycle.close(self)
        self._now_due()

    async def drop_producer(self) -> None:
        units, self.units = self.units, {}
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        self._starting, self._states = {}, {}
        await asyncio.gather(*(unit.stop() for unit in units.values()))
        self._unmark()
        self._forgotten.clear()
        self._broken = None
        await LaneLifecycle.drop_producer(self)  # `super()` does not find the class of a dataclass with slots

    # ---- the units --------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Follows the subscriptions and topics as they are now; nothing while it does not serve."""
        if self.state != "serving" or self._closing or not self.view.is_known:
            return
        wanted = set[UnitKey]()
        for name, stored in self.view.subscriptions.items():
            for topic in self.view.topics_of(name):
                for number in range(len(topic.partitions)):
                    for shard in range(stored.definition.shards):
                        key = UnitKey(name, topic.name, number, shard)
                        if key.lane(self.config.lanes) == self.number:
                            wanted.add(key)
                            self._forgotten.pop(key, None)
                            self._adopt(key, topic.id)
        for key in [key for key in self.units if key not in wanted]:
            self._retire(key)
        for key in self._states.keys() - wanted:
            if self.view.is_gone(key):
                self._forgotten[key] = None
                self._wake.set()

    def _adopt(self, key: UnitKey, topic_id: bytes) -> None:
        stored, sender = self.view.subscriptions[key.subscription], self.view.sender(key.subscription)
        unit = self.units.get(key)
        if unit is not None and unit.wanted.subscription_id == stored.id:
            return unit.change(stored, sender, topic_id)
        if unit is not None:
            self._retire(key)
        if key not in self._starting:
            task = self._starting[key] = asyncio.create_task(self._start(key, topic_id))
            task.add_done_callback(lambda _: self._starting.pop(key, None))
        return None

    def _retire(self, key: UnitKey) -> None:
        unit = self.units.pop(key)
        self._marked.pop(unit, None)
        task = asyncio.create_task(unit.stop())
        self._starting[key] = task
        task.add_done_callback(lambda _: self._starting.pop(key, None))

    async def _start(self, key: UnitKey, topic_id: bytes) -> None:
        """Begins where the state says, or where a new subscription does; tried again with the next `adopt`."""
        stored, before = self.view.subscriptions[key.subscription], self._states.get(key)
        if before is not None and before.subscription_id == stored.id:
            state = progress.taken_over(before)
        else:
            try:
                position = await self.view.first_position(key, stored)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                return log.event("topics_not_visible", error=repr(error))
            times = {"now_ms": self.services.kafka.clock.now_ms(), "created_ms": stored.created_ms}
            state = progress.begun(stored.id, topic_id, position, **times, resumed=stored.resumed)
        if self.state != "serving" or self._closing or self.view.subscriptions.get(key.subscription) is None:
            return None
        unit = DeliveryUnit(
            key=key,
            subscription=stored,
            sender=self.view.sender(key.subscription),
            services=self.services,
            topic_id=topic_id,
            wanted=state,
            committed=state._replace(epoch=state.epoch - 1),
            mark=self._mark,
        )
        self.units[key] = unit
        unit.start(self._unit_ended)
        return None

    def _mark(self, unit: DeliveryUnit) -> None:
        """Ignored once the lane is closed: the next owner finds the unit where the last commit left it."""
        if self._closing:
            return
        self._marked[unit] = None
        if not unit.may_wait:
            self._now_due()
        else:
            self._due_later()

    def _now_due(self) -> None:
        self._stop_timer()
        self._is_due = True
        self._wake.set()

    def _due_later(self) -> None:
        if self._timer is None and not self._is_due:
            self._timer = asyncio.get_running_loop().call_later(_LATER_S, self._now_due)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unmark(self) -> list[DeliveryUnit]:
        """Returns the units that were marked."""
        self._stop_timer()
        marked, self._marked, self._is_due = list(self._marked), {}, False
        return marked

    def _judge_marks(self) -> None:
        """What was due during a transaction may wait after it: its plans are committed now."""
        if self._is_due and not self._closing and all(unit.may_wait for unit in self._marked):
            self._is_due = False
            if self._marked:
                self._due_later()

    def _unit_ended(self, task: asyncio.Task[None]) -> None:
        """An error that a unit does not expect reopens the lane, by name."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.event("delivery_failed", lane=self.number, error=repr(error))
            self._broken = error
            self._wake.set()

    # ---- serving ----------------------------------------------------------------------------------------------------

    async def transact(self, producer: TransactionalProducer) -> None:
        if self._broken is not None:
            raise NotCommitted(self._broken)
        marked = self._unmark()
        forgotten, self._forgotten = list(self._forgotten), {}
        # Of this moment: what is planned during the check was not checked.
        states = {unit: unit.wanted for unit in marked}
        states |= await self._check_topics(states)
        letters = [letter for unit in marked for letter in unit.letters]
        for unit in marked:
            unit.letters = []
        changed = {unit: state for unit, state in states.items() if state != unit.committed}
        if changed or forgotten or letters:
            await self._commit(producer, changed, forgotten, letters)
        for unit, state in changed.items():
            self._states[unit.key] = state
            unit.is_committed(state)
        for key in forgotten:
            self._states.pop(key, None)
        self._judge_marks()

    async def _check_topics(self, states: dict[DeliveryUnit, DeliveryState]) -> dict[DeliveryUnit, DeliveryState]:
        """Plans are of the topic that their state names: its id is asked for after the records were read.

        Returns the states of the units that stop since it is another one.
        """
        planned = [unit for unit, state in states.items() if progress.new_plans(state, unit.committed)]
        if not planned:
            return {}
        stopped = {}
        ids = await self.services.kafka.ids_at_leaders({unit.tp for unit in planned})
        for unit in planned:
            found = ids.get(unit.key.topic)
            if found is not None and found != unit.wanted.topic_id:
                unit.drop_plans()
                unit.halt("topic-recreated", f"{unit.key.topic} was deleted and recreated")
                stopped[unit] = unit.wanted
        return stopped

    async def _commit(
        self,
        producer: TransactionalProducer,
        changed: dict[DeliveryUnit, DeliveryState],
        forgotten: list[UnitKey],
        letters: list[DeadLetter],
    ) -> None:
        records: list[Record] = [(unit.key.encode(), state.encode(), []) for unit, state in changed.items()]
        records += [(key.encode(), None, []) for key in forgotten]
        now_ms = self.services.kafka.clock.now_ms()
        parts = [_part(producer.lane.state, producer.state_topic_id, records, _BATCH_BYTES, now_ms)]
        for (topic, number), written in grouped((self._place(letter), letter) for letter in letters).items():
            facts = self.view.facts(topic)
            chunks: list[Record] = [(letter.key, letter.data, letter.headers) for letter in written]
            limit = min(_BATCH_BYTES, facts.max_message_bytes)
            parts.append(_part((topic, number), facts.id, chunks, limit, now_ms))
        self.lane_state.begin()
        started, throttled_s = time.monotonic(), producer.throttled_s
        await producer.write(parts)
        await producer.commit()
        throttled_s = producer.throttled_s - throttled_s
        self.lane_state.commit(throttled_s)
        self.metrics.committed(self.number, time.monotonic() - started, throttled_s)

    def _place(self, letter: DeadLetter) -> TopicPartition:
        topic = f"{self.config.dc}.{letter.topic}"
        return topic, partition_of(letter.key.decode(), self.view.facts(topic).partitions)

    def failed(self, error: BaseException) -> None:
        """A topic of dead letters that takes nothing is left out for a while: only its subscriptions wait for it."""
        if isinstance(error, NotCommitted):
            own = self.config.state_topic, self.number
            found = dict(error.unavailable)
            if error.refused is not None:
                found.setdefault(error.refused, str(error))
            self.view.health.refuse({tp: why for tp, why in found.items() if tp != own})


def _part(tp: TopicPartition, topic_id: bytes, records: list[Record], limit: int, now_ms: int) -> PartitionBatches:
    return PartitionBatches(*tp, topic_id, deque(batches(records, limit, now_ms, _CODEC)))
