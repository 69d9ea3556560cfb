"""The state of a subscription of `logferry hbase`, as one of its connectors reports it: the gateway asks no HBase."""

from __future__ import annotations

from typing import Annotated

from logferry.gateway.config import Strict
from logferry.gateway.reports.tables import FullTopic, Number, Seconds, StoredReport, Text
from pydantic import Field


class ReportedWait(Strict):
    """A call of a region server that was not carried out. ``who``: its host; ``times``: how often; the last one at
    ``at_ms``."""

    who: Text
    at_ms: Number
    times: Number
    reason: Text


class ReportedConnector(Strict):
    """``change_age_ms``: how old the newest change of the last call was when it was recorded; null: none was.
    ``oldest_call_s``: for how long the oldest call in hand waits. Figures are null where the connector noted none."""

    connector: Text
    calls: Number | None = None
    failed_calls: Number | None = None
    chunks: Number | None = None
    change_age_ms: Number | None = None
    oldest_call_s: Number | None = None
    waits: Annotated[list[ReportedWait], Field(default=[], max_length=100)]


class ReportedServer(Strict):
    """A region server. ``logs``: write-ahead logs to ship; ``taken_over``: those of them that are of dead servers.
    ``age_ms``: how old the last shipped operation was then. Null: the server has not published it. ``problem``: why it
    cannot be asked."""

    server: Text
    logs: Number
    taken_over: Number
    shipped_operations: Number | None
    age_ms: Number | None
    oldest_wal_ms: Number | None
    problem: Text | None = None


class HBaseReport(Strict):
    """``topics``: the one that it writes. ``every_s``: a report is due in so many seconds. ``problems``: those that
    `logferry hbase status` names."""

    topics: Annotated[list[FullTopic], Field(min_length=1, max_length=1)]
    tables: Annotated[list[Text], Field(max_length=1000)]
    state: Text
    every_s: Seconds
    connectors: Annotated[list[ReportedConnector], Field(max_length=200)]
    servers: Annotated[list[ReportedServer], Field(max_length=2000)]
    problems: Annotated[list[Text], Field(max_length=2000)]


class StoredHBaseReport(StoredReport[HBaseReport]): ...


class HBaseDescription(HBaseReport):
    """A subscription as it was reported last. ``reported_ms``: by the gateway's clock."""

    name: str
    reported_ms: Number


class HBaseSummary(Strict):
    """A subscription in a list. ``age_ms``, ``oldest_wal_ms``: the largest of its region servers; null: none is
    known."""

    name: str
    reported_ms: Number
    topics: list[str]
    tables: list[str]
    state: str
    every_s: float
    connectors: Number
    servers: Number
    logs: Number
    age_ms: Number | None
    oldest_wal_ms: Number | None
    problems: list[str]


class HBaseList(Strict):
    subscriptions: list[HBaseSummary]


def description_of(name: str, stored: StoredReport[HBaseReport]) -> HBaseDescription:
    return HBaseDescription(name=name, reported_ms=stored.reported_ms, **dict(stored.report))


def summary_of(name: str, stored: StoredReport[HBaseReport]) -> HBaseSummary:
    report = stored.report
    return HBaseSummary(
        name=name,
        reported_ms=stored.reported_ms,
        topics=report.topics,
        tables=report.tables,
        state=report.state,
        every_s=report.every_s,
        connectors=len(report.connectors),
        servers=len(report.servers),
        logs=sum(one.logs for one in report.servers),
        age_ms=max((one.age_ms for one in report.servers if one.age_ms is not None), default=None),
        oldest_wal_ms=max((one.oldest_wal_ms for one in report.servers if one.oldest_wal_ms is not None), default=None),
        problems=report.problems,
    )
