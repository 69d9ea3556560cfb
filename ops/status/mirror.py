"""``logferry status --mirror URL``: how far behind each link of a mirror is, what it waits for, and what stands still.

First what is wrong, as for the gateway; with a partition that has stopped, the command that lets it go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from logferry.ops.cli.gateway_client import Gateway
from logferry.ops.cli.problems import Problem, Unavailable
from logferry.ops.status.diagnosis import SLOW_COMMIT_S, Finding, lanes_named, many
from logferry.ops.status.render import clock, count, size, span, table_of
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.markup import escape

_TIMEOUT_S: Final = 10.0
_AT_ONCE: Final = 32
_SHOWN_STOPS: Final = 20
# By itself, once what is wrong is mended.
_GO_ON_BY_THEMSELVES: Final = ("refused", "source-deleted", "no-original")


class _Answer(BaseModel):
    # A newer worker may say more.
    model_config = ConfigDict(extra="ignore", frozen=True)


class Wait(_Answer):
    reason: str
    since_ms: int
    ended_ms: int | None
    is_fault: bool


class LinkStatus(_Answer):
    """Of one worker: of the partitions that are its own. Lags are None when nothing is known yet."""

    dc: str
    topics: int
    partitions: int
    stopped: int
    lag_records: int
    lag_bytes: int | None
    lag_s: float | None
    bytes_per_s: float | None
    last_wait: Wait | None


class MirrorLaneStatus(_Answer):
    lane: int
    state: str
    why: str
    since_ms: int
    error: str | None


class Stop(_Answer):
    kind: str
    detail: str
    since_ms: int
    what_to_do: str


class PartitionStatus(_Answer):
    topic: str
    partition: int
    dc: str
    stop: Stop | None = None


class MirrorStatus(_Answer):
    dc: str
    now_ms: int
    url: str
    workers: list[str]
    lanes_total: int
    lanes: list[MirrorLaneStatus]
    links: list[LinkStatus]
    partitions: list[PartitionStatus]


@dataclass(frozen=True)
class Mirror:
    """Its workers by URL: those that answered, at least one, and why the others did not."""

    workers: Mapping[str, MirrorStatus]
    silent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """All workers' part of it. ``lag_s``: of the partition furthest behind; ``wait``: with its worker's clock."""

    dc: str
    topics: int
    partitions: int
    stopped: int
    lag_records: int
    lag_bytes: int | None
    lag_s: float | None
    wait: tuple[Wait, int] | None


def look(urls: Iterable[str]) -> Mirror:
    """Asks the given workers and those that they know of. Raises Unavailable when none answers."""
    workers, silent, asked = dict[str, MirrorStatus](), dict[str, str](), set[str]()
    asking = [Gateway(url, timeout_s=_TIMEOUT_S) for url in urls]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        while asking:
            for worker, answer in zip(asking, threads.map(_ask, asking), strict=True):
                asked.add(worker.url)
                if isinstance(answer, MirrorStatus):
                    asked.add(answer.url)
                    workers[answer.url] = answer
                else:
                    silent[worker.url] = str(answer)
            news = {url for status in workers.values() for url in status.workers} - asked
            asking = [Gateway(url, timeout_s=_TIMEOUT_S) for url in sorted(news)]
    if not workers:
        raise Unavailable("; ".join(silent.values()))
    return Mirror(workers, silent)


def _ask(worker: Gateway) -> MirrorStatus | Problem:
    try:
        return MirrorStatus.model_validate(worker.ask("GET", "/v1/status"))
    except ValidationError:
        return Unavailable(f"what answers at {worker.url} is no worker of a mirror of a version that is known here")
    except Unavailable as problem:
        return Unavailable(str(problem).replace("no gateway answers", "no worker of a mirror answers").split(";")[0])
    except Problem as problem:
        return problem


# ---- decisions --------------------------------------------------------------------------------------------------


def links_of(mirror: Mirror) -> list[Link]:
    parts: dict[str, list[tuple[LinkStatus, MirrorStatus]]] = {}
    for worker in mirror.workers.values():
        for link in worker.links:
            parts.setdefault(link.dc, []).append((link, worker))
    return [_together(dc, found) for dc, found in sorted(parts.items())]


def _together(dc: str, parts: list[tuple[LinkStatus, MirrorStatus]]) -> Link:
    links = [link for link, _ in parts]
    sizes = [link.lag_bytes for link in links]
    ages = [link.lag_s for link in links if link.lag_s is not None]
    waits = [(link.last_wait, worker.now_ms) for link, worker in parts if link.last_wait is not None]
    return Link(
        dc=dc,
        topics=max(link.topics for link in links),
        partitions=sum(link.partitions for link in links),
        stopped=sum(link.stopped for link in links),
        lag_records=sum(link.lag_records for link in links),
        lag_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        lag_s=max(ages, default=None),
        wait=max(waits, key=lambda found: (found[0].ended_ms is None, found[0].since_ms), default=None),
    )


def judge(mirror: Mirror) -> list[Finding]:
    """Everything worth saying, worst first; nothing wrong among it: all is well. Pure."""
    found = [*_silent(mirror), *_lanes(mirror), *_waits(mirror), *_stops(mirror)]
    return [finding for finding in found if finding.wrong] + [finding for finding in found if not finding.wrong]


def _silent(mirror: Mirror) -> Iterator[Finding]:
    for url, reason in sorted(mirror.silent.items()):
        yield Finding(True, f"worker {url} does not answer", reason)


def _lanes(mirror: Mirror) -> Iterator[Finding]:
    held: dict[int, tuple[MirrorStatus, MirrorLaneStatus]] = {}
    for worker in mirror.workers.values():
        for lane in worker.lanes:
            if lane.lane not in held or lane.state == "serving":
                held[lane.lane] = (worker, lane)
    nobody = [n for n in range(max(w.lanes_total for w in mirror.workers.values())) if n not in held]
    if nobody:
        yield Finding(True, f"{lanes_named(nobody)} served by nobody", "no worker that answers has it")
    for number, (worker, lane) in sorted(held.items()):
        if lane.state != "serving":
            reason = lane.error or lane.why
            yield Finding(True, f"lane {number} is {lane.state}", reason, _s(worker.now_ms - lane.since_ms))


def _waits(mirror: Mirror) -> Iterator[Finding]:
    for link in links_of(mirror):
        if link.wait is None:
            continue
        wait, now_ms = link.wait
        for_s = _s(now_ms - wait.since_ms)
        if wait.ended_ms is None and wait.is_fault:
            yield Finding(True, f"the link to {link.dc} waits", wait.reason, for_s)
        elif wait.ended_ms is None and for_s >= SLOW_COMMIT_S:
            yield Finding(False, f"the link to {link.dc} waits", wait.reason, for_s)


def _stops(mirror: Mirror) -> Iterator[Finding]:
    stopped = [(worker, p, p.stop) for worker in mirror.workers.values() for p in worker.partitions if p.stop]
    stopped.sort(key=lambda found: (found[1].topic, found[1].partition))
    for worker, partition, stop in stopped[:_SHOWN_STOPS]:
        way = stop.what_to_do
        if stop.kind not in _GO_ON_BY_THEMSELVES:
            way += f" (logferry mirror resume {partition.topic} {partition.partition} --url {worker.url} --from …)"
        what = f"{partition.topic}-{partition.partition} of {partition.dc} stands still: {stop.kind}"
        yield Finding(True, what, f"{stop.detail}; {way}", _s(worker.now_ms - stop.since_ms))
    if len(stopped) > _SHOWN_STOPS:
        yield Finding(True, f"{many(len(stopped) - _SHOWN_STOPS, 'more partition')} stopped", "all with --json")


def _s(span_ms: int) -> float:
    return max(0, span_ms) / 1000


# ---- shown ------------------------------------------------------------------------------------------------------


def as_dict(mirror: Mirror, findings: Iterable[Finding], at_s: float) -> dict[str, Any]:
    found = list(findings)
    workers: dict[str, Any] = {url: status.model_dump() for url, status in mirror.workers.items()}
    return {
        "at_ms": int(at_s * 1000),
        "well": not any(finding.wrong for finding in found),
        "findings": [finding.as_dict() for finding in found],
        "workers": workers | {url: {"error": reason} for url, reason in mirror.silent.items()},
    }


def show_tables(mirror: Mirror, console: Console) -> None:
    links = table_of("link", "topics", "partitions", "stopped", "lag", "bytes", "age", "last wait")
    for link in links_of(mirror):
        links.add_row(
            escape(link.dc),
            count(link.topics),
            count(link.partitions),
            count(link.stopped) if not link.stopped else f"[red]{count(link.stopped)}[/]",
            f"{count(link.lag_records)} records",
            "not known yet" if link.lag_bytes is None else f"about {size(link.lag_bytes)}",
            "not known yet" if link.lag_s is None else span(link.lag_s),
            escape(_waited(link)),
        )
    console.print(links)
    workers = table_of("worker", "lanes")
    for url, worker in sorted(mirror.workers.items()):
        lanes = sum(lane.state == "serving" for lane in worker.lanes)
        workers.add_row(escape(url), f"{lanes} of {worker.lanes_total} serve here")
    for url in sorted(mirror.silent):
        workers.add_row(escape(url), "", style="red")
    console.print(workers)


def _waited(link: Link) -> str:
    if link.wait is None:
        return "never"
    wait, now_ms = link.wait
    if wait.ended_ms is None:
        return f"now, for {span(_s(now_ms - wait.since_ms))}: {wait.reason}"
    at = clock(time.time() - _s(now_ms - wait.since_ms))
    return f"at {at}, for {span(_s(wait.ended_ms - wait.since_ms))}: {wait.reason}"
