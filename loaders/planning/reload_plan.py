"""Rows loaded again, by command: which offsets are read once more, in place of the rows that the table holds of them.

Pure. The law of this file: only what lies below the table's positions can be loaded again, and only all of what is
asked for: where Kafka has dropped some of it, or has another topic of that name by now, nothing is. Positions stay.

By record time, the gateway's clock, ranges are found that hold every record of the span: from the first record that is
not older than its start, to the last one that is not as young as its end, whose clock may have been behind its
neighbours' (see `reloading`). Other records in between are loaded again with them, which changes nothing of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from logferry.loaders.errors import ConfigError, TopicChanged
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicPartition, TopicView
from logferry.loaders.storage.ledger import LedgerEntry

_TOPIC: Final = r"[a-zA-Z0-9._-]+"
_TIME: Final = r"\d{4}-\d\d-\d\d(?:T\d\d(?::\d\d(?::\d\d)?)?)?Z?"
_FORMS: Final = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H", "%Y-%m-%d")
_OFFSETS: Final = re.compile(rf"({_TOPIC}):(\d+)=(\d+)\.\.(\d+)")
_TIMES: Final = re.compile(rf"(?:({_TOPIC})=)?({_TIME})\.\.({_TIME})")
_WHOLE: Final = re.compile(rf"({_TOPIC})(?::(\d+))?")


class Span(NamedTuple):
    """Of record time: from ``start`` on, before ``end``."""

    start: datetime
    end: datetime


class Target(NamedTuple):
    """What is to be loaded again. ``topic`` None: all of the table's; ``partition`` None: all of them. ``offsets`` and
    ``span`` None: all that the table has.
    """

    text: str
    topic: str | None
    partition: int | None = None
    offsets: tuple[int, int] | None = None
    span: Span | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises ConfigError."""
        if match := _TIMES.fullmatch(text):
            span = Span(_moment(match[2]), _moment(match[3]))
            if span.start >= span.end:
                raise ConfigError(f"--reload {text!r}: the second time is the end, and after the first")
            return cls(text, match[1], span=span)
        if match := _OFFSETS.fullmatch(text):
            start, end = int(match[3]), int(match[4])
            if start >= end:
                raise ConfigError(f"--reload {text!r}: no offsets; the second one is the end, which is not read itself")
            return cls(text, match[1], int(match[2]), (start, end))
        if (match := _WHOLE.fullmatch(text)) and ".." not in text:
            return cls(text, match[1], None if match[2] is None else int(match[2]))
        raise ConfigError(
            f"--reload {text!r}: TOPIC, TOPIC:PARTITION, TOPIC:PARTITION=START..END (offsets, without the last), or "
            "TIME..TIME and TOPIC=TIME..TIME, like 2026-11-20T10..2026-11-20T12 (UTC)"
        )


class Held(NamedTuple):
    """What a table says that it has of a partition: offsets [first, position) of this data centre's Kafka.

    ``elsewhere``: spans of these offsets whose records were loaded in another data centre, by offsets of its own: the
    rows cannot be found by ours.
    """

    first: int
    position: int
    elsewhere: tuple[tuple[int, int], ...] = ()

    def loaded_here(self) -> list[tuple[int, int]]:
        """[first, position) without what was loaded elsewhere."""
        found, start = [], self.first
        for low, high in sorted(self.elsewhere):
            found.append((start, min(low, self.position)))
            start = max(start, high)
        return [cut for cut in (*found, (start, self.position)) if cut[0] < cut[1]]


def held(entries: Iterable[LedgerEntry], committed: LedgerEntry) -> dict[TopicPartition, Held]:
    """By the ledger's entries up to the last batch that the table holds. Raises TopicChanged.

    A topic of which there was another one under the same name cannot be told apart in the table.
    """
    found: dict[TopicPartition, Held] = {}
    ids: dict[str, set[str]] = {}
    elsewhere: set[TopicPartition] = set()
    for entry in sorted(entries, key=lambda one: one.batch):
        if entry.batch > committed.batch:
            continue
        if entry.dc != committed.dc:
            elsewhere |= {r.key for r in entry.ranges}
            continue
        for r in entry.ranges:
            ids.setdefault(r.topic, set()).add(r.topic_id)
            before = found.get(r.key)
            there: tuple[tuple[int, int], ...] = ()
            if r.key in elsewhere:
                # The table came back, or has come here: in between its positions went on by others' offsets.
                left = before.position if before else 0
                there = ((left, r.start),) if left < r.start else ()
                elsewhere.discard(r.key)
            if before is None:
                found[r.key] = Held(r.start, r.end, there)
            else:
                found[r.key] = Held(min(before.first, r.start), r.end, (*before.elsewhere, *there))
    for topic, seen in ids.items():
        if len(seen) > 1:
            raise TopicChanged(
                f"{topic} was created anew while this table was loaded: rows of the older one have the same offsets, "
                "so it cannot be told which ones a reload would replace"
            )
    now = {r.key for r in committed.ranges}
    return {key: have for key, have in found.items() if key in now}


def wanted(
    targets: Sequence[Target],
    have: Mapping[TopicPartition, Held],
    committed: LedgerEntry,
    views: Mapping[str, TopicView],
    spans: Mapping[Span, Mapping[TopicPartition, tuple[int, int]]],
) -> tuple[Range, ...]:
    """The ranges to load again, without overlaps. ``spans``: the offsets of each span, where it has some.

    Raises ConfigError for what there is not, TopicChanged for what Kafka does not hold any more.
    """
    ids = {r.key: r.topic_id for r in committed.ranges}
    found: dict[TopicPartition, list[tuple[int, int]]] = {}
    for target in targets:
        keys = [key for key in sorted(have) if _fits(target, key)]
        if not keys:
            known = ", ".join(sorted({key.topic for key in have})) or "none"
            raise ConfigError(f"--reload {target.text}: the table has no positions of it; it has those of {known}")
        chosen = 0
        for key in keys:
            view = views.get(key.topic)
            if view is None or view.topic_id != ids[key]:
                raise TopicChanged(
                    f"--reload {target.text}: {key.topic} "
                    + ("does not exist any more" if view is None else "was created anew")
                    + ", so nothing of what the table holds can be read again"
                )
            cuts = _offsets(target, key, have[key], view, spans)
            found.setdefault(key, []).extend(cuts)
            chosen += len(cuts)
        if not chosen:
            raise ConfigError(f"--reload {target.text}: the table holds nothing of it, so there is nothing to replace")
    return tuple(
        Range(*key, ids[key], start, end) for key in sorted(found) for start, end in _without_overlaps(found[key])
    )


def _offsets(
    target: Target,
    key: TopicPartition,
    have: Held,
    view: TopicView,
    spans: Mapping[Span, Mapping[TopicPartition, tuple[int, int]]],
) -> list[tuple[int, int]]:
    """What the target means of this partition."""
    where = f"--reload {target.text}: partition {key.partition} of {key.topic}"
    offsets = view.partitions.get(key.partition)
    if offsets is None:
        raise TopicChanged(f"{where} does not exist any more")
    if target.offsets is None and target.span is None:
        cuts = have.loaded_here()
    else:
        cuts = [_named(target, where, key, have, offsets, spans)]
    cuts = [(start, end) for start, end in cuts if start < end]
    for start, end in cuts:
        _check_readable(where, start, end, offsets)
    return cuts


def _named(
    target: Target,
    where: str,
    key: TopicPartition,
    have: Held,
    offsets: PartitionOffsets,
    spans: Mapping[Span, Mapping[TopicPartition, tuple[int, int]]],
) -> tuple[int, int]:
    """By offsets, or by a time; empty where there is none of it."""
    if target.offsets is not None:
        start, end = target.offsets
        if end > have.position:
            raise ConfigError(f"{where} is loaded up to {have.position}: what is behind is the regular load's")
    else:
        span = spans.get(target.span, {}).get(key) if target.span is not None else None
        if span is None:
            return 0, 0
        start, end = span[0], min(span[1], have.position)
        if start <= offsets.earliest and have.first < offsets.earliest:
            raise TopicChanged(
                f"{where}: Kafka holds it from {offsets.earliest} on, and what came before may be of that time, too: "
                "begin later, or name offsets"
            )
    for low, high in have.elsewhere:
        if max(start, low) < min(end, high):
            raise ConfigError(
                f"{where} from {low} to {high - 1} was loaded in another data centre, by offsets of its own: it cannot "
                "be found in the table by ours"
            )
    return start, end


def _check_readable(where: str, start: int, end: int, offsets: PartitionOffsets) -> None:
    if start < offsets.earliest:
        raise TopicChanged(
            f"{where}: Kafka holds it from {offsets.earliest} on, so {start} to {min(end, offsets.earliest) - 1} "
            "cannot be read again; nothing was replaced"
        )
    if end > offsets.stable:
        raise TopicChanged(f"{where} ends at {offsets.stable}, the table holds it up to {end}: its log was cut back")


def _fits(target: Target, key: TopicPartition) -> bool:
    return target.topic in (None, key.topic) and target.partition in (None, key.partition)


def _without_overlaps(cuts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(cuts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _moment(text: str) -> datetime:
    for form in _FORMS:
        try:
            return datetime.strptime(text.removesuffix("Z"), form).replace(tzinfo=UTC)
        except ValueError:
            continue
    raise ConfigError(f"--reload: {text!r} is no time")


__all__ = ["Held", "Span", "Target", "held", "wanted"]
