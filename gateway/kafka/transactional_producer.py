"""The transactional producer of one lane: fence, write to the leaders, commit at the coordinator.

Our own down to the requests, on aiokafka's connections, because the newest requests do more for exactness than
aiokafka's producer supports: a topic is written by its id, and each transaction has an epoch of its own (see
`requests` and `record_requests`).

Invariants:

* Every batch is acknowledged before the commit is sent.
* Within a transaction the same batch is retried with the same sequence number, which Kafka accepts once (KIP-98).
* After any error the producer is discarded. No transaction is ever aborted to continue with the same producer: the
  abort may not reach Kafka, and the aborted records are then committed with the next transaction.
* A partition that takes nothing (no leader, too few replicas in sync, a leader that does not answer) ends its
  transaction soon and by name, so that the lane continues without it. Kafka cannot end that transaction before the
  partition takes its marker: until then the lane uses another of its transactional ids. Every id is fenced first. One
  whose transaction Kafka is aborting needs none: no producer holds a valid epoch of it.
* A fence ends with a transaction of the new owner: one record in the lane's partition of the state topic. A broker that
  was frozen and still takes itself for the leader has less than that, so a replay that has this record is complete.
* The errors tell the outcome. `NotCommitted`: no commit was ever sent, so the transaction can only end as aborted.
  `OutcomeUnknown`: a commit was sent and its answer is missing, or another producer fenced this one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.contract.source_state import FENCE_KEY
from logferry.gateway.kafka import error_codes
from logferry.gateway.kafka.aiokafka_internals import AIOKafkaClient, close_client, connect
from logferry.gateway.kafka.broker_connection import BrokerConnections
from logferry.gateway.kafka.client import PASSING, KafkaClient
from logferry.gateway.kafka.hanging_transactions import MAY_NOT, NO_WRITE, FencedProducer, NewerOwner, complete_hanging
from logferry.gateway.kafka.record_batch import CODECS, RecordBatch, Stamp, batches
from logferry.gateway.kafka.record_requests import Produced, ProduceRequest
from logferry.gateway.kafka.requests import NO_ID
from logferry.gateway.kafka.transaction_coordinator import ENDING_S, TransactionCoordinator
from logferry.gateway.kafka.types import LaneIdentity, Piece, TopicIdPartition

REQUEST_TIMEOUT_MS: Final = 10_000
# A leader answers a produce request within this time: its replicas in sync have the batch, or it says which are not.
_REPLICATED_MS: Final = 4_000
_SILENT_S: Final = 5.0
_OPEN_DEADLINE_S: Final = 30.0
_TRANSACTION_DEADLINE_S: Final = 20.0
# A partition that takes nothing for so long ends the transaction.
_REJECTED_S: Final = 1.0
_SETTLE_S: Final = 0.005
_BACKOFF_S: Final = 0.02
_LONGEST_BACKOFF_S: Final = 0.5
# A leader may learn of a new topic a little later than the broker that described it.
_UNKNOWN_TOPIC_S: Final = 1.0
# Requests in flight to one leader. Kafka recognises the last five batches of a producer in a partition as duplicates
# (KAFKA-5494).
_WINDOW: Final = 4
_DENIED: Final = error_codes.TOPIC_AUTHORIZATION_FAILED
# So much is compressed at once: a MiB takes zstd 3 ms, and gzip 30.
_INLINE_BYTES: Final = 1 << 18


class NotCommitted(Exception):
    """The transaction ended without a commit.

    ``topic``: the one to blame, where it is known. ``refused``: the partition whose batch Kafka rejects.
    ``unavailable``: the partitions that took nothing, with the reason.
    """

    def __init__(
        self,
        cause: BaseException | str,
        topic: str | None = None,
        refused: TopicPartition | None = None,
        unavailable: Mapping[TopicPartition, str] | None = None,
    ) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause = cause
        self.topic = topic
        self.refused = refused
        self.unavailable = unavailable or {}


class OutcomeUnknown(Exception):
    """Committed or not: only the log tells, after a fence."""


class Fenced(OutcomeUnknown):
    """Another producer of the lane fenced this one; whether the commit came first, only the log tells."""


class Encodable(Protocol):
    """A batch. ``first``: the index of its first record in its `PartitionBatches`, which is its sequence number."""

    @property
    def first(self) -> int: ...

    def pieces(self, stamp: Stamp, /) -> Sequence[Piece]: ...


@dataclass(slots=True)
class PartitionBatches:
    """The batches of a transaction for one partition. ``offsets``: (first record, its offset) of those written."""

    topic: str
    number: int
    topic_id: bytes
    rest: deque[Encodable]
    offsets: list[tuple[int, int]] = field(default_factory=list)
    # Since when it is rejected, and why; None: it is not.
    trouble: tuple[float, str] | None = None

    @property
    def tp(self) -> TopicPartition:
        return self.topic, self.number


class TransactionalProducer:
    """One lane's producer, from the fence to the first error.

    ``state_end``: the offset after the record that the fence wrote into the state topic, whose id is
    ``state_topic_id``. ``is_troubled``: brokers were away meanwhile. It is replaced after its transaction, so that a
    fence and a check for hanging transactions precede the next one.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        lane: LaneIdentity,
        before: Mapping[str, FencedProducer] | None = None,
        change: LaneIdentity | None = None,
    ) -> None:
        """``before``: `producers` of the lane's discarded producer in this process. ``change``: whose transactions
        write into the lane's partition of the state topic, too, and only while nobody opens a lane.
        """
        self._kafka, self.lane = kafka, lane
        self._client = AIOKafkaClient(
            client_id=lane.transactional_id,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            metadata_max_age_ms=30_000,
            **kafka.options,
        )
        self._coordinator = TransactionCoordinator(self._client, lane, before or {})
        self._change = None if change is None else TransactionCoordinator(self._client, change, {})
        self._channels = BrokerConnections(self._client, kafka.options, lane.transactional_id, _SILENT_S)
        self.state_topic_id, self.state_end = NO_ID, 0
        # Nothing may be written to them now, for this reason.
        self._unchecked: dict[TopicPartition, str] = {}
        self._written: set[TopicPartition] = set()
        self._leader_was_away = False
        self._losses = 0
        self._committed_at = 0.0

    @property
    def is_troubled(self) -> bool:
        return self._leader_was_away or self._coordinator.is_troubled

    @property
    def producers(self) -> dict[str, FencedProducer]:
        """The lane's producers of this process, by transactional id; for the producer after this one."""
        return self._coordinator.producers

    @property
    def throttled_s(self) -> float:
        """The pauses that Kafka's quotas asked this producer for, in sum."""
        return self._channels.throttled_s + self._coordinator.throttled_s

    async def fence(self) -> None:
        """Fences every older producer of the lane, and completes its transactions in every partition."""
        async with asyncio.timeout(_OPEN_DEADLINE_S):
            # A client that tracks no topic asks for the metadata of all of them, again and again.
            self._client.set_topics(["__transaction_state"])
            await connect(self._client)
            await self._coordinator.fence()
            if self._change is not None:
                # In this order: a change fences the lanes after it has begun.
                await self._change.exclude()
            self._unchecked = await self._complete_hanging(None)
            self._leader_was_away = False
            if self.lane.state in self._unchecked:
                why = self._unchecked[self.lane.state]
                raise errors.LeaderNotAvailableError(f"{self.lane.state[0]}-{self.lane.state[1]}: {why}")

        self.state_topic_id = (await self._kafka.describe_topic(self.lane.state[0])).id
        self.state_end = await self._write_fence()

    async def _write_fence(self) -> int:
        """The offset after the record. Raises NotCommitted, Fenced or OutcomeUnknown."""
        record = batches([(FENCE_KEY, None, [])], _INLINE_BYTES, self._kafka.clock.now_ms(), CODECS["none"])
        part = PartitionBatches(*self.lane.state, self.state_topic_id, deque(record))
        await self.write([part])
        _, offset = part.offsets[0]
        if offset < 0:
            raise NotCommitted(f"{part.topic}-{part.number}: the offset of the fence's record is not known")
        await self.commit()
        return offset + 1

    async def settled(self) -> None:
        """Waits until Kafka has written the markers of the last commit, about 5 ms after its answer.

        A transaction that begins earlier is tried again by the broker 20 ms later. Measured: p50 23 ms without this
        pause, 9 ms with it; requests that arrive meanwhile join the same transaction.
        """
        pause = max(self._committed_at + _SETTLE_S, self._coordinator.rests_until_s) - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)

    async def write(self, parts: Sequence[PartitionBatches]) -> None:
        """Writes into the transaction; each part is of another partition, and of none that it was written to before.

        Raises NotCommitted or Fenced; the producer must be discarded then.
        """
        try:
            async with asyncio.timeout(_TRANSACTION_DEADLINE_S):
                await self._produce(parts)
                self._written.update(part.tp for part in parts)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise NotCommitted(error) from error

    async def commit(self) -> None:
        """Raises OutcomeUnknown; the producer must be discarded then."""
        try:
            async with asyncio.timeout(_TRANSACTION_DEADLINE_S):
                code = await self._coordinator.commit()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise OutcomeUnknown(f"no answer to the commit: {error!r}") from error
        if code in error_codes.FENCED:
            raise Fenced("another producer of this lane fenced this one during the commit")
        if code:
            raise OutcomeUnknown(f"Kafka answers the commit with error code {code}")
        self._committed_at = time.monotonic()

    async def _complete_hanging(self, only: set[TopicPartition] | None) -> dict[TopicPartition, str]:
        known = [self._coordinator] if self._change is None else [self._coordinator, self._change]
        fenced = [producer for one in known for producer in one.fenced.values()]
        ending = {producer_id for one in known for producer_id in one.ending.values()}
        try:
            return await complete_hanging(self._kafka, self.lane, fenced, only, ending=ending)
        except NewerOwner as error:
            raise Fenced(str(error)) from None

    async def _produce(self, parts: Sequence[PartitionBatches]) -> None:
        """All leaders at once, a few requests in flight to each, until everything is acknowledged."""
        unknown_until, pause = time.monotonic() + _UNKNOWN_TOPIC_S, _BACKOFF_S
        ended_until = time.monotonic() + ENDING_S
        if self._channels.losses != self._losses:
            # A broker may have been away since the last transaction, and its marker missing.
            self._losses = self._channels.losses
            self._unchecked |= await self._complete_hanging(self._written | {part.tp for part in parts})
        while waiting := [part for part in parts if part.rest]:
            by_leader: dict[int, list[PartitionBatches]] = {}
            for part in await self._checked(waiting):
                leader = await self._kafka.present_leader(part.topic, part.number)
                if leader < 0:
                    self._troubled(part, "it has no leader")
                else:
                    by_leader.setdefault(leader, []).append(part)
            asked = (self._produce_to(leader, led) for leader, led in by_leader.items())
            failed = [failure for failures in await asyncio.gather(*asked) for failure in failures]
            _check_rights({p.tp: NO_WRITE for p, found in failed if found.code == _DENIED})
            for part, produced in failed:
                self._judge(part, produced, may_be_new=time.monotonic() < unknown_until)
            self._give_up(parts)
            if time.monotonic() > ended_until and any(
                produced.code == error_codes.CONCURRENT_TRANSACTIONS for _, produced in failed
            ):
                raise NotCommitted("Kafka has not ended the transaction before this one")
            if failed or not by_leader:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_BACKOFF_S)
            # Where a leader was away, the marker of the transaction before may be missing, and not only there: the
            # same broker may lead the partitions that this transaction writes to next.
            if troubled := {p.tp for p, found in failed if found.code != error_codes.CONCURRENT_TRANSACTIONS}:
                self._leader_was_away = True
                self._unchecked |= await self._complete_hanging(self._written | troubled)

    def _troubled(self, part: PartitionBatches, why: str, since: float | None = None) -> None:
        part.trouble = (part.trouble[0] if part.trouble else since or time.monotonic(), why)

    def _give_up(self, parts: Sequence[PartitionBatches]) -> None:
        """Raises NotCommitted, naming the partitions that took nothing for too long."""
        before = time.monotonic() - _REJECTED_S
        if not any(part.trouble is not None and part.trouble[0] <= before for part in parts):
            return
        unavailable = {part.tp: part.trouble[1] for part in parts if part.trouble is not None}
        text = "; ".join(f"{topic}-{number}: {why}" for (topic, number), why in sorted(unavailable.items()))
        raise NotCommitted(errors.LeaderNotAvailableError(text), unavailable=unavailable)

    async def _checked(self, parts: list[PartitionBatches]) -> list[PartitionBatches]:
        """The parts that may be written now: those that could not be checked are checked first. Raises NotCommitted."""
        unchecked = self._unchecked.keys() & {part.tp for part in parts}
        if unchecked:
            missed = await self._complete_hanging(unchecked)
            self._unchecked = {tp: why for tp, why in self._unchecked.items() if tp not in unchecked} | missed
        missed = {part.tp: self._unchecked[part.tp] for part in parts if part.tp in self._unchecked}
        _check_rights({tp: why for tp, why in missed.items() if why in MAY_NOT})
        for part in parts:
            if part.tp in missed:
                self._troubled(part, missed[part.tp])
        return [part for part in parts if part.tp not in missed]

    async def _produce_to(self, leader: int, parts: list[PartitionBatches]) -> list[tuple[PartitionBatches, Produced]]:
        """Sends the batches of the parts, the next ones while the answers to others are awaited.

        Returns the rejected batches, the first of each part alone: those sent after it were rejected as well, since
        sequence numbers have no holes.
        """
        sent = dict.fromkeys((part.tp for part in parts), 0)
        failed: dict[tuple[str, int], tuple[PartitionBatches, Produced]] = {}
        under_way: deque[asyncio.Task[list[tuple[PartitionBatches, Encodable, Produced]]]] = deque()
        try:
            while True:
                going_on = [p for p in parts if p.tp not in failed and sent[p.tp] < len(p.rest)]
                if going_on and len(under_way) < _WINDOW:
                    wave = [(part, part.rest[sent[part.tp]]) for part in going_on]
                    request = await self._encoded(wave)
                    under_way.append(asyncio.create_task(self._send(leader, wave, request)))
                    for part in going_on:
                        sent[part.tp] += 1
                    # It is sent while the next one is encoded.
                    await asyncio.sleep(0)
                    continue
                if not under_way:
                    return list(failed.values())
                for part, batch, produced in await under_way.popleft():
                    if part.tp in failed:
                        continue
                    if produced.code in (error_codes.NONE, error_codes.DUPLICATE_SEQUENCE_NUMBER):
                        part.rest.popleft()
                        part.trouble = None
                        sent[part.tp] -= 1
                        part.offsets.append((batch.first, produced.base_offset))
                    else:
                        failed[part.tp] = (part, produced)
        finally:
            for task in under_way:
                task.cancel()

    async def _encoded(self, wave: list[tuple[PartitionBatches, Encodable]]) -> ProduceRequest:
        """The request for one batch of each part: in a thread where much is to be compressed.

        The batches before these are on their way meanwhile. One after the other, since sequence numbers have no holes.
        """
        producer = self._coordinator.present

        def encode() -> ProduceRequest:
            wanted: dict[TopicIdPartition, Sequence[Piece]] = {}
            for part, batch in wave:
                stamp = Stamp(producer.producer_id, producer.epoch, batch.first)
                wanted[TopicIdPartition(part.topic_id, part.number)] = batch.pieces(stamp)
            return ProduceRequest(producer.transactional_id, _REPLICATED_MS, wanted)

        to_pack = sum(len(batch.records) for _, batch in wave if isinstance(batch, RecordBatch))
        return encode() if to_pack <= _INLINE_BYTES else await asyncio.to_thread(encode)

    async def _send(
        self, leader: int, wave: list[tuple[PartitionBatches, Encodable]], request: ProduceRequest
    ) -> list[tuple[PartitionBatches, Encodable, Produced]]:
        asked_at = time.monotonic()
        try:
            answers = await self._channels.ask(leader, request)
        except PASSING as error:
            lost = Produced(error_codes.NETWORK_EXCEPTION, -1, repr(error))
            answers = {TopicIdPartition(part.topic_id, part.number): lost for part, _ in wave}
        answered = [(part, batch, answers[TopicIdPartition(part.topic_id, part.number)]) for part, batch in wave]
        for part, _, produced in answered:
            if produced.code in error_codes.UNAVAILABLE:
                why = produced.message or errors.for_code(produced.code).__name__
                self._troubled(part, f"its leader, broker {leader}, does not take the batch: {why}", asked_at)
        return answered

    def _judge(self, part: PartitionBatches, produced: Produced, *, may_be_new: bool) -> None:
        """Returns when the batch may be sent again. Raises NotCommitted or Fenced."""
        code = produced.code
        if code in error_codes.FENCED:
            raise Fenced("another producer of this lane fenced this one")
        self._kafka.forget_leader(part.topic, part.number)
        if code in error_codes.RETRIABLE or (code in error_codes.NO_SUCH_TOPIC and may_be_new):
            return
        tp = f"{part.topic}-{part.number}"
        if code in error_codes.NO_SUCH_TOPIC:
            raise NotCommitted(errors.UnknownTopicOrPartitionError(f"{tp} was deleted meanwhile"), part.topic)
        error = errors.for_code(code)(f"{tp}: {produced.message or f'Kafka rejects the batch with error code {code}'}")
        raise NotCommitted(error, part.topic if code in error_codes.TOO_LARGE else None, part.tp)

    async def discard(self) -> None:
        """Ends the producer without a request to Kafka; its open transaction ends when the next one fences it."""
        self._channels.abort()
        await close_client(self._client)


def _check_rights(lacking: Mapping[TopicPartition, str]) -> None:
    """Raises NotCommitted where there are some: they are blamed at once, since each failure is a fence."""
    for (topic, number), why in lacking.items():
        error = errors.TopicAuthorizationFailedError(f"{topic}-{number}: {why}")
        raise NotCommitted(error, refused=(topic, number), unavailable=lacking)
