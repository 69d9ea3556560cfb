"""Other positions for a table, by command: the one way in which a load does not go on where the table stands.

Said before it is done: what will never be loaded, and what will be loaded again. It is a batch of the ledger like any
other (kind ``reset``), without rows: so loaders that run meanwhile either come before it or go on from it.

A planned batch is finished first. Where Kafka cannot give all of it any more, since a topic of it was removed or
created anew, the parts of just those topics are given up, if the reset names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from logferry.loaders.errors import ConfigError
from logferry.loaders.planning.plan import Range, TopicView, unreadable

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
FORGET: Final = "forget"
_TARGET: Final = re.compile(r"([a-zA-Z0-9._-]+)(?::(\d+))?=(earliest|latest|forget|\d+)")


class Target(NamedTuple):
    """``partition`` None: all of them. ``to``: an offset, or one of the words."""

    topic: str
    partition: int | None
    to: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises ConfigError."""
        match = _TARGET.fullmatch(text)
        if match is None:
            forms = "TOPIC=earliest|latest|forget, or TOPIC:PARTITION=earliest|latest|OFFSET"
            raise ConfigError(f"--reset {text!r}: {forms}")
        partition = None if match[2] is None else int(match[2])
        if partition is None and match[3].isdigit():
            raise ConfigError(f"--reset {text!r}: an offset is one of a partition, TOPIC:PARTITION={match[3]}")
        if partition is not None and match[3] == FORGET:
            raise ConfigError(f"--reset {text!r}: a topic can be forgotten, a partition cannot")
        return cls(match[1], partition, match[3])


class Move(NamedTuple):
    """One partition's position before and after; None: not known."""

    topic: str
    partition: int
    before: int | None
    after: int | None
    means: str


class Reset(NamedTuple):
    """``ranges``: every position afterwards, all at rest."""

    ranges: tuple[Range, ...]
    moves: tuple[Move, ...]


def reset(committed: Sequence[Range], views: Mapping[str, TopicView], targets: Sequence[Target]) -> Reset:
    """Pure. Raises ConfigError for what there is not, or lies outside of what Kafka holds."""
    positions = {r.key: r._replace(start=r.end) for r in committed}
    moves: list[Move] = []
    for target in targets:
        known = {r.partition: r for r in committed if r.topic == target.topic}
        if target.to == FORGET:
            if not known:
                raise ConfigError(f"{target.topic}: the table has no positions of it")
            for partition, r in sorted(known.items()):
                moves.append(Move(target.topic, partition, r.end, None, _forgotten(views.get(target.topic))))
                del positions[r.key]
            continue
        view = views.get(target.topic)
        if view is None:
            raise ConfigError(f"{target.topic} does not exist: it can only be forgotten, {target.topic}=forget")
        wanted = sorted(view.partitions) if target.partition is None else [target.partition]
        if strangers := [r for r in known.values() if r.topic_id != view.topic_id and target.partition is not None]:
            raise ConfigError(f"{strangers[0].topic} was created anew: all of its partitions can be reset, not one")
        if target.partition is None:
            # Of a topic created anew nothing else is left.
            positions = {key: r for key, r in positions.items() if key.topic != target.topic}
        for partition in wanted:
            after = _offset(view, partition, target.to)
            before = known.get(partition)
            moved = Range(target.topic, partition, view.topic_id, after, after)
            positions[moved.key] = moved
            moves.append(
                Move(target.topic, partition, before.end if before else None, after, _means(before, moved, view))
            )
    return Reset(tuple(sorted(positions.values())), tuple(moves))


def given_up(
    planned: Sequence[Range], views: Mapping[str, TopicView], targets: Sequence[Target], *, reload: bool = False
) -> set[str]:
    """The topics of a planned batch that Kafka cannot give any more, and that the reset names. Pure.

    ``reload``: what the batch is to load again is in the table, so naming a partition is enough.
    """
    named = {target.topic for target in targets if reload or target.partition is None}
    return {r.topic for r in planned if r.topic in named and unreadable([r], views) is not None}


def _offset(view: TopicView, partition: int, to: str) -> int:
    have = view.partitions.get(partition)
    if have is None:
        raise ConfigError(f"{view.topic} has no partition {partition}")
    if to == EARLIEST:
        return have.earliest
    if to == LATEST:
        return have.stable
    if not have.earliest <= int(to) <= have.stable:
        raise ConfigError(f"{view.topic}:{partition}={to}: Kafka holds {have.earliest} to {have.stable}")
    return int(to)


def _means(before: Range | None, after: Range, view: TopicView) -> str:
    if before is None:
        skipped = after.end - view.partitions[after.partition].earliest
        return f"{skipped:,} offsets will never be loaded" if skipped else "as a new partition is loaded"
    if before.topic_id != after.topic_id:
        return "another topic of that name: what was left of the older one is never loaded"
    if after.end > before.end:
        return f"{after.end - before.end:,} offsets will never be loaded"
    if after.end < before.end:
        return f"{before.end - after.end:,} offsets will be loaded again: remove their rows, or they stand twice"
    return "stays where it is"


def _forgotten(view: TopicView | None) -> str:
    if view is None:
        return "no position is kept of it"
    return "no position is kept of it: if a pattern means it, all that Kafka holds is loaded again"
