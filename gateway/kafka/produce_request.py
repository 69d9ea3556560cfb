"""Kafka's Produce (version 13) and EndTxn (version 5) requests, and who takes them: aiokafka stops at older ones.

* Produce names a topic by its id (KIP-516): what is meant for a topic is never written into another one that was
  created under its name meanwhile. It adds its partitions to the transaction by itself (KIP-890).
* EndTxn answers with the epoch of the next transaction (KIP-890): a batch that a network held back can never end up
  in a later transaction, and sequence numbers begin anew with each.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, ClassVar, Final, NamedTuple

from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.types import (
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
from logferry.gateway.kafka.broker_connection import Piece
from logferry.gateway.kafka.metadata_request import Uuid

_ALL_IN_SYNC: Final = -1
# acks, time-out.
_HOW: Final = struct.Struct(">hi")
_PARTITION: Final = struct.Struct(">i")


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


_NO_TAGS: Final = b"\0"


class ProduceRequest:
    """One batch for each of some partitions, which one broker leads; each in pieces, which go as they are."""

    API_KEY: ClassVar[int] = 0
    API_VERSION: ClassVar[int] = 13

    def __init__(
        self, transactional_id: str, timeout_ms: int, batches: Mapping[TopicPartition, Sequence[Piece]]
    ) -> None:
        self._transactional_id, self._timeout_ms, self._batches = transactional_id.encode(), timeout_ms, batches

    def pieces(self) -> list[Piece]:
        topics: dict[bytes, list[tuple[int, Sequence[Piece]]]] = {}
        for (topic_id, partition), batch in self._batches.items():
            topics.setdefault(topic_id, []).append((partition, batch))
        name = self._transactional_id
        found: list[Piece] = []
        # What stands between the batches.
        small = [_count(len(name)), name, _HOW.pack(_ALL_IN_SYNC, self._timeout_ms), _count(len(topics))]
        for topic_id, written in topics.items():
            small += (topic_id, _count(len(written)))
            for partition, batch in written:
                small += (_PARTITION.pack(partition), _count(sum(map(len, batch))))
                found += (b"".join(small), *batch)
                small = [_NO_TAGS]
            small.append(_NO_TAGS)
        return [*found, b"".join((*small, _NO_TAGS))]

    def read(self, answer: memoryview) -> dict[TopicPartition, Produced]:
        return read_produced(ProduceResponse_v13.decode(BytesIO(answer)))


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
