"""``logferry status --mirror URL``: lag and waits of each link of a mirror, and partitions that have stopped.

Problems come first, as for the gateway. For a stopped partition the command that resumes it is printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from logferry.gateway.api.diagnosis import SLOW_S, AllWorkers, Diagnosis, silent_workers, warnings
from logferry.loaders.terminal import escape
from logferry.ops.status import service
from logferry.ops.status.render import clock, count, print_findings, span, table_of
from pydantic import BaseModel
from rich.console import Console
from rich.filesize import decimal

# Stops that end by themselves when their cause is repaired.
_RESUME_BY_THEMSELVES: Final = (
    *("write-rejected", "target-unavailable", "target-not-created", "source-deleted", "origin-unknown"),
    *("fetch-rejected", "target-unreadable"),
)


# A newer worker may send more fields: pydantic ignores them.
class MirrorWait(BaseModel):
    reason: str
    since_ms: int
    ended_ms: int | None
    is_fault: bool


class LinkStatus(BaseModel):
    """One worker's partitions of a link. A lag is None until it is known."""

    dc: str
    topics: int
    partitions: int
    stopped: int
    lag_records: int
    lag_bytes: int | None
    lag_s: float | None
    bytes_per_s: float | None
    last_wait: MirrorWait | None


class PartitionStop(BaseModel):
    kind: str
    detail: str
    since_ms: int
    what_to_do: str


class PartitionStatus(BaseModel):
    """``source_next``, ``local_next``: the committed position in the remote and here, None before the first record.
    ``source_end``: the end of the remote log at its last fetch, None before the first one. ``waiting_bytes``: fetched,
    but not committed here yet."""

    topic: str
    partition: int
    dc: str
    state: str
    source_next: int | None
    local_next: int | None
    source_end: int | None
    waiting_bytes: int
    stop: PartitionStop | None = None


class MirrorStatus(BaseModel):
    """``unaltered``: why a topic's settings here cannot be made like its original's; of an older worker: none."""

    dc: str
    now_ms: int
    url: str
    workers: list[str]
    lanes_total: int
    lanes: list[service.ServiceLane]
    links: list[LinkStatus]
    partitions: list[PartitionStatus]
    unaltered: dict[str, str] = {}
    warnings: list[str] = []


Mirror = AllWorkers[MirrorStatus]


# ---- decisions --------------------------------------------------------------------------------------------------


def links_of(mirror: Mirror) -> list[tuple[LinkStatus, int]]:
    """All workers' parts of each link as one, and the time by the clock of the worker that reports the wait.

    ``lag_s``: of the partition furthest behind.
    """
    parts: dict[str, list[tuple[LinkStatus, int]]] = {}
    for worker in mirror.workers.values():
        for link in worker.links:
            parts.setdefault(link.dc, []).append((link, worker.now_ms))
    return [_together(found) for _, found in sorted(parts.items())]


def _together(parts: list[tuple[LinkStatus, int]]) -> tuple[LinkStatus, int]:
    links = [link for link, _ in parts]
    sizes = [link.lag_bytes for link in links]
    waits = [(link.last_wait, now_ms) for link, now_ms in parts if link.last_wait is not None]
    wait, now_ms = max(waits, key=lambda one: (one[0].ended_ms is None, one[0].since_ms), default=(None, 0))
    changes = {
        **{name: sum(getattr(link, name) for link in links) for name in ("partitions", "stopped", "lag_records")},
        "topics": max(link.topics for link in links),
        "lag_bytes": None if None in sizes else sum(size for size in sizes if size is not None),
        "lag_s": max((link.lag_s for link in links if link.lag_s is not None), default=None),
        "last_wait": wait,
    }
    return links[0].model_copy(update=changes), now_ms


def diagnose_mirror(mirror: Mirror) -> list[Diagnosis]:
    """All findings, the wrong ones first. Reads no clock."""
    found = [*silent_workers(mirror.silent), *service.lane_findings(mirror), *_waits(mirror)]
    found += [*service.stop_findings([*_stops(mirror)]), *_settings(mirror)]
    return sorted(found, key=lambda finding: not finding.wrong)


def _waits(mirror: Mirror) -> Iterator[Diagnosis]:
    for link, now_ms in links_of(mirror):
        wait = link.last_wait
        if wait is not None and wait.ended_ms is None:
            for_s = service.seconds(now_ms - wait.since_ms)
            if wait.is_fault or for_s >= SLOW_S:
                yield Diagnosis(wait.is_fault, f"the link to {link.dc} waits", wait.reason, for_s)


def _stops(mirror: Mirror) -> Iterator[Diagnosis]:
    stopped = [(worker, p, p.stop) for worker in mirror.workers.values() for p in worker.partitions if p.stop]
    stopped.sort(key=lambda found: (found[1].topic, found[1].partition))
    for worker, partition, stop in stopped:
        remedy = stop.what_to_do
        if stop.kind not in _RESUME_BY_THEMSELVES:
            remedy += f" (logferry mirror resume {partition.topic} {partition.partition} --url {worker.url} --from …)"
        what = f"{partition.topic}-{partition.partition} of {partition.dc} stopped: {stop.kind}"
        yield Diagnosis(True, what, f"{stop.detail}; {remedy}", service.seconds(worker.now_ms - stop.since_ms))


def _settings(mirror: Mirror) -> Iterator[Diagnosis]:
    unaltered = {topic: why for worker in mirror.workers.values() for topic, why in worker.unaltered.items()}
    for topic, why in sorted(unaltered.items())[: service.SHOWN]:
        what = f"the settings of {topic} here may differ from its original's"
        remedy = "grant DescribeConfigs and AlterConfigs on the topic, or change them by hand"
        yield Diagnosis(False, what, f"{why}; {remedy}")
    yield from warnings(text for worker in mirror.workers.values() for text in worker.warnings)


# ---- output ------------------------------------------------------------------------------------------------------


def print_mirror(mirror: Mirror, findings: Sequence[Diagnosis], at_s: float, console: Console) -> None:
    print_findings("the mirror", mirror, findings, at_s, console)
    links = table_of("link", "topics", "partitions", "stopped", "lag", "bytes", "age", "last wait")
    for link, now_ms in links_of(mirror):
        links.add_row(
            escape(link.dc),
            count(link.topics),
            count(link.partitions),
            count(link.stopped) if not link.stopped else f"[red]{count(link.stopped)}[/]",
            f"{count(link.lag_records)} records",
            "not known yet" if link.lag_bytes is None else f"about {decimal(link.lag_bytes)}",
            "not known yet" if link.lag_s is None else span(link.lag_s),
            escape(_waited(link.last_wait, now_ms)),
        )
    console.print(links)
    service.print_workers(mirror, console)


def _waited(wait: MirrorWait | None, now_ms: int) -> str:
    if wait is None:
        return "never"
    ago_s = service.seconds(now_ms - wait.since_ms)
    if wait.ended_ms is None:
        return f"now, for {span(ago_s)}: {wait.reason}"
    at = clock(time.time() - ago_s)
    return f"at {at}, for {span(service.seconds(wait.ended_ms - wait.since_ms))}: {wait.reason}"
