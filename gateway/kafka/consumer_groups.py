"""Consumer groups in Kafka: members and committed offsets. The group's name is the consumer's.

A consumer has no other state, so Kafka's own tools see and may change all of it. Kafka decides which commits are
valid: it rejects one of a member whose generation has passed, and one without a member while the group has any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from aiokafka import AIOKafkaConsumer, errors
from logferry.gateway import log
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.aiokafka_internals import OffsetCommitRequest, admin, rejoin_after_error
from logferry.gateway.kafka.client import KafkaClient, Send, raise_for
from logferry.gateway.kafka.requests import FlexibleRequest
from logferry.gateway.kafka.types import GroupMember, grouped

_NO_OFFSET: Final = -1
_KEEP_AS_THE_BROKER_SAYS: Final = -1
_REFUSED: Final = (errors.IllegalGenerationError, errors.UnknownMemberIdError, errors.RebalanceInProgressError)


# Kafka's type of a group without members is empty.
_CONSUMER_KINDS: Final = ("consumer", "")
# Of a group that is none of the newer protocol.
_OTHER_KIND: Final = (errors.GroupIdNotFound.errno, errors.UnsupportedVersionError.errno)

# The positions of a group, or why it has none.
Committed: TypeAlias = dict[TopicPartition, int] | errors.KafkaError

_ASSIGNMENT: Final = "(partitions[topic_id:uuid topic:text partitions:int32s])"


class ConsumerGroupDescribeRequest(
    FlexibleRequest,
    key=69,
    version=0,
    asked="groups:texts include_authorized_operations:bool",
    answered="throttle_time_ms:int32 groups[error_code:int16 error_message:text group:text state:text epoch:int32 "
    "assignment_epoch:int32 assignor:text members[member_id:text instance_id:text rack_id:text epoch:int32 "
    "client_id:text host:text topics:texts topics_pattern:text "
    f"assignment{_ASSIGNMENT} target{_ASSIGNMENT}] operations:int32]",
):
    """Asks for a group of the newer protocol (KIP-848); DescribeGroups sees no members in such a group."""


class ListGroupsRequest(
    FlexibleRequest,
    key=16,
    version=4,
    asked="states:texts",
    answered="throttle_time_ms:int32 error_code:int16 groups[group:text kind:text state:text]",
):
    """The groups of one coordinator in some states, or in all (KIP-518)."""


class GroupOffsetsRequest(
    FlexibleRequest,
    key=9,
    version=8,
    asked="groups[group:text topics[topic:text partitions:int32s]] require_stable:bool",
    answered="throttle_time_ms:int32 groups[group:text topics[topic:text partitions[partition:int32 offset:int64 "
    "leader_epoch:int32 metadata:text error_code:int16]] error_code:int16]",
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


class Membership:
    """Of a consumer that only uses its group and never reads: it stays a member, or becomes one again.

    aiokafka sends no heartbeats after an error that it does not retry, such as a right that was missing for a moment,
    until a read has raised the error.
    """

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self._error: str | None = None

    def renew(self) -> None:
        """To be called again and again. Raises KafkaError when only a new consumer could join."""
        error = rejoin_after_error(self._consumer)
        if error is not None and self._error != repr(error):
            self._error = repr(error)
            log.event("group_membership_failed", error=self._error)

    def confirmed(self) -> None:
        """The group has assigned partitions to it."""
        self._error = None


@dataclass(frozen=True, slots=True)
class ConsumerGroups:
    """The consumer groups of one cluster. Every call may be repeated."""

    _kafka: KafkaClient

    async def view(self, group: str) -> GroupState:
        state, _kind, members = await self._kafka.with_coordinator(group, partial(_described, group=group))
        return GroupState(state, len(members))

    async def states_at(self, node: int) -> dict[str, str]:
        """The groups of consumers that the broker coordinates, with their state. Raises KafkaError."""
        response = await self._kafka.send(node, ListGroupsRequest([]))
        raise_for(response.error_code, f"the groups of broker {node}")
        return {group: state for group, kind, state, _ in response.groups if kind in _CONSUMER_KINDS}

    async def client_ids(self, group: str) -> list[str]:
        """The client ids of the members, of either protocol; of a group that is none of consumers, its type."""

        async def ask(send: Send) -> list[str]:
            _state, kind, members = await _described(send, group)
            if kind not in _CONSUMER_KINDS:
                return [kind]
            found = [member[1] for member in members]
            try:
                response = await send(ConsumerGroupDescribeRequest([group], False))
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
            found = _committed(await send(GroupOffsetsRequest([group])), is_whole=True)[group]
            if isinstance(found, errors.KafkaError):
                raise found
            return found

        return await self._kafka.with_coordinator(group, ask)

    async def committed_at(self, node: int, groups: Sequence[str]) -> dict[str, Committed]:
        """`committed` of several groups, in one request to their coordinator; an error is its group's.

        A partition with an error is missing like one without an offset.
        """
        return _committed(await self._kafka.send(node, GroupOffsetsRequest(groups)))

    async def commit(self, group: str, member: GroupMember, offsets: Mapping[TopicPartition, int]) -> None:
        """Commits all of the positions. Raises `CommitRefused`, and UnknownTopicOrPartitionError for a deleted topic.

        After any other error it is not known whether they are committed; the same commit may be sent again.
        """
        by_topic = grouped((topic, (number, offset, "")) for (topic, number), offset in offsets.items())

        async def ask(send: Send) -> None:
            fields = (group, *member, _KEEP_AS_THE_BROKER_SAYS, list(by_topic.items()))
            for topic, partitions in (await send(OffsetCommitRequest(*fields))).topics:
                for number, code in partitions:
                    raise_for(code, f"{topic}-{number} of {group}")

        try:
            await self._kafka.with_coordinator(group, ask)
        except _REFUSED as error:
            raise CommitRefused(str(error)) from None


async def _described(send: Send, group: str) -> tuple[str, str, list[Any]]:
    """Its state, its type and its members: each with its id, its client id and others."""
    code, _group, state, kind, _protocol, members = (await send(admin.DescribeGroupsRequest([group]))).groups[0][:6]
    raise_for(code, group)
    return state, kind, members


def _committed(response: Any, *, is_whole: bool = False) -> dict[str, Committed]:
    """``is_whole``: an error of a partition is its group's."""
    found: dict[str, Committed] = {}
    for group, topics, code, _tags in response.groups:
        offsets: dict[TopicPartition, int] = {}
        for topic, partitions, _ in topics or ():
            for number, offset, _epoch, _metadata, error, _ in partitions:
                code = code or (error if is_whole else 0)
                if not error and offset != _NO_OFFSET:
                    offsets[topic, number] = offset
        found[group] = errors.for_code(code)(group) if code else offsets
    return found
