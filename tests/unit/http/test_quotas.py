"""The quotas' rule, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.limits import BURST_S, TokenBucket
from logferry.gateway.metrics import REGISTRY
from pydantic import ValidationError


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def config(**settings: Any) -> Config:
    base = {"dc": "dc1", "data_centres": ["dc1", "dc2"], "kafka": {"bootstrap_servers": "x:1"}}
    return Config.model_validate({**base, **settings})


def token(name: str, digit: str, **quota: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digit * 64, "write": ["*"], **quota}


def refused(quotas: Quotas, *taken: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        quotas.take(*taken)
    assert (caught.value.kind, caught.value.status) == ("quota", 429)
    return caught.value


requests = st.lists(
    st.tuples(st.floats(0, 5), st.integers(0, 5000)),  # seconds since the one before, size
    max_size=60,
)


@given(requests, st.floats(0.1, 2000))
def test_never_more_than_the_rate_one_burst_and_one_request(steps: list[tuple[float, int]], rate: float) -> None:
    bucket, start_s = TokenBucket(rate, rate * BURST_S, 0.0), 0.0
    now_s, taken, largest = start_s, 0, 0
    for pause_s, size in steps:
        now_s += pause_s
        if bucket.wait_s(now_s) == 0:
            bucket.take(size)
            taken, largest = taken + size, max(largest, size)
        assert taken <= (rate * (now_s - start_s) + rate * BURST_S + largest) * (1 + 1e-9)


@given(st.floats(0.1, 1e9), st.integers(0, 1 << 40))
def test_a_client_that_waits_for_retry_after_is_admitted(rate: float, debt: int) -> None:
    bucket = TokenBucket(rate, rate * BURST_S, 50.0)
    bucket.take(debt)
    wait_s = bucket.wait_s(50.0)
    # The wait in answers is rounded up to whole seconds.
    assert bucket.wait_s(50.0 + wait_s + 1) == 0


@given(st.floats(0.1, 100), st.integers(1, 1 << 30))
def test_who_waits_less_is_not(rate: float, size: int) -> None:
    bucket = TokenBucket(rate, rate * BURST_S, 50.0)
    bucket.take(rate * BURST_S + size)
    wait_s = bucket.wait_s(50.0)
    assert wait_s == pytest.approx(size / rate)
    assert bucket.wait_s(50.0 + wait_s * 0.9) > 0


def test_nothing_is_limited_without_a_setting() -> None:
    quotas = Quotas(config(tokens=[token("a", "0")]))
    assert not quotas.is_active
    quotas.take("a", "dc1.nginx", 1 << 40, 1 << 40)
    quotas.take(None, "dc1.nginx", 1 << 40, 1 << 40)


def test_a_token_is_limited_over_all_topics() -> None:
    clock = Clock()
    quotas = Quotas(config(tokens=[token("a", "0", bytes_per_s=100), token("b", "1")]), clock)
    assert quotas.is_active
    quotas.take("a", "dc1.x", 60, 1)
    quotas.take("a", "dc1.y", 60, 1)  # 120 of 100: into debt
    problem = refused(quotas, "a", "dc1.z", 1, 1)
    assert problem.retry_after_s == pytest.approx(0.2)
    assert "100 bytes a second" in problem.detail
    quotas.take("b", "dc1.x", 1 << 30, 1)
    clock.now_s += 0.3
    quotas.take("a", "dc1.z", 1, 1)


def test_chunks_are_counted_beside_bytes() -> None:
    clock = Clock()
    quotas = Quotas(config(tokens=[token("a", "0", bytes_per_s=1_000_000, chunks_per_s=10)]), clock)
    quotas.take("a", "dc1.x", 10, 25)
    problem = refused(quotas, "a", "dc1.x", 1, 1)
    assert problem.retry_after_s == pytest.approx(1.5)
    assert "10 chunks a second" in problem.detail


def test_each_topic_has_its_own_and_the_first_entry_that_fits_counts() -> None:
    clock = Clock()
    entries = [{"topic": "dc1.big", "bytes_per_s": 1000}, {"topic": "*", "bytes_per_s": 10}]
    quotas = Quotas(config(quotas=entries), clock)
    quotas.take(None, "dc1.big", 500, 1)
    quotas.take(None, "dc1.big", 400, 1)
    quotas.take(None, "dc1.small", 11, 1)
    assert "the topic dc1.small" in refused(quotas, None, "dc1.small", 1, 1).detail
    quotas.take(None, "dc1.other", 11, 1)
    quotas.take(None, "dc1.big", 1, 1)


def test_what_is_refused_counts_nowhere() -> None:
    clock = Clock()
    entries = [{"topic": "*", "bytes_per_s": 10}]
    quotas = Quotas(config(quotas=entries, tokens=[token("a", "0", bytes_per_s=100)]), clock)
    quotas.take("a", "dc1.x", 20, 1)  # the topic is in debt now, the token has 80 left
    for _ in range(100):
        refused(quotas, "a", "dc1.x", 50, 1)
    quotas.take("a", "dc1.y", 79, 1)
    quotas.take("a", "dc1.z", 1, 1)
    assert "the token a" in refused(quotas, "a", "dc1.w", 1, 1).detail


def test_a_look_takes_nothing() -> None:
    quotas = Quotas(config(quotas=[{"topic": "*", "chunks_per_s": 1}]), Clock())
    for _ in range(10):
        quotas.take(None, "dc1.x")
    quotas.take(None, "dc1.x", 1, 1)
    assert "the topic dc1.x" in refused(quotas, None, "dc1.x").detail


def test_throttled_time_is_in_the_metrics() -> None:
    def seconds() -> float:
        labels = {"scope": "topic", "name": "dc1.throttled"}
        return REGISTRY.get_sample_value("logferry_throttled_seconds_total", labels) or 0.0

    quotas = Quotas(config(quotas=[{"topic": "throttled", "bytes_per_s": 10}]), Clock())
    quotas.take(None, "dc1.throttled", 40, 1)
    before = seconds()
    told = refused(quotas, None, "dc1.throttled", 1, 1).retry_after_s
    assert told == pytest.approx(3)
    assert seconds() - before == pytest.approx(told)


def test_throttled_time_is_kept_for_the_status_over_a_change_of_quotas() -> None:
    clock = Clock()
    quotas = Quotas(config(quotas=[{"topic": "*", "bytes_per_s": 10}]), clock)
    assert quotas.throttled() == []
    quotas.take(None, "dc1.b", 60)
    for _ in range(2):
        refused(quotas, None, "dc1.b", 1)
    quotas.replace(config())
    clock.now_s += 7
    throttled: list[Any] = quotas.throttled()
    assert throttled == [("topic", "dc1.b", 2, pytest.approx(10.0), 7.0)]


def test_other_quotas_take_over() -> None:
    quotas = Quotas(config(quotas=[{"topic": "*", "bytes_per_s": 1}]), Clock())
    quotas.take(None, "dc1.x", 1000, 1)
    refused(quotas, None, "dc1.x")
    quotas.replace(config(quotas=[{"topic": "*", "bytes_per_s": 2}]))
    quotas.take(None, "dc1.x")
    quotas.replace(config())
    assert not quotas.is_active


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quotas": [{"topic": "x"}]}, "x limits nothing"),
        ({"quotas": [{"topic": "x", "bytes_per_s": 0}]}, "bytes_per_s"),
        ({"quotas": [{"topic": "a b", "bytes_per_s": 1}]}, "topic"),
        ({"quotas": [{"topic": "x", "bytes": 1}]}, "bytes"),
        ({"tokens": [token("a", "0", chunks_per_s=-1)]}, "chunks_per_s"),
    ],
)
def test_refused_and_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        config(**settings)
