"""The state of a table as JSON, for `logferry table state` and for reports to the gateway. Without Spark. Read only."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any, Final

from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.segment_states import ACTIVE, DROPPED, READY, Segment, SegmentRules
from logferry.loaders.planning.source_facts import FAR_BEHIND, moment_of, utc_text
from logferry.loaders.storage.files import dataset, open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import last_check, read_segments, segment_length
from logferry.loaders.storage.tables import active_filter, read_state

_NEWEST: Final = 48
# Of the open ones the oldest, so many.
_OPEN: Final = 200
_SOURCES: Final = 20


def table_facts(path: Location) -> dict[str, Any]:
    """As JSON. Raises LoaderConfigError where there is no table, Terminal, StorageUnavailable."""
    paths = TablePaths.of(path)
    state = read_state(paths)
    if state.newest is None:
        raise LoaderConfigError(f"{paths.main}: no batch was ever loaded: check the path, or run logferry load first")
    return {
        "table": str(paths.main),
        "last": _facts(state.committed),
        "planned": _facts(state.planned),
        "quarantine": _quarantined(paths, state.last),
        "positions": [
            {"topic": r.topic, "partition": r.partition, "offset": r.end, "topic_id": r.topic_id}
            for r in (state.committed.ranges if state.committed else ())
        ],
    }


def _facts(entry: LedgerEntry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        **{name: getattr(entry, name) for name in ("batch", "kind", "dc", "parser")},
        "planned": entry.planned.isoformat(),
        "reads": sum(r.size for r in entry.reads),
        "cutoff": entry.cutoff.isoformat() if entry.cutoff else None,
    }


def _quarantined(paths: TablePaths, last: int) -> dict[str, int]:
    """Reason → number of active lines and records in the quarantine."""
    table = open_table(paths.quarantine)
    if table is None:
        return {}
    stored = dataset(paths.quarantine, table)
    found: Counter[str] = Counter()
    for batch in stored.scanner(columns=["reason"], filter=active_filter(last)).to_batches():
        found.update({one["values"]: one["counts"] for one in batch.column(0).value_counts().to_pylist()})
    return dict(sorted(found.items()))


def why_not_ready(segment: Segment, rules: SegmentRules, look: dict[str, Any]) -> str:
    """What is between the segment and READY, as of the last check."""
    if segment.state == READY:
        if not segment.silent_sources:
            return ""
        return f"{segment.silent_sources:,} of {segment.sources:,} sources were silent"
    if segment.state == DROPPED:
        return segment.reason
    if not look:
        return "not checked yet"
    low, end = look.get("low"), utc_text(rules.end_of(segment.start))
    if look.get("waits") and (low is None or low < end):
        return str(look["waits"])
    if low is not None and low < end:
        return f"not over: the low watermark is {low}"
    return segment.reason if segment.state == ACTIVE and segment.reason else "waits for the next check"


def segment_facts(paths: TablePaths) -> dict[str, Any] | None:
    """The newest segments and the open ones, each with what it waits for as of the last check; None: it has none.

    Raises StorageUnavailable.
    """
    length = segment_length(paths.segments)
    if length is None:
        return None
    rules, look = SegmentRules(length), last_check(paths.segments)
    segments = sorted(read_segments(paths.segments, last_batch(open_table(paths.main))).values())
    waiting = [one for one in segments if one.state not in (READY, DROPPED)]
    chosen = sorted({*segments[-_NEWEST:], *waiting[:_OPEN]})
    return {
        "checked": look.get("at"),
        "complete": complete_to(segments),
        "newest": [_segment(one, rules, look) for one in chosen],
    }


def complete_to(segments: list[Segment]) -> str | None:
    """The newest segment up to which all known ones are READY or dropped, in their order."""
    complete = None
    for segment in segments:
        if segment.state not in (READY, DROPPED):
            break
        complete = segment.name
    return complete


def _segment(segment: Segment, rules: SegmentRules, look: dict[str, Any]) -> dict[str, Any]:
    is_open = segment.state not in (READY, DROPPED)
    return {
        "segment": segment.name,
        "state": segment.state,
        "version": segment.version,
        "rows": segment.rows,
        "since": utc_text(segment.closed or segment.touched),
        "why": why_not_ready(segment, rules, look) if is_open else "",
        "waits_for": holding_sources(look, rules.end_of(segment.start))[:_SOURCES] if is_open else [],
    }


def holding_sources(look: dict[str, Any], end: datetime) -> list[dict[str, Any]]:
    """The sources of a check that hold back a segment with this end, the one that is furthest behind first."""
    found = []
    for source in look.get("behind") or ():
        at = moment_of(source["at"]) if source["at"] else None
        if at is None or at < end <= (at + FAR_BEHIND if source["far"] else end):
            found.append({name: source[name] for name in ("source_id", "topic", "at", "seen", "owes")})
    return found
