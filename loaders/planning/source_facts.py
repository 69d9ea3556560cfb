"""The sources of a table: their chunks by topic, and the low watermark, up to which event time the table has all rows.
Pure: facts and a clock in.

A source is one writer, whatever data centre it writes in. One that moved has several of these facts, one per topic.

The low watermark is the minimum over the sources that count of the time up to which each has sent everything, its mark.
All times but those of events and watermarks are the gateways'. Which sources count:

    live            a chunk or heartbeat less than ``source_idle_s`` ago
    owing           the gateway has recorded more of it than is loaded, and Kafka may still have it
    silent together it has heartbeats, and within ``source_idle_s`` stopped with so many others that have: more than
                    those seen since, for any time; or ``share`` of all these and `FEWEST`, for ``hold_s`` at most
    silent at once  no source was seen for ``source_idle_s``, and this one stopped within that of the last one, in a
                    table that usually has rows: as if it had sent all that is older than ``hold_s``
    far behind      its mark is `FAR_BEHIND` or more before it was last seen: it holds up the event times after its mark
                    for that long, and none later, as its clock may be wrong
    others          hold up nothing: finished, excluded, silent alone, or nothing of it is loaded and Kafka has no more

A program that writes without heartbeats may be done when it is silent. So its silence counts only together with that of
all others, only where the table usually has rows (``is_steady``), and not permanently.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Final, NamedTuple

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


def with_events(known: KnownSources, events: Mapping[SourceKey, datetime]) -> dict[SourceKey, SourceFacts]:
    """The facts with the newest event of each source; sources without facts are not added."""
    return {key: facts._replace(event=events.get(key, facts.event)) for key, facts in known.items()}


def newest(*times: datetime | None) -> datetime | None:
    return max((at for at in times if at is not None), default=None)


def _both(one: SourceFacts, other: SourceFacts) -> SourceFacts:
    return SourceFacts(
        min(one.first_seqno, other.first_seqno),
        max(one.last_seqno, other.last_seqno),
        max(one.recorded, other.recorded),
        newest(one.event, other.event),
    )


def shared_topics(topics: Iterable[str]) -> set[str]:
    """Those of the topics that several data centres have under the same name."""
    by_name: dict[str, set[str]] = {}
    for topic in topics:
        by_name.setdefault(split_topic(topic)[1], set()).add(topic)
    return {topic for same in by_name.values() if len(same) > 1 for topic in same}


def possible_copies(
    known: KnownSources, batch: KnownSources, shared: Collection[str]
) -> dict[SourceKey, tuple[int, int]]:
    """Sources of a batch that may have chunks from another data centre, too: the seqnos to compare. ``shared``: topics.

    A source that moved and came back has chunks before and after the others, so the ranges of its seqnos overlap. One
    that writes in one data centre only is never compared.
    """
    topics: dict[str, set[str]] = {}
    for topic in shared:
        topics.setdefault(split_topic(topic)[1], set()).add(topic)
    found: dict[SourceKey, tuple[int, int]] = {}
    for key, facts in batch.items():
        if key.topic not in shared:
            continue
        low, high = facts.last_seqno + 1, facts.first_seqno - 1
        for topic in topics[key.anywhere[0]] - {key.topic}:
            there = SourceKey(topic, key.source_id)
            several = [one for one in (known.get(there), batch.get(there)) if one is not None]
            if not several:
                continue
            other = reduce(_both, several)
            start, end = max(facts.first_seqno, other.first_seqno), min(facts.last_seqno, other.last_seqno)
            if start <= end:
                low, high = min(low, start), max(high, end)
        if low <= high:
            found[key] = (low, high)
    return found


FAR_BEHIND: Final = timedelta(days=7)
# Fewer than these may be switched off together.
FEWEST: Final = 4
LISTED: Final = 50
SILENT_SHARE: Final = 0.25
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d(T\d\d(:\d\d(:\d\d)?)?)?Z?")


class SourceView(NamedTuple):
    """One source in a check.

    ``event``: its newest event in the table. ``recorded``: when its last chunk was recorded. ``beat`` and
    ``watermark``: of its heartbeat. ``owes``: the gateway has recorded more of it than is loaded. ``is_lost``: nothing
    of it is loaded, and Kafka has none of its records any more.
    """

    topic: str
    source_id: str
    event: datetime | None
    recorded: datetime | None
    beat: datetime | None = None
    watermark: datetime | None = None
    finished: bool = False
    owes: bool = False
    is_lost: bool = False

    @property
    def mark(self) -> datetime | None:
        """The source has sent all events before it; None: unknown. Times from a clock that is ahead are capped."""
        marks = []
        if self.event is not None:
            marks.append(self.event if self.recorded is None else min(self.event, self.recorded))
        if self.watermark is not None and not self.owes:
            marks.append(self.watermark if self.beat is None else min(self.watermark, self.beat))
        return max(marks, default=None)

    @property
    def last_seen(self) -> datetime | None:
        return newest(self.recorded, self.beat)

    @property
    def is_far_behind(self) -> bool:
        mark, seen = self.mark, self.last_seen
        return not self.owes and mark is not None and seen is not None and seen - mark >= FAR_BEHIND

    def holds_up(self, end: datetime) -> bool:
        """Whether a source that is far behind may have rows before ``end``, of what its clock says."""
        mark = self.mark
        return mark is not None and mark < end <= mark + FAR_BEHIND


class LaggingSource(NamedTuple):
    """A source that holds back segments: all that end after ``mark`` (None: all), for a week if it is ``far``."""

    mark: datetime | None
    source: SourceView
    far: bool = False


class LowWatermark(NamedTuple):
    """``at`` None: unknown, because nothing is known of one source. ``waits_for``: the source that holds it back; None:
    no source that counts is behind ``at``, which is the time of the check. ``far_behind``: sources that hold up old
    segments only. ``sources``: all of the check, ``silent`` of which are neither live nor finished. ``together``: as
    many as fell silent together, and count. ``limit_s``: for how long the one that is waited for does; None: any time.
    ``behind``: the sources that are furthest behind, `LISTED` at most.
    """

    at: datetime | None
    waits_for: SourceView | None
    far_behind: tuple[SourceView, ...] = ()
    sources: int = 0
    silent: int = 0
    together: int = 0
    limit_s: float | None = None
    behind: tuple[LaggingSource, ...] = ()

    def is_past(self, end: datetime) -> bool:
        return self.at is not None and self.at >= end and not any(source.holds_up(end) for source in self.far_behind)

    def why(self, end: datetime | None = None) -> str:
        """What holds back the low watermark, or the segment that ends at ``end``; empty: nothing does."""
        held_by = self.waits_for
        if end is not None and self.at is not None and self.at >= end:
            held_by = next((source for source in self.far_behind if source.holds_up(end)), None)
        if held_by is None:
            return ""
        source = f"waits for {held_by.source_id} in {held_by.topic}"
        at = "of which no event is known" if held_by.mark is None else f"at {utc_text(held_by.mark)}"
        if held_by.owes:
            return f"{source}, {at}: more is recorded than loaded"
        seen = held_by.last_seen
        said = f"{source}, {at}" + (f", last seen at {utc_text(seen)}" if seen is not None else "")
        if not self.together:
            return said
        limit = "" if self.limit_s is None else f"; held for {self.limit_s:,.0f} s at most"
        return f"{said}: {self.together} of {self.sources} sources fell silent together{limit}"


def low_watermark(
    sources: Iterable[SourceView],
    now: datetime,
    idle_s: float,
    hold_s: float = 0.0,
    share: float = SILENT_SHARE,
    *,
    is_steady: bool = False,
) -> LowWatermark:
    """The minimum over the sources that count. ``now``: by the gateways' clock. ``idle_s``, ``hold_s``, ``share``: see
    above. ``is_steady``: the table usually has rows.
    """
    views, idle, hold = list(sources), timedelta(seconds=idle_s), timedelta(seconds=hold_s)
    watched = [view for view in views if not view.finished and not (view.is_lost and view.mark is None)]
    most, many = _silent_together(_seen(view for view in watched if view.beat is not None), now, idle, hold, share)
    at_once = _silent_at_once(_seen(watched), now, idle) - most - many if is_steady else set()
    together = most | many | at_once
    found = LowWatermark(now, None, sources=len(views), together=len(together))
    far_behind: list[SourceView] = []
    behind: list[LaggingSource] = []
    silent = 0
    for source in views:
        key = source.topic, source.source_id
        if not source.owes:
            if source.finished or source.last_seen is None:
                continue
            is_silent = now - source.last_seen >= idle
            silent += is_silent
            if is_silent and key not in together:
                continue
        mark = source.mark
        if source.is_far_behind:
            far_behind.append(source)
            behind.append(LaggingSource(mark, source, far=True))
            continue
        if key in at_once and not source.owes:
            mark = newest(mark, now - hold)
        if not (mark is None and source.is_lost) and (mark is None or mark < now):
            behind.append(LaggingSource(mark, source))
        limit_s = None if key in most or source.owes or key not in together else hold_s
        if mark is None and not source.is_lost:
            found = found._replace(at=None, waits_for=source, limit_s=limit_s)
        elif mark is not None and found.at is not None and mark < found.at:
            found = found._replace(at=mark, waits_for=source, limit_s=limit_s)
    furthest = heapq.nsmallest(LISTED, behind, key=lambda one: (one.mark is not None, one.mark or now, *one.source[:2]))
    return found._replace(far_behind=tuple(far_behind), silent=silent, behind=tuple(furthest))


_Seen = list[tuple[datetime, tuple[str, str]]]
_Keys = set[tuple[str, str]]


def _seen(views: Iterable[SourceView]) -> _Seen:
    """When each source (topic, source_id) was seen last, the earliest first."""
    return sorted((at, (view.topic, view.source_id)) for view in views if (at := view.last_seen) is not None)


def _silent_together(seen: _Seen, now: datetime, idle: timedelta, hold: timedelta, share: float) -> tuple[_Keys, _Keys]:
    """The sources that stopped within one ``idle`` of each other: more than those seen since; or many."""
    times = [at for at, _ in seen]
    first_live = bisect_right(times, now - idle)
    most: _Keys = set()
    many: _Keys = set()
    covered = {id(most): 0, id(many): 0}
    for start in range(first_live):
        stop = min(bisect_left(times, times[start] + idle), first_live)
        stopped, rest = stop - start, len(seen) - stop
        is_many = stopped >= max(FEWEST, share * (stopped + rest)) and now - times[stop - 1] < hold
        if stopped > rest or is_many:
            found = most if stopped > rest else many
            found.update(source for _, source in seen[max(start, covered[id(found)]) : stop])
            covered[id(found)] = stop
    return most, many


def _silent_at_once(seen: _Seen, now: datetime, idle: timedelta) -> _Keys:
    """The sources that stopped within ``idle`` of the last one, if that is silent."""
    if not seen or now - seen[-1][0] < idle:
        return set()
    return {source for at, source in seen if seen[-1][0] - at < idle}


def without(sources: Iterable[SourceView], excluded: Collection[str]) -> list[SourceView]:
    """The sources but for those that an operator excluded; ``*`` in a name stands for any text."""
    patterns = [re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL) for name in excluded]
    return [source for source in sources if not any(p.fullmatch(source.source_id) for p in patterns)]


def utc_text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(text: str) -> datetime | None:
    """``2026-11-20``, ``2026-11-20T10`` or ``2026-11-20T10:15:30``, in UTC; None: it is none of these."""
    try:
        return datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=UTC) if _TIME.fullmatch(text) else None
    except ValueError:
        return None
