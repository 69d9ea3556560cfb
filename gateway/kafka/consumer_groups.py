"""Consumer groups as Kafka keeps them: who is in, what is committed. The group's name is the consumer's.

Nothing about a consumer is kept anywhere else, so Kafka's own tools see and may change all of it. Kafka decides
which commits are good: it refuses one of a member whose generation has passed, and one without a member while
the group has any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from aiokafka import errors
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from logferry.gateway.kafka.client import Kafka, Send, raise_for
from logferry.gateway.reading.assignment import Member
from logferry.gateway.reading.formats import Partition

_NO_OFFSET: Final = -1
_KEEP_AS_THE_BROKER_SAYS: Final = -1
_REFUSED: Final = (
    errors.IllegalGenerationError,
    errors.UnknownMemberIdError,
    errors.RebalanceInProgressError,
)


class Refused(Exception):
    """Kafka refused a commit: the group has moved on, or has members. Nothing of it was committed."""


class GroupView(NamedTuple):
    """``state`` in Kafka's words: Empty, Dead (there is none), Stable, PreparingRebalance, CompletingRebalance."""

    state: str
    members: int


class Groups:
    """The consumer groups of one cluster. Every call may be repeated."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka

    async def view(self, group: str) -> GroupView:
        async def ask(send: Send) -> GroupView:
            response = await send(DescribeGroupsRequest([group]))
            code, _group, state, _type, _protocol, members = response.groups[0][:6]
            raise_for(code, group)
            return GroupView(state, len(members))

        return await self._kafka.with_coordinator(group, ask)

    async def committed(self, group: str) -> dict[Partition, int]:
        """The committed positions: the offset of the next record to read. What has none is missing."""

        async def ask(send: Send) -> dict[Partition, int]:
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

    async def commit(self, group: str, member: Member, offsets: Mapping[Partition, int]) -> None:
        """Commits all of the positions. Raises `Refused`, and UnknownTopicOrPartitionError for a topic that is gone.

        After any other error it is not known whether they are committed; the same commit may be sent again.
        """
        by_topic: dict[str, list[tuple[int, int, str]]] = {}
        for (topic, number), offset in offsets.items():
            by_topic.setdefault(topic, []).append((number, offset, ""))

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
            raise Refused(str(error)) from None
