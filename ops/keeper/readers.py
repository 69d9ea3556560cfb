"""What readers still need: positions of consumer groups, of mirrors in other data centres, of tables' ledgers, and of
push delivery.

A reader that gives no answer, or has no position in a partition of its topics, needs all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition, printed_topic_id
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.consumer_groups import ConsumerGroups
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.cli.problems import CommandError
from logferry.ops.keeper.config import KeeperConfig, ReaderSettings, matches
from logferry.ops.keeper.delivery_positions import DeliveryNeeds, DeliveryPositions

_ANSWER_S: Final = 10.0
_MOST_WORKERS: Final = 64


@dataclass(slots=True)
class Needs:
    """``positions``, ``deliveries``: by reader. ``unknown``: readers that gave no answer, with the reason."""

    readers: list[ReaderSettings]
    positions: dict[str, dict[TopicPartition, int]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    deliveries: dict[str, DeliveryNeeds] = field(default_factory=dict)

    def of(self, tp: TopicPartition) -> dict[str, int | None]:
        """The position of each reader of the topic, and of each subscription by its own name; None: it needs all."""
        found: dict[str, int | None] = {}
        for reader in self.readers:
            if not matches(reader.topics, tp[0]):
                continue
            if reader.deliver is not None and reader.name in self.deliveries:
                found |= self.deliveries[reader.name].of(reader.deliver, tp)
            else:
                found[reader.name] = self.positions.get(reader.name, {}).get(tp)
        return found


class Readers:
    def __init__(self, kafka: KafkaClient, config: KeeperConfig) -> None:
        self._groups, self._config = ConsumerGroups(kafka), config
        self._deliveries = DeliveryPositions(kafka, config.prefix, config.dc)

    async def needs(self, ids: Mapping[str, bytes]) -> Needs:
        """Asks all of them at once, each for ten seconds at most. ``ids``: of the topics, as they are now."""
        found = Needs(self._config.readers)

        async def ask(reader: ReaderSettings) -> None:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    if reader.deliver is not None:
                        deliveries = await self._deliveries.read(ids)
                        deliveries.check(reader.deliver)
                        found.deliveries[reader.name] = deliveries
                    else:
                        found.positions[reader.name] = await self._positions(reader, ids)
            except Exception as error:  # noqa: BLE001  whatever a reader's store raises: nothing of its topics goes
                found.unknown[reader.name] = str(error) or type(error).__name__

        await asyncio.gather(*map(ask, self._config.readers))
        return found

    async def _positions(self, reader: ReaderSettings, ids: Mapping[str, bytes]) -> dict[TopicPartition, int]:
        if reader.consumer is not None:
            committed = await self._groups.committed(reader.consumer)
            if not committed:
                raise errors.UnknownTopicOrPartitionError("the group has no committed offsets")
            return committed
        if reader.mirror is not None:
            return await asyncio.to_thread(_mirrored, reader.mirror, reader.token_file, self._config.dc)
        return await asyncio.to_thread(_loaded, reader.table or "", ids)


def _mirrored(url: str, token_file: str | None, dc: str) -> dict[TopicPartition, int]:
    """The offsets of this data centre from which all workers of the mirror fetch next. Raises CommandError."""
    from logferry.client.transport.cluster import read_token

    token = None if token_file is None else read_token(token_file)
    pending, asked, found = [url.rstrip("/")], set[str](), dict[TopicPartition, int]()
    while pending:
        one = pending.pop()
        asked.add(one)
        said = GatewayClient(one, token, timeout_s=_ANSWER_S / 2, service="mirror").request("GET", "/v1/status")
        asked.add(str(said.get("url", one)))
        found |= dict(_taken(said.get("partitions", ()), dc))
        pending += [other for other in said.get("workers", ()) if other not in asked and other not in pending]
        if len(asked) > 2 * _MOST_WORKERS:
            raise CommandError(f"{url}: more than {_MOST_WORKERS} workers")
    return found


def _taken(partitions: Iterable[dict[str, object]], dc: str) -> Iterable[tuple[TopicPartition, int]]:
    for one in partitions:
        at, number = one.get("source_next"), one.get("partition")
        if one.get("dc") == dc and isinstance(at, int) and isinstance(number, int):
            yield (str(one.get("topic")), number), at


def _loaded(path: str, ids: Mapping[str, bytes]) -> dict[TopicPartition, int]:
    """Where the table's next batch begins. Without Spark. Raises what the store raises.

    A position in a topic that was recreated since is none: the table has nothing of the present one.
    """
    from logferry.loaders.location import Location
    from logferry.loaders.storage.tables import snapshot_of

    known = {topic: printed_topic_id(topic_id) for topic, topic_id in ids.items()}
    ranges = snapshot_of(Location.of(path)).entry.ranges
    return {(r.topic, r.partition): r.end for r in ranges if known.get(r.topic) == r.topic_id}
