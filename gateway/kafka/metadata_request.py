"""Kafka's Metadata request, version 12: the first thing it brings over older ones is the topics' ids.

A topic deleted and created anew keeps its name and changes its id; everything recorded about the older one must
not be believed any more. aiokafka stops at version 5, so the structures are here (KIP-516, KIP-700).
"""

from __future__ import annotations

from io import BytesIO
from typing import Any, NamedTuple

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

NO_ID = bytes(16)


class Uuid(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


class MetadataResponse_v12(Response):
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString("utf-8")),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class MetadataRequest_v12(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = MetadataResponse_v12
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", Uuid), ("topic", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class MetadataRequest(Request[MetadataRequest_v12]):
    """Asks for some topics, or all (None); never creates one."""

    API_KEY = 3

    def __init__(self, topics: list[str] | None) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[MetadataRequest_v12]) -> MetadataRequest_v12:
        topics: list[Any] | None = None
        if self._topics is not None:
            topics = [(NO_ID, topic, {}) for topic in self._topics]
        return request_struct_class(topics, False, False, {})


class PartitionView(NamedTuple):
    """``leader`` -1: there is none now."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class TopicView(NamedTuple):
    """One topic as a broker describes it; partitions by number, without holes."""

    name: str
    id: bytes
    internal: bool
    partitions: tuple[PartitionView, ...]


class ClusterView(NamedTuple):
    """``topics`` holds the existing ones alone; ``errors`` Kafka's error code for each asked topic that is not."""

    cluster_id: str
    brokers: dict[int, tuple[str, int]]
    topics: dict[str, TopicView]
    errors: dict[str, int]


def read_metadata(response: Any) -> ClusterView:
    topics: dict[str, TopicView] = {}
    errors: dict[str, int] = {}
    for error, name, topic_id, internal, partitions, _operations, _tags in response.topics:
        if error:
            errors[name] = error
            continue
        views = sorted(PartitionView(p[1], p[2], p[3], tuple(p[4]), tuple(p[5])) for p in partitions)
        topics[name] = TopicView(name, topic_id, internal, tuple(views))
    brokers = {node: (host, port) for node, host, port, _rack, _tags in response.brokers}
    return ClusterView(response.cluster_id or "", brokers, topics, errors)
