"""The status on a terminal: findings with reason and duration; then the workers, Kafka and the lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from logferry.gateway.api.diagnosis import AllWorkers, Diagnosis, ServiceStatus, lane_holders
from logferry.gateway.api.status_schemas import LaneStatus, Status
from logferry.loaders.terminal import escape
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

_SHOWN_LANES: Final = 64
_STYLES: Final = {"serving": "green", "closed": "red", "closing": "yellow"}


def print_status(service: ServiceStatus, findings: Sequence[Diagnosis], at_s: float, console: Console) -> None:
    """``at_s``: Unix time of the query."""
    print_findings("", service, findings, at_s, console)
    console.print(_workers(service))
    for line in _kafka(service):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_lanes(service))


def print_findings(
    what: str, service: AllWorkers[Any], findings: Sequence[Diagnosis], at_s: float, console: Console
) -> None:
    """One line with the verdict, then the findings. ``what``: before the name of the data centre."""
    dcs = ", ".join(sorted({worker.dc for worker in service.workers.values()}))
    whose = f"{what} of {dcs}" if what else dcs
    wrong = sum(finding.wrong for finding in findings)
    verdict = f"{whose}: {wrong} problem{'s' if wrong > 1 else ''} found" if wrong else f"{whose}: no problem found"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    style = "bold red" if wrong else "bold green"
    console.print(f"[{style}]{escape(verdict)}[/]  [dim]at {stamp}[/]", highlight=False)
    for finding in findings:
        mark, style = ("✗", "bold red") if finding.wrong else ("·", "yellow")
        lasts = "" if finding.for_s is None else f"  for {span(finding.for_s)}, since {clock(at_s - finding.for_s)}"
        console.print(f"  [{style}]{mark} {escape(finding.what)}[/]{lasts}", highlight=False, soft_wrap=True)
        console.print(f"      {escape(finding.reason)}", highlight=False, soft_wrap=True)


def _workers(service: ServiceStatus) -> Table:
    table = table_of("worker", "version", "up", "lanes", "in flight", "connections", "sessions", "Kafka")
    for url, worker in sorted(service.workers.items()):
        lanes = sum(lane.state == "serving" for lane in worker.lanes)
        kafka = "[green]answers[/]" if worker.kafka.reachable else "[red]does not answer[/]"
        table.add_row(
            escape(url),
            escape(worker.version),
            span((worker.now_ms - worker.started_ms) / 1000),
            f"{lanes} serve" + (f", {len(worker.lanes) - lanes} not" if len(worker.lanes) > lanes else ""),
            _used(worker, "process_bytes", decimal),
            _used(worker, "connections", count),
            _used(worker, "sessions", count),
            kafka,
        )
    for url, silent in sorted(service.silent.items()):
        table.add_row(escape(url), "", "", "", "", "", "", "", style="red" if silent.wrong else "dim")
    return table


def _kafka(service: ServiceStatus) -> Iterator[str]:
    for cluster in sorted({worker.kafka.cluster_id or "not known yet" for worker in service.workers.values()}):
        yield f"Kafka cluster {escape(cluster)}"
    brokers = {
        (broker.id, f"{broker.host}:{broker.port}", broker.error is None)
        for worker in service.workers.values()
        for broker in worker.kafka.brokers
    }
    texts = [f"{node} {escape(place)}" + ("" if answers else " [red]✗[/]") for node, place, answers in sorted(brokers)]
    yield f"brokers  {', '.join(texts) or 'none is known'}"


def _lanes(service: ServiceStatus) -> Table:
    held = lane_holders(service)
    total = max(worker.lanes_total for worker in service.workers.values())
    table = table_of("lane", "state", "for", "worker", "sources", "in flight", "last commit", "last wait")
    # Lanes that do not serve are shown whatever their number.
    numbers = sorted(range(total), key=lambda number: (number in held and held[number][1].state == "serving", number))
    for number in sorted(numbers[:_SHOWN_LANES]):
        if number in held:
            _lane(table, *held[number])
        else:
            table.add_row(str(number), "[red]nobody[/]", "", "", "", "", "", "")
    captions = [f"the source states of lane K are in partition {escape(lane.topic)}-K" for _, lane in held.values()][:1]
    if total > _SHOWN_LANES:
        captions.insert(0, f"and {total - _SHOWN_LANES:,} more; --json lists all")
    table.caption = "\n".join(captions)
    return table


def _lane(table: Table, worker: Status, lane: LaneStatus) -> None:
    def ago(at_ms: int | None) -> str:
        return "" if at_ms is None else span((worker.now_ms - at_ms) / 1000)

    wait, waited = lane.last_wait, ""
    if wait is not None:
        until_ms = worker.now_ms if wait.ended_ms is None else wait.ended_ms
        when = "now" if wait.ended_ms is None else f"{ago(wait.ended_ms)} ago"
        waited = f"{when}, {span((until_ms - wait.began_ms) / 1000)}: {wait.reason}"
    table.add_row(
        str(lane.lane),
        f"[{_STYLES.get(lane.state, 'red')}]{escape(lane.state)}[/]",
        ago(lane.since_ms),
        escape(worker.url),
        count(lane.sources),
        decimal(lane.in_flight_bytes),
        "" if lane.committed_ms is None else f"{ago(lane.committed_ms)} ago",
        escape(waited),
    )


def table_of(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for name in columns:
        right = name in ("up", "in flight", "connections", "sessions", "lane", "for", "sources", "last commit")
        is_text = name in ("last wait", "worker")
        table.add_column(name, justify="right" if right else "left", no_wrap=not is_text, overflow="fold")
    return table


def _used(worker: Status, name: str, text: Callable[[int], str]) -> str:
    usage = worker.limits.get(name)
    return "" if usage is None else f"{text(usage.used)} of {text(usage.limit)}"


def count(number: int) -> str:
    return f"{number:,}"


def span(seconds: float) -> str:
    """A duration for people: ``0.3 s``, ``42 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 2 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, unit, part in ((86_400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def clock(at_s: float) -> str:
    """The local time; with the date unless it is today's."""
    then, now = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)
