"""New positions for a table, by command: a load continues from the stored position otherwise. Pure.

A reset sets positions by hand. The command first prints the effect: offsets that will never be loaded, or will be
loaded again. A reset is a batch of the ledger (kind ``reset``) without rows, so other loaders' batches come before it
or continue from it. A planned batch is finished first. Where Kafka no longer has all of it, since a topic was removed
or recreated, the parts of those topics are abandoned, if the reset names them.

A move translates the positions of one data centre to another, by way of the original offset, in the topic where the
records were written first. For topics of the table's own data centre that is the position itself; for others the ledger
records it with each batch. The law: records before the position are before the translated one, all others are at or
after it. Where that is unknown of one position, it is named and nothing moves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from logferry.gateway.contract.names import Malformed, split_topic
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.planning.ledger_entry import LedgerEntry, OriginOffset
from logferry.loaders.planning.plan import Range, TopicOffsets, TopicPartition, unreadable

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

    def __str__(self) -> str:
        before, after = ("none" if offset is None else f"{offset:,}" for offset in (self.before, self.after))
        return f"{self.topic} {self.partition}: {before} → {after}: {self.means}"


class PositionPlan(NamedTuple):
    """``ranges``: every position afterwards, all at rest. Of a move, ``refused``: what cannot be translated;
    ``behind``: what cannot be yet.
    """

    ranges: tuple[Range, ...]
    moves: tuple[PositionChange, ...]
    refused: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


def plan_reset(
    committed: Sequence[Range], views: Mapping[str, TopicOffsets], targets: Sequence[ResetTarget]
) -> PositionPlan:
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
    return PositionPlan(tuple(sorted(positions.values())), tuple(moves))


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


class PositionAnswer(NamedTuple):
    """The offset of a position in the new data centre, or why it is unknown. ``behind``: it may be known later."""

    offset: int | None
    topic_id: str = ""
    behind: bool = False
    why: str = ""


_UNKNOWN: Final = PositionAnswer(None, why="not mirrored")


def is_full(name: str) -> bool:
    """Whether a topic's name has the form ``<dc>.<topic>``."""
    with suppress(Malformed):
        return bool(split_topic(name))
    return False


def origin_dc(topic: str) -> str:
    """The data centre in which a topic is written."""
    return split_topic(topic)[0]


def known_originals(
    positions: Iterable[Range], dc: str, entries: Iterable[LedgerEntry]
) -> tuple[list[OriginOffset], list[Range]]:
    """The originals of positions (the ranges' ends) in ``dc``, and the ranges of which the ledger has none."""
    recorded: dict[tuple[TopicPartition, str, int], OriginOffset] = {}
    for entry in entries:
        if entry.dc == dc:
            ends = {r.key: (r.key, r.topic_id, r.end) for r in entry.ranges}
            recorded |= {ends[original.key]: original for original in entry.originals}
    have: list[OriginOffset] = []
    lacking: list[Range] = []
    for r in positions:
        if origin_dc(r.topic) == dc:
            have.append(OriginOffset(*r.key, r.topic_id, r.end))
        elif original := recorded.get((r.key, r.topic_id, r.end)):
            have.append(original)
        else:
            lacking.append(r)
    return have, lacking


def answer_at_origin(original: OriginOffset, view: TopicOffsets | None) -> PositionAnswer:
    """For a position in a topic whose original is in the new data centre."""
    if view is None:
        return PositionAnswer(None, why="the topic does not exist there")
    if view.topic_id != original.topic_id:
        return PositionAnswer(None, why="the topic was recreated there, or the copy was one of another topic")
    return PositionAnswer(original.offset, view.topic_id)


def plan_move(
    positions: Sequence[Range],
    told: Mapping[TopicPartition, PositionAnswer],
    views: Mapping[str, TopicOffsets],
    given: Mapping[TopicPartition, Range],
    given_up: Collection[str],
    dc: str,
) -> PositionPlan:
    """``views``: the topics in the new data centre, ``dc``. ``given``: positions there that the operator chose;
    ``given_up``: topics whose positions are removed.
    """
    after: list[Range] = []
    moves: list[PositionChange] = []
    refused: dict[str, str] = {}
    behind: list[str] = []
    for r in positions:
        view = views.get(r.topic)
        if r.topic in given_up:
            is_loaded = "all that Kafka there has is loaded again" if view else "the topic is not there"
            moves.append(PositionChange(*r.key, r.end, None, f"its position is removed: {is_loaded}"))
            continue
        chosen = given.get(r.key)
        if chosen is not None:
            after.append(chosen)
            moves.append(PositionChange(*r.key, r.end, chosen.end, f"as requested: {chosen.end:,} in {dc}"))
            continue
        here = told.get(r.key, _UNKNOWN)
        if here.behind:
            behind.append(f"{r.topic} {r.partition}: {here.why}")
        elif (why := _wrong(r, here, view)) is not None:
            refused.setdefault(f"{r.topic}: {why}", "")
        elif view is not None and here.offset is not None:
            if here.offset > view.partitions[r.partition].stable:
                behind.append(f"{r.topic} {r.partition}: the records before {here.offset} are not committed there yet")
                continue
            after.append(Range(*r.key, view.topic_id, here.offset, here.offset))
            moves.append(PositionChange(*r.key, r.end, here.offset, f"the same record in {dc}"))
    # Partitions that only the operator's choice names.
    have = {r.key for r in positions}
    after += [r for key, r in given.items() if key not in have]
    return PositionPlan(tuple(sorted(after)), tuple(moves), tuple(refused), tuple(behind))


def _wrong(position: Range, here: PositionAnswer, view: TopicOffsets | None) -> str | None:
    if view is None:
        return "not mirrored: there is no such topic"
    if here.offset is None:
        return here.why
    if here.topic_id and here.topic_id != view.topic_id:
        return "the copy was recreated"
    have = view.partitions.get(position.partition)
    if have is None:
        return f"there is no partition {position.partition}"
    if have.earliest > here.offset:
        removed = f"{here.offset} to {have.earliest - 1}"
        return f"the records {removed} of partition {position.partition} were removed there before they were loaded"
    return None
