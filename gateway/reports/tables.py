"""The state of a table as its loader reports it: the gateway itself reads no table.

A report is a record of a compacted topic with one partition, by the table's name; one without a value removes it. Each
replaces the one before, whole. A report is as old as ``reported_ms`` says: who stops reporting is not noticed here.
"""

from __future__ import annotations

from typing import Annotated, Final, Generic, Self, TypeVar

from logferry.gateway.config import MIB, Strict
from logferry.gateway.contract.names import MAX_SEQNO, split_topic
from pydantic import AfterValidator, Field

REPORT_BYTES: Final = 256 << 10
# Every worker holds all reports in memory.
HELD_BYTES: Final = 64 * MIB
# A report replaces the one before, so most of the topic is old: small segments let Kafka remove it.
CONFIGS: Final = {"segment.bytes": str(16 * MIB)}

Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]
Text = Annotated[str, Field(max_length=2000)]


def _full_name(topic: str) -> str:
    split_topic(topic)
    return topic


FullTopic = Annotated[str, AfterValidator(_full_name)]


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Report = TypeVar("_Report", bound=Strict)


class StoredReport(Strict, Generic[_Report]):
    """A report of any kind, as the store has it."""

    reported_ms: Number
    report: _Report

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises ValueError."""
        return cls.model_validate_json(raw)


class ReportedBatch(Strict):
    """The last committed batch. ``rows``: null where another loader wrote it, or where it is not known."""

    batch: Number
    kind: Text
    planned: Text
    rows: Number | None = None


class ReportedLag(Strict):
    """Of one topic. ``records``, ``seconds`` null: unknown. ``way``: what ends a stop."""

    topic: FullTopic
    records: Number | None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    stopped: Text | None = None
    way: Text | None = None


class HoldingSource(Strict):
    """A source that a segment waits for. ``at``: it has sent all before (null: unknown); ``seen``: its last sign of
    life; ``owes``: more of it is recorded than loaded."""

    source_id: Annotated[str, Field(max_length=512)]
    topic: FullTopic
    at: Text | None
    seen: Text | None
    owes: bool


class ReportedSegment(Strict):
    """``why``: what is between it and READY; empty for one that is. ``since``: of its rows or its closing."""

    segment: Text
    state: Text
    version: Number
    rows: Number
    since: Text
    why: Text
    waits_for: Annotated[list[HoldingSource], Field(max_length=100)]


class ReportedSegments(Strict):
    """``checked``: when segments were checked last. ``complete``: the newest one before which all known are READY.
    ``failure``: why the last check or notification failed. ``newest``: of the segments, and all that are open."""

    checked: Text | None
    complete: Text | None
    failure: Text | None
    newest: Annotated[list[ReportedSegment], Field(max_length=1000)]


class TableReport(Strict):
    """``location``: without secrets. ``every_s``: a report is due in so many seconds; null: the run has ended, or the
    next one is not planned by the loader. ``quarantine``: reason → lines and records in it."""

    location: Annotated[str, Field(min_length=1, max_length=2000)]
    dc: Text
    topics: Annotated[list[FullTopic], Field(min_length=1, max_length=2000)]
    every_s: Seconds | None = None
    error: Text | None = None
    batch: ReportedBatch | None = None
    lag: Annotated[list[ReportedLag], Field(default=[], max_length=2000)]
    lag_unknown: Text | None = None
    quarantine: Annotated[dict[Text, Number], Field(default={}, max_length=1000)]
    segments: ReportedSegments | None = None


class StoredTableReport(StoredReport[TableReport]): ...


class TableDescription(TableReport):
    """A table as it was reported last. ``reported_ms``: by the gateway's clock."""

    name: str
    reported_ms: Number


class TableSummary(Strict):
    """A table in a list: figures in place of lists. ``lag_records`` null: unknown. ``open_segments`` null: it has no
    segments. ``waits_for``: the oldest open segment, and why it is not READY."""

    name: str
    reported_ms: Number
    location: str
    topics: list[str]
    every_s: float | None
    error: str | None
    batch: ReportedBatch | None
    lag_records: Number | None
    stopped: Number
    quarantined: Number
    open_segments: Number | None
    complete: str | None
    waits_for: ReportedSegment | None


class TablesList(Strict):
    tables: list[TableSummary]


def description_of(name: str, stored: StoredReport[TableReport]) -> TableDescription:
    return TableDescription(name=name, reported_ms=stored.reported_ms, **dict(stored.report))


def summary_of(name: str, stored: StoredReport[TableReport]) -> TableSummary:
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
