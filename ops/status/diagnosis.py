"""From what the workers say to what is wrong, worst first. Pure.

*Wrong* is what somebody has to look at now; a *note* is worth knowing and passes, or is already over. What several
workers or lanes say with the same reason is said once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from logferry.gateway.api.schemas import LaneStatus, Status

SLOW_COMMIT_S: Final = 5.0
UNSEEN_S: Final = 15.0
FULL: Final = 0.95
RECENT_S: Final = 600.0
THROTTLED_S: Final = 60.0
STARTED_S: Final = 300.0
LONG_WAIT_MS: Final = 1000


@dataclass(frozen=True)
class Silent:
    """A worker that did not say anything, and why. ``wrong``: that it did not is what is wrong."""

    reason: str
    wrong: bool = True


@dataclass(frozen=True)
class Service:
    """All workers by URL: those that answered, at least one, and the others."""

    workers: Mapping[str, Status]
    silent: Mapping[str, Silent] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """``for_s``: how long it is so, or has been over; None: not known."""

    wrong: bool
    what: str
    reason: str
    for_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"wrong": self.wrong, "what": self.what, "reason": self.reason, "for_s": self.for_s}


def judge(service: Service) -> list[Finding]:
    """Everything worth saying; nothing wrong among it: all is well."""
    found = [
        *_workers_silent(service),
        *_kafka(service),
        *_lanes(service),
        *_group(service),
        *_limits(service),
        *_passing(service),
    ]
    return [finding for finding in found if finding.wrong] + [finding for finding in found if not finding.wrong]


def serving(service: Service) -> dict[int, tuple[Status, LaneStatus]]:
    """Each lane that somebody has, with its worker; if several do, with the one that serves it."""
    found: dict[int, tuple[Status, LaneStatus]] = {}
    for worker in service.workers.values():
        for lane in worker.lanes:
            if lane.lane not in found or lane.state == "serving":
                found[lane.lane] = (worker, lane)
    return found


# ---- what is looked at ------------------------------------------------------------------------------------------


def _workers_silent(service: Service) -> Iterator[Finding]:
    for url, silent in sorted(service.silent.items()):
        yield Finding(silent.wrong, f"worker {url} does not answer", silent.reason)


def _kafka(service: Service) -> Iterator[Finding]:
    away, brokers = _Said(), _Said()
    for url, worker in service.workers.items():
        kafka = worker.kafka
        broken = [broker for broker in kafka.brokers if broker.error is not None]
        if not kafka.reachable:
            reason = "; ".join(f"{b.host}:{b.port}: {b.error}" for b in broken) or kafka.error or "no broker is known"
            away.add(url, reason, _since(worker, kafka.answered_ms))
            continue
        for broker in broken:
            brokers.add(f"{broker.id} ({broker.host}:{broker.port})", broker.error or "", None)
        if kafka.partitions is None:
            away.add(url, kafka.error or "", None)
    for urls, reason, for_s in away:
        whom = "" if len(urls) == len(service.workers) else f" {', '.join(urls)}"
        yield Finding(True, f"Kafka does not answer{whom}", reason, for_s)
    for names, reason, for_s in brokers:
        yield Finding(True, f"Kafka's broker {', '.join(names)} does not answer", reason, for_s)
    seen = [worker.kafka.partitions for worker in service.workers.values() if worker.kafka.partitions is not None]
    if seen:
        worst = max(seen, key=lambda partitions: (partitions.without_leader, partitions.under_replicated))
        some = ", ".join(worst.examples)
        if worst.without_leader:
            yield Finding(True, f"{many(worst.without_leader, 'partition')} of Kafka without a leader", some)
        if worst.under_replicated:
            yield Finding(False, f"{many(worst.under_replicated, 'partition')} of Kafka lack replicas in sync", some)


def _lanes(service: Service) -> Iterator[Finding]:
    held = serving(service)
    said: dict[str, _Said] = {}
    for number in range(max(worker.lanes_total for worker in service.workers.values())):
        if number in held:
            what, reason, for_s = _held_lane(*held[number])
        else:
            what, reason, for_s = "served by nobody", _why_nobody(service, number), None
        if what:
            said.setdefault(what, _Said()).add(number, reason, for_s)
    for what, reasons in said.items():
        for numbers, reason, for_s in reasons:
            verb = "is" if len(numbers) == 1 else "are"
            yield Finding(True, f"{lanes_named(numbers)} {verb} {what}", reason, for_s)


def _held_lane(worker: Status, lane: LaneStatus) -> tuple[str, str, float | None]:
    """What is wrong with it (nothing: the empty text), why, and for how long."""
    if lane.state == "serving":
        for_s = _since(worker, lane.transaction_ms)
        if for_s is None or for_s < SLOW_COMMIT_S:
            return "", "", None
        return "waiting for a commit", "Kafka has not answered it yet", for_s
    # Since when it does not serve, which may be longer than its present state.
    wait = lane.last_wait
    since_ms = lane.since_ms if wait is None or wait.ended_ms is not None else wait.began_ms
    of_this_wait = lane.last_error is not None and (lane.last_error_ms or 0) >= since_ms
    return lane.state, str(lane.last_error) if of_this_wait else lane.why, _since(worker, since_ms)


def _why_nobody(service: Service, number: int) -> str:
    owners = [worker.group.owners.get(str(number)) for worker in service.workers.values()]
    named = sorted({owner for owner in owners if owner is not None})
    if not named:
        return "the group has given it to no worker yet"
    verb = "which does not answer" if all(owner in service.silent for owner in named) else "which does not have it yet"
    return f"the group gave it to {', '.join(named)}, {verb}"


def _group(service: Service) -> Iterator[Finding]:
    said = _Said()
    for url, worker in service.workers.items():
        if worker.kafka.reachable:
            for_s = _since(worker, worker.group.seen_ms or worker.started_ms)
            if for_s is not None and for_s > UNSEEN_S:
                said.add(url, worker.group.error or "the group is changing all the time", for_s)
    for urls, reason, for_s in said:
        yield Finding(True, f"worker {', '.join(urls)} does not see the other workers", reason, for_s)


def _limits(service: Service) -> Iterator[Finding]:
    for url, worker in service.workers.items():
        for name, usage in worker.limits.items():
            if usage.used > 0 and usage.used >= FULL * usage.limit:
                what = f"worker {url} is at its limit of {name}"
                yield Finding(True, what, f"{usage.used:,} of {usage.limit:,}")


def _passing(service: Service) -> Iterator[Finding]:
    """What is over, or is no fault."""
    mended = _Said()
    for worker, lane in serving(service).values():
        wait = lane.last_wait
        if lane.state == "serving" and wait is not None and wait.ended_ms is not None:
            over_s = _since(worker, wait.ended_ms) or 0.0
            failed = lane.last_error is not None and (lane.last_error_ms or 0) >= wait.began_ms
            if over_s < RECENT_S and (failed or wait.ended_ms - wait.began_ms >= LONG_WAIT_MS):
                mended.add(lane.lane, str(lane.last_error) if failed else wait.reason, over_s)
    for numbers, reason, for_s in mended:
        yield Finding(False, f"{lanes_named(numbers)} had to wait, and can go on again", reason, for_s)
    for url, worker in service.workers.items():
        for throttled in worker.throttled:
            ago_s = _since(worker, throttled.last_ms)
            if ago_s is not None and ago_s < THROTTLED_S:
                what = f"the {throttled.scope} {throttled.name} is over its quota"
                yield Finding(False, what, f"{url} refused {throttled.count:,} writes; the last {ago_s:.0f} s ago")
    young = {url: (worker.now_ms - worker.started_ms) / 1000 for url, worker in service.workers.items()}
    if texts := [f"{url} {up_s:.0f} s ago" for url, up_s in young.items() if up_s < STARTED_S]:
        reason = f"{', '.join(texts)}; if nobody did that, the log says why it ended before"
        yield Finding(False, f"{many(len(texts), 'worker')} started a short time ago", reason)
    versions = sorted({worker.version for worker in service.workers.values()})
    if len(versions) > 1:
        yield Finding(False, "the workers have different versions", ", ".join(versions))


# ---- words ------------------------------------------------------------------------------------------------------


class _Said:
    """Who says the same, and the longest time for which it is so."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[list[Any], float | None]] = {}

    def add(self, who: Any, reason: str, for_s: float | None) -> None:
        whose, longest_s = self._of.get(reason, ([], None))
        if who not in whose:
            whose.append(who)
        times = [time for time in (longest_s, for_s) if time is not None]
        self._of[reason] = (whose, max(times, default=None))

    def __iter__(self) -> Iterator[tuple[list[Any], str, float | None]]:
        for reason, (whose, for_s) in self._of.items():
            yield whose, reason, for_s


def _since(worker: Status, at_ms: int | None) -> float | None:
    """By the worker's own clock, so that ours may be wrong."""
    return None if at_ms is None else max(0, worker.now_ms - at_ms) / 1000


def many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def lanes_named(numbers: Iterable[int]) -> str:
    """``lane 3``, ``lanes 0 to 3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return ("lane " if single else "lanes ") + ", ".join(texts)
