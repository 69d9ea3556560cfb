"""Pauses before a request is sent again: clients that fail together do not come back together."""

import random
from collections import Counter

import pytest
from logferry.client.transport.cluster import RETRY_S, pause_s

CLIENTS = 2000


@pytest.mark.parametrize("asked_s", [0.0, 1.0])
def test_a_fleet_that_fails_at_once_is_spread(asked_s: float) -> None:
    """No gateway answers, or each answer asks for a second: after some tries, each second has its share of requests."""
    random.seed(5)
    tries = []
    for _ in range(CLIENTS):
        now, failures = 0.0, 0
        while now < 60:
            failures += 1
            now += pause_s(failures, RETRY_S, asked_s)
            tries.append(now)
    late = [at for at in tries if 30 <= at < 60]
    for width in (1.0, 0.1):
        peak = max(Counter(int(at / width) for at in late).values())
        assert peak < 2 * len(late) * width / 30, f"{peak} requests within {width} s"


def test_a_fleet_that_is_refused_at_once_does_not_return_at_once() -> None:
    """A gateway that starts asks all for the same second."""
    random.seed(5)
    first = Counter(int(10 * pause_s(1, RETRY_S, 1.0)) for _ in range(CLIENTS))
    assert min(first) == 10
    assert max(first.values()) < CLIENTS / 7


def test_a_pause_grows_and_is_no_shorter_than_asked() -> None:
    for failures in range(1, 40):
        for asked_s in (0.0, 1.0, 100.0):
            pause = pause_s(failures, RETRY_S, asked_s)
            own_s = min(0.1 * 2 ** (failures - 1), 10)
            assert max(own_s / 2, asked_s) <= pause <= max(own_s, asked_s + max(min(asked_s, 1), asked_s / 5))
