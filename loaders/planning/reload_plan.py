"""Rows reloaded by command: the offsets that are read again, and whose rows are replaced. Pure.

The law of this file: only offsets below the table's positions can be reloaded, and only the whole request: where Kafka
has removed some of it, or has another topic of that name, nothing is. Positions stay unchanged.

A time span is in record time, the gateways' clock. Its ranges hold every record of the span: from the first record that
is not before its start to the last one before its end (see `batches.reload`). Other records in between are reloaded
with them, which does not change their rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from logferry.loaders.errors import LoaderConfigError, TopicChanged
from logferry.loaders.planning.ledger_entry import LedgerEntry
from logferry.loaders.planning.plan import Range, TopicOffsets, TopicPartition
from logferry.loaders.planning.source_facts import moment_of

_TOPIC: Final = r"[a-zA-Z0-9._-]+"
_TIME: Final = r"\d{4}-\d\d-\d\d(?:T\d\d(?::\d\d(?::\d\d)?)?)?Z?"
_TIMES: Final = re.compile(rf"(?:({_TOPIC})=)?({_TIME})\.\.({_TIME})")
_PLACE: Final = re.compile(rf"({_TOPIC})(?::(\d+)(?:=(\d+)\.\.(\d+))?)?")


class TimeSpan(NamedTuple):
    """Record time: [start, end)."""

    start: datetime
    end: datetime


class ReloadTarget(NamedTuple):
    """A range to reload. ``topic`` None: all topics of the table; ``partition`` None: all partitions. ``offsets`` and
    ``span`` None: all that the table has.
    """

    text: str
    topic: str | None
    partition: int | None = None
    offsets: tuple[int, int] | None = None
    span: TimeSpan | None = None

    @classmethod
    def parse(cls, text: str) -> ReloadTarget:
        """Raises LoaderConfigError."""
        if match := _TIMES.fullmatch(text):
            span = TimeSpan(_moment(match[2]), _moment(match[3]))
            if span.start >= span.end:
                raise LoaderConfigError(f"--from {text!r}: the end must be after the start")
            return cls(text, match[1], span=span)
        if (match := _PLACE.fullmatch(text)) and (match[3] or ".." not in text):
            partition = None if match[2] is None else int(match[2])
            offsets = None if match[3] is None else (int(match[3]), int(match[4]))
            if offsets is not None and offsets[0] >= offsets[1]:
                raise LoaderConfigError(
                    f"--from {text!r}: no offsets: the end is exclusive and must be above the start"
                )
            return cls(text, match[1], partition, offsets)
        raise LoaderConfigError(
            f"--from {text!r}: TOPIC, TOPIC:PARTITION, TOPIC:PARTITION=START..END (offsets, end exclusive), or "
            "TIME..TIME and TOPIC=TIME..TIME, like 2026-11-20T10..2026-11-20T12 (UTC)"
        )


SpanOffsets = Mapping[TimeSpan, Mapping[TopicPartition, tuple[int, int]]]


class HeldOffsets(NamedTuple):
    """The offsets of a partition in a table: [first, position) of this data centre's Kafka.

    ``elsewhere``: spans of these offsets whose records were loaded in another data centre, under its offsets: their
    rows cannot be found by ours.
    """

    first: int
    position: int
    elsewhere: tuple[tuple[int, int], ...] = ()

    def loaded_here(self) -> list[tuple[int, int]]:
        """[first, position) without the offsets loaded elsewhere."""
        found, start = [], self.first
        for low, high in sorted(self.elsewhere):
            found.append((start, min(low, self.position)))
            start = max(start, high)
        return [cut for cut in (*found, (start, self.position)) if cut[0] < cut[1]]


def held_offsets(entries: Iterable[LedgerEntry], committed: LedgerEntry) -> dict[TopicPartition, HeldOffsets]:
    """From the ledger's entries up to the table's last batch. Raises TopicChanged where a topic was recreated: the
    rows of both topics have the same name and offsets.
    """
    found: dict[TopicPartition, HeldOffsets] = {}
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
            before = found.get(r.key, HeldOffsets(r.start, 0))
            there: tuple[tuple[int, int], ...] = ()
            if r.key in elsewhere:
                # The table moved here, or came back: in between, its positions advanced by another centre's offsets.
                there = ((before.position, r.start),) if before.position < r.start else ()
                elsewhere.discard(r.key)
            found[r.key] = HeldOffsets(min(before.first, r.start), r.end, (*before.elsewhere, *there))
    for topic, seen in ids.items():
        if len(seen) > 1:
            raise TopicChanged(
                f"{topic} was recreated while this table was loaded: rows of the older topic have the same offsets, "
                "so a reload cannot tell which rows to replace"
            )
    now = {r.key for r in committed.ranges}
    return {key: have for key, have in found.items() if key in now}


def ranges_to_reload(
    targets: Sequence[ReloadTarget],
    have: Mapping[TopicPartition, HeldOffsets],
    committed: LedgerEntry,
    views: Mapping[str, TopicOffsets],
    spans: SpanOffsets,
) -> tuple[Range, ...]:
    """The ranges to load again, without overlaps. ``spans``: the offsets of each span, where it has some.

    Raises LoaderConfigError for what there is not, TopicChanged for what Kafka does not hold any more.
    """
    ids = {r.key: r.topic_id for r in committed.ranges}
    found: dict[TopicPartition, list[tuple[int, int]]] = {}
    for target in targets:
        of_topic = [key for key in sorted(have) if target.topic in (None, key.topic)]
        keys = [key for key in of_topic if target.partition in (None, key.partition)]
        if not keys:
            known = ", ".join(sorted({key.topic for key in have})) or "none"
            raise LoaderConfigError(f"--from {target.text}: no committed position in this table; it has {known}")
        chosen = 0
        for key in keys:
            view = views.get(key.topic)
            if view is None or view.topic_id != ids[key]:
                raise TopicChanged(
                    f"--from {target.text}: {key.topic} "
                    + ("no longer exists" if view is None else "was recreated")
                    + ", so its rows cannot be read again"
                )
            cuts = _offsets(target, key, have[key], view, spans)
            found.setdefault(key, []).extend(cuts)
            chosen += len(cuts)
        if not chosen:
            raise LoaderConfigError(f"--from {target.text}: the table has no rows of it to replace")
    return tuple(
        Range(*key, ids[key], start, end) for key in sorted(found) for start, end in _without_overlaps(found[key])
    )


def _offsets(
    target: ReloadTarget, key: TopicPartition, have: HeldOffsets, view: TopicOffsets, spans: SpanOffsets
) -> list[tuple[int, int]]:
    """The offsets of this partition that the target names; none where a time span has none."""
    where = f"--from {target.text}: partition {key.partition} of {key.topic}"
    offsets = view.partitions.get(key.partition)
    if offsets is None:
        raise TopicChanged(f"{where} no longer exists")
    if target.offsets is not None:
        cuts = [target.offsets]
        if target.offsets[1] > have.position:
            raise LoaderConfigError(f"{where} is loaded up to {have.position}; the rest is left to `logferry load`")
    elif target.span is not None:
        found = spans.get(target.span, {}).get(key)
        if found is None:
            return []
        cuts = [(found[0], min(found[1], have.position))]
        if found[0] <= offsets.earliest and have.first < offsets.earliest:
            raise TopicChanged(
                f"{where}: Kafka has it from {offsets.earliest} on, and earlier records may be of that time, too: "
                "start later, or name offsets"
            )
    else:
        cuts = have.loaded_here()
    cuts = [(start, end) for start, end in cuts if start < end]
    for start, end in cuts:
        for low, high in have.elsewhere:
            if max(start, low) < min(end, high):
                raise LoaderConfigError(
                    f"{where} from {low} to {high - 1} was loaded in another data centre, under its own offsets: its "
                    "rows cannot be found by ours"
                )
        if start < offsets.earliest:
            raise TopicChanged(
                f"{where}: Kafka has it from {offsets.earliest} on, so {start} to {min(end, offsets.earliest) - 1} "
                "cannot be read again; nothing was replaced"
            )
        if end > offsets.stable:
            raise TopicChanged(f"{where} ends at {offsets.stable}, the table has it up to {end}: its log was truncated")
    return cuts


def _without_overlaps(cuts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(cuts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _moment(text: str) -> datetime:
    found = moment_of(text)
    if found is None:
        raise LoaderConfigError(f"--from: {text!r} is not a time like 2026-11-20T10 (UTC)")
    return found
