"""Kafka's error codes by their names, and which of them the producer and the fetcher retry.

The numbers are those of Kafka's protocol: https://kafka.apache.org/protocol#protocol_error_codes. aiokafka knows most
of them as classes, but not the newer ones; requests that are decoded here bear the numbers.
"""

from __future__ import annotations

from typing import Final

NONE: Final = 0
OFFSET_OUT_OF_RANGE: Final = 1
UNKNOWN_TOPIC_OR_PARTITION: Final = 3
LEADER_NOT_AVAILABLE: Final = 5
NOT_LEADER_OR_FOLLOWER: Final = 6
REQUEST_TIMED_OUT: Final = 7
REPLICA_NOT_AVAILABLE: Final = 9
MESSAGE_TOO_LARGE: Final = 10
NETWORK_EXCEPTION: Final = 13
COORDINATOR_LOAD_IN_PROGRESS: Final = 14
COORDINATOR_NOT_AVAILABLE: Final = 15
NOT_COORDINATOR: Final = 16
RECORD_LIST_TOO_LARGE: Final = 18
NOT_ENOUGH_REPLICAS: Final = 19
NOT_ENOUGH_REPLICAS_AFTER_APPEND: Final = 20
TOPIC_AUTHORIZATION_FAILED: Final = 29
CLUSTER_AUTHORIZATION_FAILED: Final = 31
DUPLICATE_SEQUENCE_NUMBER: Final = 46
INVALID_PRODUCER_EPOCH: Final = 47
CONCURRENT_TRANSACTIONS: Final = 51
KAFKA_STORAGE_ERROR: Final = 56
FENCED_LEADER_EPOCH: Final = 74
UNKNOWN_LEADER_EPOCH: Final = 75
PRODUCER_FENCED: Final = 90
UNKNOWN_TOPIC_ID: Final = 100
INCONSISTENT_TOPIC_ID: Final = 103

# The topic of that id does not exist (KIP-516), or the broker has not heard of it yet.
NO_SUCH_TOPIC: Final = frozenset({UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID, INCONSISTENT_TOPIC_ID})
# Another producer with the same transactional id was initialised (KIP-98, KIP-588, KIP-890).
FENCED: Final = frozenset({INVALID_PRODUCER_EPOCH, PRODUCER_FENCED})
# The batch is over the topic's max.message.bytes, or the segment's size.
TOO_LARGE: Final = frozenset({MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE})
# The producer retries these: no leader or coordinator now (KIP-98), a leader of another epoch (KIP-320), too few
# replicas in sync, or markers of the transaction before that are not written yet (KIP-890).
RETRIABLE: Final = frozenset(
    {
        *(LEADER_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER, REQUEST_TIMED_OUT, NETWORK_EXCEPTION),
        *(COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR),
        *(NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND, KAFKA_STORAGE_ERROR),
        *(FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH, CONCURRENT_TRANSACTIONS),
    }
)
# A leader answers so, or not at all, while its partition takes nothing.
UNAVAILABLE: Final = RETRIABLE - {CONCURRENT_TRANSACTIONS}
# The fetcher looks up the leader again (KIP-320).
LEADER_CHANGED: Final = frozenset(
    {
        *(LEADER_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER, REPLICA_NOT_AVAILABLE, KAFKA_STORAGE_ERROR),
        *(FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH),
    }
)
