"""What the status of a mirror and that of deliver share: lanes of workers, stops, and the frame of the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from logferry.gateway.api.diagnosis import AllWorkers, Diagnosis, lane_holders, name_lanes, plural
from logferry.loaders.terminal import escape
from logferry.ops.status.render import table_of
from pydantic import BaseModel
from rich.console import Console

SHOWN: Final = 20


# A newer worker may send more fields: pydantic ignores them.
class ServiceLane(BaseModel):
    lane: int
    state: str
    why: str
    since_ms: int
    error: str | None


def lane_findings(service: AllWorkers[Any]) -> Iterator[Diagnosis]:
    """Lanes that no worker that answers has, and those that do not serve."""
    held = lane_holders(service)
    nobody = [n for n in range(max(w.lanes_total for w in service.workers.values())) if n not in held]
    if nobody:
        yield Diagnosis(True, f"{name_lanes(nobody)} served by nobody", "no worker that answers has it")
    for number, (worker, lane) in sorted(held.items()):
        if lane.state != "serving":
            reason = lane.error or lane.why
            yield Diagnosis(True, f"lane {number} is {lane.state}", reason, seconds(worker.now_ms - lane.since_ms))


def stop_findings(stops: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """The first of them, and how many more there are."""
    yield from stops[:SHOWN]
    if len(stops) > SHOWN:
        yield Diagnosis(True, f"{plural(len(stops) - SHOWN, 'more partition')} stopped", "--json lists all")


def seconds(span_ms: int) -> float:
    """Of a span by a worker's own clock."""
    return max(0, span_ms) / 1000


def print_workers(service: AllWorkers[Any], console: Console) -> None:
    table = table_of("worker", "lanes")
    for url, worker in sorted(service.workers.items()):
        lanes = sum(lane.state == "serving" for lane in worker.lanes)
        table.add_row(escape(url), f"{lanes} of {worker.lanes_total} serve here")
    for url in sorted(service.silent):
        table.add_row(escape(url), "", style="red")
    console.print(table)
