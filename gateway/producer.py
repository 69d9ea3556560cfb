"""One transaction through Kafka: produce to the leaders, then commit at the coordinator.

Ours down to the requests, on aiokafka's connections, because the newest ones do more for exactness than aiokafka's
producer knows of: a topic is written by its id, and each transaction has an epoch of its own (see `produce`).

What this module keeps:

* Every batch is acknowledged before the commit is sent.
* Within a transaction the same batch is sent again with the same sequence number, which Kafka takes once.
* After any error the producer is thrown away. Nothing is ever aborted to go on with the same producer: its
  abort may not reach Kafka, and what was aborted is then committed with the next transaction.
* The errors say what happened. `NotCommitted`: no commit was ever sent, so the transaction can only end as aborted.
  `OutcomeUnknown`: a commit was sent and its answer never came, or another producer fenced this one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka import errors
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.protocol.transaction import InitProducerIdRequest
from logferry.gateway.batches import CODECS, Batch, Stamp, batches
from logferry.gateway.config import Config
from logferry.gateway.kafka import PASSING, Kafka, connect, hang_up
from logferry.gateway.markers import mend
from logferry.gateway.metadata import NO_ID
from logferry.gateway.produce import CommitRequest, Produced, ProduceRequest, TopicPartition, read_produced
from logferry.gateway.topics import Topics
from logferry.gateway.transaction import Draft, Record

TRANSACTION_TIMEOUT_MS: Final = 15_000
REQUEST_TIMEOUT_MS: Final = 10_000
_OPEN_DEADLINE_S: Final = 30.0
_TRANSACTION_DEADLINE_S: Final = 20.0
_SETTLE_S: Final = 0.005
_BACKOFF_S: Final = 0.02
_LONGEST_BACKOFF_S: Final = 0.5
_BATCH_BYTES: Final = 1 << 20
# A leader may hear of a new topic a little later than the broker that told of it.
_UNKNOWN_TOPIC_S: Final = 1.0

_NETWORK: Final = 13
_CONCURRENT_TRANSACTIONS: Final = 51
_NO_SUCH_TOPIC: Final = frozenset({3, 100, 103})
_TOO_LARGE: Final = frozenset({10, 18})
_FENCED: Final = frozenset({47, 90})
_DUPLICATE_SEQUENCE: Final = 46
# What passes by itself: no leader or coordinator now, too few replicas in sync, markers that are not written yet.
_PASSING_CODES: Final = frozenset({5, 6, 7, _NETWORK, 14, 15, 16, 19, 20, 56, 74, 75, _CONCURRENT_TRANSACTIONS})

Offsets = dict[tuple[str, int], list[tuple[int, int]]]


class NotCommitted(Exception):
    """The transaction ended without a commit. ``topic``: the one that is to blame, where it is known."""

    def __init__(self, cause: BaseException | str, topic: str | None = None) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause = cause
        self.topic = topic


class OutcomeUnknown(Exception):
    """Committed or not: only the log can say, after a fence."""


class Fenced(OutcomeUnknown):
    """Another producer of the lane shut this one out; whether it let the commit through first, only the log can say."""


@dataclass(slots=True)
class _Part:
    """What a transaction writes to one partition. ``offsets``: (first record, its offset) of the batches written."""

    topic: str
    number: int
    topic_id: bytes
    rest: list[Batch]
    offsets: list[tuple[int, int]] = field(default_factory=list)

    @property
    def sequence(self) -> int:
        return self.rest[0].first


class LaneProducer:
    """A transactional producer for one lane, from the fence to the first error.

    ``is_troubled``: brokers were away meanwhile. It is replaced after its transaction, so that a fence and a look at
    the markers come before the next one.
    """

    def __init__(self, kafka: Kafka, topics: Topics, config: Config, lane: int) -> None:
        self._kafka, self._topics = kafka, topics
        self._transactional_id = config.transactional_id(lane)
        self._codec = CODECS[config.codec]
        self._client = AIOKafkaClient(
            client_id=self._transactional_id,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            metadata_max_age_ms=30_000,
            **kafka.options,
        )
        self._config, self._lane = config, lane
        self._state_topic = config.state_topic
        self._unseen: set[tuple[str, int]] = set()
        self._state_topic_id = NO_ID
        self.is_troubled = False
        self._coordinator: int | None = None
        self._producer_id = self._epoch = -1
        self._committed_at = 0.0

    async def fence(self) -> None:
        """Shuts out every older producer of the transactional id, and ends its open transaction in every partition."""
        async with asyncio.timeout(_OPEN_DEADLINE_S):
            # A client that tracks no topic asks for the metadata of all of them, again and again.
            self._client.set_topics(["__transaction_state"])
            await connect(self._client)
            request = InitProducerIdRequest(self._transactional_id, TRANSACTION_TIMEOUT_MS)
            answer = await self._ask_coordinator(request)
            if answer.error_code:
                raise errors.for_code(answer.error_code)(f"fencing {self._transactional_id}")
            self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch
            self._state_topic_id = (await self._kafka.describe_topic(self._state_topic)).id
            self._unseen = await self._mend(None)
            self.is_troubled = False
            if (self._state_topic, self._lane) in self._unseen:
                raise errors.LeaderNotAvailableError(f"{self._state_topic}-{self._lane} has no leader")

    async def settled(self) -> None:
        """Waits until Kafka has written the markers of the last commit, about 5 ms after its answer.

        A transaction that begins earlier is tried again by the broker 20 ms later. Measured: p50 23 ms without this
        pause, 9 ms with it; what arrives meanwhile goes into the same transaction.
        """
        pause = self._committed_at + _SETTLE_S - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)

    async def transact(self, draft: Draft) -> Offsets:
        """Writes and commits the draft. Returns, by partition, (index of the first record, its offset) of each batch.

        Raises NotCommitted or OutcomeUnknown; the producer must be discarded then.
        """
        try:
            async with asyncio.timeout(_TRANSACTION_DEADLINE_S):
                parts = self._parts(draft)
                await self._see(draft)
                await self._produce(parts, draft.now_ms)
                await self._check_topics(draft)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise NotCommitted(error) from error
        try:
            async with asyncio.timeout(_TRANSACTION_DEADLINE_S):
                await self._commit()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise OutcomeUnknown(f"no answer to the commit: {error!r}") from error
        self._committed_at = time.monotonic()
        return {(part.topic, part.number): part.offsets for part in parts}

    async def _see(self, draft: Draft) -> None:
        """Partitions that had no leader at the fence are looked at before they are written to."""
        wanted = self._unseen & draft.records.keys()
        if wanted:
            left = await self._mend(wanted)
            if left:
                raise errors.LeaderNotAvailableError(f"no leader: {sorted(left)}")
            self._unseen -= wanted

    async def _mend(self, only: set[tuple[str, int]] | None) -> set[tuple[str, int]]:
        return await mend(self._kafka, self._config, self._lane, (self._producer_id, self._epoch), only)

    # ---- producing --------------------------------------------------------------------------------------------

    def _parts(self, draft: Draft) -> list[_Part]:
        states: list[Record] = [(key, value, []) for key, value in draft.states.items()]
        parts = [_Part(self._state_topic, self._lane, self._state_topic_id, list(batches(states, _BATCH_BYTES)))]
        for (topic, number), records in draft.records.items():
            facts = draft.topics[topic]
            limit = min(_BATCH_BYTES, facts.max_message_bytes)
            parts.append(_Part(topic, number, facts.id, list(batches(records, limit))))
        return parts

    async def _produce(self, parts: list[_Part], now_ms: int) -> None:
        """One batch of each partition at a time, all leaders at once, until everything is acknowledged."""
        unknown_until, pause = time.monotonic() + _UNKNOWN_TOPIC_S, _BACKOFF_S
        while waiting := [part for part in parts if part.rest]:
            by_leader: dict[int, list[_Part]] = {}
            for part in waiting:
                by_leader.setdefault(await self._kafka.leader(part.topic, part.number), []).append(part)
            asked = (self._produce_to(leader, led, now_ms) for leader, led in by_leader.items())
            failed = [failure for failures in await asyncio.gather(*asked) for failure in failures]
            for part, produced in failed:
                self._judge(part, produced, may_be_new=time.monotonic() < unknown_until)
            if failed:
                await asyncio.sleep(pause)
                await self._see_again([part for part, produced in failed if produced.code != _CONCURRENT_TRANSACTIONS])
                pause = min(2 * pause, _LONGEST_BACKOFF_S)

    async def _see_again(self, troubled: list[_Part]) -> None:
        """Where a leader was away, the marker of the transaction before may be missing: before there is more to end."""
        if troubled:
            self.is_troubled = True
            await self._mend({(part.topic, part.number) for part in troubled})

    async def _produce_to(self, leader: int, parts: list[_Part], now_ms: int) -> list[tuple[_Part, Produced]]:
        """Sends the next batch of each of the parts. Returns what was not taken."""
        wanted = {}
        for part in parts:
            stamp = Stamp(self._producer_id, self._epoch, part.sequence)
            wanted[TopicPartition(part.topic_id, part.number)] = part.rest[0].encode(stamp, now_ms, self._codec)
        request = ProduceRequest(self._transactional_id, REQUEST_TIMEOUT_MS, wanted)
        try:
            answers = read_produced(await self._client.send(leader, request))
        except PASSING as error:
            lost = Produced(_NETWORK, -1, repr(error))
            return [(part, lost) for part in parts]
        failed = []
        for part in parts:
            produced = answers[TopicPartition(part.topic_id, part.number)]
            if produced.code in (0, _DUPLICATE_SEQUENCE):
                part.offsets.append((part.rest.pop(0).first, produced.base_offset))
            else:
                failed.append((part, produced))
        return failed

    def _judge(self, part: _Part, produced: Produced, *, may_be_new: bool) -> None:
        """Returns when the batch may be sent again. Raises NotCommitted or Fenced."""
        code = produced.code
        if code in _FENCED:
            raise Fenced("another producer of this lane fenced this one")
        self._kafka.forget_leader(part.topic, part.number)
        if code in _PASSING_CODES or (code in _NO_SUCH_TOPIC and may_be_new):
            return
        place = f"{part.topic}-{part.number}"
        if code in _NO_SUCH_TOPIC or code in _TOO_LARGE:
            # Whose request is to blame shows when all come again, and are held against fresh facts.
            self._topics.forget(part.topic)
        if code in _NO_SUCH_TOPIC:
            raise NotCommitted(errors.UnknownTopicOrPartitionError(f"{place} was deleted meanwhile"), part.topic)
        error = errors.for_code(code)(f"{place}: {produced.message or f'Kafka says {code}'}")
        raise NotCommitted(error, part.topic if code in _TOO_LARGE else None)

    async def _check_topics(self, draft: Draft) -> None:
        """The topics are the ones that the draft was decided for; those that it wrote to were named by their id."""
        ids = {topic: draft.topics[topic].id for topic, _ in draft.records}
        unwritten = draft.topics.keys() - ids.keys()
        if unwritten:
            ids.update(await self._topics.confirm((topic, 0) for topic in unwritten))
        changed = draft.changed_topic(ids)
        if changed is not None:
            self._topics.forget(changed)
            raise NotCommitted(errors.UnknownTopicOrPartitionError(f"{changed} was deleted meanwhile"), changed)

    # ---- the coordinator --------------------------------------------------------------------------------------

    async def _commit(self) -> None:
        """Commits; a commit that Kafka did already is answered alike when it is asked for again."""
        answer = await self._ask_coordinator(CommitRequest(self._transactional_id, self._producer_id, self._epoch))
        if answer.error_code in _FENCED:
            raise Fenced("another producer of this lane fenced this one during the commit")
        if answer.error_code:
            raise OutcomeUnknown(f"Kafka answers the commit by error {answer.error_code}")
        self._producer_id, self._epoch = answer.producer_id, answer.producer_epoch

    async def _ask_coordinator(self, request: Any) -> Any:
        """The coordinator's answer, once it is there and no other transaction of the id is ending."""
        pause = _BACKOFF_S
        while True:
            try:
                if self._coordinator is None:
                    self._coordinator = await self._client.coordinator_lookup(
                        CoordinationType.TRANSACTION, self._transactional_id
                    )
                answer = await self._client.send(self._coordinator, request)
                if answer.error_code not in _PASSING_CODES:
                    return answer
                if answer.error_code != _CONCURRENT_TRANSACTIONS:
                    self._coordinator, self.is_troubled = None, True
            except PASSING:
                self._coordinator, self.is_troubled = None, True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_BACKOFF_S)

    async def discard(self) -> None:
        """Ends the producer without a word to Kafka; its open transaction ends when the next one fences it."""
        await hang_up(self._client)
