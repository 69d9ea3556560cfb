"""Group commit: writes a transaction draft, the chunks and the states of their sources together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final

from aiokafka import errors
from logferry.gateway.config import Config
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.hanging_transactions import FencedProducer
from logferry.gateway.kafka.record_batch import CODECS, batches
from logferry.gateway.kafka.transactional_producer import NotCommitted, PartitionBatches, TransactionalProducer
from logferry.gateway.kafka.types import Record
from logferry.gateway.lanes.transaction import Draft
from logferry.gateway.topics.catalog import TopicCatalog

_BATCH_BYTES: Final = 1 << 20
# The encoding of so many bytes takes a few ms at most, whatever they are.
_INLINE_BYTES: Final = 1 << 16
_INLINE_STATES: Final = 500

Offsets = dict[tuple[str, int], list[tuple[int, int]]]


class GroupCommit(TransactionalProducer):
    def __init__(
        self,
        kafka: KafkaClient,
        topics: TopicCatalog,
        config: Config,
        lane: int,
        before: Mapping[str, FencedProducer] | None = None,
    ) -> None:
        super().__init__(kafka, config.lane(lane), before)
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
