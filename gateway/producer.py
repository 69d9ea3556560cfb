"""One transaction through Kafka: begin, send, look at the topics' ids, commit.

What this module keeps:

* Every send is awaited before the commit: in aiokafka a batch that failed does not fail its transaction, and a
  transaction without its data would be committed.
* After any error the producer is thrown away. Nothing is ever aborted to go on with the same producer: its
  abort may not reach Kafka, and what was aborted is then committed with the next transaction.
* The errors say what happened. `NotCommitted`: no commit was ever sent, so the transaction can only end as aborted.
  `OutcomeUnknown`: a commit was sent and its answer never came, or another producer fenced this one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from aiokafka import AIOKafkaProducer, TopicPartition, errors
from aiokafka.producer.message_accumulator import BatchBuilder
from logferry.gateway.kafka import hang_up
from logferry.gateway.topics import Topics
from logferry.gateway.transaction import Draft, Record

TRANSACTION_TIMEOUT_MS: Final = 15_000
REQUEST_TIMEOUT_MS: Final = 10_000
_OPEN_DEADLINE_S: Final = 30.0
_TRANSACTION_DEADLINE_S: Final = 20.0
_SLOW_S: Final = 1.0
_SETTLE_S: Final = 0.005
_BATCH_BYTES: Final = 1 << 20
_CODECS: Final = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_SEQUENCE_LIMIT: Final = 1 << 30

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


class LaneProducer:
    """A transactional producer for one lane, from the fence to the first error."""

    def __init__(self, options: dict[str, Any], transactional_id: str, codec: str, topics: Topics) -> None:
        self._topics = topics
        self._producer = AIOKafkaProducer(
            transactional_id=transactional_id,
            acks="all",
            compression_type=None if codec == "none" else codec,
            max_batch_size=_BATCH_BYTES,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            client_id=transactional_id,
            **options,
        )
        self._codec = _CODECS[codec]
        self._highest_sequence = 0
        self._committed_at = 0.0

    async def fence(self) -> None:
        """Shuts out every older producer of the transactional id, and waits until its open transaction ended."""
        async with asyncio.timeout(_OPEN_DEADLINE_S):
            await self._producer.start()

    async def settled(self) -> None:
        """Waits until Kafka has written the markers of the last commit, about 5 ms after its answer.

        A transaction that begins earlier is refused and tried again 20 ms later. Measured: p50 23 ms without this
        pause, 9 ms with it; what arrives meanwhile goes into the same transaction.
        """
        pause = self._committed_at + _SETTLE_S - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)

    @property
    def is_worn(self) -> bool:
        """Sequence numbers near their end: aiokafka would wrap them to negative ones, which Kafka refuses."""
        return self._highest_sequence >= _SEQUENCE_LIMIT

    async def transact(self, draft: Draft, state_partition: tuple[str, int]) -> Offsets:
        """Writes and commits the draft. Returns, by partition, (index of the first record, its offset) of each batch.

        Raises NotCommitted or OutcomeUnknown; the producer must be discarded then.
        """
        try:
            async with asyncio.timeout(_TRANSACTION_DEADLINE_S):
                await self._producer.begin_transaction()
                offsets = await self._send_all(draft, state_partition)
                await self._check_topics(draft)
        except NotCommitted:
            raise
        except (errors.ProducerFenced, errors.InvalidProducerEpoch) as error:
            raise Fenced("another producer of this lane fenced this one") from error
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise NotCommitted(error) from error
        try:
            async with asyncio.timeout(_TRANSACTION_DEADLINE_S):
                await self._producer.commit_transaction()
        except (errors.ProducerFenced, errors.InvalidProducerEpoch) as error:
            raise Fenced("another producer of this lane fenced this one during the commit") from error
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise OutcomeUnknown(f"no answer to the commit: {error!r}") from error
        self._committed_at = time.monotonic()
        return offsets

    async def _send_all(self, draft: Draft, state_partition: tuple[str, int]) -> Offsets:
        states: list[Record] = [(key, value, []) for key, value in draft.states.items()]
        sends = {}
        for partition, records in (*draft.records.items(), (state_partition, states)):
            facts = draft.topics.get(partition[0])
            limit = _BATCH_BYTES if facts is None else min(_BATCH_BYTES, facts.max_message_bytes)
            sends[partition] = asyncio.ensure_future(self._send(partition, self._batches(records, draft.now_ms, limit)))
        try:
            _, slow = await asyncio.wait(sends.values(), timeout=_SLOW_S)
            if slow:
                # Kafka's client tries a deleted topic again and again; a look at the topics fails it alone.
                await self._check_topics(draft)
                await asyncio.wait(sends.values())
        finally:
            for send in sends.values():
                send.cancel()
            await asyncio.gather(*sends.values(), return_exceptions=True)
        for (topic, _), send in sends.items():
            error = send.exception()
            if isinstance(error, errors.MessageSizeTooLargeError | errors.UnknownTopicOrPartitionError):
                # Whose request is to blame shows when all come again, and are held against fresh facts.
                self._topics.forget(topic)
                raise NotCommitted(error, topic)
            if error is not None:
                raise error
        return {partition: send.result() for partition, send in sends.items()}

    async def _send(
        self, partition: tuple[str, int], batches: Iterator[tuple[int, BatchBuilder]]
    ) -> list[tuple[int, int]]:
        topic, number = partition
        await self._know(topic, number)
        futures = []
        for first, batch in batches:
            futures.append((first, await self._producer.send_batch(batch, topic, partition=number)))
        offsets = [(first, (await future).offset) for first, future in futures]
        sequence = self._producer._txn_manager.sequence_number(TopicPartition(topic, number))
        self._highest_sequence = max(self._highest_sequence, sequence)
        return offsets

    async def _know(self, topic: str, partition: int) -> None:
        """aiokafka asserts that a partition is in its metadata; of a topic that grew it may be stale."""
        client, cluster = self._producer.client, self._producer.client.cluster
        # A refresh brings the tracked topics alone, so each one that is written to must be tracked.
        await client.add_topic(topic)
        while partition not in (cluster.partitions_for_topic(topic) or ()):
            await client.force_metadata_update()
            await asyncio.sleep(0.05)

    def _batches(self, records: list[Record], now_ms: int, limit_bytes: int) -> Iterator[tuple[int, BatchBuilder]]:
        """Batches of at most the limit before compression, headers and all; a larger record has one of its own."""
        batch, first = self._batch(limit_bytes), 0
        for index, (key, value, headers) in enumerate(records):
            if batch.append(timestamp=now_ms, key=key, value=value, headers=headers) is None:
                yield first, batch
                batch, first = self._batch(limit_bytes), index
                batch.append(timestamp=now_ms, key=key, value=value, headers=headers)
        batch.close()
        yield first, batch

    def _batch(self, limit_bytes: int) -> BatchBuilder:
        return BatchBuilder(limit_bytes, self._codec, is_transactional=True)

    async def _check_topics(self, draft: Draft) -> None:
        """The topics are the ones that the draft was decided for, now that its records are in them."""
        changed = draft.changed_topic(await self._topics.confirm(draft.partitions()))
        if changed is not None:
            self._topics.forget(changed)
            raise NotCommitted(errors.UnknownTopicOrPartitionError(f"{changed} was deleted meanwhile"), changed)

    async def discard(self) -> None:
        """Ends the producer without a word to Kafka; its open transaction ends when the next one fences it.

        aiokafka's own `stop` waits for batches that can't be delivered any more, so the parts are ended one by one.
        """
        producer = self._producer
        producer._closed = True
        producer._message_accumulator.fail_all(errors.ProducerClosed())
        await hang_up(producer.client)
        sender = producer._sender.sender_task
        for _ in range(3):
            if sender is None or sender.done():
                break
            sender.cancel()
            await asyncio.wait({sender}, timeout=1)
        if sender is not None and sender.done():
            with suppress(asyncio.CancelledError):
                sender.exception()
