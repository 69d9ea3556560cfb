"""Limits over all workers, by a model: workers with seeded demand that come and go; reports that are lost or late."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.http import shared_limits
from logferry.gateway.http.shared_limits import SILENT_S, QuotaReport, SharedLimits
from logferry.gateway.http.shares import INTERVAL_S, LimitUsage, Share, SharedCount, SharedLimit, fair_part

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
    request: float = _REQUEST
    count: SharedCount | None = None
    asks_s: float = 0.0


class Model:
    """``lost``: the part of the reports that do not arrive; each of the others takes up to ``late_s``."""

    def __init__(self, seed: int, lost: float = 0.0, late_s: float = 0.2) -> None:
        self.random, self.lost, self.late_s, self.now_s = random.Random(seed), lost, late_s, 1000.0
        self.workers: list[Worker] = []
        self.under_way: list[tuple[float, Worker, str, QuotaReport]] = []
        self.members: list[tuple[float, frozenset[str]]] = []
        self.taken: list[tuple[float, str, float]] = []

    def add(self, name: str, demand: Demand) -> Worker:
        limits = SharedLimits(lambda: self.now_s)
        worker = Worker(name, limits, None, demand, self.now_s)  # type: ignore[arg-type]
        self.workers.append(worker)
        # A worker has lanes only after the group told the others, who look once in an interval.
        self._changed(INTERVAL_S)
        limits.report({other.name for other in self.workers} - {name})
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
        report = QuotaReport.decode(worker.limits.report(names - {worker.name}).encode())
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
        request = worker.request
        worker.owed = min(worker.owed + wanted * _STEP_S, max(wanted, request)) if wanted else 0.0
        while worker.owed >= request and worker.limit.wait_s(self.now_s) == 0:
            worker.owed -= request
            worker.limit.take(request)
            self.taken.append((self.now_s, worker.name, request))

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


class Connections(Model):
    """Connections in place of a rate: ``demand`` is how many the callers of a worker try to have, as a part of the
    limit, again and again; where it falls, they close the rest at once."""

    def __init__(self, seed: int, limit: int, lost: float = 0.0, late_s: float = 0.2) -> None:
        super().__init__(seed, lost, late_s)
        self.number, self.open_most = limit, 0
        self.above_since_s, self.above_most_s = self.now_s, 0.0

    def _ask(self, worker: Worker) -> None:
        wanted, count = int(worker.demand(self.now_s) * self.number), worker.count
        if count is None or not count.open:
            if not wanted:
                return
            count = worker.count = worker.limits.count("a", self.number)
        while count.is_too_many():
            count.open -= 1
        while count.open < wanted and count.enter(self.now_s):
            pass
        if count.open > wanted:
            count.open = wanted
            worker.limits.drop_unused(count)
        self.open_most = max(self.open_most, self.open)
        above = self.open > self.number + len(self.workers)
        self.above_since_s = self.above_since_s if above else self.now_s
        self.above_most_s = max(self.above_most_s, self.now_s - self.above_since_s)

    @property
    def open(self) -> int:
        return sum(worker.count.open for worker in self.workers if worker.count is not None)


class Patient(Model):
    """At each worker with a demand one client, which always has a request, and waits as long as `Retry-After` says."""

    def _ask(self, worker: Worker) -> None:
        if not worker.demand(self.now_s) or self.now_s < worker.asks_s:
            return
        if wait_s := worker.limit.wait_s(self.now_s):
            worker.asks_s = self.now_s + math.ceil(wait_s)
            return
        worker.limit.take(worker.request)
        self.taken.append((self.now_s, worker.name, worker.request))


def in_turn(worker: int, number: int, pause_s: float) -> Demand:
    return lambda now_s: 9.0 if int(now_s / pause_s) % number == worker else 0.0


def after(begin_s: float, part: float) -> Demand:
    return lambda now_s: part if now_s > begin_s else 0.0


def steady(part: float) -> Demand:
    return lambda _: part


NETWORKS = [(0.0, 0.2), (0.1, 0.5), (0.3, 1.5)]


def churn(seed: int, lost: float, late_s: float, seconds: int = 120) -> Model:
    """Workers whose demand jumps every few seconds, some of which die, and new ones come."""
    model = Model(seed, lost, late_s)
    choose = model.random

    def jumping() -> Demand:
        levels = [choose.choice((0, 0, 0.05, 0.3, 1, 9)) for _ in range(400)]
        pause_s = choose.choice((0.7, 2.0, 5.0, 20.0))
        return lambda now_s: levels[int(now_s / pause_s) % 400]

    count = choose.choice((2, 3, 4, 8))
    for number in range(count):
        model.add(str(number), jumping())
    for number in range(seconds // 10):
        model.run(10)
        if choose.random() < 0.3:
            model.kill(choose.choice(model.workers))
            model.run(choose.random() * 8)
            model.add(f"later-{number}", jumping())
    return model


@pytest.mark.parametrize(("lost", "late_s"), NETWORKS)
@pytest.mark.parametrize(
    "parts", [(9, 9), (0, 9), (0.3, 9), (0.2, 0.2, 0.9), (9,) * 4, (0, 0, 0, 9), (*(0.1,) * 7, 9), (*(0,) * 15, 9)]
)
def test_a_steady_demand_gets_the_limit_and_no_more(parts: tuple[float, ...], lost: float, late_s: float) -> None:
    least = 0.9 if lost < 0.2 else 0.8
    for seed in range(2):
        model = Model(seed, lost, late_s)
        for number, part in enumerate(parts):
            model.add(str(number), steady(part))
        model.run(15)
        for _ in range(3):
            model.run(10)
            assert model.rate(10) <= 1.1, seed
        assert model.rate(30) >= least * min(1.0, sum(parts)), seed
        # Who wants less than an equal part has it.
        for number, part in enumerate(parts):
            if part <= 1 / len(parts):
                assert model.rate(30, str(number)) >= least * part, seed
        assert model.most_above(1.0) <= BURST_S, seed


@pytest.mark.parametrize(("lost", "late_s"), NETWORKS)
@pytest.mark.parametrize("seed", range(6))
def test_no_demand_takes_more_than_the_limit_in_the_long_run(seed: int, lost: float, late_s: float) -> None:
    """Neither does one that follows the shares: of all periods none has more than the limit and some seconds of it."""
    model = churn(seed, lost, late_s)
    assert model.most_above(1.0) <= BURST_S
    # It is not that nothing passed.
    assert len({who for _, who, _ in model.taken}) > 1


@pytest.mark.parametrize("number", [2, 4])
def test_the_long_run_holds_also_where_the_shares_do_not(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all have taken counts for each of them: a wrong share is a matter of moments."""
    monkeypatch.setattr(Share, "divide", lambda *_: LIMIT)
    model = Model(1, 0.1, 0.5)
    for worker in range(number):
        model.add(str(worker), steady(9))
    model.run(20)
    model.run(60)
    assert 0.9 <= model.rate(60) <= 1.1


@pytest.mark.parametrize(("number", "request_s", "pause_s"), [(2, 20, 6.5), (4, 5, 2.0), (4, 20, 6.5), (8, 5, 2.0)])
def test_large_requests_to_one_worker_after_another_are_no_way_around(
    number: int, request_s: int, pause_s: float
) -> None:
    """Each of them is worth many seconds of the limit: the debt counts at all workers."""
    model = Model(1, 0.1, 0.5)
    for name in range(number):
        worker = model.add(str(name), in_turn(name, number, pause_s))
        worker.request = request_s * LIMIT
    model.run(300)
    assert 0.7 <= model.rate(240) <= 1.05
    # Each worker may take one before it hears of the others'.
    assert model.most_above(1.0) <= BURST_S + number * request_s


@pytest.mark.parametrize("all_send", [True, False])
@pytest.mark.parametrize("request_s", [0.3, 2, 4, 8, 20])
@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_who_waits_as_retry_after_says_gets_the_limit(number: int, request_s: float, all_send: bool) -> None:
    """Also with requests of which each is worth many seconds of the limit, at one of many workers."""
    model = Patient(1, 0.0, 0.2)
    for name in range(number):
        worker = model.add(str(name), steady(9 if all_send or not name else 0))
        worker.request = request_s * LIMIT
    model.run(20 + 4 * request_s)
    seconds = 60 + 20 * request_s
    model.run(seconds)
    assert 0.8 <= model.rate(seconds) <= 1.1


@pytest.mark.parametrize("number", [2, 4])
def test_those_that_are_left_have_the_part_of_a_worker_that_died(number: int) -> None:
    model = Model(2)
    workers = [model.add(str(n), steady(9)) for n in range(number)]
    model.run(20)
    model.kill(workers[0])
    model.run(4)
    # Until Kafka's group knows, its part is set aside: it may have lost its voice alone.
    assert model.rate(2) <= 1.1
    model.run(8)
    model.run(10)
    assert 0.95 <= model.rate(10) <= 1.05
    model.add("new", steady(9))
    model.run(10)
    model.run(10)
    assert 0.9 <= model.rate(10) <= 1.05
    assert model.rate(10, "new") == pytest.approx(1 / number, abs=0.05)


def test_a_worker_that_dies_alone_leaves_the_limit_to_the_next() -> None:
    model = Model(3)
    first = model.add("first", steady(9))
    model.add("second", lambda now_s: 9.0 if now_s > 1020 else 0.0)
    model.run(20)
    assert model.rate(10, "first") >= 0.9
    model.kill(first)
    model.run(12)
    model.run(10)
    assert model.rate(10, "second") >= 0.95


def test_workers_that_hear_nobody_have_an_equal_part() -> None:
    model = Model(4, lost=1.0)
    for number in range(4):
        model.add(str(number), steady(9))
    model.run(10)
    model.run(20)
    for number in range(4):
        assert model.rate(20, str(number)) == pytest.approx(0.25, abs=0.01)
    # The network returns.
    model.lost = 0.0
    for worker in model.workers[1:]:
        worker.demand = steady(0)
    model.run(6)
    model.run(10)
    assert model.rate(10, "0") >= 0.95


def test_one_worker_needs_no_report() -> None:
    model = Model(5)
    model.add("0", steady(9))
    model.run(20)
    assert 0.99 <= model.rate(10) <= 1.01
    assert model.most_above(1.0) <= 1.1


@given(st.floats(0.01, 1e6), st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_fair_parts_are_the_room_and_nobody_gets_less_than_an_equal_one(room: float, wants: list[float]) -> None:
    parts = [fair_part(room, want, wants[:index] + wants[index + 1 :]) for index, want in enumerate(wants)]
    assert sum(parts) == pytest.approx(room)
    for want, part in zip(wants, parts, strict=True):
        assert part >= min(want, room / len(wants)) * (1 - 1e-9)


def test_a_report_again_or_of_a_restarted_worker_charges_nothing() -> None:
    now_s = 100.0
    limits = SharedLimits(lambda: now_s)
    limits.report({"other"})
    limit = limits.make("token", "a", "bytes", 100)
    key = ("token", "a", "bytes")

    def heard(taken: float) -> float:
        limits.hear("other", QuotaReport({key: LimitUsage(taken, 0)}))
        return limit._all.level

    # What was taken before this worker came counts nowhere.
    assert heard(50_000) == 100
    assert heard(50_060) == 40
    assert heard(50_060) == 40
    assert heard(10) == 40
    assert heard(30) == 20
    # A large request is a debt of all workers; what comes at once after a silence does not stop this one for long.
    assert heard(530) == -480
    now_s += SILENT_S + 10
    assert heard(10_000) == -200
    limit.take(1000)
    now_s += SILENT_S + 1
    assert heard(20_000) == pytest.approx(-750)


def test_other_quotas_keep_the_sums() -> None:
    """The others would take a smaller sum for a restart, and a limit that is not there for one that is not used."""
    limits = SharedLimits(lambda: 100.0)
    limits.report({"other"})
    limit = limits.make("token", "a", "bytes", 100)
    assert limit.share == 50
    assert limit.wait_s(100.0) == 0
    limit.take(70)
    limits.clear({})
    again = limits.make("token", "a", "bytes", 200)
    assert again.wait_s(100.0) == 0
    again.take(5)
    assert limits.report({"other"}).usage["token", "a", "bytes"].taken == 75


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"1", b'[["a"]]', b'[["token", "a", "bytes", "x", 1]]', b'{"a": 1}', b"null"]
)
def test_what_is_no_report(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        QuotaReport.decode(data)


def test_a_silent_worker_is_one_that_was_not_heard_for_some_intervals() -> None:
    assert SILENT_S > 3 * INTERVAL_S


# ---- connections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "late_s"), NETWORKS)
@pytest.mark.parametrize("limit", [1, 7, 100])
@pytest.mark.parametrize("parts", [(9,), (9, 9), (0, 9), (0.3, 9), (9,) * 4, (0, 0, 0, 9), (*(0,) * 15, 9), (9,) * 16])
def test_as_many_connections_as_the_limit_says(
    parts: tuple[float, ...], limit: int, lost: float, late_s: float
) -> None:
    """Whatever worker they reach: one of sixteen gets all of them. They all come at once."""
    model = Connections(6, limit, lost, late_s)
    for number, part in enumerate(parts):
        # Once all workers know of each other.
        model.add(str(number), after(1002, part))
    model.run(17)
    assert model.open >= limit * min(1.0, sum(parts)) * 0.99 - 1
    # From the start each has an equal part, of which the last one need not be whole.
    most = limit if lost == 0 else 2 * limit
    assert model.open_most <= most + len(parts) - 1


@pytest.mark.parametrize(("lost", "late_s"), NETWORKS)
@pytest.mark.parametrize("seed", range(8))
def test_connections_that_jump_between_workers(seed: int, lost: float, late_s: float) -> None:
    """All that a tenant can do: it opens and closes all of them where it likes, while workers die and come."""
    model = Connections(seed, 100, lost, late_s)
    choose, count = model.random, model.random.choice((2, 3, 4, 8))

    def jumping() -> Demand:
        levels = [choose.choice((0, 0, 0.3, 9)) for _ in range(400)]
        pause_s = choose.choice((0.3, 0.9, 2.0, 7.0))
        return lambda now_s: levels[int(now_s / pause_s) % 400]

    for number in range(count):
        model.add(str(number), jumping())
    for number in range(12):
        model.run(10)
        if choose.random() < 0.3:
            model.kill(choose.choice(model.workers))
            model.run(choose.random() * 8)
            model.add(f"later-{number}", jumping())
    assert 50 <= model.open_most <= 200 + count
    assert model.above_most_s <= 3, "what was too much is closed with its next request"
    for worker in model.workers:
        worker.demand = steady(0)
    model.run(10)
    assert model.open == 0
    assert not any(worker.limits._counts or worker.limits._awake for worker in model.workers)


def test_the_connections_of_a_worker_that_died_are_free_again() -> None:
    model = Connections(1, 100)
    first = model.add("first", steady(9))
    model.add("second", steady(0))
    model.run(15)
    assert first.count is not None
    assert first.count.open == 100
    model.workers[1].demand = steady(9)
    model.run(10)
    assert model.open == 100, "what is open stays open, and counts at the others"
    model.kill(first)
    model.run(3)
    assert model.open <= 50, "it may have lost its voice alone"
    model.run(12)
    assert model.open == 100


def test_workers_that_hear_nobody_keep_an_equal_part_of_the_connections() -> None:
    model = Connections(4, 100, lost=1.0)
    for number in range(4):
        model.add(str(number), after(1002, 9))
    model.run(20)
    assert [worker.count and worker.count.open for worker in model.workers] == [25] * 4
    assert all("quota_usage_failed" in worker.limits.warnings()[0] for worker in model.workers)
    model.lost = 0.0
    model.run(2)
    assert not any(worker.limits.warnings() for worker in model.workers)


def test_another_limit_of_connections_counts_those_that_are_open() -> None:
    now_s = 100.0
    limits = SharedLimits(lambda: now_s)
    limits.report({"other"})
    count = limits.count("a", None)
    assert all(count.enter(now_s) for _ in range(30))
    assert ("token", "a", "connections") not in limits.report({"other"}).usage
    limits.clear({"a": 20})
    assert limits.report({"other"}).usage["token", "a", "connections"] == LimitUsage(30, 20)
    assert not count.enter(now_s)
    limits.clear({})
    assert limits.count("a", None) is count
    assert count.enter(now_s)


# ---- many limits -------------------------------------------------------------------------------------------------


def test_only_what_is_used_is_divided_and_published() -> None:
    """100,000 tokens, of which few are used at a time: the work and the report are for these alone."""
    now_s = 100.0
    limits = SharedLimits(lambda: now_s)
    limits.report({"other"})
    for number in range(100_000):
        limits.make("token", f"t{number}", "requests", 100)
    used = limits.make("token", "used", "requests", 100)
    assert used.wait_s(now_s) == 0
    assert limits.report({"other"}).usage.keys() == {used.key}
    for number in range(10_000):
        count = limits.count(f"t{number}", 5)
        assert count.enter(now_s)
        count.open -= 1
        limits.drop_unused(count)
    limits.report({"other"})
    now_s += 6
    assert not limits.report({"other"}).usage
    assert not limits._counts
    assert not limits._awake


def test_more_limits_than_a_report_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics take no room of tokens. Of what is not in the reports every worker has an equal part."""
    monkeypatch.setattr(shared_limits, "_MOST", {"token": 2, "topic": 3})
    now_s = 100.0
    first, second = (SharedLimits(lambda: now_s) for _ in range(2))

    def exchange() -> None:
        for one, name, other, its in (first, "first", second, "second"), (second, "second", first, "first"):
            report = QuotaReport.decode(one.report({its}).encode())
            assert len(report.usage) <= 6
            other.hear(name, report)

    exchange()
    topics = [first.make("topic", f"dc1.{number}", "bytes", 100) for number in range(50)]
    token = first.make("token", "a", "bytes", 100)
    there = second.make("topic", "dc1.49", "bytes", 100)
    for _ in range(8):
        now_s += 1
        for limit in (*topics, token, there):
            limit.wait_s(now_s)
            limit.take(150)
        exchange()
    assert token.share == 100
    # The report of the first has no room for it, so the second leaves it its part.
    assert topics[49].share == there.share == 50
    now_s += 20
    exchange()
    there.wait_s(now_s)
    there.take(1000)
    for _ in range(8):
        now_s += 1
        there.wait_s(now_s)
        exchange()
    assert there.share == 100


def test_the_largest_report_is_a_message_that_kafka_takes() -> None:
    limits = SharedLimits(lambda: 100.0)
    limits.report({"other"})
    for scope, name in ("token", "n" * 64), ("topic", "dc." + "n" * 246):
        for number in range(5000):
            made = limits.make(scope, f"{name[:-6]}{number:06}", "read bytes", 1e9)  # type: ignore[arg-type]
            made.wait_s(100.0)
            made.take(123456789012.345)
    assert 300_000 < len(limits.report({"other"}).encode()) < 900_000


def test_a_worker_that_starts_is_not_alone() -> None:
    """Until it has seen the group it takes the workers of its host for all."""
    limits = SharedLimits(lambda: 100.0, 4)
    limit, count = limits.make("token", "a", "requests", 100), limits.count("a", 8)
    assert limit.wait_s(100.0) == 0
    assert limit.share == 25
    assert sum(count.enter(100.0) for _ in range(8)) == 2
    for _ in range(3):
        limits.report(())
    assert limit.share == 100
    assert sum(count.enter(100.0) for _ in range(8)) == 6
