"""Kafka's requests in versions that aiokafka does not speak, and what their answers say.

* Metadata 12 has the topics' ids (KIP-516, KIP-700). A topic that is deleted and recreated keeps its name and changes
  its id; the states of the older one are not valid for it.
* EndTxn 5 returns the epoch of the next transaction (KIP-890), so a batch that the network delayed can never become
  part of a later transaction, and sequence numbers start at zero in each.
* IncrementalAlterConfigs 1 (KIP-339), DescribeLogDirs 2 (KIP-113), ApiVersions 3 with the finalized features, and
  DescribeQuorum 1, which has the time of the active controller (KIP-595, KIP-836).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import Any, Final, NamedTuple, TypeVar

from logferry.gateway.kafka.aiokafka_internals import (
    Request,
    RequestStruct,
    Response,
    ResponseHeader_v0,
    ResponseHeader_v1,
    Struct,
    types,
)

_T = TypeVar("_T")
NO_ID = bytes(16)
# Some hundred partitions; ten thousand take aiokafka 45 ms.
_INLINE_BYTES: Final = 4096


class Uuid(types.AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


_WORD: Final = re.compile(r"[\w:]+[\[(]?|[\])]")
_TYPES: Final[dict[str, Any]] = {
    "bool": types.Boolean,
    "int8": types.Int8,
    "int16": types.Int16,
    "int32": types.Int32,
    "int64": types.Int64,
    "text": types.CompactString("utf-8"),
    "uuid": Uuid,
    "int32s": types.CompactArray(types.Int32),
    "bytes": types.CompactBytes,
    "texts": types.CompactArray(types.CompactString("utf-8")),
    "float64": types.Float64,
}


def schema(fields: str) -> types.Schema:
    """With tagged fields (KIP-482). Fields are ``name:type``, ``array[fields]`` and ``structure(fields)``."""
    return types.Schema(*_fields(iter(_WORD.findall(fields))))


def _fields(words: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for word in words:
        if word in ("]", ")"):
            break
        name, _, kind = word.partition(":")
        if kind:
            yield name, _TYPES[kind]
        else:
            yield name[:-1], (types.CompactArray if name.endswith("[") else types.Schema)(*_fields(words))
    yield "tags", types.TaggedFields


class FlexibleRequest(Request[RequestStruct]):
    """A request in the one version that is spoken here, with tagged fields (KIP-482)."""

    API_KEY = -1

    def __init_subclass__(
        cls, *, key: int, version: int, asked: str, answered: str | None, header: type[Struct] = ResponseHeader_v1
    ) -> None:
        """Not aiokafka's own, which reads the versions from a type parameter. ``header``: of the answer.

        ``asked`` and ``answered``: for `schema`. None: the answer is left as bytes for `read_answer`, since aiokafka
        decodes in the event loop.
        """
        shared: dict[str, Any] = {"API_KEY": key, "API_VERSION": version}
        decoding = {"decode": staticmethod(BytesIO.read)} if answered is None else {"SCHEMA": schema(answered)}
        response = type("FlexibleResponse", (Response,), {"SCHEMA": None, **shared, **decoding})
        shared |= {"FLEXIBLE_VERSION": True, "RESPONSE_TYPE": response, "SCHEMA": schema(asked)}
        shared["parse_response_header"] = lambda _, raw: header.decode(raw)
        cls.API_KEY, cls._CLASSES = key, (type("FlexibleStruct", (RequestStruct,), shared),)

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[RequestStruct]) -> RequestStruct:
        return request_struct_class(*self._fields, {})


async def read_answer(answer: bytes, read: Callable[[BytesIO], _T]) -> _T:
    """What ``read`` makes of an answer that aiokafka left as bytes; in a thread where they are many."""
    raw = BytesIO(answer)
    return await asyncio.to_thread(read, raw) if len(answer) > _INLINE_BYTES else read(raw)


_METADATA: Final = schema(
    "throttle_time_ms:int32 brokers[node_id:int32 host:text port:int32 rack:text] cluster_id:text controller_id:int32 "
    "topics[error_code:int16 topic:text topic_id:uuid is_internal:bool partitions[error_code:int16 partition:int32 "
    "leader:int32 leader_epoch:int32 replicas:int32s isr:int32s offline_replicas:int32s] authorized_operations:int32]"
)


class MetadataRequest(
    FlexibleRequest,
    key=3,
    version=12,
    asked="topics[topic_id:uuid topic:text] allow_auto_topic_creation:bool include_authorized_operations:bool",
    answered=None,
):
    """Asks for some topics, or all (None); never creates one. `read_metadata` decodes the answer, `read_operations`
    that of one ``with_operations``."""

    def __init__(self, topics: list[str] | None, with_operations: bool = False) -> None:
        asked: list[Any] | None = None if topics is None else [(NO_ID, topic, {}) for topic in topics]
        super().__init__(asked, False, with_operations)


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


def read_metadata(raw: BytesIO) -> ClusterMetadata:
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


def read_operations(raw: BytesIO) -> dict[str, int]:
    """The operations that the caller may do with each topic that it sees, as bits by Kafka's number (KIP-430)."""
    topics = _METADATA.decode(raw)[4]
    return {name: operations for error, name, _id, _internal, _partitions, operations, _tags in topics if not error}


_TOPIC_RESOURCE, _SET, _DELETE = 2, 0, 1


class AlterConfigsRequest(
    FlexibleRequest,
    key=44,
    version=1,
    asked="resources[type:int8 name:text changes[name:text operation:int8 value:text]] validate_only:bool",
    answered="throttle_time_ms:int32 responses[error_code:int16 error_message:text type:int8 name:text]",
):
    """Changes these settings of a topic, or of another resource, and leaves its others. None: back to the default."""

    def __init__(self, name: str, settings: Mapping[str, str | None], resource: int = _TOPIC_RESOURCE) -> None:
        changes: list[Any] = [(key, _DELETE if value is None else _SET, value, {}) for key, value in settings.items()]
        super().__init__([(resource, name, changes, {})], False)


class CommitRequest(
    FlexibleRequest,
    key=26,
    version=5,
    asked="transactional_id:text producer_id:int64 producer_epoch:int16 committed:bool",
    answered="throttle_time_ms:int32 error_code:int16 producer_id:int64 producer_epoch:int16",
):
    def __init__(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        super().__init__(transactional_id, producer_id, epoch, True)


class ApiVersionsRequest(
    FlexibleRequest,
    key=18,
    version=3,
    asked="client_software_name:text client_software_version:text",
    answered="error_code:int16 api_keys[key:int16 least:int16 most:int16] throttle_time_ms:int32",
    header=ResponseHeader_v0,  # the old one, so that brokers of every age can answer
):
    def __init__(self) -> None:
        super().__init__("logferry", "0")


class BrokerAbilities(NamedTuple):
    """Supported versions of a broker: the newest of Produce and EndTxn, and the feature transaction.version."""

    produce: int
    end_txn: int
    transactions: int


_FINALIZED_FEATURES: Final = 2
_FEATURES: Final = schema("features[name:text most:int16 least:int16]").fields[0]


def read_abilities(response: Any) -> BrokerAbilities:
    newest = {key: most for key, _least, most, _tags in response.api_keys}
    raw = response.tags.get(_FINALIZED_FEATURES)
    features = {name: level for name, level, _, _ in _FEATURES.decode(BytesIO(raw))} if raw else {}
    return BrokerAbilities(newest.get(0, 0), newest.get(26, 0), features.get("transaction.version", 0))


_LOG_DIRS: Final = schema(
    "throttle_time_ms:int32 dirs[error_code:int16 dir:text topics[topic:text partitions[partition:int32 "
    "size_bytes:int64 offset_lag:int64 is_future:bool]]]"
)


class DescribeLogDirsRequest(
    FlexibleRequest, key=35, version=2, asked="topics[topic:text partitions:int32s]", answered=None
):
    """Asks one broker for the sizes of its replicas. `read_log_sizes` decodes the answer."""

    def __init__(self, partitions: Mapping[str, list[int]]) -> None:
        super().__init__([(topic, numbers, {}) for topic, numbers in partitions.items()])


def read_log_sizes(raw: BytesIO) -> dict[tuple[str, int], int]:
    """Bytes by partition; a copy that is being moved to another directory does not count, nor a failed directory."""
    found = {}
    for code, _dir, topics, _ in _LOG_DIRS.decode(raw)[1]:
        for topic, partitions, _ in topics if not code else ():
            for number, size_bytes, _lag, is_future, _ in partitions:
                if not is_future:
                    found[topic, number] = size_bytes
    return found


_REPLICA_STATES: Final = "[replica:int32 end:int64 fetched_ms:int64 caught_up_ms:int64]"


class DescribeQuorumRequest(
    FlexibleRequest,
    key=55,
    version=1,
    asked="topics[topic:text partitions[partition:int32]]",
    answered="error_code:int16 topics[topic:text partitions[partition:int32 error_code:int16 leader:int32 "
    f"leader_epoch:int32 high_watermark:int64 voters{_REPLICA_STATES} observers{_REPLICA_STATES}]]",
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
