"""The state of a table as its loader reports it: the gateway itself reads no table.

A report is a record of a compacted topic with one partition, by the table's name; one without a value removes it. Each
replaces the one before, whole. A report is as old as ``reported_ms`` says: who stops reporting is not noticed here.
"""

from __future__ import annotations

from typing import Annotated, Final

from logferry.gateway.config import MIB, Strict
from logferry.gateway.contract.names import MAX_SEQNO, split_topic
from pydantic import AfterValidator, Field

REPORT_BYTES: Final = 256 << 10
# Every worker holds all reports in memory.
HELD_BYTES: Final = 64 * MIB
# A report replaces the one before, so most of the topic is old: small segments let Kafka remove it.
CONFIGS: Final = {"segment.bytes": str(16 * MIB)}

_Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]
_Text = Annotated[str, Field(max_length=2000)]


def _full_name(topic: str) -> str:
    split_topic(topic)
    return topic


_Topic = Annotated[str, AfterValidator(_full_name)]


def reports_topic(prefix: str, dc: str) -> str:
    return f"{prefix}.tables.{dc}"


class ReportedBatch(Strict):
    """The last committed batch. ``rows``: null where another loader wrote it, or where it is not known."""

    batch: _Number
    kind: _Text
    planned: _Text
    rows: _Number | None = None


class ReportedLag(Strict):
    """Of one topic. ``records``, ``seconds`` null: unknown. ``way``: what ends a stop."""

    topic: _Topic
    records: _Number | None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    stopped: _Text | None = None
    way: _Text | None = None


class HoldingSource(Strict):
    """A source that a segment waits for. ``at``: it has sent all before (null: unknown); ``seen``: its last sign of
    life; ``owes``: more of it is recorded than loaded."""

    source_id: Annotated[str, Field(max_length=512)]
    topic: _Topic
    at: _Text | None
    seen: _Text | None
    owes: bool


class ReportedSegment(Strict):
    """``why``: what is between it and READY; empty for one that is. ``since``: of its rows or its closing."""

    segment: _Text
    state: _Text
    version: _Number
    rows: _Number
    since: _Text
    why: _Text
    waits_for: Annotated[list[HoldingSource], Field(max_length=100)]


class ReportedSegments(Strict):
    """``checked``: when segments were checked last. ``complete``: the newest one before which all known are READY.
    ``failure``: why the last check or notification failed. ``newest``: of the segments, and all that are open."""

    checked: _Text | None
    complete: _Text | None
    failure: _Text | None
    newest: Annotated[list[ReportedSegment], Field(max_length=1000)]


class TableReport(Strict):
    """``location``: without secrets. ``every_s``: a report is due in so many seconds; null: the run has ended, or the
    next one is not planned by the loader. ``quarantine``: reason → lines and records in it."""

    location: Annotated[str, Field(min_length=1, max_length=2000)]
    dc: _Text
    topics: Annotated[list[_Topic], Field(min_length=1, max_length=2000)]
    every_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    error: _Text | None = None
    batch: ReportedBatch | None = None
    lag: Annotated[list[ReportedLag], Field(default=[], max_length=2000)]
    lag_unknown: _Text | None = None
    quarantine: Annotated[dict[_Text, _Number], Field(default={}, max_length=1000)]
    segments: ReportedSegments | None = None


class StoredReport(Strict):
    reported_ms: _Number
    report: TableReport

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, raw: bytes) -> StoredReport:
        """Raises ValueError."""
        return cls.model_validate_json(raw)


class TableDescription(TableReport):
    """A table as it was reported last. ``reported_ms``: by the gateway's clock."""

    name: str
    reported_ms: _Number


class TableSummary(Strict):
    """A table in a list: figures in place of lists. ``lag_records`` null: unknown. ``open_segments`` null: it has no
    segments. ``waits_for``: the oldest open segment, and why it is not READY."""

    name: str
    reported_ms: _Number
    location: str
    topics: list[str]
    every_s: float | None
    error: str | None
    batch: ReportedBatch | None
    lag_records: _Number | None
    stopped: _Number
    quarantined: _Number
    open_segments: _Number | None
    complete: str | None
    waits_for: ReportedSegment | None


class TablesList(Strict):
    tables: list[TableSummary]


def description_of(name: str, stored: StoredReport) -> TableDescription:
    return TableDescription(name=name, reported_ms=stored.reported_ms, **dict(stored.report))


def summary_of(name: str, stored: StoredReport) -> TableSummary:
    report, segments = stored.report, stored.report.segments
    known = [one.records for one in report.lag if one.records is not None]
    waiting = [one for one in segments.newest if one.why] if segments is not None else []
    return TableSummary(
        name=name,
        reported_ms=stored.reported_ms,
        location=report.location,
        topics=report.topics,
        every_s=report.every_s,
        error=report.error,
        batch=report.batch,
        lag_records=sum(known) if known else None,
        stopped=sum(one.stopped is not None for one in report.lag),
        quarantined=sum(report.quarantine.values()),
        open_segments=None if segments is None else len(waiting),
        complete=None if segments is None else segments.complete,
        waits_for=min(waiting, key=lambda one: one.segment, default=None),
    )
