"""When the client fails over to another data centre, and when it fails back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from logferry.client.transport import failover
from logferry.client.transport.failover import PROBE_S, SPREAD, STALE_S, FailoverPolicy

CLIENTS = 5000
exact = pytest.mark.usefixtures("_without_spread")


@pytest.fixture
def _without_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "SPREAD", 0.0)


def centres(count: int = 2, here: int = 0) -> FailoverPolicy:
    return FailoverPolicy([f"dc{n + 1}" for n in range(count)], failover_s=60.0, failback_s=120.0, here=here)


def probes(centres: FailoverPolicy, works: set[int], begin: float, end: float) -> list[str]:
    """Every second, whatever the client sends meanwhile fails where ``works`` does not say otherwise; the moves."""
    moves = []
    for now in range(int(begin), int(end)):
        centres.record(centres.here, centres.here in works, now)
        dc = centres.probe(now)
        if dc is not None:
            centres.record(dc, dc in works, now)
        if centres.switch(now) is not None:
            moves.append(f"{now}: {centres.names[centres.here]}, {centres.why}")
    return moves


@exact
def test_it_fails_over_after_its_time_and_fails_back_after_its_time() -> None:
    both = centres()
    assert probes(both, {0, 1}, 0, 1000) == []
    assert probes(both, {1}, 1000, 2000) == ["1060: dc2, nothing of dc1 has worked for 60 s"]
    (back,) = probes(both, {0, 1}, 2000, 3000)
    assert back.endswith("s: dc1, dc1 has answered for 120 s again") or "dc1 has answered for 12" in back
    assert 2120 <= int(back.partition(":")[0]) <= 2120 + 2 * PROBE_S


@exact
def test_where_all_are_gone_it_stays() -> None:
    both = centres()
    assert probes(both, set(), 0, 1000) == []
    assert probes(both, {1}, 1000, 1010) == ["1000: dc2, nothing of dc1 has worked for 1000 s"] or both.here == 1


@exact
def test_it_goes_to_the_first_that_answers_also_back() -> None:
    three = centres(3)
    assert probes(three, {2}, 0, 100) == ["60: dc3, nothing of dc1 has worked for 60 s"]
    assert probes(three, {0}, 100, 200) == ["160: dc1, nothing of dc3 has worked for 60 s"]


def test_a_preferred_one_that_comes_and_goes_is_not_gone_back_to() -> None:
    both = centres()
    probes(both, {1}, 0, 100)
    moves = [probes(both, {0, 1} if number % 2 else {1}, 100 * number, 100 * number + 100) for number in range(1, 20)]
    assert (moves, both.here) == ([[]] * 19, 1)


def test_a_failure_now_and_then_is_no_absence() -> None:
    both = centres()
    for number in range(20):
        now = number * (STALE_S + 1)
        both.record(0, False, now)
        both.record(1, True, now)
        assert both.switch(now) is None


def test_one_success_restarts_the_time() -> None:
    both = centres()
    assert probes(both, {1}, 0, 59) == []
    assert probes(both, {0, 1}, 59, 60) == []
    assert probes(both, {1}, 60, 119) == []


def test_no_probe_is_sent_while_all_is_well() -> None:
    both = centres()
    both.record(0, True, 0.0)
    assert both.probe(1000.0) is None
    both.record(0, False, 1001.0)
    assert [both.probe(1001.0), both.probe(1002.0), both.probe(1001.0 + PROBE_S)] == [1, None, 1]


@pytest.mark.parametrize("here", [1, 2])
def test_those_preferred_are_asked_from_the_start(here: int) -> None:
    three = centres(3, here)
    assert {three.probe(0.0) for _ in range(3)} == {None, *range(here)}


def test_a_single_one_is_never_left() -> None:
    assert probes(centres(1), set(), 0, 1000) == []


def waits(fleet: list[FailoverPolicy], works: set[int], begin: float) -> list[float]:
    """From ``begin`` on only ``works`` answer: when each client moves, in seconds after that."""
    found = []
    for one in fleet:
        here, now = one.here, begin
        while one.here == here:
            for number in range(len(one.names)):
                one.record(number, number in works, now)
            one.switch(now)
            now += 0.1
        found.append(now - 0.1 - begin)
    return found


def test_a_fleet_that_loses_a_data_centre_at_once_moves_and_returns_spread() -> None:
    """None moves before its time, or later than a quarter more; and in no tenth of a second many more than others."""
    random.seed(5)
    fleet = [centres() for _ in range(CLIENTS)]
    away = waits(fleet, {1}, 1000.0)
    back = waits(fleet, {0, 1}, 2000.0)
    for found, usual_s in ((away, 60.0), (back, 120.0)):
        assert usual_s <= min(found) + 1e-6 < usual_s + 0.2
        assert usual_s * (1 + SPREAD) - 0.2 < max(found) < usual_s * (1 + SPREAD) + 0.2
        in_each = Counter(int(10 * wait_s) for wait_s in found)
        assert max(in_each.values()) < 2.5 * CLIENTS / (10 * usual_s * SPREAD)


def test_the_waits_of_a_client_differ() -> None:
    random.seed(5)
    both = centres()
    found = []
    for begin in (1000.0, 2000.0, 3000.0, 4000.0):
        found += waits([both], {1}, begin)
        waits([both], {0, 1}, begin + 500)
    assert len({round(wait_s, 1) for wait_s in found}) > 1
