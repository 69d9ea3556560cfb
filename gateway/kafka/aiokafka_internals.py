"""All that this project uses of aiokafka beyond its documented interface. No other module touches it (a test).

The test of this module names each part that is relied on, so a new version of aiokafka that changes one fails by name.

Connections of aiokafka leak and its shutdown may hang, so its clients are also started and stopped here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from aiokafka import AIOKafkaConsumer, errors
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.cluster import ClusterMetadata as Cluster
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode
from aiokafka.conn import AIOKafkaConnection, CloseReason, OAuthAuthenticator, create_conn
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.protocol import admin, types
from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0, ResponseHeader_v1
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataResponse_v1
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.struct import Struct
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from logferry.gateway.kafka.types import GroupMember

__all__ = [
    "ABORT_MARKER",
    "AIOKafkaClient",
    "AIOKafkaConnection",
    "ControlRecord",
    "CoordinationType",
    "DefaultRecordBatchBuilder",
    "FetchRequest",
    "InitProducerIdRequest",
    "MemoryRecords",
    "MetadataResponse_v1",
    "OffsetCommitRequest",
    "OffsetRequest",
    "Request",
    "RequestStruct",
    "Response",
    "ResponseHeader_v0",
    "ResponseHeader_v1",
    "RoundRobinPartitionAssignor",
    "StickyPartitionAssignor",
    "Struct",
    "admin",
    "create_conn",
    "gzip_encode",
    "lz4_encode",
    "snappy_encode",
    "types",
]

# ---- connections ---------------------------------------------------------------------------------------------------

_send = AIOKafkaConnection.send


def _send_or_break(self: AIOKafkaConnection, request: Any, expect_response: bool = True) -> Any:
    """uvloop refuses to write to a connection that has just broken by RuntimeError, which nobody expects."""
    try:
        return _send(self, request, expect_response)
    except RuntimeError as error:
        self.close(reason=CloseReason.CONNECTION_BROKEN)
        raise errors.KafkaConnectionError(f"the connection broke: {error}") from error


AIOKafkaConnection.send = _send_or_break

_step = OAuthAuthenticator.step


async def _step_or_hear_refusal(self: OAuthAuthenticator, payload: bytes | None) -> tuple[bytes, bool] | None:
    """A broker that refuses the token answers without an error code, with a text. The client sends one byte more, and
    only then the login fails (RFC 7628, section 3.2.3). aiokafka would take it for a success and the next request
    would fail, whatever it was, with an error that nobody retries.
    """
    if payload:
        return b"\1", True
    return await _step(self, payload)  # type: ignore[no-any-return]


OAuthAuthenticator.step = _step_or_hear_refusal


def take_over(connection: AIOKafkaConnection) -> tuple[dict[int, tuple[int, int]], Any]:
    """Ends aiokafka's reading of an open connection. Returns the versions that the broker knows, and the transport.

    The caller keeps a reference of the connection: without one aiokafka closes the transport.
    """
    connection._read_task.cancel()
    return connection._versions, connection._writer.transport


class _NotOfKafkaItself(logging.Filter):
    """Drops what aiokafka says of topics of Kafka itself, such as a missing right. They are named to it only so that it
    does not ask for all topics, and their metadata is not used.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(isinstance(one, str) and one.startswith("__") for one in arguments)


logging.getLogger(Cluster.__module__).addFilter(_NotOfKafkaItself())


# ---- clients -------------------------------------------------------------------------------------------------------


async def connect(client: AIOKafkaClient) -> None:
    """Raises KafkaConnectionError when no bootstrap server answers, or the one that does knows of no broker.

    A broker that was frozen for half a minute knows of none for some milliseconds, not even of itself. aiokafka would
    continue and fail in an assertion.
    """
    await client.bootstrap()
    if not client.cluster.brokers():
        raise errors.KafkaConnectionError("the broker that answers knows of no broker yet")


class StartedClient(Protocol):
    options: dict[str, Any]

    async def start(self) -> None: ...


async def start_or_explain(client: StartedClient) -> None:
    """Starts it. Raises KafkaConnectionError with the reason, which aiokafka only logs: it connects again for that."""
    try:
        await client.start()
    except errors.KafkaConnectionError:
        options = dict(client.options)
        for server in options.pop("bootstrap_servers").split(","):
            host, _, port = server.strip().rpartition(":")
            try:
                (await create_conn(host, int(port), **options)).close()
            except (OSError, TimeoutError, errors.KafkaError) as error:
                raise errors.KafkaConnectionError(f"{server}: {str(error) or type(error).__name__}") from None
        raise


async def close_client(client: AIOKafkaClient) -> None:
    """Aborts the client's connections with the requests in flight on them.

    Over TLS a broker that receives a request just before the close_notify never sends its own, and asyncio would wait
    30 s for it. An orderly shutdown is not needed: every answer that matters has arrived before.
    """
    for connection in list(client._conns.values()):
        if connection._writer is not None:
            connection._writer.transport.abort()
    await client.close()


# ---- consumers -----------------------------------------------------------------------------------------------------


def group_member(consumer: AIOKafkaConsumer) -> GroupMember:
    """The member that the group knows the started consumer as, and the generation of its assignment."""
    coordinator = consumer._coordinator
    return GroupMember(coordinator.generation, coordinator.member_id)


def assigned_partitions(assignment: bytes, topic: str) -> list[int]:
    """Of a member of a group, as the group describes it; none of another program's that cannot be decoded."""
    with suppress(ValueError):
        assigned = ConsumerProtocolMemberAssignment.decode(assignment).assignment
        return [number for name, partitions in assigned if name == topic for number in partitions]
    return []


class _Partitions:
    """In the place of `ClusterMetadata` in an assignment: so many partitions of one topic, which may have more."""

    def __init__(self, topic: str, partitions: int) -> None:
        self._topic, self._partitions = topic, partitions

    def topics(self) -> set[str]:
        return {self._topic}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(range(self._partitions)) if topic == self._topic else None


def assignor_of(topic: str, partitions: Callable[[], int]) -> type[StickyPartitionAssignor]:
    """Of the topic's first partitions, as many as there are in use when the group assigns them."""

    class FirstPartitions(StickyPartitionAssignor):
        @classmethod
        def assign(cls, cluster: object, members: Any) -> Any:
            return super().assign(_Partitions(topic, partitions()), members)

    return FirstPartitions


def rejoin(consumer: AIOKafkaConsumer) -> None:
    """Lets the group assign its partitions again."""
    consumer._coordinator.request_rejoin()


def rejoin_after_error(consumer: AIOKafkaConsumer) -> errors.KafkaError | None:
    """The error after which it has sent no heartbeats, or None. After one it joins its group again now.

    aiokafka waits then until a read has raised the error. Raises KafkaError: it cannot join any more.
    """
    coordinator = consumer._coordinator
    if coordinator._coordination_task.done():
        coordinator._coordination_task.result()
    try:
        coordinator.check_errors()
    except errors.KafkaError as error:
        # Only a join starts heartbeats again.
        coordinator.request_rejoin()
        return error
    return None


def fetched_partitions(consumer: AIOKafkaConsumer) -> set[tuple[str, int]]:
    """The partitions of which answers wait in memory to be decoded."""
    return {(partition.topic, partition.partition) for partition in consumer._fetcher._records}


def limit_fetches(consumer: AIOKafkaConsumer, partition_bytes: int) -> None:
    """Its next fetches ask for at most so much of each partition."""
    consumer._fetcher._max_partition_fetch_bytes = partition_bytes


async def leave_group(consumer: AIOKafkaConsumer) -> None:
    """Leaves the group and ends the consumer. Its resources are freed even when Kafka cannot be reached."""
    consumer._closed = True
    try:
        if consumer._coordinator is not None:
            await consumer._coordinator.close()
    finally:
        if consumer._fetcher is not None:
            await consumer._fetcher.close()
        await close_client(consumer._client)
