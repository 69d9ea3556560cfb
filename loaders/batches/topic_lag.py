"""How far a table is behind its topics: Kafka's offsets now against those of the ledger. Without Spark. Read only.

The age of the oldest record that is not loaded comes from Kafka's index of times, by bisection: no record is fetched,
and a round is one request to each broker, whatever the number of partitions. It is by this host's clock, and right
where a partition has its records in the order of their times, as gateways and mirrors write them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.config import ConfigError, KafkaSettings
from logferry.gateway.contract.names import printed_topic_id
from logferry.gateway.kafka.aiokafka_internals import start_or_explain
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.tls import kafka_options
from logferry.loaders.config import Config, check_config
from logferry.loaders.errors import KafkaUnavailable
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicOffsets, plan
from logferry.loaders.planning.position_plan import is_full
from logferry.loaders.storage.tables import TableSnapshot, wanted_topics

_DEADLINE_S: Final = 30.0
# Ages are found between these, to a twentieth.
_YOUNGEST_S: Final = 1.0
_OLDEST_S: Final = 10 * 365 * 86_400.0
_EXACT: Final = 1.05


class TopicLag(NamedTuple):
    """``records``: offsets that are not loaded, control records included. ``seconds``: the age of the oldest of them, 0
    where all are loaded, None where it is unknown. ``stopped``: why the topic cannot be loaded.
    """

    topic: str
    records: int | None
    seconds: float | None
    stopped: str | None = None


def lag_of(snapshots: Sequence[TableSnapshot], settings: KafkaSettings) -> list[list[TopicLag]]:
    """The lag of each table by topic. Raises KafkaUnavailable, LoaderConfigError."""

    async def ask() -> list[list[TopicLag]]:
        kafka = KafkaClient(kafka_options(settings), "logferry-table")
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await start_or_explain(kafka)
                return [await _lag(kafka, snapshot) for snapshot in snapshots]
        finally:
            await kafka.close()

    try:
        return asyncio.run(ask())
    except (errors.KafkaError, TimeoutError, OSError, ConfigError) as error:
        why = str(error) or type(error).__name__
        raise KafkaUnavailable(f"Kafka at {settings.bootstrap_servers} cannot be read: {why}") from error


def kafka_settings(settings: Config | None, bootstrap: str) -> KafkaSettings:
    """The connection of a configuration, else an address alone. Raises LoaderConfigError."""
    if settings is not None:
        return settings.kafka
    raw = {"kafka": {"bootstrap_servers": bootstrap}, "tables": [{"path": "/-", "topics": ["*"]}]}
    return check_config(raw, "--bootstrap").kafka


async def topic_views(
    kafka: KafkaClient, snapshot: TableSnapshot, patterns: Sequence[str], *, is_chosen: bool = False
) -> tuple[dict[str, TopicOffsets], list[str]]:
    """The table's topics as Kafka has them, and the names of all of them, with those that are missing.

    ``patterns``: of the topics. ``is_chosen``: these alone, not those that the table was ever loaded from.
    """
    topics = (await kafka.describe()).topics
    fitting = [n for n in topics if is_full(n) and any(fnmatchcase(n, pattern) for pattern in patterns)]
    configs = await kafka.configs(fitting) if fitting else {}
    names = [name for name in fitting if "compact" not in configs[name].get("cleanup.policy", "")]
    wanted = wanted_topics(snapshot, names, is_chosen=is_chosen)
    places = [(n, p.partition) for n in wanted if n in topics for p in topics[n].partitions]
    firsts = await kafka.offsets(places, EARLIEST) if places else {}
    nexts = await kafka.offsets(places, LATEST) if places else {}
    offsets: dict[str, dict[int, PartitionOffsets]] = {name: {} for name, _ in places}
    for name, n in places:
        offsets[name][n] = PartitionOffsets(firsts[name, n], nexts[name, n])
    found = {name: TopicOffsets(name, printed_topic_id(topics[name].id), offsets[name]) for name in offsets}
    return found, wanted


async def _lag(kafka: KafkaClient, snapshot: TableSnapshot) -> list[TopicLag]:
    origin = snapshot.entry.origin
    views, wanted = await topic_views(kafka, snapshot, origin.topics if origin else ())
    found = plan(snapshot.entry.ranges, views, wanted, max_records=sys.maxsize)
    stopped = {one.topic: one.reason for one in found.stopped}
    behind: dict[str, list[Range]] = {topic: [] for topic in wanted if topic not in stopped}
    for r in found.ranges:
        if r.size and r.topic in behind:
            behind[r.topic].append(r)
    ages = await _ages(kafka, {topic: ranges for topic, ranges in behind.items() if ranges})
    return [
        TopicLag(topic, None, None, stopped[topic])
        if topic in stopped
        else TopicLag(topic, sum(r.size for r in behind[topic]), ages.get(topic, 0.0 if not behind[topic] else None))
        for topic in wanted
    ]


async def _ages(kafka: KafkaClient, behind: Mapping[str, Sequence[Range]]) -> dict[str, float]:
    """Seconds since the oldest record of each topic's ranges, rounded up; a topic where it is unknown is missing."""
    now = time.time()

    async def is_older(topic: str, age: float) -> bool:
        first = await kafka.offsets([r.key for r in behind[topic]], int((now - age) * 1000))
        return any(first[r.key] < 0 or first[r.key] > r.start for r in behind[topic])

    async def age_of(topic: str) -> float | None:
        low, high = _YOUNGEST_S, _OLDEST_S
        if await is_older(topic, high):
            # There are only control records, which have no place in the index of times.
            return None
        if not await is_older(topic, low):
            return low
        while high > low * _EXACT:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if await is_older(topic, middle) else (low, middle)
        return high

    topics = list(behind)
    ages = await asyncio.gather(*map(age_of, topics))
    return {topic: age for topic, age in zip(topics, ages, strict=True) if age is not None}
