"""Kafka's Produce (version 13), EndTxn (version 5) and ApiVersions (version 3) requests; aiokafka stops at older ones.

* Produce names a topic by its id (KIP-516), so a batch is never written into another topic that was created under
  its name meanwhile. It adds its partitions to the transaction by itself (KIP-890).
* EndTxn returns the epoch of the next transaction (KIP-890), so a batch that the network delayed can never become part
  of a later transaction, and sequence numbers start at zero in each.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, ClassVar, Final, NamedTuple

from aiokafka.protocol.api import ResponseHeader_v0
from aiokafka.protocol.types import Boolean, Int16, Int32, Int64, Schema
from logferry.gateway.contract.varint import varint
from logferry.gateway.kafka.metadata_request import TAGS, TEXT, FlexibleRequest, Uuid, array
from logferry.gateway.kafka.types import Piece, TopicIdPartition, grouped

_ALL_IN_SYNC: Final = -1
# acks, time-out.
_HOW: Final = struct.Struct(">hi")
_PARTITION: Final = struct.Struct(">i")


_WRITTEN = (("partition", Int32), ("error_code", Int16), ("base_offset", Int64), ("log_append_time_ms", Int64))
_ERRORS = (("record_errors", array(("index", Int32), ("message", TEXT))), ("error_message", TEXT))
_PARTITIONS = array(*_WRITTEN, ("log_start_offset", Int64), *_ERRORS)


_PRODUCED = Schema(
    ("topics", array(("topic_id", Uuid), ("partitions", _PARTITIONS))), ("throttle_time_ms", Int32), TAGS
)
_NO_TAGS: Final = b"\0"


class ProduceRequest:
    """One batch for each of some partitions of one broker, in pieces that are sent without copying."""

    API_KEY: ClassVar[int] = 0
    API_VERSION: ClassVar[int] = 13

    def __init__(
        self, transactional_id: str, timeout_ms: int, batches: Mapping[TopicIdPartition, Sequence[Piece]]
    ) -> None:
        self._transactional_id, self._timeout_ms, self._batches = transactional_id.encode(), timeout_ms, batches
        self.throttle_ms = 0

    def pieces(self) -> list[Piece]:
        topics = grouped((topic_id, (partition, batch)) for (topic_id, partition), batch in self._batches.items())
        name = self._transactional_id
        found: list[Piece] = []
        # The bytes between the batches; a compact length is one more than the length.
        small = [varint(len(name) + 1), name, _HOW.pack(_ALL_IN_SYNC, self._timeout_ms), varint(len(topics) + 1)]
        for topic_id, written in topics.items():
            small += (topic_id, varint(len(written) + 1))
            for partition, batch in written:
                small += (_PARTITION.pack(partition), varint(sum(map(len, batch)) + 1))
                found += (b"".join(small), *batch)
                small = [_NO_TAGS]
            small.append(_NO_TAGS)
        return [*found, b"".join((*small, _NO_TAGS))]

    def read(self, answer: memoryview) -> dict[TopicIdPartition, Produced]:
        topics, self.throttle_ms, _tags = _PRODUCED.decode(BytesIO(answer))
        return {
            TopicIdPartition(topic_id, number): Produced(code, base_offset, message)
            for topic_id, partitions, _ in topics
            for number, code, base_offset, _append_ms, _log_start, _records, message, _ in partitions
        }


class CommitRequest(
    FlexibleRequest,
    key=26,
    version=5,
    asked=Schema(
        *(("transactional_id", TEXT), ("producer_id", Int64), ("producer_epoch", Int16), ("committed", Boolean), TAGS)
    ),
    answered=Schema(
        *(("throttle_time_ms", Int32), ("error_code", Int16), ("producer_id", Int64), ("producer_epoch", Int16), TAGS)
    ),
):
    def __init__(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        super().__init__(transactional_id, producer_id, epoch, True)


class ApiVersionsRequest(
    FlexibleRequest,
    key=18,
    version=3,
    asked=Schema(("client_software_name", TEXT), ("client_software_version", TEXT), TAGS),
    answered=Schema(
        ("error_code", Int16),
        ("api_keys", array(("key", Int16), ("least", Int16), ("most", Int16))),
        *(("throttle_time_ms", Int32), TAGS),
    ),
    header=ResponseHeader_v0,  # the old one, so that brokers of every age can answer
):
    def __init__(self) -> None:
        super().__init__("logferry", "0")


class BrokerAbilities(NamedTuple):
    """Supported versions of a broker: the newest of Produce and EndTxn, and the feature transaction.version."""

    produce: int
    end_txn: int
    transactions: int

    @property
    def suffices(self) -> bool:
        return self.produce >= 13 and self.end_txn >= 5 and self.transactions >= 2


class Produced(NamedTuple):
    """The result of one batch. ``code``: of `error_codes`."""

    code: int
    base_offset: int
    message: str | None


_FINALIZED_FEATURES = 2
_FEATURES = array(("name", TEXT), ("most", Int16), ("least", Int16))


def read_abilities(response: Any) -> BrokerAbilities:
    newest = {key: most for key, _least, most, _tags in response.api_keys}
    raw = response.tags.get(_FINALIZED_FEATURES)
    features = {name: level for name, level, _, _ in _FEATURES.decode(BytesIO(raw))} if raw else {}
    return BrokerAbilities(newest.get(0, 0), newest.get(26, 0), features.get("transaction.version", 0))
