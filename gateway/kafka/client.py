"""The worker's connection to its Kafka cluster: metadata, offsets, fetches, topics, groups.

Everything here may be called again safely. Errors are Kafka's own (`aiokafka.errors.KafkaError`); what passes by
itself (a moved leader, a broker that is coming back) is tried again until the deadline. Long polls run on
connections of their own, because Kafka serves the requests of a connection in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from aiokafka import errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.protocol.admin import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest,
)
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from logferry.gateway.fetch import Fetched, committed_records
from logferry.gateway.kafka.broker_connection import Channels
from logferry.gateway.kafka.metadata_request import ClusterView, MetadataRequest, TopicView, read_metadata
from logferry.gateway.kafka.produce_request import ApiVersionsRequest, BrokerAbilities, read_abilities
from logferry.gateway.links import connect, hang_up

EARLIEST: Final = -2
LATEST: Final = -1

_READ_COMMITTED: Final = 1
_TOPIC_RESOURCE: Final = 2
_REQUEST_TIMEOUT_MS: Final = 10_000
_DEADLINE_S: Final = 15.0
_BACKOFF_S: Final = 0.1
# Connections to each broker for fetches: those that wait for data, and those that do not, so that a lane's replay
# never stands behind the readers.
_WAITING_FETCHES: Final = 256
_IMMEDIATE_FETCHES: Final = 16
_LOOK_AGAIN_S: Final = 0.25

# What passes by itself once the metadata is fresh.
PASSING: Final = (
    errors.NotLeaderForPartitionError,
    errors.LeaderNotAvailableError,
    errors.ReplicaNotAvailableError,
    errors.KafkaStorageError,
    errors.NodeNotReadyError,
    errors.RequestTimedOutError,
    errors.KafkaConnectionError,
    errors.StaleMetadata,
    errors.CoordinatorNotAvailableError,
    errors.CoordinatorLoadInProgressError,
    errors.NotCoordinatorError,
)


_T = TypeVar("_T")
Send = Callable[[Any], Awaitable[Any]]


class Kafka:
    """One client for everything but transactions, which have a producer each."""

    def __init__(self, options: dict[str, Any], client_id: str) -> None:
        self.options = options
        self._client = AIOKafkaClient(
            client_id=client_id, request_timeout_ms=_REQUEST_TIMEOUT_MS + 35_000, metadata_max_age_ms=30_000, **options
        )
        self.channels = Channels(self._client, options, client_id, _REQUEST_TIMEOUT_MS / 1000)
        self.cluster_id: str | None = None
        self._leaders: dict[tuple[str, int], int] = {}
        self._idle_waiting = list(range(_WAITING_FETCHES))
        self._idle_immediate = list(range(_IMMEDIATE_FETCHES))
        self._immediate = asyncio.Semaphore(_IMMEDIATE_FETCHES)

    async def start(self) -> None:
        """Connects. Raises KafkaConnectionError when no bootstrap server answers."""
        # A client that tracks no topic asks for the metadata of all of them, again and again.
        self._client.set_topics(["__consumer_offsets"])
        await connect(self._client)

    async def close(self) -> None:
        self.channels.hang_up()
        await hang_up(self._client)

    # ---- metadata ---------------------------------------------------------------------------------------------

    async def describe(self, topics: list[str] | None = None) -> ClusterView:
        """The topics (None: all) as brokers see them now.

        A broker hears of a new topic a little later than another: one that is asked for is missing only when every
        broker that answers says so.
        """
        view = read_metadata(await self._send_any(MetadataRequest(topics)))
        self.cluster_id = view.cluster_id
        for node in view.brokers if topics and view.errors else ():
            try:
                other = read_metadata(await self._client.send(node, MetadataRequest(sorted(view.errors))))
            except PASSING:
                continue
            view = ClusterView(view.cluster_id, view.brokers, {**view.topics, **other.topics}, other.errors)
            if not view.errors:
                break
        for topic in view.topics.values():
            for partition in topic.partitions:
                self._leaders[topic.name, partition.partition] = partition.leader
        return view

    async def ids_at_leaders(self, partitions: Iterable[tuple[str, int]]) -> dict[str, bytes]:
        """The topics' ids as the leaders of these partitions know them; a topic is missing where they do not agree.

        What a leader took, it took into the topic that it knows: another broker may hear of a deletion later.
        """
        wanted = set(partitions)
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                by_node: dict[int, set[str]] = {}
                for partition in wanted:
                    by_node.setdefault(self._leaders.get(partition, -1), set()).add(partition[0])
                leaderless = by_node.pop(-1, None)
                asked = (self._client.send(node, MetadataRequest(sorted(topics))) for node, topics in by_node.items())
                answers = await asyncio.gather(*asked, return_exceptions=True)
                failed = [answer for answer in answers if isinstance(answer, BaseException)]
                if not failed and not leaderless:
                    return _agreed(by_node, [read_metadata(answer).topics for answer in answers])
                for failure in failed:
                    if not isinstance(failure, PASSING):
                        raise failure
                view = await self.describe(sorted({topic for topic, _ in wanted}))
                wanted = {partition for partition in wanted if partition[0] in view.topics}
                if failed:
                    await asyncio.sleep(_BACKOFF_S)

    def brokers(self) -> list[tuple[int, str, int]]:
        """Id, host and port of the brokers that are known, whether they answer or not."""
        return sorted((broker.nodeId, broker.host, broker.port) for broker in self._client.cluster.brokers())

    async def describe_topic(self, topic: str) -> TopicView:
        """One topic. Raises UnknownTopicOrPartitionError when it does not exist."""
        view = await self.describe([topic])
        if topic not in view.topics:
            raise errors.for_code(view.errors.get(topic, 3))(topic)
        return view.topics[topic]

    async def leader(self, topic: str, partition: int) -> int:
        """The broker that leads the partition, waited for. Raises UnknownTopicOrPartitionError."""
        while (known := self._leaders.get((topic, partition), -1)) < 0:
            view = await self.describe_topic(topic)
            if partition >= len(view.partitions):
                raise errors.UnknownTopicOrPartitionError(f"{topic} has no partition {partition}")
            if view.partitions[partition].leader < 0:
                await asyncio.sleep(_BACKOFF_S)
        return known

    def forget_leader(self, topic: str, partition: int) -> None:
        self._leaders.pop((topic, partition), None)

    async def configs(self, topics: list[str]) -> dict[str, dict[str, str]]:
        """The settings of topics. Raises UnknownTopicOrPartitionError when one does not exist."""
        request = DescribeConfigsRequest([(_TOPIC_RESOURCE, topic, None) for topic in topics])
        nodes = [broker.nodeId for broker in self._client.cluster.brokers()]
        for left in range(len(nodes), -1, -1):
            response = await self._send_any(request)
            codes = [resource[0] for resource in response.resources]
            if not (left and errors.UnknownTopicOrPartitionError.errno in codes):
                break
            await asyncio.sleep(_BACKOFF_S)
        found = {}
        for code, message, _type, name, entries in response.resources:
            raise_for(code, message or name)
            found[name] = {entry[0]: entry[1] or "" for entry in entries}
        return found

    # ---- topics -----------------------------------------------------------------------------------------------

    async def create_topic(self, topic: str, partitions: int, replication: int, configs: dict[str, str]) -> None:
        """Raises TopicAlreadyExistsError, InvalidReplicationFactorError, …"""
        wanted: list[Any] = [(topic, partitions, replication, [], list(configs.items()))]
        response = await self._send_any(CreateTopicsRequest(wanted, _REQUEST_TIMEOUT_MS, False))
        for error in response.topic_errors:
            raise_for(error[1], error[2] if len(error) > 2 and error[2] else topic)

    async def grow_topic(self, topic: str, partitions: int) -> None:
        request = CreatePartitionsRequest([(topic, (partitions, None))], _REQUEST_TIMEOUT_MS, False)
        response = await self._send_any(request)
        for _topic, code, message in response.topic_errors:
            raise_for(code, message or topic)

    # ---- records ----------------------------------------------------------------------------------------------

    async def offset(self, topic: str, partition: int, time_ms: int) -> int:
        """The offset at a time (`EARLIEST`, or `LATEST`: the end of what is committed); -1: no record so late."""

        async def ask(node: int) -> int:
            found = await self._offsets_at(node, [(topic, partition)], time_ms)
            return found[topic, partition]

        return await self._with_leader(topic, partition, ask)

    async def offsets(self, partitions: list[tuple[str, int]], time_ms: int) -> dict[tuple[str, int], int]:
        """`offset` of many partitions, with one request a broker."""
        found: dict[tuple[str, int], int] = {}
        missing = partitions
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                by_node: dict[int, list[tuple[str, int]]] = {}
                for partition in missing:
                    by_node.setdefault(self._leaders.get(partition, -1), []).append(partition)
                by_node.pop(-1, None)
                asked = (self._offsets_at(node, asked_of, time_ms) for node, asked_of in by_node.items())
                for answer in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(answer, dict):
                        found.update(answer)
                    elif not isinstance(answer, PASSING):
                        raise answer
                missing = [partition for partition in partitions if partition not in found]
                if not missing:
                    return found
                await asyncio.sleep(_BACKOFF_S)
                await self.describe(sorted({topic for topic, _ in missing}))

    async def _offsets_at(
        self, node: int, partitions: list[tuple[str, int]], time_ms: int
    ) -> dict[tuple[str, int], int]:
        by_topic: dict[str, list[tuple[int, int]]] = {}
        for topic, number in partitions:
            by_topic.setdefault(topic, []).append((number, time_ms))
        response = await self._client.send(node, OffsetRequest(-1, _READ_COMMITTED, list(by_topic.items())))
        found = {}
        for topic, answers in response.topics:
            for number, code, _timestamp, offset in answers:
                raise_for(code, f"{topic}-{number}")
                found[topic, number] = offset
        return found

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_bytes: int,
        stop_bytes: int | None = None,
        wait_ms: int = 0,
    ) -> Fetched:
        """Committed records from ``offset`` on. Waits up to ``wait_ms`` for one; may answer with none before that.

        ``max_bytes`` is what Kafka sends, compressed; ``stop_bytes`` ends with the record that reaches it.

        Raises OffsetOutOfRangeError outside of what is retained: nothing is ever reset in silence.
        """

        async def ask(node: int) -> Fetched:
            wanted = [(topic, [(partition, offset, max_bytes)])]
            async with self._own_connection(wait_ms) as (group, wait):
                response = await self._client.send(
                    node, FetchRequest(wait, 1, max_bytes, _READ_COMMITTED, wanted), group=group
                )
            fields = response.topics[0][1][0]
            raise_for(fields[1], f"{topic}-{partition} at {offset}")
            records, next_offset = committed_records(fields[-1] or b"", fields[5] or (), offset, stop_bytes)
            return Fetched(records, next_offset, last_stable=fields[3], log_start=fields[4])

        return await self._with_leader(topic, partition, ask)

    # ---- groups -----------------------------------------------------------------------------------------------

    async def group_assignment(self, group: str, topic: str) -> dict[str, list[int]] | None:
        """Who has which partitions of the topic, by client id; None while the group is changing, {} without members."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await self._client.send(node, DescribeGroupsRequest([group]))
        code, _group, state, _type, _protocol, members = response.groups[0][:6]
        raise_for(code, group)
        if state not in ("Stable", "Empty", "Dead"):
            return None
        # A member without a partition is a member all the same.
        found: dict[str, list[int]] = {client_id: [] for _member, client_id in (member[:2] for member in members)}
        for _member, client_id, _host, _metadata, assignment in (member[:5] for member in members):
            decoded = ConsumerProtocolMemberAssignment.decode(assignment)
            for assigned, partitions in decoded.assignment:
                if assigned == topic:
                    found[client_id].extend(partitions)
        return found

    async def with_coordinator(self, group: str, ask: Callable[[Send], Awaitable[_T]]) -> _T:
        """The answer of ``ask``, which sends requests to the group's coordinator and raises what they answer."""
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                try:
                    node = await self._client.coordinator_lookup(CoordinationType.GROUP, group)
                    return await ask(partial(self._client.send, node))
                except PASSING:
                    await asyncio.sleep(_BACKOFF_S)

    async def send(self, node: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
        """The broker's answer to one request, asked once. ``group``: a connection of its own. Raises KafkaError."""
        return await self._client.send(node, request, group=group)

    async def abilities(self) -> dict[str, BrokerAbilities]:
        """What the brokers that answer take, by their address."""
        found = {}
        for node, (host, port) in (await self.describe([])).brokers.items():
            with suppress(*PASSING):
                found[f"{host}:{port}"] = read_abilities(await self._client.send(node, ApiVersionsRequest()))
        return found

    async def find_transaction_coordinator(self, transactional_id: str) -> None:
        """Returns when it is found; the first call in a cluster makes Kafka create its transaction log."""
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                try:
                    await self._client.coordinator_lookup(CoordinationType.TRANSACTION, transactional_id)
                    return
                except PASSING:
                    await asyncio.sleep(_BACKOFF_S)

    # ---- ways to a broker -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _own_connection(self, wait_ms: int) -> AsyncIterator[tuple[tuple[str, int], int]]:
        """A connection that nobody else uses meanwhile, and how long its fetch may wait.

        When all those for waiting are taken, a pause comes before a fetch that does not wait.
        """
        if wait_ms and self._idle_waiting:
            number = self._idle_waiting.pop()
            try:
                yield ("waits", number), wait_ms
            finally:
                self._idle_waiting.append(number)
            return
        if wait_ms:
            await asyncio.sleep(min(wait_ms / 1000, _LOOK_AGAIN_S))
        async with self._immediate:
            number = self._idle_immediate.pop()
            try:
                yield ("fetches", number), 0
            finally:
                self._idle_immediate.append(number)

    async def _send_any(self, request: Any) -> Any:
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                nodes = [broker.nodeId for broker in self._client.cluster.brokers()]
                random.shuffle(nodes)
                for node in nodes:
                    try:
                        return await self._client.send(node, request)
                    except PASSING:
                        continue
                await asyncio.sleep(_BACKOFF_S)
                self._client.force_metadata_update()

    async def _with_leader(self, topic: str, partition: int, ask: Callable[[int], Awaitable[_T]]) -> _T:
        async with asyncio.timeout(_DEADLINE_S + 35):
            while True:
                try:
                    return await ask(await self.leader(topic, partition))
                except PASSING:
                    self.forget_leader(topic, partition)
                await asyncio.sleep(_BACKOFF_S)


def raise_for(code: int, detail: str) -> None:
    """Kafka's error code as its exception; 0 is none."""
    if code:
        raise errors.for_code(code)(detail)


def _agreed(asked: Mapping[int, set[str]], answers: Sequence[Mapping[str, TopicView]]) -> dict[str, bytes]:
    """The id of each topic that every leader that was asked for it knows alike."""
    seen: dict[str, set[bytes | None]] = {}
    for topics, known in zip(asked.values(), answers, strict=True):
        for topic in topics:
            seen.setdefault(topic, set()).add(known[topic].id if topic in known else None)
    only = {topic: next(iter(ids)) for topic, ids in seen.items() if len(ids) == 1}
    return {topic: topic_id for topic, topic_id in only.items() if topic_id is not None}
