"""Finds problems in the status documents of the workers, worst first. Pure.

A *wrong* finding needs an operator now. A *note* needs none: it passes by itself, or is over. Findings of several
workers or lanes with the same reason are merged into one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Final, Generic, TypeVar

from logferry.gateway.api.status_schemas import LaneStatus, Status
from pydantic import BaseModel

SLOW_S: Final = 5.0
UNSEEN_S: Final = 15.0
FULL: Final = 0.95
RECENT_S: Final = 600.0
THROTTLED_S: Final = 60.0
STARTED_S: Final = 300.0
LONG_WAIT_MS: Final = 1000

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True)
class SilentWorker:
    """A worker without an answer, and the reason. ``wrong``: False if the command did not ask it."""

    reason: str
    wrong: bool = True


@dataclass(frozen=True)
class AllWorkers(Generic[S]):
    """All workers of a service by URL: those that answered (at least one), and the others."""

    workers: Mapping[str, S]
    silent: Mapping[str, SilentWorker] = field(default_factory=dict)


ServiceStatus = AllWorkers[Status]


@dataclass(frozen=True)
class Diagnosis:
    """One finding. ``for_s``: its duration, or the time since it was over; None: unknown."""

    wrong: bool
    what: str
    reason: str
    for_s: float | None = None


def diagnose(service: ServiceStatus) -> list[Diagnosis]:
    """All findings, the wrong ones first."""
    found = [*silent_workers(service.silent), *_kafka(service), *_lanes(service), *_refused(service), *_group(service)]
    found += [*_open_transactions(service), *_limits(service), *_passing(service)]
    found += warnings(text for worker in service.workers.values() for text in worker.warnings)
    return sorted(found, key=lambda finding: not finding.wrong)


def as_document(findings: Iterable[Diagnosis], at_s: float, service: AllWorkers[Any]) -> dict[str, Any]:
    """The document of ``--json``."""
    found = [asdict(finding) for finding in findings]
    well = not any(finding["wrong"] for finding in found)
    known = {url: status.model_dump() for url, status in service.workers.items()}
    away = {url: {"error": silent.reason} for url, silent in service.silent.items()}
    return {"at_ms": int(at_s * 1000), "well": well, "findings": found, "workers": known | away}


def lane_holders(service: AllWorkers[Any]) -> dict[int, tuple[Any, Any]]:
    """Each lane that some worker holds, with that worker; of several, the one that serves it."""
    found: dict[int, tuple[Any, Any]] = {}
    for worker in service.workers.values():
        for lane in worker.lanes:
            if lane.lane not in found or lane.state == "serving":
                found[lane.lane] = (worker, lane)
    return found


# ---- checks ------------------------------------------------------------------------------------------


def silent_workers(silent: Mapping[str, SilentWorker]) -> Iterator[Diagnosis]:
    for url, worker in sorted(silent.items()):
        yield Diagnosis(worker.wrong, f"worker {url} does not answer", worker.reason)


def _kafka(service: ServiceStatus) -> Iterator[Diagnosis]:
    away: list[_Found] = []
    brokers: list[_Found] = []
    for url, worker in service.workers.items():
        kafka = worker.kafka
        broken = [broker for broker in kafka.brokers if broker.error is not None]
        if not kafka.reachable:
            reason = "; ".join(f"{b.host}:{b.port}: {b.error}" for b in broken) or kafka.error or "no broker is known"
            away.append((url, reason, _since(worker, kafka.answered_ms)))
            continue
        for broker in broken:
            brokers.append((f"{broker.id} ({broker.host}:{broker.port})", broker.error or "", None))
        if kafka.partitions is None:
            away.append((url, kafka.error or "", None))
    for urls, reason, for_s in _merged(away):
        whom = "" if len(urls) == len(service.workers) else f" {', '.join(urls)}"
        yield Diagnosis(True, f"Kafka does not answer{whom}", reason, for_s)
    for names, reason, for_s in _merged(brokers):
        yield Diagnosis(True, f"Kafka's broker {', '.join(names)} does not answer", reason, for_s)
    seen = [worker.kafka.partitions for worker in service.workers.values() if worker.kafka.partitions is not None]
    if seen:
        worst = max(seen, key=lambda partitions: (partitions.without_leader, partitions.under_replicated))
        some = ", ".join(worst.examples)
        if worst.without_leader:
            yield Diagnosis(True, f"{plural(worst.without_leader, 'partition')} of Kafka without a leader", some)
        if worst.under_replicated:
            what = f"{plural(worst.under_replicated, 'partition')} of Kafka lack replicas in sync"
            yield Diagnosis(False, what, some)


def _lanes(service: ServiceStatus) -> Iterator[Diagnosis]:
    held = lane_holders(service)
    reasons_of: dict[str, list[_Found]] = {}
    for number in range(max(worker.lanes_total for worker in service.workers.values())):
        if number in held:
            what, reason, for_s = _held_lane(*held[number])
        else:
            what, reason, for_s = "served by nobody", _why_nobody(service, number), None
        if what:
            reasons_of.setdefault(what, []).append((number, reason, for_s))
    for what, reasons in reasons_of.items():
        for numbers, reason, for_s in _merged(reasons):
            verb = "is" if len(numbers) == 1 else "are"
            yield Diagnosis(True, f"{name_lanes(numbers)} {verb} {what}", reason, for_s)


def _refused(service: ServiceStatus) -> Iterator[Diagnosis]:
    found: list[_Found] = []
    for worker in service.workers.values():
        for refused in worker.refused:
            name = refused.topic if refused.partition is None else f"{refused.topic}-{refused.partition}"
            found.append((name, refused.why, _since(worker, refused.since_ms)))
    for names, why, for_s in _merged(found):
        yield Diagnosis(True, f"no writes to {', '.join(sorted(names))}", why, for_s)


def _open_transactions(service: ServiceStatus) -> Iterator[Diagnosis]:
    found: list[_Found] = []
    for worker in service.workers.values():
        for one in worker.open_transactions:
            name = f"{one.topic}-{one.partition} from offset {one.offset}"
            found.append((name, f"producer id {one.producer_id}", _since(worker, one.since_ms)))
    remedy = "find its program by kafka-transactions.sh list; if the list lacks it: runbook, Hanging transactions"
    for names, whose, for_s in _merged(found):
        what = f"an open transaction hides the records of {', '.join(sorted(names))}"
        yield Diagnosis(True, what, f"{whose}: {remedy}", for_s)


def warnings(texts: Iterable[str]) -> Iterator[Diagnosis]:
    """Each once. A text has the form ``what: remedy``."""
    for text in sorted(set(texts)):
        what, _, remedy = text.partition(": ")
        yield Diagnosis(False, what, remedy)


def _held_lane(worker: Status, lane: LaneStatus) -> tuple[str, str, float | None]:
    """Problem of a held lane (empty: none), reason, duration."""
    if lane.state == "serving":
        for_s = _since(worker, lane.transaction_ms)
        if for_s is None or for_s < SLOW_S:
            return "", "", None
        return "waiting for a commit", "Kafka has not answered it yet", for_s
    # The start of the wait: it may be earlier than that of the present state.
    wait = lane.last_wait
    since_ms = lane.since_ms if wait is None or wait.ended_ms is not None else wait.began_ms
    of_this_wait = lane.last_error is not None and (lane.last_error_ms or 0) >= since_ms
    return lane.state, str(lane.last_error) if of_this_wait else lane.why, _since(worker, since_ms)


def _why_nobody(service: ServiceStatus, number: int) -> str:
    owners = [worker.group.owners.get(str(number)) for worker in service.workers.values()]
    named = sorted({owner for owner in owners if owner is not None})
    if not named:
        return "the group has assigned it to no worker yet"
    verb = "which does not answer" if all(owner in service.silent for owner in named) else "which does not have it yet"
    return f"the group assigned it to {', '.join(named)}, {verb}"


def _group(service: ServiceStatus) -> Iterator[Diagnosis]:
    found: list[_Found] = []
    for url, worker in service.workers.items():
        if worker.kafka.reachable:
            for_s = _since(worker, worker.group.seen_ms or worker.started_ms)
            if for_s is not None and for_s > UNSEEN_S:
                found.append((url, worker.group.error or "the members of the group change all the time", for_s))
    for urls, reason, for_s in _merged(found):
        yield Diagnosis(True, f"worker {', '.join(urls)} does not see the other workers", reason, for_s)


def _limits(service: ServiceStatus) -> Iterator[Diagnosis]:
    for url, worker in service.workers.items():
        for name, usage in worker.limits.items():
            if usage.used > 0 and usage.used >= FULL * usage.limit:
                what = f"worker {url} is at its limit of {name}"
                yield Diagnosis(True, what, f"{usage.used:,} of {usage.limit:,}")


def _passing(service: ServiceStatus) -> Iterator[Diagnosis]:
    """Notes: problems that are over, and facts that are no fault."""
    recovered: list[_Found] = []
    for worker, lane in lane_holders(service).values():
        wait = lane.last_wait
        if lane.state == "serving" and wait is not None and wait.ended_ms is not None:
            over_s = _since(worker, wait.ended_ms) or 0.0
            failed = lane.last_error is not None and (lane.last_error_ms or 0) >= wait.began_ms
            if over_s < RECENT_S and (failed or wait.ended_ms - wait.began_ms >= LONG_WAIT_MS):
                recovered.append((lane.lane, str(lane.last_error) if failed else wait.reason, over_s))
    for numbers, reason, for_s in _merged(recovered):
        yield Diagnosis(False, f"{name_lanes(numbers)} had to wait, and can serve again", reason, for_s)
    for url, worker in service.workers.items():
        for throttled in worker.throttled:
            ago_s = _since(worker, throttled.last_ms)
            if ago_s is not None and ago_s < THROTTLED_S:
                what = f"the {throttled.scope} {throttled.name} is over its quota"
                yield Diagnosis(False, what, f"{url} refused {throttled.count:,} requests; the last {ago_s:.0f} s ago")
    young = {url: (worker.now_ms - worker.started_ms) / 1000 for url, worker in service.workers.items()}
    if texts := [f"{url} {up_s:.0f} s ago" for url, up_s in young.items() if up_s < STARTED_S]:
        reason = f"{', '.join(texts)}; if no operator restarted it, its log has the reason"
        yield Diagnosis(False, f"{plural(len(texts), 'worker')} started a short time ago", reason)
    versions = sorted({worker.version for worker in service.workers.values()})
    if len(versions) > 1:
        yield Diagnosis(False, "the workers have different versions", ", ".join(versions))


# ---- wording ------------------------------------------------------------------------------------------------------


# Who has a problem, why, and for how many seconds (None: unknown).
_Found = tuple[Any, str, float | None]


def _merged(found: Iterable[_Found]) -> Iterator[tuple[list[Any], str, float | None]]:
    """Merges the same reason of several workers or lanes; keeps the longest duration."""
    by_reason: dict[str, list[_Found]] = {}
    for one in found:
        by_reason.setdefault(one[1], []).append(one)
    for reason, same in by_reason.items():
        times = [for_s for *_, for_s in same if for_s is not None]
        yield list(dict.fromkeys(who for who, *_ in same)), reason, max(times, default=None)


def _since(worker: Status, at_ms: int | None) -> float | None:
    """Seconds since then by the worker's own clock, so that ours may be wrong."""
    return None if at_ms is None else max(0, worker.now_ms - at_ms) / 1000


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def name_lanes(numbers: Iterable[int]) -> str:
    """``lane 3``, ``lanes 0 to 3, 7``."""
    ordered = enumerate(sorted(numbers))
    runs = [[number for _, number in run] for _, run in groupby(ordered, lambda one: one[1] - one[0])]
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ("lane " if len(runs) == len(runs[0]) == 1 else "lanes ") + ", ".join(texts)
