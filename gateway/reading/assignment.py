"""The subscription of a read session, the partitions that it holds, and the frames that its reader received. Pure.

Everything that changes the state of the partitions is here:

| state | `grant` | `hold` of that grant | `revoke` |
| --- | --- | --- | --- |
| nothing | granted | refused | nothing |
| granted: start positions are not known yet | granted | held | nothing |
| held: chunks may be delivered | granted | refused | nothing |

* Kafka grants partitions in a generation, the session looks up where they start, and only then delivers chunks.
* The reader receives frames in order (`due`): ``assigned`` before the first chunk, ``revoked`` before the next
  ``assigned``, and nothing of an assignment after its ``revoked``. A grant that was revoked before its ``assigned``
  was sent is never mentioned.
* A commit is valid for the generation in which its partitions were held last (`may_commit`). Whether that generation
  still is the group's, Kafka decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.record_batch import CorruptBatch
from logferry.gateway.kafka.types import GroupMember
from logferry.gateway.reading import formats
from logferry.gateway.reading.formats import Frame

Starts = Mapping[TopicPartition, int]


class Grant(NamedTuple):
    """Partitions that Kafka assigned to the session, before their start positions are known."""

    member: GroupMember
    partitions: frozenset[TopicPartition]


class HeldPartitions:
    """Partitions that the session holds; ``reached``: the position up to which each was read."""

    def __init__(self, member: GroupMember, starts: Starts, leaderless: Iterable[TopicPartition] = ()) -> None:
        self.member = member
        self.starts = dict(starts)
        self.leaderless = sorted(leaderless)
        self.reached = dict(starts)
        self._owed: dict[TopicPartition, int] = {}
        self._announced: dict[TopicPartition, int] = {}

    def deliver(self, partition: TopicPartition, position: int) -> None:
        """A chunk before ``position`` was sent; its reader owes a commit of it."""
        self._owed[partition] = position

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        for partition, offset in offsets.items():
            if offset >= self._owed.get(partition, offset + 1):
                del self._owed[partition]

    @property
    def is_settled(self) -> bool:
        """Every delivered chunk is committed: none will be delivered again."""
        return not self._owed

    def reach(self, partition: TopicPartition, position: int) -> None:
        self.reached[partition] = max(position, self.reached[partition])

    def caught_up(self, partition: TopicPartition, position: int, end: int) -> bool:
        """Whether a ``caught_up`` frame is due for ``position``: once, until the position moves again."""
        if position < end or self._announced.get(partition) == position:
            return False
        self._announced[partition] = position
        self.reach(partition, position)
        return True


class SessionAssignment:
    def __init__(self) -> None:
        self.granted: Grant | None = None
        self.held: HeldPartitions | None = None
        self._last: HeldPartitions | None = None
        self._announced_to_reader: HeldPartitions | None = None

    def grant(self, member: GroupMember, partitions: Iterable[TopicPartition]) -> None:
        self.granted, self.held = Grant(member, frozenset(partitions)), None

    def revoke(self) -> None:
        self.granted = self.held = None

    @property
    def is_settled(self) -> bool:
        """Every delivered chunk is committed."""
        return self._last is None or self._last.is_settled

    def hold(self, granted: Grant, starts: Starts, leaderless: Iterable[TopicPartition] = ()) -> HeldPartitions | None:
        """None when the grant was replaced or revoked while its start positions were looked up."""
        if granted is not self.granted:
            return None
        self.granted = None
        self.held = self._last = HeldPartitions(granted.member, starts, leaderless)
        return self.held

    def due(self) -> list[Frame]:
        """The frames that the reader must receive before any further chunk."""
        if self._announced_to_reader is self.held:
            return []
        found = []
        if self._announced_to_reader is not None:
            found.append(formats.revoked(self._announced_to_reader.member.generation, self._announced_to_reader.starts))
        if self.held is not None:
            found.append(formats.assigned(self.held.member.generation, self.held.starts, self.held.leaderless))
        self._announced_to_reader = self.held
        return found

    def may_commit(self, generation: int, partitions: Iterable[TopicPartition]) -> HeldPartitions:
        """The assignment in whose name the positions may be committed. Raises Problem ``superseded``."""
        last = self._last
        if last is None or last.member.generation != generation:
            known = "none yet" if last is None else last.member.generation
            raise Problem("superseded", f"generation {generation} is not the session's, which is {known}")
        for topic, number in partitions:
            if (topic, number) not in last.starts:
                raise Problem("superseded", f"{topic}, partition {number} is not assigned to this session")
        return last


def out_of_range(partition: TopicPartition, offset: int, first: int, end: int) -> Problem:
    """The consumer missed chunks, or the topic was recreated: nothing is skipped, an operator decides."""
    topic, number = partition
    return Problem(
        "out-of-range",
        f"position {offset} of {topic}, partition {number} is outside the retained offsets {first} to {end};"
        " set the consumer's position to continue: PUT /v1/consumers/{consumer}/offsets",
        topic=topic,
        partition=number,
        offset=offset,
        first=first,
        next=end,
    )


def undecodable(partition: TopicPartition, error: CorruptBatch) -> Problem:
    """Kafka gives the same damaged records again: an operator mends them, or readers go behind them."""
    topic, number = partition
    what_to_do = "make an intact replica the leader, or read on behind it"
    return Problem("kafka-unavailable", f"{topic}-{number}: {error}; {what_to_do}", topic=topic, partition=number)


def next_count(count: int, records: int, size_bytes: int, target_bytes: int, most: int) -> int:
    """How many records to take next, so that they have about ``target_bytes``. Grows by doubling, shrinks at once."""
    if records == 0:
        return count
    fitting = target_bytes * records // max(size_bytes, 1)
    return max(1, min(fitting, 2 * count, most))


@lru_cache(maxsize=256)
def matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression for all of them: a session looks at every topic there is."""
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topics by full name and by pattern, of those that the caller may read, and filters.

    Whether the patterns match a topic is decided once; whether the caller may read it, each time.
    """

    consumer: str
    topics: frozenset[str]
    patterns: tuple[str, ...]
    may_read: Callable[[str], bool]
    source_prefix: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    _decided: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """The topics to read, of those that exist."""
        return frozenset(name for name in names if name in self.topics or self._fits(name))

    def _fits(self, name: str) -> bool:
        fits = self._decided.get(name)
        if fits is None:
            fits = self._decided[name] = matcher(self.patterns).match(name) is not None
        return fits and self.may_read(name)

    def passes(self, source_id: str, attributes: dict[str, str]) -> bool:
        return source_id.startswith(self.source_prefix) and self.attributes.items() <= attributes.items()


def unknown_topic(topic: str) -> Problem:
    return Problem("unknown-topic", f"there is no topic {topic}", topic=topic)


def recreated(topic: str) -> Problem:
    detail = f"{topic} was deleted and recreated: positions in the older topic are not valid in it; open a new session"
    return Problem("unknown-topic", detail, topic=topic)
