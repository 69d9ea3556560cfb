"""Positions of one data centre as those of another: what is to be asked, and what comes of the answers. Pure.

A position goes by way of the original: the place in the topic of the data centre where its records were written first.
In a table's own data centre that is the position itself; of the others' topics the ledger notes it with each batch.
The law of this file: every record before the position is before the translated one, every record at or behind it is at
or behind; a position of which that is not known is named, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from logferry.gateway.contract.chunk import split_topic
from logferry.loaders.planning.plan import Range, TopicPartition, TopicView
from logferry.loaders.planning.reset_plan import Move
from logferry.loaders.storage.ledger import LedgerEntry, Original


class Told(NamedTuple):
    """An answer: where a position is in the new place, or why that is not known. ``behind``: it may be known later."""

    offset: int | None
    topic_id: str = ""
    behind: bool = False
    why: str = ""


_UNKNOWN: Final = Told(None, why="it is not mirrored")


class Translated(NamedTuple):
    """``ranges``: all at rest. ``refused``: what cannot be translated, ``behind``: what cannot be yet."""

    ranges: tuple[Range, ...]
    moves: tuple[Move, ...]
    refused: tuple[str, ...]
    behind: tuple[str, ...]


def home_of(topic: str) -> str:
    """The data centre where a topic is written."""
    return split_topic(topic)[0]


def noted(entries: Iterable[LedgerEntry], dc: str) -> dict[tuple[TopicPartition, str, int], Original]:
    """All that the ledger knows of originals: by (partition, the topic's id in ``dc``, offset there)."""
    found: dict[tuple[TopicPartition, str, int], Original] = {}
    for entry in entries:
        if entry.dc == dc:
            ends = {r.key: r for r in entry.ranges}
            for original in entry.originals:
                r = ends[original.key]
                found[r.key, r.topic_id, r.end] = original
    return found


def original_of(position: Range, dc: str, known: Mapping[tuple[TopicPartition, str, int], Original]) -> Original | None:
    """Of a position (the range's end) in ``dc``; None: nobody noted it."""
    if home_of(position.topic) == dc:
        return Original(*position.key, position.topic_id, position.end)
    return known.get((position.key, position.topic_id, position.end))


def to_note(
    ranges: Iterable[Range], dc: str, known: Mapping[tuple[TopicPartition, str, int], Original]
) -> tuple[list[Original], list[Range]]:
    """Of a new batch: the originals that are known, and the ranges of which they have to be asked for."""
    found: list[Original] = []
    asked: list[Range] = []
    for r in ranges:
        if home_of(r.topic) != dc:
            original = original_of(r, dc, known)
            if original is None:
                asked.append(r)
            else:
                found.append(original)
    return found, asked


def told_at_home(original: Original, view: TopicView | None) -> Told:
    """Of a position in a topic whose original is in the new place."""
    if view is None:
        return Told(None, why="it does not exist there")
    if view.topic_id != original.topic_id:
        return Told(None, why="it was created anew there, or the copy was one of another topic")
    return Told(original.offset, view.topic_id)


def translated(
    positions: Sequence[Range],
    told: Mapping[TopicPartition, Told],
    views: Mapping[str, TopicView],
    given: Mapping[TopicPartition, Range],
    given_up: Collection[str],
    dc: str,
) -> Translated:
    """``views``: the topics in the new place, ``dc``. ``given``: positions there that somebody chose himself;
    ``given_up``: topics of which none is kept.
    """
    after: list[Range] = []
    moves: list[Move] = []
    refused: dict[str, str] = {}
    behind: list[str] = []
    for r in positions:
        view = views.get(r.topic)
        if r.topic in given_up:
            is_loaded = "all that Kafka there holds of it is loaded again" if view else "it is not there"
            moves.append(Move(*r.key, r.end, None, f"no position is kept of it: {is_loaded}"))
            continue
        chosen = given.get(r.key)
        if chosen is not None:
            after.append(chosen)
            moves.append(Move(*r.key, r.end, chosen.end, f"as was said: {chosen.end:,} in {dc}"))
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
            moves.append(Move(*r.key, r.end, here.offset, f"the same place in {dc}"))
    # Partitions that only somebody's choice names.
    have = {r.key for r in positions}
    after += [r for key, r in given.items() if key not in have]
    return Translated(tuple(sorted(after)), tuple(moves), tuple(refused), tuple(behind))


def _wrong(position: Range, here: Told, view: TopicView | None) -> str | None:
    if view is None:
        return "it is not mirrored, there is no such topic"
    if here.offset is None:
        return here.why
    if here.topic_id and here.topic_id != view.topic_id:
        return "the copy was created anew"
    have = view.partitions.get(position.partition)
    if have is None:
        return f"there is no partition {position.partition}"
    if have.earliest > here.offset:
        removed = f"{here.offset} to {have.earliest - 1}"
        return f"the records {removed} of partition {position.partition} were removed there before they were loaded"
    return None
