"""Translates positions of one data centre to another: which offsets to ask for, and the plan from the answers. Pure.

A position is translated by way of its original offset, in the topic where its records were written first. For topics of
the table's own data centre that is the position itself; for others the ledger records it with each batch. The law of
this file: records before the position are before the translated one, all others are at or after it. Where that is
unknown of one position, it is named and nothing moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from logferry.gateway.contract.names import split_topic
from logferry.loaders.planning.ledger_entry import LedgerEntry, OriginOffset
from logferry.loaders.planning.plan import Range, TopicOffsets, TopicPartition
from logferry.loaders.planning.reset_plan import PositionChange


class PositionAnswer(NamedTuple):
    """The offset of a position in the new data centre, or why it is unknown. ``behind``: it may be known later."""

    offset: int | None
    topic_id: str = ""
    behind: bool = False
    why: str = ""


_UNKNOWN: Final = PositionAnswer(None, why="not mirrored")


class MovePlan(NamedTuple):
    """``ranges``: all at rest. ``refused``: what cannot be translated; ``behind``: what cannot be yet."""

    ranges: tuple[Range, ...]
    moves: tuple[PositionChange, ...]
    refused: tuple[str, ...]
    behind: tuple[str, ...]


def origin_dc(topic: str) -> str:
    """The data centre in which a topic is written."""
    return split_topic(topic)[0]


def recorded_originals(entries: Iterable[LedgerEntry], dc: str) -> dict[tuple[TopicPartition, str, int], OriginOffset]:
    """The original offsets in the ledger, by (partition, the topic's id in ``dc``, offset there)."""
    found: dict[tuple[TopicPartition, str, int], OriginOffset] = {}
    for entry in entries:
        if entry.dc == dc:
            ends = {r.key: r for r in entry.ranges}
            for original in entry.originals:
                r = ends[original.key]
                found[r.key, r.topic_id, r.end] = original
    return found


def original_of(
    position: Range, dc: str, known: Mapping[tuple[TopicPartition, str, int], OriginOffset]
) -> OriginOffset | None:
    """Of a position (the range's end) in ``dc``; None: not recorded."""
    if origin_dc(position.topic) == dc:
        return OriginOffset(*position.key, position.topic_id, position.end)
    return known.get((position.key, position.topic_id, position.end))


def originals_to_record(
    ranges: Iterable[Range], dc: str, known: Mapping[tuple[TopicPartition, str, int], OriginOffset]
) -> tuple[list[OriginOffset], list[Range]]:
    """For a new batch: the originals that are known, and the ranges whose originals the mirror must be asked for."""
    found: list[OriginOffset] = []
    asked: list[Range] = []
    for r in ranges:
        if origin_dc(r.topic) != dc:
            original = original_of(r, dc, known)
            if original is None:
                asked.append(r)
            else:
                found.append(original)
    return found, asked


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
) -> MovePlan:
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
    return MovePlan(tuple(sorted(after)), tuple(moves), tuple(refused), tuple(behind))


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
