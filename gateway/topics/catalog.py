"""The topics as the gateway knows them: cached facts for requests, confirmed before anything is acknowledged.

A cached fact may be a few seconds old. So before a transaction is committed, and before a chunk is called a
duplicate, `confirm` reads the topic's id again: if the topic was deleted and recreated in between, the recorded states
belong to the older one and are not valid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from aiokafka import errors
from logferry.gateway.config import Config
from logferry.gateway.contract.names import check_topic, full_topic, printed_topic_id, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, ELECTION_S, LATEST, KafkaClient
from logferry.gateway.kafka.requests import DescribeLogDirsRequest, TopicMetadata, read_answer, read_log_sizes
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.topics.health import PartitionHealth, replication, weakness

_FACTS_TTL_S: Final = 5.0
RECORD_OVERHEAD_BYTES: Final = 4096
MAX_MESSAGE_BYTES: Final = (1 << 24) + RECORD_OVERHEAD_BYTES


class TopicCatalog:
    """Facts about topics, from one Kafka connection."""

    def __init__(self, kafka: KafkaClient, config: Config) -> None:
        self._kafka = kafka
        self._config = config
        self._facts: dict[str, tuple[float, TopicFacts]] = {}
        self._loading: dict[str, asyncio.Task[TopicFacts]] = {}
        self._next_look: asyncio.Task[dict[str, bytes]] | None = None
        self._wanted: set[tuple[str, int]] = set()
        self._look_lock = asyncio.Lock()
        self.health = PartitionHealth()
        # By which the states of sources are stamped.
        self.clock = kafka.clock

    def fresh(self, topic: str) -> TopicFacts | None:
        """The facts, if they are known and young enough."""
        known = self._facts.get(topic)
        return known[1] if known is not None and known[0] > time.monotonic() else None

    async def facts(self, topic: str) -> TopicFacts:
        """The facts of a topic by its full name, at most a few seconds old. Raises Problem ``unknown-topic``."""
        known = self.fresh(topic)
        if known is not None:
            return known
        loading = self._loading.get(topic)
        if loading is None:
            loading = self._loading[topic] = asyncio.create_task(self._load(topic))
            loading.add_done_callback(lambda _: self._loading.pop(topic, None))
        return await asyncio.shield(loading)

    def min_in_sync(self, topic: str) -> int:
        """The replicas that must have a record, as far as it is known."""
        known = self._facts.get(topic)
        return 1 if known is None else known[1].min_in_sync

    def weak(self) -> dict[str, str]:
        """The topics in use that nothing is written to, with the reason."""
        return {name: facts.weakness for name, (_, facts) in sorted(self._facts.items()) if facts.weakness is not None}

    def forget(self, topic: str) -> None:
        self._facts.pop(topic, None)

    async def confirm(self, partitions: Iterable[tuple[str, int]]) -> dict[str, bytes]:
        """The ids of the partitions' topics as their leaders know them, as of after this call began.

        A topic that is gone, or about which the leaders disagree, is missing. Calls during one look-up share the next.
        """
        self._wanted.update(partitions)
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._look())
        return await asyncio.shield(self._next_look)

    async def _look(self) -> dict[str, bytes]:
        async with self._look_lock:
            wanted, self._wanted, self._next_look = self._wanted, set(), None
            return await self._kafka.ids_at_leaders(wanted)

    async def _load(self, topic: str) -> TopicFacts:
        try:
            view = await self._kafka.describe_topic(topic)
            configs = await self._kafka.configs([topic])
        except errors.UnknownTopicOrPartitionError:
            raise self._unknown(topic) from None
        settings = configs[topic]
        limits = int(settings["max.message.bytes"]), int(settings["min.insync.replicas"])
        weak = weakness(view, settings, self._config.accept_weak_kafka)
        facts = TopicFacts(topic, view.id, len(view.partitions), *limits, weak)
        self.health.judge(view, facts.min_in_sync)
        self._facts[topic] = (time.monotonic() + _FACTS_TTL_S, facts)
        return facts

    def _unknown(self, topic: str) -> Problem:
        dc, name = split_topic(topic)
        detail = f"there is no topic {name} in {dc}; create it: logferry topics create {name} --partitions 4"
        return Problem("unknown-topic", detail, topic=topic)

    # ---- the topics as users see them -------------------------------------------------------------------------

    async def put(self, name: str, partitions: int, retention_ms: int | None) -> tuple[dict[str, Any], bool]:
        """Creates the topic or grows it. Returns its description, and whether it was created. Idempotent."""
        topic = full_topic(self._config.dc, check_topic(name))
        first, _, rest = name.partition(".")
        if rest and first in {self._config.dc, *self._config.data_centres}:
            raise Problem("conflict", f"the name {name} begins with the data centre {first}; such names are reserved")
        if len(topic) > 249:
            raise Problem("bad-request", f"topic: {topic} is over Kafka's limit of 249 characters")
        created = False
        view = (await self._kafka.describe([topic])).topics.get(topic)
        if view is None:
            created = await self._create(topic, partitions, retention_ms)
            view = await self._appeared(topic)
        if len(view.partitions) > partitions:
            detail = f"{topic} has {len(view.partitions)} partitions; their number cannot be reduced"
            raise Problem("conflict", detail, partitions=len(view.partitions))
        if len(view.partitions) < partitions:
            await self._kafka.grow_topic(topic, partitions)
        self.forget(topic)
        return await self._settled(topic, partitions), created

    async def _create(self, topic: str, partitions: int, retention_ms: int | None) -> bool:
        brokers = len((await self._kafka.describe([])).brokers)
        replicas, in_sync = replication(self._config.accept_weak_kafka, brokers)
        configs = {
            "compression.type": "producer",
            "unclean.leader.election.enable": "false",
            "min.insync.replicas": str(in_sync),
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
        }
        if retention_ms is not None:
            configs["retention.ms"] = str(retention_ms)
        try:
            await self._kafka.create_topic(topic, partitions, replicas, configs)
        except errors.TopicAlreadyExistsError:
            return False
        except errors.InvalidReplicationFactorError:
            why = f"{topic} needs {replicas} brokers for its replicas, {brokers} are there; nothing was created"
            raise Problem("kafka-unavailable", why) from None
        except (errors.InvalidPartitionsError, errors.InvalidConfigurationError, errors.PolicyViolationError) as error:
            raise Problem("bad-request", f"Kafka rejects the topic: {error}") from None
        return True

    async def _appeared(self, topic: str) -> TopicMetadata:
        """Waits until the brokers know the topic, each partition with a leader."""
        async with asyncio.timeout(self._config.limits.request_timeout_s):
            while True:
                view = (await self._kafka.describe([topic])).topics.get(topic)
                if view and all(p.leader >= 0 for p in view.partitions):
                    return view
                await asyncio.sleep(0.02)

    async def _settled(self, topic: str, partitions: int) -> dict[str, Any]:
        """Its description, once the brokers that lead it know it: the broker asked may be ahead of them."""
        async with asyncio.timeout(self._config.limits.request_timeout_s):
            while True:
                with suppress(Problem):
                    described = await self.describe(topic)
                    if described["partitions"] >= partitions:
                        return described
                await asyncio.sleep(0.02)

    async def describe(self, topic: str, at_ms: int | None = None, *, sizes: bool = False) -> dict[str, Any]:
        """A topic, named as in `Config.full_name`. ``first`` is retained, ``next`` follows the last committed one; None
        for a partition without a leader. ``at_ms``, ``sizes``: with the offset at that time, and with its bytes."""
        topic = self._config.full_name(topic)
        try:
            view = await self._kafka.describe_topic(topic)
            return (await self._describe([view], at_ms, sizes))[0]
        except errors.UnknownTopicOrPartitionError:
            raise self._unknown(topic) from None

    async def describe_all(
        self, wanted: Callable[[str], bool], at_ms: int | None = None, *, sizes: bool = False
    ) -> list[dict[str, Any]]:
        """The wanted topics of the known data centres, by name, described as by `describe`."""
        known = self._config.known_dcs
        views = (await self._kafka.describe()).topics
        names = [name for name in sorted(views) if name.partition(".")[0] in known and wanted(name)]
        return await self._describe([views[name] for name in names], at_ms, sizes)

    async def _describe(
        self, views: list[TopicMetadata], at_ms: int | None = None, sizes: bool = False
    ) -> list[dict[str, Any]]:
        if not views:
            return []
        partitions = [(view.name, p.partition) for view in views for p in view.partitions]
        times = [EARLIEST, *(() if at_ms is None else (at_ms,))]
        configs, measured, (firsts, *at) = await asyncio.gather(
            self._kafka.configs([view.name for view in views]),
            self._sizes(views if sizes else []),
            asyncio.gather(*(self._kafka.offsets(partitions, time_ms, ELECTION_S) for time_ms in times)),
        )
        more: dict[str, Mapping[tuple[str, int], int | None]] = {"size_bytes": measured} if sizes else {}
        if at:
            more["at"] = {tp: offset if offset >= 0 else None for tp, offset in at[0].items()}
        # After the others, so that none of them lies behind it.
        nexts = await self._kafka.offsets(sorted(firsts), LATEST, ELECTION_S)
        described = []
        for view in views:
            dc, name = split_topic(view.name)
            tps = [(view.name, p.partition) for p in view.partitions]
            facts = {
                "topic": view.name,
                "id": printed_topic_id(view.id),
                "dc": dc,
                "name": name,
                "partitions": len(tps),
                "retention_ms": int(configs[view.name]["retention.ms"]),
                "offsets": [
                    {
                        "partition": tp[1],
                        "first": firsts.get(tp),
                        "next": nexts.get(tp),
                        **{name: values.get(tp) for name, values in more.items()},
                    }
                    for tp in tps
                ],
            }
            described.append(facts)
        return described

    async def _sizes(self, views: list[TopicMetadata]) -> dict[tuple[str, int], int]:
        """The bytes of the leaders' logs, where these answer and the gateway has the right to describe the cluster."""
        led: dict[int, dict[str, list[int]]] = {}
        for view in views:
            for partition in view.partitions:
                if partition.leader >= 0:
                    led.setdefault(partition.leader, {}).setdefault(view.name, []).append(partition.partition)

        async def ask(node: int, partitions: dict[str, list[int]]) -> dict[tuple[str, int], int]:
            with suppress(errors.KafkaError, TimeoutError):
                async with asyncio.timeout(ELECTION_S):
                    answer = await self._kafka.send(node, DescribeLogDirsRequest(partitions))
                return await read_answer(answer, read_log_sizes)
            return {}

        answers = await asyncio.gather(*(ask(node, partitions) for node, partitions in led.items()))
        return {tp: size for answer in answers for tp, size in answer.items()}
