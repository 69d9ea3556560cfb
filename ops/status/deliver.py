"""``logferry status --deliver URL``: lag, last error and stops of each subscription of `logferry deliver`.

Problems come first, as for the gateway. For a stopped partition the way on is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from logferry.gateway.api.diagnosis import AllWorkers, Diagnosis, plural, silent_workers, warnings
from logferry.loaders.terminal import escape
from logferry.ops.status import service
from logferry.ops.status.render import count, print_findings, span, table_of
from pydantic import BaseModel
from rich.console import Console

# An error is written again every ten seconds while it lasts.
_LASTING_ATTEMPTS: Final = 2


# A newer worker may send more fields: pydantic ignores them.
class DeliverStop(BaseModel):
    kind: str
    detail: str
    at_ms: int
    what_to_do: str = ""


class DeliverError(BaseModel):
    detail: str
    at_ms: int
    attempts: int


class DeliverUnitStatus(BaseModel):
    """A partition of a subscription, or one of its shards. ``lag_records``: None until the end is known."""

    subscription: str
    topic: str
    partition: int
    shard: int
    position: int
    lag_records: int | None
    waits_for: str
    is_paused: bool = False
    stop: DeliverStop | None
    error: DeliverError | None

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}" + (f" shard {self.shard}" if self.shard else "")


class DeliverStatus(BaseModel):
    """``subscriptions``: all names; of an older worker: none. ``unreadable``: names, with the reason."""

    dc: str
    now_ms: int
    url: str
    workers: list[str]
    lanes_total: int
    lanes: list[service.ServiceLane]
    units: list[DeliverUnitStatus]
    subscriptions: list[str] = []
    unreadable: dict[str, str] = {}
    warnings: list[str] = []


Delivery = AllWorkers[DeliverStatus]


@dataclass
class SubscriptionLag:
    """All partitions of a subscription, from all workers that answered; each with the worker's time in ms."""

    units: list[tuple[DeliverUnitStatus, int]] = field(default_factory=list)

    @property
    def lag_records(self) -> int | None:
        lags = [unit.lag_records for unit, _ in self.units]
        return None if None in lags else sum(lag for lag in lags if lag is not None)

    @property
    def last_error(self) -> tuple[DeliverUnitStatus, DeliverError, float] | None:
        """The newest one that still holds, and its age in seconds."""
        held = [
            (unit, unit.error, service.seconds(now_ms - unit.error.at_ms)) for unit, now_ms in self.units if unit.error
        ]
        return min(held, key=lambda one: one[2], default=None)


# ---- decisions --------------------------------------------------------------------------------------------------


def subscriptions_of(delivery: Delivery) -> dict[str, SubscriptionLag]:
    """By name; those that deliver no partition, too."""
    names = {name for worker in delivery.workers.values() for name in worker.subscriptions}
    found = {name: SubscriptionLag() for name in names}
    for worker in delivery.workers.values():
        for unit in worker.units:
            found.setdefault(unit.subscription, SubscriptionLag()).units.append((unit, worker.now_ms))
    return dict(sorted(found.items()))


def diagnose_delivery(delivery: Delivery) -> list[Diagnosis]:
    """All findings, the wrong ones first. Reads no clock."""
    found = [
        *silent_workers(delivery.silent),
        *service.lane_findings(delivery),
        *_unreadable(delivery),
        *service.stop_findings([*_stops(delivery)]),
    ]
    found += [*_errors(delivery), *_idle(delivery)]
    found += warnings(text for worker in delivery.workers.values() for text in worker.warnings)
    return sorted(found, key=lambda finding: not finding.wrong)


def _unreadable(delivery: Delivery) -> Iterator[Diagnosis]:
    unreadable = {name: why for worker in delivery.workers.values() for name, why in worker.unreadable.items()}
    for name, why in sorted(unreadable.items())[: service.SHOWN]:
        yield Diagnosis(True, f"the subscription {name} cannot be read", f"{why}; make it again: PUT {_path(name)}")


def _stops(delivery: Delivery) -> Iterator[Diagnosis]:
    stopped = [
        (name, unit, unit.stop, now_ms)
        for name, one in subscriptions_of(delivery).items()
        for unit, now_ms in one.units
        if unit.stop is not None
    ]
    for name, unit, stop, now_ms in stopped:
        remedy = f"{stop.what_to_do} (POST {_path(name)}/resume or /replay at a gateway)"
        what = f"{name}: {unit.name} stopped: {stop.kind}"
        yield Diagnosis(True, what, f"{stop.detail}; {remedy}", service.seconds(now_ms - stop.at_ms))


def _errors(delivery: Delivery) -> Iterator[Diagnosis]:
    """A receiver that was away for a moment is a note; one that stays away is not."""
    for name, one in subscriptions_of(delivery).items():
        failing = [unit for unit, _ in one.units if unit.error is not None and unit.stop is None]
        last = one.last_error
        if failing and last is not None:
            lasts = any(unit.error is not None and unit.error.attempts >= _LASTING_ATTEMPTS for unit in failing)
            what = f"{name}: the receiver does not take {plural(len(failing), 'partition')}"
            yield Diagnosis(lasts, what, f"{last[0].name}: {last[1].detail}; it is retried until the receiver takes it")


def _idle(delivery: Delivery) -> Iterator[Diagnosis]:
    found = subscriptions_of(delivery)
    idle = [name for name, one in found.items() if not one.units]
    if idle and not delivery.silent:
        reason = "no topic that is here fits its topics, or its partitions are being opened"
        yield Diagnosis(False, f"nothing is delivered to {', '.join(idle[: service.SHOWN])}", reason)
    paused = [name for name, one in found.items() if any(unit.is_paused for unit, _ in one.units)]
    if paused:
        reason = f"continue with POST {_path('NAME')}/resume at a gateway"
        yield Diagnosis(False, f"paused: {', '.join(paused[: service.SHOWN])}", reason)


def _path(name: str) -> str:
    return f"/v1/subscriptions/{name}"


# ---- output ------------------------------------------------------------------------------------------------------


def print_delivery(delivery: Delivery, findings: Sequence[Diagnosis], at_s: float, console: Console) -> None:
    print_findings("the delivery", delivery, findings, at_s, console)
    table = table_of("subscription", "partitions", "stopped", "lag", "last error")
    for name, one in subscriptions_of(delivery).items():
        stopped, lag, error = sum(unit.stop is not None for unit, _ in one.units), one.lag_records, one.last_error
        table.add_row(
            escape(name),
            count(len(one.units)),
            count(stopped) if not stopped else f"[red]{count(stopped)}[/]",
            "not known yet" if lag is None else f"{count(lag)} records",
            "" if error is None else escape(f"{span(error[2])} ago: {error[1].detail}"),
        )
    console.print(table)
    service.print_workers(delivery, console)
