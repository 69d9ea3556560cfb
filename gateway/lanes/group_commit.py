"""A draft of the gateway through Kafka: its chunks and the states of their sources, in one transaction."""

from __future__ import annotations

from collections import deque
from typing import Final

from aiokafka import errors
from logferry.gateway.config import Config
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import NO_ID
from logferry.gateway.kafka.record_batch import CODECS, batches
from logferry.gateway.kafka.transactional_producer import NotCommitted, Part, TransactionalProducer
from logferry.gateway.lanes.transaction import Draft, Record
from logferry.gateway.topics.catalog import Topics

_BATCH_BYTES: Final = 1 << 20

Offsets = dict[tuple[str, int], list[tuple[int, int]]]


class LaneProducer(TransactionalProducer):
    """The gateway's producer of a lane."""

    def __init__(self, kafka: Kafka, topics: Topics, config: Config, lane: int) -> None:
        super().__init__(kafka, config.lane(lane))
        self._topics = topics
        self._codec = CODECS[config.codec]
        self._state_topic_id = NO_ID

    async def fence(self) -> None:
        await super().fence()
        self._state_topic_id = (await self._kafka.describe_topic(self.lane.state[0])).id

    async def transact(self, draft: Draft) -> Offsets:
        """Writes and commits the draft. Returns, by partition, (index of the first record, its offset) of each batch.

        Raises NotCommitted or OutcomeUnknown; the producer must be discarded then.
        """
        parts = self._parts(draft)
        try:
            await self.write(parts)
            await self._check_topics(draft)
        except NotCommitted as failure:
            if failure.topic is not None:
                # Whose request is to blame shows when all come again, and are held against fresh facts.
                self._topics.forget(failure.topic)
            raise
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise NotCommitted(error) from error
        await self.commit()
        return {part.place: part.offsets for part in parts}

    def _parts(self, draft: Draft) -> list[Part]:
        states: list[Record] = [(key, value, []) for key, value in draft.states.items()]
        written = batches(states, _BATCH_BYTES, draft.now_ms, self._codec)
        parts = [Part(*self.lane.state, self._state_topic_id, deque(written))]
        for (topic, number), records in draft.records.items():
            facts = draft.topics[topic]
            written = batches(records, min(_BATCH_BYTES, facts.max_message_bytes), draft.now_ms, self._codec)
            parts.append(Part(topic, number, facts.id, deque(written)))
        return parts

    async def _check_topics(self, draft: Draft) -> None:
        """The topics are the ones that the draft was decided for; those that it wrote to were named by their id."""
        ids = {topic: draft.topics[topic].id for topic, _ in draft.records}
        unwritten = draft.topics.keys() - ids.keys()
        if unwritten:
            ids.update(await self._topics.confirm((topic, 0) for topic in unwritten))
        changed = draft.changed_topic(ids)
        if changed is not None:
            raise NotCommitted(errors.UnknownTopicOrPartitionError(f"{changed} was deleted meanwhile"), changed)
