"""What a table holds of each source, by topic: the first and the last chunk, the newest event. Pure.

A source is one writer, whatever data centre it writes in. Of one that moved there are several of these facts, one for
each data centre's topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from logferry.gateway.contract.chunk import split_topic


class SourceKey(NamedTuple):
    """``topic`` with its data centre."""

    topic: str
    source_id: str

    @property
    def anywhere(self) -> tuple[str, str]:
        """The same for all data centres: (topic without the data centre, source_id)."""
        return split_topic(self.topic)[1], self.source_id


class SourceFacts(NamedTuple):
    """``event``: the newest time of an event, None where the parser has none. ``recorded``: of the last chunk."""

    first_seqno: int
    last_seqno: int
    recorded: datetime
    event: datetime | None = None


Known = Mapping[SourceKey, SourceFacts]


def merged(*many: Known) -> dict[SourceKey, SourceFacts]:
    """Of each source all that any of them says."""
    found: dict[SourceKey, SourceFacts] = {}
    for known in many:
        for key, facts in known.items():
            before = found.get(key)
            found[key] = facts if before is None else _both(before, facts)
    return found


def with_events(known: Known, newest: Mapping[SourceKey, datetime]) -> dict[SourceKey, SourceFacts]:
    """The facts with the newest event of each source; of what there are no facts nothing is said."""
    return {key: facts._replace(event=newest.get(key, facts.event)) for key, facts in known.items()}


def _both(one: SourceFacts, other: SourceFacts) -> SourceFacts:
    events = [event for event in (one.event, other.event) if event is not None]
    return SourceFacts(
        min(one.first_seqno, other.first_seqno),
        max(one.last_seqno, other.last_seqno),
        max(one.recorded, other.recorded),
        max(events) if events else None,
    )


def several_centres(topics: Iterable[str]) -> set[str]:
    """Of these topics those that are there under the same name for several data centres."""
    by_name: dict[str, set[str]] = {}
    for topic in topics:
        by_name.setdefault(split_topic(topic)[1], set()).add(topic)
    return {topic for same in by_name.values() if len(same) > 1 for topic in same}


def maybe_twice(known: Known, batch: Known) -> dict[SourceKey, tuple[int, int]]:
    """Sources of a batch that may have chunks which came by another data centre, too: the seqnos to look at.

    A source that moved and came back has chunks before and after the others: its seqnos lie within those of the other
    topic, and a look is needed. One that writes in one place only is never looked at.
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
