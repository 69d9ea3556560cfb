"""Values that all layers share: identities of partitions and lanes, facts of topics, members of groups, records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

from logferry.gateway.contract.chunk import Headers
from logferry.gateway.contract.names import TopicPartition

Piece = bytes | bytearray | memoryview
_K = TypeVar("_K")
_V = TypeVar("_V")


class LaneIdentity(NamedTuple):
    """A lane as Kafka sees it. ``state``: its partition of the state topic.

    ``may_write``: whether a partition, of the state topic or another, may hold records of the lane; never false for one
    that does. ``spares``: further transactional ids. ``timeout_ms``: Kafka aborts a transaction that takes longer;
    None: the usual one.
    """

    number: int
    transactional_id: str
    state: TopicPartition
    may_write: Callable[[str, int], bool]
    spares: int = 2
    timeout_ms: int | None = None

    @property
    def transactional_ids(self) -> tuple[str, ...]:
        """The lane's transactional ids, the usual one first.

        Kafka cannot end a transaction while one of its partitions takes no marker, and its transactional id can
        begin no other one meanwhile: the lane continues with the next id.
        """
        return (self.transactional_id, *(f"{self.transactional_id}~{number}" for number in range(1, self.spares + 1)))


class TopicIdPartition(NamedTuple):
    """A partition of one incarnation of a topic (KIP-516)."""

    topic_id: bytes
    partition: int


class GroupMember(NamedTuple):
    """A member of a consumer group in one generation. `NO_MEMBER`: commits for a group without members."""

    generation: int
    id: str


NO_MEMBER: Final = GroupMember(-1, "")


class TopicFacts(NamedTuple):
    """The facts of a Kafka topic; ``id`` changes when it is deleted and recreated.

    ``weakness``: why what is acknowledged in it may be lost; nothing is written to it then.
    """

    name: str
    id: bytes
    partitions: int
    max_message_bytes: int
    min_in_sync: int = 1
    weakness: str | None = None


# Key, value (None forgets a state), headers: a plain tuple, there is one for each chunk.
Record = tuple[bytes, bytes | None, Headers]


def grouped(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """The second parts by the first, as requests list the partitions of a broker or a topic."""
    found: dict[_K, list[_V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
