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


# ---- requests, connections, reads --------------------------------------------------------------------------------

KEYED = {"worker_key_file": "/etc/logferry/worker.key"}


class Line:
    """A connection of a caller."""

    def __init__(self) -> None:
        self.counted: Any = None
        self.transport: Any = object()
        self.on_lost: Any = None

    def close(self) -> None:
        self.transport = None
        if self.on_lost is not None:
            self.on_lost()


def refuses(quotas: Quotas, name: str, line: Line | None = None) -> Problem:
    with pytest.raises(Problem) as caught:
        quotas.take_request(name, line)
    assert caught.value.kind == "quota"
    return caught.value


def test_requests_are_counted_by_entry() -> None:
    clock = Clock()
    quotas = Quotas(config(**KEYED, tokens=[token("a", "0", requests_per_s=10), token("b", "1")]), clock)
    assert quotas.is_active
    for number in range(10):
        quotas.take_request(f"a:web{number}.example", None)
    problem = refuses(quotas, "a")
    assert problem.detail == "the token a is over its quota of 10 requests a second"
    assert not problem.ends_connection
    for _ in range(100):
        quotas.take_request("b", None)
        refuses(quotas, "a")
    clock.now_s += 0.5
    for _ in range(5):
        quotas.take_request("a", None)
    refuses(quotas, "a")
    # Writes have a quota of their own.
    quotas.take("a", "dc1.x", 1 << 30, 1 << 30)
    assert {key[2] for key in quotas.shared.report({"other"}).usage} == {"requests"}


def test_connections_are_counted_until_they_are_closed() -> None:
    clock = Clock()
    quotas = Quotas(config(**KEYED, tokens=[token("a", "0", connections=3), token("b", "1")]), clock)
    lines = [Line() for _ in range(4)]
    for line in lines[:3]:
        for _ in range(5):
            quotas.take_request("a", line)
    problem = refuses(quotas, "a", lines[3])
    assert problem.detail == "the token a is over its quota of 3 connections"
    assert problem.ends_connection
    lines[3].close()
    # Of two tokens on one connection the latest counts.
    quotas.take_request("b", lines[0])
    quotas.take_request("a", line := Line())
    assert refuses(quotas, "a", lines[0]).ends_connection
    for one in (*lines, line):
        one.close()
        one.close()
    assert [quotas.shared.count("a", 3).open, quotas.shared.count("b", None).open] == [0, 0]
    # The request of a caller that has gone meanwhile.
    quotas.take_request("a", lines[1])
    assert quotas.shared.count("a", 3).open == 0


def test_a_lower_limit_ends_connections_with_their_next_request() -> None:
    quotas = Quotas(config(**KEYED, tokens=[token("a", "0", connections=100)]), Clock())
    lines = [Line() for _ in range(100)]
    for line in lines:
        quotas.take_request("a", line)
    quotas.replace(config(**KEYED, tokens=[token("a", "0", connections=30)]))
    ended = 0
    for line in lines:
        try:
            quotas.take_request("a", line)
        except Problem as problem:
            ended += problem.ends_connection
    assert ended == 70
    quotas.replace(config(tokens=[token("a", "0")]))
    for _ in range(100):
        quotas.take_request("a", Line())


def test_thousands_of_connections_closed_at_once_leave_nothing() -> None:
    clock = Clock()
    quotas = Quotas(config(**KEYED, tokens=[token("a", "0", connections=5000)]), clock)
    lines = [Line() for _ in range(5000)]
    for line in lines:
        quotas.take_request("a", line)
    refuses(quotas, "a", Line())
    for line in lines:
        line.close()
    assert quotas.shared.report({"other"}).usage["token", "a", "connections"].taken == 0
    clock.now_s += 10
    assert not quotas.shared.report({"other"}).usage
    assert not quotas.shared._counts


def test_what_a_read_takes_is_known_after_it() -> None:
    clock = Clock()
    quotas = Quotas(config(tokens=[token("a", "0", read_bytes_per_s=1_000_000), token("b", "1")]), clock)
    assert quotas.reads("b") is None
    assert quotas.reads(None) is None
    quota = quotas.reads("a:alice")
    assert quota is not None
    # Several at the same time leave each other something, and give back what they did not find.
    held = [quota.hold(1 << 30, 1000) for _ in range(20)]
    assert held[0] == 250_000
    assert held == sorted(held, reverse=True)
    assert sum(held) < 1_000_000
    for one in held:
        quota.settle(one, 0)
    assert quota.hold(1 << 30, 1000) == 250_000
    quota.settle(250_000, 3_000_000)
    assert quota.wait_s() == pytest.approx(2.0)
    with pytest.raises(Problem, match="1e\\+06 bytes read a second") as caught:
        quota.hold(1, 1)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    clock.now_s += 2.5
    assert quota.hold(1 << 30, 1000) == 125_000
    assert quotas.shared.report({"other"}).usage["token", "a", "read bytes"].taken == 3_000_000
    # Another configuration counts at once, also for a stream that runs.
    quotas.replace(config(tokens=[token("a", "0", read_bytes_per_s=10)]))
    quota.settle(0, 100)
    assert quota.wait_s() == pytest.approx(9.5), "as the share grows"
    quotas.replace(config(tokens=[token("a", "0")]))
    assert quota.wait_s() == 0
    assert quota.hold(1 << 30, 1) == 1 << 30
    quota.settle(1 << 30, 1 << 30)


@pytest.mark.parametrize("quota", [{"requests_per_s": 1}, {"connections": 1}])
def test_what_is_counted_where_it_arrives_needs_the_key_of_the_workers(quota: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="worker_key_file: is needed, since a has requests_per_s or connections"):
        config(tokens=[token("a", "0", **quota)])


def test_workers_that_are_not_heard_are_in_the_status_where_there_are_quotas() -> None:
    clock = Clock()
    with_quotas, without = Quotas(config(quotas=[{"topic": "*", "bytes_per_s": 1}]), clock), Quotas(config(), clock)
    for quotas in (with_quotas, without):
        quotas.shared.report({"other"})
    assert with_quotas.warnings() == []
    clock.now_s += 11
    for quotas in (with_quotas, without):
        quotas.shared.report({"other"})
    [warning] = with_quotas.warnings()
    assert warning.partition(": ")[2] == "look for quota_usage_failed in their logs"
    assert without.warnings() == []
    for _ in range(2):
        with_quotas.shared.report(())
    assert with_quotas.warnings() == []
