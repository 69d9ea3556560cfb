"""The worker's client of its Kafka cluster: metadata, offsets, fetches, topics, groups.

Every call may be repeated safely. Errors are Kafka's own (`aiokafka.errors.KafkaError`); transient ones (a moved
leader, a restarting broker) are retried until the deadline. Long polls have connections of their own, because Kafka
serves the requests of a connection in order.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from aiokafka import errors
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.aiokafka_internals import (
    AIOKafkaClient,
    CoordinationType,
    FetchRequest,
    OffsetRequest,
    admin,
    assigned_partitions,
    close_client,
    connect,
)
from logferry.gateway.kafka.broker_connection import BrokerConnections
from logferry.gateway.kafka.error_codes import UNKNOWN_TOPIC_OR_PARTITION
from logferry.gateway.kafka.record_batch import FetchedRecords, committed_records
from logferry.gateway.kafka.requests import (
    NO_ID,
    AlterConfigsRequest,
    ApiVersionsRequest,
    BrokerAbilities,
    ClusterMetadata,
    MetadataRequest,
    TopicMetadata,
    read_abilities,
    read_answer,
    read_metadata,
)
from logferry.gateway.kafka.types import grouped

EARLIEST: Final = -2
LATEST: Final = -1
_READ_COMMITTED: Final = 1
_TOPIC_RESOURCE, _BROKER_RESOURCE = 2, 4
_REQUEST_TIMEOUT_MS: Final = 10_000
_DEADLINE_S: Final = 15.0
_BACKOFF_S: Final = 0.1
ELECTION_S: Final = 2.0  # a partition without a leader for so long has none for now
# Connections to each broker for fetches that wait for data, and for others: a replay never queues behind readers.
_WAITING_FETCHES: Final = 256
_IMMEDIATE_FETCHES: Final = 16
_POLL_S: Final = 0.25
_INLINE_BYTES: Final = 4096  # of batches that are decoded at once: a MiB takes some ten ms
_AT_ONCE: Final = 200  # partitions of one request: each is some ten microseconds of aiokafka
# Transient errors, which are gone once the metadata is fresh.
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


class KafkaClient:
    """One client for everything except transactions, which have a producer each."""

    def __init__(self, options: dict[str, Any], client_id: str) -> None:
        self.options = options
        self._client = AIOKafkaClient(
            client_id=client_id, request_timeout_ms=_REQUEST_TIMEOUT_MS + 35_000, metadata_max_age_ms=30_000, **options
        )
        self.channels = BrokerConnections(self._client, options, client_id, _REQUEST_TIMEOUT_MS / 1000)
        self.clock = BrokerClock()
        self.cluster_id: str | None = None
        self.risks: list[str] = []  # of the brokers' settings, by the last check, each with a remedy
        self._leaders: dict[TopicPartition, int] = {}
        self._idle_waiting = _numbers(_WAITING_FETCHES)
        self._idle_immediate = _numbers(_IMMEDIATE_FETCHES)

    async def start(self) -> None:
        """Connects. Raises KafkaConnectionError when no bootstrap server answers."""
        # A client that tracks no topic asks for the metadata of all of them, again and again.
        self._client.set_topics(["__consumer_offsets"])
        await connect(self._client)

    async def close(self) -> None:
        self.channels.abort()
        await close_client(self._client)

    async def describe(self, topics: list[str] | None = None) -> ClusterMetadata:
        """The topics (None: all) as brokers see them now.

        Brokers learn of a new topic at different times: a topic that is asked for is missing only when every broker
        that answers says so.
        """
        view = await read_answer(await self._send_any(MetadataRequest(topics)), read_metadata)
        self.cluster_id = view.cluster_id
        for node in view.brokers if topics else ():
            if not view.errors:
                break
            with suppress(*PASSING):
                other = await self.described_by(node, sorted(view.errors))
                view = ClusterMetadata(view.cluster_id, view.brokers, {**view.topics, **other.topics}, other.errors)
        for topic in view.topics.values():
            for partition in topic.partitions:
                self._leaders[topic.name, partition.partition] = partition.leader
        return view

    async def described_by(self, node: int, topics: list[str] | None) -> ClusterMetadata:
        """The topics (None: all) as this broker sees them, asked once. Raises KafkaError."""
        return await read_answer(await self._client.send(node, MetadataRequest(topics)), read_metadata)

    async def ids_at_leaders(self, partitions: Iterable[TopicPartition]) -> dict[str, bytes]:
        """The topics' ids as the leaders of these partitions know them; a topic is missing where they do not agree.

        A leader writes into the topic that it knows: another broker may learn of a deletion later. Any broker answers
        for a partition without one.
        """

        async def ask(node: int, led: list[TopicPartition]) -> dict[TopicPartition, bytes]:
            known = (await self.described_by(node, sorted({topic for topic, _ in led}))).topics
            return {tp: known[tp[0]].id if tp[0] in known else NO_ID for tp in led}

        seen: dict[str, set[bytes]] = {}
        wanted = set(partitions)
        # An answer has the topic's other partitions, too: all of a leader's are asked for at once.
        answers = await self._ask_leaders(wanted, ask, sys.maxsize, gone=NO_ID, give_up_s=ELECTION_S)
        if left := wanted - answers.keys():
            known = (await self.describe(sorted({topic for topic, _ in left}))).topics
            answers |= {tp: known[tp[0]].id if tp[0] in known else NO_ID for tp in left}
        for (topic, _), topic_id in answers.items():
            seen.setdefault(topic, set()).add(topic_id)
        return {topic: topic_id for topic, (topic_id, *others) in seen.items() if not others and topic_id != NO_ID}

    def brokers(self) -> list[tuple[int, str, int]]:
        """Id, host and port of the brokers that are known, whether they answer or not."""
        return sorted((broker.nodeId, broker.host, broker.port) for broker in self._client.cluster.brokers())

    async def describe_topic(self, topic: str) -> TopicMetadata:
        """One topic. Raises UnknownTopicOrPartitionError when it does not exist."""
        view = await self.describe([topic])
        if topic not in view.topics:
            raise errors.for_code(view.errors.get(topic, UNKNOWN_TOPIC_OR_PARTITION))(topic)
        return view.topics[topic]

    async def present_leader(self, topic: str, partition: int) -> int:
        """The partition's leader, or -1 while it has none. Raises UnknownTopicOrPartitionError."""
        known = self._leaders.get((topic, partition), -1)
        if known < 0:
            view = await self.describe_topic(topic)
            if partition >= len(view.partitions):
                raise errors.UnknownTopicOrPartitionError(f"{topic} has no partition {partition}")
            known = view.partitions[partition].leader
        return known

    def forget_leader(self, topic: str, partition: int) -> None:
        self._leaders.pop((topic, partition), None)

    async def configs(self, topics: list[str]) -> dict[str, dict[str, str]]:
        """The settings of topics. Raises UnknownTopicOrPartitionError when one does not exist."""
        request = admin.DescribeConfigsRequest([(_TOPIC_RESOURCE, topic, None) for topic in topics])
        for left in range(len(self.brokers()), -1, -1):
            response = await self._send_any(request)
            if not (left and any(one[0] == UNKNOWN_TOPIC_OR_PARTITION for one in response.resources)):
                break
            await asyncio.sleep(_BACKOFF_S)
        return _settings(response)

    async def broker_settings(self) -> dict[int, dict[str, str]]:
        """The settings of the brokers that answer. Raises ClusterAuthorizationFailedError without the right."""
        found: dict[int, dict[str, str]] = {}
        for node, _, _ in self.brokers():
            with suppress(*PASSING):
                request = admin.DescribeConfigsRequest([(_BROKER_RESOURCE, str(node), None)])
                found[node] = _settings(await self._client.send(node, request))[str(node)]
        return found

    async def create_topic(self, topic: str, partitions: int, replication: int, configs: dict[str, str]) -> None:
        """Raises TopicAlreadyExistsError, InvalidReplicationFactorError, …"""
        wanted: list[Any] = [(topic, partitions, replication, [], list(configs.items()))]
        for error in (await self._send_any(admin.CreateTopicsRequest(wanted, _REQUEST_TIMEOUT_MS, False))).topic_errors:
            raise_for(error[1], error[2] if len(error) > 2 and error[2] else topic)

    async def grow_topic(self, topic: str, partitions: int) -> None:
        request = admin.CreatePartitionsRequest([(topic, (partitions, None))], _REQUEST_TIMEOUT_MS, False)
        for _topic, code, message in (await self._send_any(request)).topic_errors:
            raise_for(code, message or topic)

    async def alter_topic(self, topic: str, configs: Mapping[str, str]) -> None:
        for code, message, *_ in (await self._send_any(AlterConfigsRequest(topic, configs))).responses:
            raise_for(code, message or topic)

    async def offset(self, topic: str, partition: int, time_ms: int) -> int:
        """The offset at a time (`EARLIEST`, or `LATEST`: the end of what is committed); -1: no record so late."""
        ask = partial(self._offsets_at, time_ms, led=[(topic, partition)])
        return (await self._with_leader(topic, partition, ask))[topic, partition]

    async def offsets(
        self, partitions: list[TopicPartition], time_ms: int, give_up_s: float | None = None, *, committed: bool = True
    ) -> dict[TopicPartition, int]:
        """`offset` of many partitions; waits for those that are not there yet, and without a leader ``give_up_s``.
        ``committed`` False: the end includes open transactions."""
        ask = partial(self._offsets_at, time_ms, isolation=_READ_COMMITTED * committed)
        return await self._ask_leaders(partitions, ask, _AT_ONCE, give_up_s=give_up_s)

    async def _offsets_at(
        self, time_ms: int, node: int, led: list[TopicPartition], isolation: int = _READ_COMMITTED
    ) -> dict[TopicPartition, int]:
        asked = grouped((topic, (number, time_ms)) for topic, number in led).items()
        async with self._own_connection(0) as (group, _):  # a time takes Kafka long: nothing waits behind it
            response = await self._client.send(node, OffsetRequest(-1, isolation, list(asked)), group=group)
        found = {}
        for topic, answers in response.topics:
            for number, code, _timestamp, offset in answers:
                raise_for(code, f"{topic}-{number}")
                found[topic, number] = offset
        return found

    async def _ask_leaders(
        self,
        partitions: Iterable[TopicPartition],
        ask: Callable[[int, list[TopicPartition]], Awaitable[dict[TopicPartition, _T]]],
        at_once: int,
        gone: _T | None = None,
        give_up_s: float | None = None,
    ) -> dict[TopicPartition, _T]:
        """The answers of all leaders; waits for one ``give_up_s``. ``gone``: that for a topic which is missing."""
        found: dict[TopicPartition, _T] = {}
        missing, began_s = set(partitions), time.monotonic()
        async with asyncio.timeout(_DEADLINE_S):
            while missing:
                by_node = grouped((self._leaders.get(tp, -1), tp) for tp in missing)
                by_node.pop(-1, None)
                few = ((n, led[i : i + at_once]) for n, led in by_node.items() for i in range(0, len(led), at_once))
                answers = await asyncio.gather(*(ask(node, led) for node, led in few), return_exceptions=True)
                for answer in answers:
                    if isinstance(answer, dict):
                        found |= answer
                    elif not isinstance(answer, PASSING):
                        raise answer
                missing -= found.keys()
                if not missing:
                    break
                topics = (await self.describe(sorted({topic for topic, _ in missing}))).topics
                if gone is not None:
                    found |= {tp: gone for tp in missing if tp[0] not in topics}
                    missing -= found.keys()
                if give_up_s is not None and time.monotonic() >= began_s + give_up_s:
                    missing = {tp for tp in missing if self._leaders.get(tp, -1) >= 0}
                are_led = all(self._leaders.get(tp, -1) >= 0 for tp in missing)
                if not (are_led and all(isinstance(answer, dict) for answer in answers)):
                    await asyncio.sleep(_BACKOFF_S)
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
    ) -> FetchedRecords:
        """Committed records from ``offset`` on. Waits up to ``wait_ms`` for one; may answer with none before that.

        ``max_bytes`` is what Kafka sends, compressed; ``stop_bytes`` ends with the record that reaches it.
        Raises OffsetOutOfRangeError outside of what is retained: nothing is ever reset in silence.
        """

        async def ask(node: int) -> FetchedRecords:
            wanted = [(topic, [(partition, offset, max_bytes)])]
            async with self._own_connection(wait_ms) as (group, wait):
                request = FetchRequest(wait, 1, max_bytes, _READ_COMMITTED, wanted)
                response = await self._client.send(node, request, group=group)
                # Over a quota Kafka answers with nothing, and reads nothing from this connection meanwhile (KIP-219).
                await asyncio.sleep(min(response.throttle_time_ms / 1000, _DEADLINE_S))
            if not response.topics:
                raise errors.RequestTimedOutError(f"a quota of Kafka delays reads by {response.throttle_time_ms} ms")
            fields = response.topics[0][1][0]
            raise_for(fields[1], f"{topic}-{partition} at {offset}")
            found = fields[-1] or b"", fields[5] or (), offset, stop_bytes
            is_large = len(found[0]) > _INLINE_BYTES
            decoded = await asyncio.to_thread(committed_records, *found) if is_large else committed_records(*found)
            return FetchedRecords(*decoded, last_stable=fields[3])

        return await self._with_leader(topic, partition, ask)

    async def _with_leader(self, topic: str, partition: int, ask: Callable[[int], Awaitable[_T]]) -> _T:
        async with asyncio.timeout(_DEADLINE_S + 35):
            while True:
                try:
                    leader = await self.present_leader(topic, partition)
                    if leader >= 0:
                        return await ask(leader)
                except PASSING:
                    self.forget_leader(topic, partition)
                await asyncio.sleep(_BACKOFF_S)

    async def group_assignment(self, group: str, topic: str) -> dict[str, list[int]] | None:
        """Who has which partitions of the topic, by client id; None while the group is changing, {} without members."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await self._client.send(node, admin.DescribeGroupsRequest([group]))
        code, _group, state, _type, _protocol, members = response.groups[0][:6]
        raise_for(code, group)
        if state not in ("Stable", "Empty", "Dead"):
            return None
        # A member without a partition is a member all the same.
        found: dict[str, list[int]] = {client_id: [] for _member, client_id in (member[:2] for member in members)}
        for _member, client_id, _host, _metadata, assignment in (member[:5] for member in members):
            found[client_id] += assigned_partitions(assignment, topic)
        return found

    async def with_coordinator(
        self, name: str, ask: Callable[[Send], Awaitable[_T]], kind: CoordinationType = CoordinationType.GROUP
    ) -> _T:
        """The answer of ``ask``, which sends requests to the group's coordinator and raises what they answer."""
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                with suppress(*PASSING):
                    return await ask(partial(self._client.send, await self._client.coordinator_lookup(kind, name)))
                await asyncio.sleep(_BACKOFF_S)

    async def send(self, node: int, request: Any) -> Any:
        """The broker's answer to one request, asked once. Raises KafkaError."""
        return await self._client.send(node, request)

    async def abilities(self) -> dict[str, BrokerAbilities]:
        """The abilities of the brokers that answer, by their address."""
        found = {}
        for node, (host, port) in (await self.describe([])).brokers.items():
            with suppress(*PASSING):
                found[f"{host}:{port}"] = read_abilities(await self._client.send(node, ApiVersionsRequest()))
        return found

    async def find_transaction_coordinator(self, transactional_id: str) -> None:
        """Returns when it is found; the first call in a cluster makes Kafka create its transaction log."""
        await self.with_coordinator(transactional_id, lambda _: asyncio.sleep(0), CoordinationType.TRANSACTION)

    @asynccontextmanager
    async def _own_connection(self, wait_ms: int) -> AsyncIterator[tuple[tuple[str, int], int]]:
        """A connection of its own, and how long its fetch may wait: not at all where all for waiting are in use."""
        name, idle, wait = "waits", self._idle_waiting, wait_ms
        if not wait_ms or idle.empty():
            await asyncio.sleep(min(wait_ms / 1000, _POLL_S))
            name, idle, wait = "fetches", self._idle_immediate, 0
        number = await idle.get()
        try:
            yield (name, number), wait
        finally:
            idle.put_nowait(number)

    async def _send_any(self, request: Any) -> Any:
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                nodes = self.brokers()
                for node, _, _ in random.sample(nodes, len(nodes)):
                    with suppress(*PASSING):
                        return await self._client.send(node, request)
                await asyncio.sleep(_BACKOFF_S)
                self._client.force_metadata_update()


def _settings(response: Any) -> dict[str, dict[str, str]]:
    """By the name of the topic or broker."""
    found = {}
    for code, message, _type, name, entries in response.resources:
        raise_for(code, message or name)
        found[name] = {entry[0]: entry[1] or "" for entry in entries}
    return found


def _numbers(size: int) -> asyncio.LifoQueue[int]:
    queue = asyncio.LifoQueue[int]()
    for number in range(size):
        queue.put_nowait(number)
    return queue


def raise_for(code: int, detail: str) -> None:
    """Kafka's error code as its exception; 0 is none."""
    if code:
        raise errors.for_code(code)(detail)
