"""What a read session holds of its group, and what its reader was told of it. Pure; everything that changes it is here.

* Kafka grants partitions in a generation (`grant`), the session finds where they start (`hold`), and only then
  anything is delivered. A revocation at any moment ends all of that at once.
* The reader hears of it in order: ``assigned`` before the first chunk, ``revoked`` before the next ``assigned``,
  and nothing of an assignment after its ``revoked`` (`due`). A grant that was revoked before the reader heard of it
  is never told.
* A commit is good for the generation in which its partitions were held last (`may_commit`). Whether that generation
  still is the group's, Kafka decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from logferry.gateway.errors import Problem
from logferry.gateway.reading import formats as frames
from logferry.gateway.reading.formats import Frame, Partition


class Member(NamedTuple):
    """A member of a group in one generation. `NOBODY` stands for a group that is empty."""

    generation: int
    id: str


NOBODY: Final = Member(-1, "")


class Grant(NamedTuple):
    """Partitions that Kafka gave to the session; where they start is not known yet."""

    member: Member
    partitions: frozenset[Partition]


class Assignment:
    """Partitions that the session holds; ``reached``: the position up to which each was read."""

    def __init__(self, member: Member, starts: Mapping[Partition, int]) -> None:
        self.member = member
        self.starts = dict(starts)
        self.reached = dict(starts)
        self._owed: dict[Partition, int] = {}
        self._announced: dict[Partition, int] = {}

    def deliver(self, partition: Partition, position: int) -> None:
        """A chunk before ``position`` was sent; its reader owes a commit of it."""
        self._owed[partition] = position

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        for partition, offset in offsets.items():
            if offset >= self._owed.get(partition, offset + 1):
                del self._owed[partition]

    @property
    def is_settled(self) -> bool:
        """Everything that was delivered is committed: nothing of it will come again to anybody."""
        return not self._owed

    def reach(self, partition: Partition, position: int) -> None:
        self.reached[partition] = max(position, self.reached[partition])

    def caught_up(self, partition: Partition, position: int, end: int) -> bool:
        """Whether the reader is to be told that it has everything up to ``position``: once, until it moves again."""
        if position < end or self._announced.get(partition) == position:
            return False
        self._announced[partition] = position
        self.reach(partition, position)
        return True


class Standing:
    """Where a session stands in its group."""

    def __init__(self) -> None:
        self.granted: Grant | None = None
        self.held: Assignment | None = None
        self._last: Assignment | None = None
        self._told: Assignment | None = None

    def grant(self, member: Member, partitions: Iterable[Partition]) -> None:
        self.granted, self.held = Grant(member, frozenset(partitions)), None

    def revoke(self) -> None:
        self.granted = self.held = None

    @property
    def is_settled(self) -> bool:
        """Nothing of what was delivered will come again."""
        return self._last is None or self._last.is_settled

    def hold(self, granted: Grant, starts: Mapping[Partition, int]) -> bool:
        """False when the grant was replaced or revoked while its positions were looked up."""
        if granted is not self.granted:
            return False
        self.granted = None
        self.held = self._last = Assignment(granted.member, starts)
        return True

    def due(self) -> list[Frame]:
        """What the reader has to hear before it hears of any chunk."""
        if self._told is self.held:
            return []
        found = []
        if self._told is not None:
            found.append(frames.revoked(self._told.member.generation, self._told.starts))
        if self.held is not None:
            found.append(frames.assigned(self.held.member.generation, self.held.starts))
        self._told = self.held
        return found

    def may_commit(self, generation: int, partitions: Iterable[Partition]) -> Assignment:
        """The assignment in whose name the positions may be committed. Raises Problem ``superseded``."""
        last = self._last
        if last is None or last.member.generation != generation:
            known = "none yet" if last is None else last.member.generation
            raise Problem("superseded", f"generation {generation} is not the session's, which is {known}")
        for topic, number in partitions:
            if (topic, number) not in last.starts:
                raise Problem("superseded", f"{topic}, partition {number} is not assigned to this session")
        return last


def start_positions(
    partitions: Iterable[Partition], committed: Mapping[Partition, int], firsts: Mapping[Partition, int]
) -> dict[Partition, int]:
    """Where each partition starts: at its committed position, without one at the first retained chunk."""
    return {partition: committed.get(partition, firsts[partition]) for partition in partitions}


def out_of_range(partition: Partition, offset: int, first: int, end: int) -> Problem:
    """Chunks were lost to a consumer, or the topic is another one: somebody has to decide, nothing is skipped."""
    topic, number = partition
    return Problem(
        "out-of-range",
        f"position {offset} of {topic}, partition {number} is outside of {first} to {end};"
        " set the consumer's position to go on: PUT /v1/consumers/{consumer}/offsets",
        topic=topic,
        partition=number,
        offset=offset,
        first=first,
        next=end,
    )


def next_count(count: int, records: int, size_bytes: int, target_bytes: int, most: int) -> int:
    """How many records to take next, so that they have about ``target_bytes``. Grows by doubling, shrinks at once."""
    if records == 0:
        return count
    fitting = target_bytes * records // max(size_bytes, 1)
    return max(1, min(fitting, 2 * count, most))
