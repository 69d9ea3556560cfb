"""Requests about topics: Kafka's Metadata (version 12) and IncrementalAlterConfigs (version 1).

Metadata 12 has the topics' ids (KIP-516, KIP-700); aiokafka stops at version 5 and does not know the other (KIP-339).

And DescribeQuorum, version 1, which has the time of the active controller (KIP-595, KIP-836).

A topic that is deleted and recreated keeps its name and changes its id; the states of the older one are not valid for
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple, TypeVar

from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v1
from aiokafka.protocol.struct import Struct
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

_T = TypeVar("_T")
NO_ID = bytes(16)
# Some hundred partitions; ten thousand take aiokafka 45 ms.
_INLINE_BYTES: Final = 4096


class Uuid(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


TAGS: Final = ("tags", TaggedFields)
TEXT: Final = CompactString("utf-8")


def array(*fields: Any) -> CompactArray:
    """A compact array of structures with tagged fields (KIP-482)."""
    return CompactArray(*fields, TAGS)


_BROKERS = array(("node_id", Int32), ("host", TEXT), ("port", Int32), ("rack", TEXT))
_LEADER = (("error_code", Int16), ("partition", Int32), ("leader", Int32), ("leader_epoch", Int32))
_REPLICAS = tuple((name, CompactArray(Int32)) for name in ("replicas", "isr", "offline_replicas"))
_TOPIC = (("error_code", Int16), ("topic", TEXT), ("topic_id", Uuid), ("is_internal", Boolean))
_TOPICS = array(*_TOPIC, ("partitions", array(*_LEADER, *_REPLICAS)), ("authorized_operations", Int32))


class FlexibleRequest(Request[RequestStruct]):
    """A request in the one version that is spoken here, with tagged fields (KIP-482)."""

    API_KEY = -1

    def __init_subclass__(
        cls,
        *,
        key: int,
        version: int,
        asked: Schema,
        answered: Schema | None,
        header: type[Struct] = ResponseHeader_v1,
    ) -> None:
        """Not aiokafka's own, which reads the versions from a type parameter. ``header``: of the answer.

        ``answered`` None: the answer is left as bytes for `read_answer`, since aiokafka decodes in the event loop.
        """
        shared: dict[str, Any] = {"API_KEY": key, "API_VERSION": version}
        decoding = {"decode": staticmethod(BytesIO.read)} if answered is None else {}
        response = type("FlexibleResponse", (Response,), {**shared, "SCHEMA": answered, **decoding})
        shared |= {"FLEXIBLE_VERSION": True, "RESPONSE_TYPE": response, "SCHEMA": asked}
        shared["parse_response_header"] = lambda _, raw: header.decode(raw)
        cls.API_KEY, cls._CLASSES = key, (type("FlexibleStruct", (RequestStruct,), shared),)

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[RequestStruct]) -> RequestStruct:
        return request_struct_class(*self._fields, {})


_METADATA = Schema(
    *(("throttle_time_ms", Int32), ("brokers", _BROKERS), ("cluster_id", TEXT), ("controller_id", Int32)),
    *(("topics", _TOPICS), TAGS),
)


class MetadataRequest(
    FlexibleRequest,
    key=3,
    version=12,
    asked=Schema(
        ("topics", array(("topic_id", Uuid), ("topic", TEXT))),
        *(("allow_auto_topic_creation", Boolean), ("include_authorized_operations", Boolean), TAGS),
    ),
    answered=None,
):
    """Asks for some topics, or all (None); never creates one. `read_metadata` decodes the answer."""

    def __init__(self, topics: list[str] | None) -> None:
        super().__init__(None if topics is None else [(NO_ID, topic, {}) for topic in topics], False, False)


_CHANGE: Final = array(("name", TEXT), ("operation", Int8), ("value", TEXT))
_RESOURCE: Final = (("type", Int8), ("name", TEXT))
_TOPIC_RESOURCE, _SET = 2, 0


class AlterConfigsRequest(
    FlexibleRequest,
    key=44,
    version=1,
    asked=Schema(("resources", array(*_RESOURCE, ("changes", _CHANGE))), ("validate_only", Boolean), TAGS),
    answered=Schema(
        ("throttle_time_ms", Int32),
        ("responses", array(("error_code", Int16), ("error_message", TEXT), *_RESOURCE)),
        TAGS,
    ),
):
    """Changes these settings of a topic, and leaves its others."""

    def __init__(self, topic: str, settings: Mapping[str, str]) -> None:
        changes: list[Any] = [(name, _SET, value, {}) for name, value in settings.items()]
        super().__init__([(_TOPIC_RESOURCE, topic, changes, {})], False)


class PartitionMetadata(NamedTuple):
    """``leader`` -1: there is none now."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class TopicMetadata(NamedTuple):
    """One topic as a broker describes it; partitions by number, without holes."""

    name: str
    id: bytes
    internal: bool
    partitions: tuple[PartitionMetadata, ...]


class ClusterMetadata(NamedTuple):
    """``topics`` holds the existing ones alone; ``errors`` Kafka's error code for each asked topic that is not."""

    cluster_id: str
    brokers: dict[int, tuple[str, int]]
    topics: dict[str, TopicMetadata]
    errors: dict[str, int]


async def read_answer(answer: bytes, read: Callable[[BytesIO], _T]) -> _T:
    """What ``read`` makes of an answer that aiokafka left as bytes; in a thread where they are many."""
    raw = BytesIO(answer)
    return await asyncio.to_thread(read, raw) if len(answer) > _INLINE_BYTES else read(raw)


async def read_metadata(answer: Any) -> ClusterMetadata:
    """``answer``: its bytes."""
    return await read_answer(answer, _decoded)


def _decoded(raw: BytesIO) -> ClusterMetadata:
    _throttle_ms, known_brokers, cluster_id, _controller, known_topics, _ = _METADATA.decode(raw)
    topics: dict[str, TopicMetadata] = {}
    errors: dict[str, int] = {}
    for error, name, topic_id, internal, partitions, _operations, _tags in known_topics:
        if error:
            errors[name] = error
            continue
        views = sorted(PartitionMetadata(p[1], p[2], p[3], tuple(p[4]), tuple(p[5])) for p in partitions)
        topics[name] = TopicMetadata(name, topic_id, internal, tuple(views))
    brokers = {node: (host, port) for node, host, port, _rack, _tags in known_brokers}
    return ClusterMetadata(cluster_id or "", brokers, topics, errors)


_REPLICA_STATES = array(("replica", Int32), ("end", Int64), ("fetched_ms", Int64), ("caught_up_ms", Int64))
_QUORUM = (("leader", Int32), ("leader_epoch", Int32), ("high_watermark", Int64))
_STATES = (("voters", _REPLICA_STATES), ("observers", _REPLICA_STATES))
_QUORUM_PARTITIONS = array(("partition", Int32), ("error_code", Int16), *_QUORUM, *_STATES)


class DescribeQuorumRequest(
    FlexibleRequest,
    key=55,
    version=1,
    asked=Schema(("topics", array(("topic", TEXT), ("partitions", array(("partition", Int32))))), TAGS),
    answered=Schema(
        ("error_code", Int16), ("topics", array(("topic", TEXT), ("partitions", _QUORUM_PARTITIONS))), TAGS
    ),
):
    """Asks for the state of the controllers; any broker passes it on to the active one."""

    def __init__(self) -> None:
        super().__init__([("__cluster_metadata", [(0, {})], {})])


def read_controller_ms(response: Any) -> tuple[int, int]:
    """Kafka's error code, and Unix time in ms by the clock of the active controller: its own state is of now."""
    code = response.error_code
    for _topic, partitions, _ in response.topics:
        for _number, partition_code, leader, _epoch, _end, voters, _observers, _ in partitions:
            code = code or partition_code
            for replica, _log_end, _fetched_ms, caught_up_ms, _ in voters:
                if replica == leader and not code and caught_up_ms > 0:
                    return 0, caught_up_ms
    return code, 0


def agreed_ids(asked: Mapping[int, list[str]], answers: Sequence[Mapping[str, TopicMetadata]]) -> dict[str, bytes]:
    """The id of each topic that every leader that was asked for it knows alike."""
    seen: dict[str, set[bytes | None]] = {}
    for topics, known in zip(asked.values(), answers, strict=True):
        for topic in topics:
            seen.setdefault(topic, set()).add(known[topic].id if topic in known else None)
    only = {topic: next(iter(ids)) for topic, ids in seen.items() if len(ids) == 1}
    return {topic: topic_id for topic, topic_id in only.items() if topic_id is not None}
