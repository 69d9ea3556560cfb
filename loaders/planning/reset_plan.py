"""New positions for a table, by command: the only way in which a load does not continue from the stored position.

The command first prints the effect: offsets that will never be loaded, or will be loaded again. A reset is a batch of
the ledger (kind ``reset``) without rows, so other loaders' batches come before it or continue from it.

A planned batch is finished first. Where Kafka no longer has all of it, since a topic was removed or recreated, the
parts of those topics are abandoned, if the reset names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.planning.plan import Range, TopicOffsets, unreadable

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
FORGET: Final = "forget"
_TARGET: Final = re.compile(r"([a-zA-Z0-9._-]+)(?::(\d+))?=(earliest|latest|forget|\d+)")


class ResetTarget(NamedTuple):
    """``partition`` None: all of them. ``to``: an offset, or one of the words."""

    topic: str
    partition: int | None
    to: str

    @classmethod
    def parse(cls, text: str) -> ResetTarget:
        """Raises LoaderConfigError."""
        match = _TARGET.fullmatch(text)
        if match is None:
            forms = "TOPIC=earliest|latest|forget, or TOPIC:PARTITION=earliest|latest|OFFSET"
            raise LoaderConfigError(f"reset target {text!r}: {forms}")
        partition = None if match[2] is None else int(match[2])
        if partition is None and match[3].isdigit():
            raise LoaderConfigError(f"reset target {text!r}: an offset needs a partition: TOPIC:PARTITION={match[3]}")
        if partition is not None and match[3] == FORGET:
            raise LoaderConfigError(f"reset target {text!r}: a topic can be forgotten, a partition cannot")
        return cls(match[1], partition, match[3])


class PositionChange(NamedTuple):
    """One partition's position before and after; None: no position. ``means``: the effect on its records."""

    topic: str
    partition: int
    before: int | None
    after: int | None
    means: str


class ResetPlan(NamedTuple):
    """``ranges``: every position afterwards, all at rest."""

    ranges: tuple[Range, ...]
    moves: tuple[PositionChange, ...]


def plan_reset(
    committed: Sequence[Range], views: Mapping[str, TopicOffsets], targets: Sequence[ResetTarget]
) -> ResetPlan:
    """Pure. Raises LoaderConfigError for what there is not, or lies outside of what Kafka holds."""
    positions = {r.key: r.at_rest for r in committed}
    moves: list[PositionChange] = []
    for target in targets:
        known = {r.partition: r for r in committed if r.topic == target.topic}
        view = views.get(target.topic)
        if target.to == FORGET:
            if not known:
                raise LoaderConfigError(f"{target.topic}: no committed position in this table")
            again = "" if view is None else ": if a pattern matches it, all that Kafka has is loaded again"
            for _, r in sorted(known.items()):
                moves.append(PositionChange(*r.key, r.end, None, f"its position is removed{again}"))
                del positions[r.key]
            continue
        if view is None:
            raise LoaderConfigError(f"{target.topic} does not exist in Kafka; only {target.topic}=forget is possible")
        wanted = sorted(view.partitions) if target.partition is None else [target.partition]
        if strangers := [r for r in known.values() if r.topic_id != view.topic_id and target.partition is not None]:
            raise LoaderConfigError(f"{strangers[0].topic} was recreated: reset all of its partitions, not one")
        if target.partition is None:
            # A recreated topic has no other partitions.
            positions = {key: r for key, r in positions.items() if key.topic != target.topic}
        for partition in wanted:
            after = _offset(view, partition, target.to)
            before = known.get(partition)
            moved = Range(target.topic, partition, view.topic_id, after, after)
            positions[moved.key] = moved
            was = before.end if before else None
            moves.append(PositionChange(*moved.key, was, after, _means(before, moved, view)))
    return ResetPlan(tuple(sorted(positions.values())), tuple(moves))


def abandoned_topics(
    planned: Sequence[Range], views: Mapping[str, TopicOffsets], targets: Sequence[ResetTarget], *, reload: bool = False
) -> set[str]:
    """The topics of a planned batch that Kafka no longer has, and that the reset names.

    ``reload``: the table has the rows of the batch, so naming a partition is enough.
    """
    named = {target.topic for target in targets if reload or target.partition is None}
    return {r.topic for r in planned if r.topic in named and unreadable([r], views) is not None}


def _offset(view: TopicOffsets, partition: int, to: str) -> int:
    have = view.partitions.get(partition)
    if have is None:
        known = f"0 to {max(view.partitions)}" if view.partitions else "none"
        raise LoaderConfigError(f"{view.topic} has no partition {partition}; name one that it has: {known}")
    if to == EARLIEST:
        return have.earliest
    if to == LATEST:
        return have.stable
    if not have.earliest <= int(to) <= have.stable:
        raise LoaderConfigError(f"{view.topic}:{partition}={to}: Kafka holds {have.earliest} to {have.stable}")
    return int(to)


def _means(before: Range | None, after: Range, view: TopicOffsets) -> str:
    if before is None:
        skipped = after.end - view.partitions[after.partition].earliest
        return f"{skipped:,} offsets will never be loaded" if skipped else "loaded like a new partition"
    if before.topic_id != after.topic_id:
        return "another topic of that name: the rest of the older one will never be loaded"
    if after.end > before.end:
        return f"{after.end - before.end:,} offsets will never be loaded"
    if after.end < before.end:
        again = before.end - after.end
        return f"{again:,} offsets will be loaded again: remove their rows first, or they will be duplicated"
    return "unchanged"
