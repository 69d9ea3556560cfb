"""Limits over all workers, by a model: workers with seeded demand, that come and go, and reports that are lost or late."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.http.shared_limits import INTERVAL_S, SILENT_S, Report, SharedLimit, SharedLimits, Usage, fair_part

LIMIT = 1000.0
_STEP_S = 0.02
_REQUEST = LIMIT / 100
# What the workers may take above the limit for each change of demand or workers, in seconds of the limit.
BURST_S = 6.0

Demand = Callable[[float], float]


@dataclass(eq=False)
class Worker:
    """``demand``: what its callers send at a time, as a part of the limit; they retry what is refused at once."""

    name: str
    limits: SharedLimits
    limit: SharedLimit
    demand: Demand
    next_report_s: float
    owed: float = 0.0
    seen: set[str] = field(default_factory=set)


class Model:
    """``lost``: the part of the reports that do not arrive; each of the others takes up to ``late_s``."""

    def __init__(self, seed: int, lost: float = 0.0, late_s: float = 0.2) -> None:
        self.random, self.lost, self.late_s, self.now_s = random.Random(seed), lost, late_s, 1000.0
        self.workers: list[Worker] = []
        self.under_way: list[tuple[float, Worker, str, Report]] = []
        self.members: list[tuple[float, frozenset[str]]] = []
        self.taken: list[tuple[float, str, float]] = []

    def add(self, name: str, demand: Demand) -> Worker:
        limits = SharedLimits(lambda: self.now_s)
        worker = Worker(name, limits, None, demand, self.now_s)  # type: ignore[arg-type]
        self.workers.append(worker)
        self._changed(2.0)
        limits.report(self.known() - {name})
        worker.limit = limits.make("token", "a", "bytes", LIMIT)
        worker.next_report_s += self.random.random() * INTERVAL_S
        return worker

    def kill(self, worker: Worker) -> None:
        """The others learn of it when Kafka's group does."""
        self.workers.remove(worker)
        self._changed(6.0)

    def _changed(self, after_s: float) -> None:
        due_s = self.now_s if not self.members else self.now_s + after_s
        self.members.append((due_s, frozenset(worker.name for worker in self.workers)))

    def known(self) -> Collection[str]:
        return [names for due_s, names in self.members if due_s <= self.now_s][-1] | {self.workers[-1].name}

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / _STEP_S)):
            self.now_s += _STEP_S
            self._deliver()
            for worker in self.workers:
                if self.now_s >= worker.next_report_s:
                    worker.next_report_s += INTERVAL_S
                    self._publish(worker)
                self._ask(worker)

    def _publish(self, worker: Worker) -> None:
        names = [names for due_s, names in self.members if due_s <= self.now_s][-1]
        report = Report.decode(worker.limits.report(names - {worker.name}).encode())
        for other in self.workers:
            if other is not worker and self.random.random() >= self.lost:
                due_s = self.now_s + self.random.random() * self.late_s
                self.under_way.append((due_s, other, worker.name, report))

    def _deliver(self) -> None:
        due = [one for one in self.under_way if one[0] <= self.now_s]
        self.under_way = [one for one in self.under_way if one[0] > self.now_s]
        for _due_s, worker, name, report in due:
            worker.limits.hear(name, report)

    def _ask(self, worker: Worker) -> None:
        wanted = worker.demand(self.now_s) * LIMIT
        worker.owed = min(worker.owed + wanted * _STEP_S, max(wanted, _REQUEST)) if wanted else 0.0
        while worker.owed >= _REQUEST and worker.limit.wait_s(self.now_s) == 0:
            worker.owed -= _REQUEST
            worker.limit.take(_REQUEST)
            self.taken.append((self.now_s, worker.name, _REQUEST))

    def rate(self, seconds: float, name: str | None = None) -> float:
        """What was taken in the last seconds, as a part of the limit."""
        amounts = (n for at_s, who, n in self.taken if at_s > self.now_s - seconds and name in (None, who))
        return sum(amounts) / seconds / LIMIT

    def most_above(self, slack: float) -> float:
        """The most that any period took above ``slack`` times the limit, in seconds of the limit."""
        worst = level = 0.0
        before_s = self.taken[0][0] if self.taken else 0.0
        for at_s, _, amount in self.taken:
            level = max(0.0, level - (at_s - before_s) * LIMIT * slack) + amount
            before_s, worst = at_s, max(worst, level)
        return worst / LIMIT


def steady(part: float) -> Demand:
    return lambda _: part


NETWORKS = [(0.0, 0.2), (0.1, 0.5), (0.3, 1.5)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("lost", "late_s"), NETWORKS)
@pytest.mark.parametrize(
    "parts", [(9, 9), (0, 9), (0.3, 9), (0.2, 0.2, 0.9), (9,) * 4, (0, 0, 0, 9), (0.1,) * 7 + (9,), (0,) * 15 + (9,)]
)
def test_a_steady_demand_gets_the_limit_and_no_more(
    parts: tuple[float, ...], lost: float, late_s: float, seed: int
) -> None:
    model = Model(seed, lost, late_s)
    for number, part in enumerate(parts):
        model.add(str(number), steady(part))
    model.run(15)
    for _ in range(3):
        model.run(10)
        rate = model.rate(10)
        assert rate <= 1.1
        assert rate >= 0.9 * min(1.0, sum(parts)), rate
        # Who wants less than an equal part has it.
        for number, part in enumerate(parts):
            if part <= 1 / len(parts):
                assert model.rate(10, str(number)) >= 0.9 * part
    assert model.most_above(1.0) <= BURST_S


if __name__ == "__main__":
    for parts in [(9, 9), (0, 9), (0.3, 9), (0.2, 0.2, 0.9), (9,) * 4, (0, 0, 0, 9), (0.1,) * 7 + (9,), (0,) * 15 + (9,)]:
        for lost, late in NETWORKS:
            m = Model(1, lost, late)
            for i, p in enumerate(parts):
                m.add(str(i), steady(p))
            m.run(15)
            out = []
            for _ in range(3):
                m.run(10)
                out.append(round(m.rate(10), 3))
            print(parts[:3], len(parts), lost, out, "above", round(m.most_above(1.0), 2), [round(m.rate(10, str(i)), 2) for i in range(len(parts))][:8])
