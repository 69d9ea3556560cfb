"""Kafka's requests about replicas, directories and leaders, which the rest of logferry does not need. Pure.

DescribeLogDirs 4 with the size of the disk (KIP-827), AlterReplicaLogDirs 2 (KIP-113), AlterPartitionReassignments 0
and ListPartitionReassignments 0 (KIP-455), ElectLeaders 2 (KIP-460), DescribeCluster 2 with fenced brokers (KIP-1073).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.requests import FlexibleRequest
from logferry.gateway.kafka.types import grouped

TIMEOUT_MS: Final = 5000
PREFERRED: Final = 0
_CODES: Final = "topics[topic:text partitions[partition:int32 error_code:int16 error_message:text]]"


class DiskUsageRequest(
    FlexibleRequest,
    key=35,
    version=4,
    asked="topics[topic:text partitions:int32s]",
    answered="throttle_time_ms:int32 error_code:int16 dirs[error_code:int16 dir:text topics[topic:text "
    "partitions[partition:int32 size_bytes:int64 offset_lag:int64 is_future:bool]] total_bytes:int64 "
    "usable_bytes:int64]",
):
    """Asks one broker for its directories and all replicas in them. A failed one has an error and no replicas."""

    def __init__(self) -> None:
        super().__init__(None)


class AllBrokersRequest(
    FlexibleRequest,
    key=60,
    version=2,
    asked="include_authorized_operations:bool endpoint_type:int8 include_fenced_brokers:bool",
    answered="throttle_time_ms:int32 error_code:int16 error_message:text endpoint_type:int8 cluster_id:text "
    "controller_id:int32 brokers[node_id:int32 host:text port:int32 rack:text is_fenced:bool] operations:int32",
):
    """Asks for the registered brokers, also for those that the controller does not hear of."""

    def __init__(self) -> None:
        super().__init__(False, 1, True)


class ReassignRequest(
    FlexibleRequest,
    key=45,
    version=0,
    asked="timeout_ms:int32 topics[topic:text partitions[partition:int32 replicas:int32s]]",
    answered=f"throttle_time_ms:int32 error_code:int16 error_message:text {_CODES}",
):
    """Gives partitions other replicas; None cancels what is under way."""

    def __init__(self, targets: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        by_topic: dict[str, list[Any]] = grouped(
            (topic, (number, replicas, {})) for (topic, number), replicas in targets.items()
        )
        super().__init__(TIMEOUT_MS, [(topic, parts, {}) for topic, parts in by_topic.items()])


class ReassignmentsRequest(
    FlexibleRequest,
    key=46,
    version=0,
    asked="timeout_ms:int32 topics[topic:text partitions:int32s]",
    answered="throttle_time_ms:int32 error_code:int16 error_message:text topics[topic:text "
    "partitions[partition:int32 replicas:int32s adding:int32s removing:int32s]]",
):
    """Asks for all reassignments that are under way."""

    def __init__(self) -> None:
        super().__init__(TIMEOUT_MS, None)


class MoveDirRequest(
    FlexibleRequest,
    key=34,
    version=2,
    asked="dirs[dir:text topics[topic:text partitions:int32s]]",
    answered="throttle_time_ms:int32 topics[topic:text partitions[partition:int32 error_code:int16]]",
):
    """Moves a broker's replicas to one of its directories; of one that is yet to come, it is where it will be made."""

    def __init__(self, path: str, partitions: Iterable[TopicPartition]) -> None:
        super().__init__([(path, [(topic, numbers, {}) for topic, numbers in grouped(partitions).items()], {})])


class ElectLeadersRequest(
    FlexibleRequest,
    key=43,
    version=2,
    asked="election_type:int8 topics[topic:text partitions:int32s] timeout_ms:int32",
    answered=f"throttle_time_ms:int32 error_code:int16 {_CODES}",
):
    """Elects the preferred leaders, never one that is not in sync."""

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        topics: list[Any] = [(topic, numbers, {}) for topic, numbers in grouped(partitions).items()]
        super().__init__(PREFERRED, topics, TIMEOUT_MS)
