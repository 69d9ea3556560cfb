"""Kafka's Produce (version 13) and EndTxn (version 5) requests, and who takes them: aiokafka stops at older ones.

* Produce names a topic by its id (KIP-516): what is meant for a topic is never written into another one that was
  created under its name meanwhile. It adds its partitions to the transaction by itself (KIP-890).
* EndTxn answers with the epoch of the next transaction (KIP-890): a batch that a network held back can never end up
  in a later transaction, and sequence numbers begin anew with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple

from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
    UnsignedVarInt32,
)
from logferry.gateway.metadata import Uuid

_ALL_IN_SYNC = -1


class ProduceResponse_v13(Response):
    API_KEY = 0
    API_VERSION = 13
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("topic_id", Uuid),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("base_offset", Int64),
                        ("log_append_time_ms", Int64),
                        ("log_start_offset", Int64),
                        (
                            "record_errors",
                            CompactArray(("index", Int32), ("message", CompactString("utf-8")), ("tags", TaggedFields)),
                        ),
                        ("error_message", CompactString("utf-8")),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class _Encoded(AbstractType[bytes]):
    """A field that was encoded before: a schema copies what it holds once for each of its levels."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value


class ProduceRequest_v13(RequestStruct):
    """``topics``: an array of (topic id, array of (partition, batch)), as `_encoded` makes it."""

    FLEXIBLE_VERSION = True
    API_KEY = 0
    API_VERSION = 13
    RESPONSE_TYPE = ProduceResponse_v13
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("acks", Int16),
        ("timeout_ms", Int32),
        ("topics", _Encoded),
        ("tags", TaggedFields),
    )


class EndTxnResponse_v5(Response):
    API_KEY = 26
    API_VERSION = 5
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class EndTxnRequest_v5(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 26
    API_VERSION = 5
    RESPONSE_TYPE = EndTxnResponse_v5
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("committed", Boolean),
        ("tags", TaggedFields),
    )


class ApiVersionsResponse_v3(Response):
    API_KEY = 18
    API_VERSION = 3
    SCHEMA = Schema(
        ("error_code", Int16),
        ("api_keys", CompactArray(("key", Int16), ("least", Int16), ("most", Int16), ("tags", TaggedFields))),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class ApiVersionsRequest_v3(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = 18
    API_VERSION = 3
    RESPONSE_TYPE = ApiVersionsResponse_v3
    SCHEMA = Schema(
        ("client_software_name", CompactString("utf-8")),
        ("client_software_version", CompactString("utf-8")),
        ("tags", TaggedFields),
    )

    def parse_response_header(self, read_buffer: BytesIO | bytes) -> Any:
        """The old header, so that brokers of every age can answer."""
        return ResponseHeader_v0.decode(read_buffer)


class TopicPartition(NamedTuple):
    """A partition of one incarnation of a topic."""

    topic_id: bytes
    partition: int


class ProduceRequest(Request[ProduceRequest_v13]):
    """One batch for each of some partitions, which one broker leads."""

    API_KEY = 0

    def __init__(self, transactional_id: str, timeout_ms: int, batches: Mapping[TopicPartition, bytes]) -> None:
        self._transactional_id, self._timeout_ms, self._batches = transactional_id, timeout_ms, batches

    def build(self, request_struct_class: type[ProduceRequest_v13]) -> ProduceRequest_v13:
        topics = _encoded(self._batches)
        return request_struct_class(self._transactional_id, _ALL_IN_SYNC, self._timeout_ms, topics, {})


_NO_TAGS = b"\0"


def _encoded(batches: Mapping[TopicPartition, bytes]) -> bytes:
    topics: dict[bytes, list[tuple[int, bytes]]] = {}
    for (topic_id, partition), batch in batches.items():
        topics.setdefault(topic_id, []).append((partition, batch))
    parts = [_count(len(topics))]
    for topic_id, written in topics.items():
        parts += (topic_id, _count(len(written)))
        for partition, batch in written:
            parts += (Int32.encode(partition), _count(len(batch)), batch, _NO_TAGS)
        parts.append(_NO_TAGS)
    return b"".join(parts)


def _count(number: int) -> bytes:
    """The length of a compact array, or of compact bytes."""
    encoded: bytes = UnsignedVarInt32.encode(number + 1)
    return encoded


class CommitRequest(Request[EndTxnRequest_v5]):
    API_KEY = 26

    def __init__(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        self._producer = (transactional_id, producer_id, epoch)

    def build(self, request_struct_class: type[EndTxnRequest_v5]) -> EndTxnRequest_v5:
        return request_struct_class(*self._producer, True, {})


class ApiVersionsRequest(Request[ApiVersionsRequest_v3]):
    API_KEY = 18

    def build(self, request_struct_class: type[ApiVersionsRequest_v3]) -> ApiVersionsRequest_v3:
        return request_struct_class("logferry", "0", {})


class BrokerAbilities(NamedTuple):
    """What a broker takes. ``produce``, ``end_txn``: the newest version. ``transactions``: transaction.version."""

    produce: int
    end_txn: int
    transactions: int

    @property
    def suffices(self) -> bool:
        return self.produce >= 13 and self.end_txn >= 5 and self.transactions >= 2


class Produced(NamedTuple):
    """What became of one batch. ``code``: Kafka's error code, 0 is none."""

    code: int
    base_offset: int
    message: str | None


def read_produced(response: Any) -> dict[TopicPartition, Produced]:
    return {
        TopicPartition(topic_id, number): Produced(code, base_offset, message)
        for topic_id, partitions, _tags in response.topics
        for number, code, base_offset, _append_ms, _log_start, _records, message, _partition_tags in partitions
    }


_FINALIZED_FEATURES = 2
_FEATURES = CompactArray(("name", CompactString("utf-8")), ("most", Int16), ("least", Int16), ("tags", TaggedFields))


def read_abilities(response: Any) -> BrokerAbilities:
    newest = {key: most for key, _least, most, _tags in response.api_keys}
    raw = response.tags.get(_FINALIZED_FEATURES)
    features = {name: level for name, level, _, _ in _FEATURES.decode(BytesIO(raw))} if raw else {}
    return BrokerAbilities(newest.get(0, 0), newest.get(26, 0), features.get("transaction.version", 0))
