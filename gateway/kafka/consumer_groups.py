"""Consumer groups in Kafka: members and committed offsets. The group's name is the consumer's.

A consumer has no other state, so Kafka's own tools see and may change all of it. Kafka decides which commits are
valid: it rejects one of a member whose generation has passed, and one without a member while the group has any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.types import Boolean, CompactArray, Int16, Int32, Int64, Schema
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import KafkaClient, Send, raise_for
from logferry.gateway.kafka.metadata_request import TAGS, TEXT, FlexibleRequest, Uuid, array
from logferry.gateway.kafka.types import GroupMember, grouped

_NO_OFFSET: Final = -1
_KEEP_AS_THE_BROKER_SAYS: Final = -1
_REFUSED: Final = (errors.IllegalGenerationError, errors.UnknownMemberIdError, errors.RebalanceInProgressError)


# Kafka's type of a group without members is empty.
_CONSUMER_KINDS: Final = ("consumer", "")
# Of a group that is none of the newer protocol.
_OTHER_KIND: Final = (errors.GroupIdNotFound.errno, errors.UnsupportedVersionError.errno)

_ASSIGNMENT = Schema(
    ("partitions", array(("topic_id", Uuid), ("topic", TEXT), ("partitions", CompactArray(Int32)))), TAGS
)
_MEMBER = (
    *(("member_id", TEXT), ("instance_id", TEXT), ("rack_id", TEXT), ("epoch", Int32), ("client_id", TEXT)),
    *(("host", TEXT), ("topics", CompactArray(TEXT)), ("topics_pattern", TEXT)),
    *(("assignment", _ASSIGNMENT), ("target", _ASSIGNMENT)),
)
_DESCRIBED_GROUP = (
    *(("error_code", Int16), ("error_message", TEXT), ("group", TEXT), ("state", TEXT), ("epoch", Int32)),
    *(("assignment_epoch", Int32), ("assignor", TEXT), ("members", array(*_MEMBER)), ("operations", Int32)),
)


class ConsumerGroupDescribeRequest(
    FlexibleRequest,
    key=69,
    version=0,
    asked=Schema(("groups", CompactArray(TEXT)), ("include_authorized_operations", Boolean), TAGS),
    answered=Schema(("throttle_time_ms", Int32), ("groups", array(*_DESCRIBED_GROUP)), TAGS),
):
    """Asks for a group of the newer protocol (KIP-848); DescribeGroups sees no members in such a group."""

    def __init__(self, group: str) -> None:
        super().__init__([group], False)


_ASKED: Final = ("topics", array(("topic", TEXT), ("partitions", CompactArray(Int32))))
_COMMITTED: Final = array(
    *(("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT), ("error_code", Int16))
)
_GROUP_OFFSETS: Final = array(
    *(("group", TEXT), ("topics", array(("topic", TEXT), ("partitions", _COMMITTED))), ("error_code", Int16))
)


class GroupOffsetsRequest(
    FlexibleRequest,
    key=9,
    version=8,
    asked=Schema(("groups", array(("group", TEXT), _ASKED)), ("require_stable", Boolean), TAGS),
    answered=Schema(("throttle_time_ms", Int32), ("groups", _GROUP_OFFSETS), TAGS),
):
    """OffsetFetch, version 8: all committed offsets of several groups of one coordinator (KIP-709)."""

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__([(group, None, {}) for group in groups], False)


class CommitRefused(Exception):
    """Kafka rejected a commit: the generation has passed, or the group has members. Nothing of it was committed."""


class GroupState(NamedTuple):
    """``state``: Kafka's Empty, Dead (no such group), Stable, PreparingRebalance or CompletingRebalance."""

    state: str
    members: int


class ConsumerGroups:
    """The consumer groups of one cluster. Every call may be repeated."""

    def __init__(self, kafka: KafkaClient) -> None:
        self._kafka = kafka

    async def view(self, group: str) -> GroupState:
        async def ask(send: Send) -> GroupState:
            response = await send(DescribeGroupsRequest([group]))
            code, _group, state, _type, _protocol, members = response.groups[0][:6]
            raise_for(code, group)
            return GroupState(state, len(members))

        return await self._kafka.with_coordinator(group, ask)

    async def client_ids(self, group: str) -> list[str]:
        """The client ids of the members, of either protocol; of a group that is none of consumers, its type."""

        async def ask(send: Send) -> list[str]:
            response = await send(DescribeGroupsRequest([group]))
            code, _group, _state, kind, _protocol, members = response.groups[0][:6]
            raise_for(code, group)
            if kind not in _CONSUMER_KINDS:
                return [kind]
            found = [client_id for _member, client_id in (member[:2] for member in members)]
            try:
                response = await send(ConsumerGroupDescribeRequest(group))
            except errors.IncompatibleBrokerVersion:
                return found
            code, _message, _group, _state, _epoch, _assigned, _assignor, newer = response.groups[0][:8]
            if code not in _OTHER_KIND:
                raise_for(code, group)
            return found + [member[4] for member in newer]

        return await self._kafka.with_coordinator(group, ask)

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """The committed offsets: of the next record to read. Partitions without one are missing."""

        async def ask(send: Send) -> dict[TopicPartition, int]:
            response = await send(OffsetFetchRequest(group, None))
            raise_for(response.error_code, group)
            found = {}
            for topic, partitions in response.topics:
                for number, offset, _metadata, code in partitions:
                    raise_for(code, f"{topic}-{number} of {group}")
                    if offset != _NO_OFFSET:
                        found[topic, number] = offset
            return found

        return await self._kafka.with_coordinator(group, ask)

    async def committed_at(
        self, node: int, groups: Sequence[str]
    ) -> dict[str, dict[TopicPartition, int] | errors.KafkaError]:
        """`committed` of several groups, in one request to the broker that coordinates them; an error is its group's.

        A partition with an error is missing like one without an offset.
        """
        response: Any = await self._kafka.send(node, GroupOffsetsRequest(groups))
        found: dict[str, dict[TopicPartition, int] | errors.KafkaError] = {}
        for group, topics, code, _tags in response.groups:
            offsets = {
                (topic, number): offset
                for topic, partitions, _ in topics or ()
                for number, offset, _epoch, _metadata, error, _ in partitions
                if not error and offset != _NO_OFFSET
            }
            found[group] = errors.for_code(code)(group) if code else offsets
        return found

    async def commit(self, group: str, member: GroupMember, offsets: Mapping[TopicPartition, int]) -> None:
        """Commits all of the positions. Raises `CommitRefused`, and UnknownTopicOrPartitionError for a deleted topic.

        After any other error it is not known whether they are committed; the same commit may be sent again.
        """
        by_topic = grouped((topic, (number, offset, "")) for (topic, number), offset in offsets.items())

        async def ask(send: Send) -> None:
            request = OffsetCommitRequest(
                group, member.generation, member.id, _KEEP_AS_THE_BROKER_SAYS, list(by_topic.items())
            )
            response = await send(request)
            for topic, partitions in response.topics:
                for number, code in partitions:
                    raise_for(code, f"{topic}-{number} of {group}")

        try:
            await self._kafka.with_coordinator(group, ask)
        except _REFUSED as error:
            raise CommitRefused(str(error)) from None
