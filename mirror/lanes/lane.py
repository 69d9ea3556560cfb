"""A lane of the mirror: it alone writes the partitions that fall to it, and reads their checkpoints before it does.

The order that makes it exact is the gateway's: fence first, then read the checkpoint of each partition, then continue
exactly there, transaction by transaction (see `transaction`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from aiokafka.errors import TopicAuthorizationFailedError
from logferry.gateway import log
from logferry.gateway.contract.lane_count import LaneCount
from logferry.gateway.contract.mirror_state import mirror_lane_of, partitions_of_lane
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.kafka.requests import NO_ID, TopicMetadata
from logferry.gateway.kafka.transactional_producer import NotCommitted, TransactionalProducer
from logferry.gateway.kafka.types import TopicIdPartition
from logferry.gateway.lanes.lifecycle import LaneLifecycle, now_ms
from logferry.gateway.metrics import LaneMetrics
from logferry.gateway.topics.present_lanes import PresentLanes, change_identity
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.lanes.chain import ChainHistories
from logferry.mirror.lanes.stops import REJECTED, CannotResume, Resume, RetriedStops, original_position
from logferry.mirror.lanes.target_topics import TargetTopics
from logferry.mirror.lanes.transaction import LaneTransactions
from logferry.mirror.remote import MemoryBudget, RemoteCluster
from prometheus_client import CollectorRegistry, Counter

# How long a passed marker waits for a record that its position can be committed with.
_PASS_S: Final = 0.5
# The mirror's metrics. Labels are few: data centre, lane, result; never a partition.
REGISTRY: Final = CollectorRegistry()
RECORDS = Counter("logferry_mirror_records_total", "Mirrored records, by remote data centre", ["dc"], registry=REGISTRY)
BYTES = Counter("logferry_mirror_bytes_total", "Bytes of the mirrored batches as stored", ["dc"], registry=REGISTRY)


@dataclass(slots=True, eq=False, kw_only=True)
class MirrorLane(LaneLifecycle[TransactionalProducer]):
    """One lane of the mirror. ``links``: by the data centre whose topics they bring."""

    metrics: ClassVar = LaneMetrics("logferry_mirror", REGISTRY)
    config: MirrorConfig
    kafka: KafkaClient
    targets: TargetTopics
    links: dict[str, RemoteCluster]
    budget: MemoryBudget
    chains: ChainHistories
    lanes: PresentLanes
    partitions: dict[TopicPartition, MirroredPartition] = field(default_factory=dict)
    # None while the lane does not serve: nothing may be adopted then, since its checkpoints are not known.
    _transactions: LaneTransactions | None = None
    _retried: RetriedStops = field(default_factory=lambda: RetriedStops(now_ms))
    _uncoalesced: set[TopicPartition] = field(default_factory=set)
    _begins: dict[TopicIdPartition, int] = field(default_factory=dict)
    _resumes: dict[TopicPartition, Resume] = field(default_factory=dict)
    _passing: bool = False

    # ---- for `LaneLifecycle` ----------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return True

    @property
    def has_work(self) -> bool:
        is_ready = self._transactions is not None and bool(self._transactions.ready)
        return is_ready or bool(self._resumes) or self._passing

    def failed(self, error: BaseException) -> None:
        self.targets.invalidate()
        for link in self.links.values():
            link.refresh_soon()
        if not isinstance(error, NotCommitted):
            return
        # A right that is missing is blamed on all partitions without it; nothing else is to be tried there.
        may_not = isinstance(error.cause, TopicAuthorizationFailedError)
        rejected = {error.refused, *(error.unavailable if may_not else ())}
        # Without its own partitions the lane can do nothing; no other one is to blame. One that is rejected has a stop.
        unavailable = {tp: why for tp, why in error.unavailable.items() if tp not in rejected}
        unavailable |= self._without_history(unavailable)
        self.targets.health.refuse({tp: why for tp, why in unavailable.items() if tp in self.partitions})
        for tp in rejected & self.partitions.keys():
            self.targets.reread(tp[0])
            if may_not or tp in self._uncoalesced:
                self.partitions[tp].halt(REJECTED, error.unavailable.get(tp, str(error)))
            else:
                # The topic here may allow less than its original: the batches are tried as they are.
                self._uncoalesced.add(tp)

    def _without_history(self, unavailable: Mapping[TopicPartition, str]) -> dict[TopicPartition, str]:
        """The copies whose partition of the history takes nothing; none where that is the only one of the lane."""
        transactions, topic = self._transactions, self.config.history_topic
        if transactions is None:
            return {}
        writers = (tp for tp, partition in self.partitions.items() if partition.keeps_history)
        places = {tp: (topic, mirror_lane_of(*tp, transactions.histories)) for tp in writers}
        if len(set(places.values())) < 2:
            return {}
        return {
            tp: f"{topic}-{at[1]}, its history: {unavailable[at]}" for tp, at in places.items() if at in unavailable
        }

    def stopped(self) -> None:
        self._refuse_resumes(f"lane {self.number} is stopped: {self.why}")

    def ended(self) -> None:
        self._refuse_resumes(f"lane {self.number} moved to another worker; try again")

    def _refuse_resumes(self, why: str) -> None:
        while self._resumes:
            self._resumes.popitem()[1].refuse(why)

    async def drop_producer(self) -> None:
        for partition in self.partitions.values():
            self.links[partition.dc].unfollow(partition)
            self.budget.give(partition.waiting_bytes)
        self.partitions = {}
        if self._transactions is not None:
            self.budget.give(self._transactions.taken_bytes)
            self._transactions = None
        await LaneLifecycle.drop_producer(self)  # `super()` does not find the class of a dataclass with slots

    # ---- opening ----------------------------------------------------------------------------------------------

    async def may_open(self) -> None:
        await self.unchanged(self.lanes)

    def make_producer(self) -> TransactionalProducer:
        lane, change = self.config.lane(self.number), change_identity(self.config)
        return TransactionalProducer(self.kafka, lane, self._before, change)

    async def replay(self, producer: TransactionalProducer) -> None:
        transactions = LaneTransactions(
            config=self.config,
            kafka=self.kafka,
            targets=self.targets,
            budget=self.budget,
            chains=self.chains,
            producer=producer,
            uncoalesced=self._uncoalesced,
            # After the fence, and before the replay, which may find a newer one.
            count=await self.lanes.read(),
        )
        await transactions.replay()
        self._transactions = transactions

    @property
    def count(self) -> LaneCount:
        """By which the lane copies; while it does not serve, that of the others."""
        return self.lanes.count if self._transactions is None else self._transactions.count

    def opened(self) -> dict[str, Any]:
        self.lanes.take(self.count)
        for link in self.links.values():
            self.adopt(link, link.topics)
        return {"partitions": len(self.partitions)}

    def adopt(self, link: RemoteCluster, topics: dict[str, TopicMetadata], hidden: Collection[str] = ()) -> None:
        """Follows the partitions of this lane among the remote topics; nothing while it does not serve. ``hidden``:
        others that the remote has."""
        transactions = self._transactions
        if self.state != "serving" or transactions is None:
            return
        for topic in topics.values():
            for number in partitions_of_lane(topic.name, len(topic.partitions), self.number, self.count.lanes):
                self._adopt(transactions, link, topic, number)
        for partition in self.partitions.values():
            there = topics.get(partition.topic)
            # It may have been recreated with fewer partitions.
            is_gone = there is None or partition.number >= len(there.partitions)
            if not is_gone or partition.dc != link.remote.dc or partition.stop is not None:
                continue
            if partition.topic in hidden:
                partition.halt("fetch-rejected", f"{link.remote.dc} hides the topic from the mirror: grant Read on it")
            else:
                partition.halt("source-deleted", f"{partition.name} was deleted in {link.remote.dc}")

    def _adopt(self, transactions: LaneTransactions, link: RemoteCluster, topic: TopicMetadata, number: int) -> None:
        target, tp = self.targets.known.get(topic.name), (topic.name, number)
        known = self.partitions.get(tp)
        if target is None or number >= len(target.partitions):
            why = self.targets.errors.get(topic.name)
            if why is not None and known is None:
                self._begin(transactions, link, topic, number, NO_ID).halt("target-not-created", why)
            return
        if known is not None and (known.source_id, known.local_id) == (topic.id, target.id):
            if known.stop is not None and known.stop.kind == "log-truncated" and known.verifies:
                if topic.name in self.targets.compacted:
                    # Compaction changed the batch that it was compared with; a truncation by epochs stops it again.
                    known.verifies, known.stop = False, None
                    self.budget.give(known.rewind())
            elif known.stop is not None and known.stop.kind == "source-deleted":
                known.stop = None
                known.on_change(known)
            return
        if known is not None:
            self._abandon(transactions, known)
        partition = self._begin(transactions, link, topic, number, target.id)
        partition.rewind()
        link.follow(partition)

    def _begin(
        self, transactions: LaneTransactions, link: RemoteCluster, topic: TopicMetadata, number: int, local_id: bytes
    ) -> MirroredPartition:
        tp = (topic.name, number)
        partition = self.partitions[tp] = MirroredPartition(
            topic=topic.name,
            number=number,
            dc=link.remote.dc,
            source_id=topic.id,
            local_id=local_id,
            partition_bytes=self.config.limits.partition_bytes,
            checkpoint=transactions.checkpoints.get(tp),
            begins=self._begins,
            clock_ms=now_ms,
            verifies=topic.name not in self.targets.compacted,
            is_chained=link.remote.is_chained(topic.name),
            keeps_history=topic.name not in link.sources,
            stop=self._retried.present.get(tp),
            retried=self._retried.tried.get(tp),
            heard_at=time.monotonic(),
            on_waiting=self._has_waiting,
            on_passed=self._has_passed,
            on_stop=self._has_stopped,
        )
        return partition

    def _has_waiting(self, partition: MirroredPartition) -> None:
        if self._transactions is not None:
            self._transactions.ready[partition] = None
            self._wake.set()

    def _has_passed(self, partition: MirroredPartition) -> None:
        if self._transactions is not None:
            if not self._transactions.passed:
                asyncio.get_running_loop().call_later(_PASS_S, self._pass_soon)
            self._transactions.passed[partition] = None

    def _has_stopped(self, partition: MirroredPartition) -> None:
        if partition.stop is None or self.partitions.get(partition.tp) is not partition:
            return  # another took its place
        stop = partition.stop
        if stop.kind == "log-truncated" and partition.verifies:
            self.targets.reread(partition.topic)
            self.links[partition.dc].refresh_soon()
        partition.stop = self._retried.add(partition.tp, stop)
        if partition.stop is stop:
            facts = {"topic": partition.topic, "partition": partition.number, "dc": partition.dc}
            log.event("partition_stopped", **facts, stop=stop.kind, detail=stop.detail)

    def retry_stops(self) -> None:
        """Ends the stops that end by themselves, where it is time; called often. Nothing while it does not serve."""
        if self._transactions is None or self.state != "serving":
            return
        for tp in [tp for tp in self._retried.tried if (one := self.partitions.get(tp)) and one.last_stop is None]:
            self._retried.committed(tp)
        for tp in self._retried.due(lambda tp: self.targets.health.why(*tp) is None, self.targets.altered_ms):
            partition = self.partitions.get(tp)
            if partition is not None:
                partition.retried, partition.stop = partition.stop, None
                self.budget.give(partition.rewind())

    def _pass_soon(self) -> None:
        self._passing = True
        self._wake.set()

    # ---- serving ----------------------------------------------------------------------------------------------

    async def transact(self, producer: TransactionalProducer) -> None:
        transactions = self._transactions
        if transactions is None or await self._resume(transactions):
            return
        if self._passing:
            self._passing = False
            await transactions.commit_passed(self.partitions)
            return
        taken, origins = await transactions.take_batches()
        if not taken:
            return
        self.lane_state.begin()
        started, throttled_s = time.monotonic(), producer.throttled_s
        await transactions.commit(taken, origins)
        throttled_s = producer.throttled_s - throttled_s
        self.lane_state.commit(throttled_s)
        self.metrics.committed(self.number, time.monotonic() - started, throttled_s)
        for partition, batches in taken.items():
            self._retried.committed(partition.tp)
            now = self.partitions.get(partition.tp)
            if now is not None and now is not partition:
                # Another took its place meanwhile, which knew the checkpoint before.
                now.checkpoint = partition.checkpoint
                self.budget.give(now.rewind())
            RECORDS.labels(partition.dc).inc(sum(batch.size for batch in batches))
            BYTES.labels(partition.dc).inc(sum(batch.size_bytes for batch in batches))

    # ---- resuming after a stop --------------------------------------------------------------------------------

    async def resume(self, tp: TopicPartition, start: int | None) -> int:
        """Resumes at an offset of the remote log (None: its first) and returns it; committed when this returns.

        Raises CannotResume, and KafkaError.
        """
        partition, name = self.partitions.get(tp), f"{tp[0]}-{tp[1]}"
        if partition is None or self._transactions is None or self.state != "serving":
            raise CannotResume(f"{name} is not mirrored by this lane at the moment; try again")
        if partition.stop is None:
            raise CannotResume(f"{name} has not stopped")
        if partition.stop.kind == "target-not-created":
            raise CannotResume(f"{name}: {partition.stop.detail}; the mirror retries")
        if partition.stop.kind == "source-deleted":
            raise CannotResume(f"{name}: {partition.dc} no longer has the topic")
        link = self.links[partition.dc]
        first, end = await link.offset(tp, EARLIEST), await link.offset(tp, LATEST)
        at = first if start is None else start
        if not first <= at <= end:
            raise CannotResume(f"{partition.dc} has the offsets {first} to {end} of {name}, {at} is outside")
        history = self.chains.of(partition)
        original = None if history is None else await original_position(history, tp, at)
        if tp in self._resumes:
            raise CannotResume(f"{name} is being resumed already")
        if self.partitions.get(tp) is not partition or partition.stop is None:
            raise CannotResume(f"{name} was opened again meanwhile; try again")
        resume = Resume(partition, at, original, asyncio.get_running_loop().create_future())
        self._resumes[tp] = resume
        self._wake.set()
        await resume.done
        return at

    async def _resume(self, transactions: LaneTransactions) -> bool:
        """Resumes the partitions without batches that wait; those of the others are committed first.

        Returns whether there were some.
        """
        for tp, resume in list(self._resumes.items()):
            if not resume.is_of(self.partitions.get(tp)):
                self._resumes.pop(tp).refuse(f"{resume.partition.name} was opened again meanwhile; try again")
        resumes = {tp: resume for tp, resume in self._resumes.items() if not resume.partition.waiting}
        for tp in resumes:
            del self._resumes[tp]
        if not resumes:
            return False
        after = {tp: resume.checkpoint() for tp, resume in resumes.items()}
        try:
            await transactions.commit_checkpoints(after)
        except BaseException as error:
            for resume in resumes.values():
                resume.refuse(f"Kafka here did not commit the position: {error!r}; try again")
            raise
        for tp, resume in resumes.items():
            self._retried.forget(tp)
            self._abandon(transactions, self.partitions.pop(tp))
            log.event("partition_resumed", topic=tp[0], partition=tp[1], source_next=resume.source_next)
            if not resume.done.done():
                resume.done.set_result(None)
        for link in self.links.values():
            self.adopt(link, link.topics)
        return True

    def _abandon(self, transactions: LaneTransactions, partition: MirroredPartition) -> None:
        """Another takes its place, which begins at the checkpoint."""
        self.links[partition.dc].unfollow(partition)
        self.budget.give(partition.rewind())
        transactions.ready.pop(partition, None)
