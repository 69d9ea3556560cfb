"""The chunks of each source in a table, by topic: the first and the last one, and the newest event. Pure.

A source is one writer, whatever data centre it writes in. One that moved has several of these facts, one per topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from logferry.gateway.contract.names import split_topic


class SourceKey(NamedTuple):
    """``topic`` with its data centre."""

    topic: str
    source_id: str

    @property
    def anywhere(self) -> tuple[str, str]:
        """The key without the data centre: (topic name, source_id)."""
        return split_topic(self.topic)[1], self.source_id


class SourceFacts(NamedTuple):
    """``event``: the newest time of an event, None where the parser has none. ``recorded``: of the last chunk."""

    first_seqno: int
    last_seqno: int
    recorded: datetime
    event: datetime | None = None


KnownSources = Mapping[SourceKey, SourceFacts]


def merged(*many: KnownSources) -> dict[SourceKey, SourceFacts]:
    """The union of the facts of each source."""
    found: dict[SourceKey, SourceFacts] = {}
    for known in many:
        for key, facts in known.items():
            before = found.get(key)
            found[key] = facts if before is None else _both(before, facts)
    return found


def with_events(known: KnownSources, newest: Mapping[SourceKey, datetime]) -> dict[SourceKey, SourceFacts]:
    """The facts with the newest event of each source; sources without facts are not added."""
    return {key: facts._replace(event=newest.get(key, facts.event)) for key, facts in known.items()}


def _both(one: SourceFacts, other: SourceFacts) -> SourceFacts:
    events = [event for event in (one.event, other.event) if event is not None]
    return SourceFacts(
        min(one.first_seqno, other.first_seqno),
        max(one.last_seqno, other.last_seqno),
        max(one.recorded, other.recorded),
        max(events) if events else None,
    )


def shared_topics(topics: Iterable[str]) -> set[str]:
    """Those of the topics that several data centres have under the same name."""
    by_name: dict[str, set[str]] = {}
    for topic in topics:
        by_name.setdefault(split_topic(topic)[1], set()).add(topic)
    return {topic for same in by_name.values() if len(same) > 1 for topic in same}


def possible_duplicates(known: KnownSources, batch: KnownSources) -> dict[SourceKey, tuple[int, int]]:
    """Sources of a batch that may have chunks from another data centre, too: the seqnos to compare.

    A source that moved and came back has chunks before and after the others, so the ranges of its seqnos overlap. One
    that writes in one data centre only is never compared.
    """
    others: dict[tuple[str, str], list[tuple[str, SourceFacts]]] = {}
    for key, facts in merged(known, batch).items():
        others.setdefault(key.anywhere, []).append((key.topic, facts))
    found: dict[SourceKey, tuple[int, int]] = {}
    for key, facts in batch.items():
        low, high = facts.last_seqno + 1, facts.first_seqno - 1
        for topic, other in others[key.anywhere]:
            if topic == key.topic:
                continue
            start, end = max(facts.first_seqno, other.first_seqno), min(facts.last_seqno, other.last_seqno)
            if start <= end:
                low, high = min(low, start), max(high, end)
        if low <= high:
            found[key] = (low, high)
    return found
