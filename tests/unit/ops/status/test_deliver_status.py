"""The findings of `logferry status --deliver`, by what the workers answer."""

from __future__ import annotations

from typing import Any

from logferry.gateway.api.diagnosis import AllWorkers, SilentWorker
from logferry.ops.status.deliver import DeliverStatus, diagnose_delivery, subscriptions_of

NOW_MS = 1_000_000


def unit(subscription: str = "a", partition: int = 0, **changes: Any) -> dict[str, Any]:
    place = {"subscription": subscription, "topic": "dc1.x", "partition": partition, "shard": 0}
    facts = {"position": 5, "lag_records": 3, "epoch": 1, "waits_for": "records", "stop": None, "error": None}
    return {**place, **facts, **changes}


def worker(
    url: str, lanes: list[int], units: list[dict[str, Any]], state: str = "serving", **more: Any
) -> DeliverStatus:
    held = [{"lane": n, "state": state, "why": "waits", "since_ms": NOW_MS - 2000, "error": None} for n in lanes]
    facts = {"dc": "dc1", "now_ms": NOW_MS, "url": url, "workers": [url], "lanes_total": 2, "lanes": held}
    return DeliverStatus.model_validate({**facts, "units": units, **more})


def findings(*workers: DeliverStatus, silent: str = "") -> list[tuple[bool, str, str, float | None]]:
    away = {silent: SilentWorker("refused")} if silent else {}
    found = diagnose_delivery(AllWorkers({one.url: one for one in workers}, away))
    return [(one.wrong, one.what, one.reason, one.for_s) for one in found]


def test_nothing_to_say() -> None:
    assert findings(worker("u", [0, 1], [unit()], subscriptions=["a"])) == []


def test_a_stop_names_the_partition_its_cause_and_the_way_on() -> None:
    stop = {"kind": "rejected", "detail": "422", "at_ms": NOW_MS - 7000, "what_to_do": "correct the receiver"}
    [(wrong, what, reason, for_s)] = findings(worker("u", [0, 1], [unit(partition=3, shard=2, stop=stop)]))
    assert (wrong, what, for_s) == (True, "a: dc1.x-3 shard 2 stopped: rejected", 7.0)
    assert reason == "422; correct the receiver (POST /v1/subscriptions/a/resume or /replay at a gateway)"


def test_a_receiver_that_failed_once_is_a_note_and_one_that_stays_away_is_not() -> None:
    def error(attempts: int) -> dict[str, Any]:
        return {"detail": "500", "at_ms": NOW_MS - 1000, "attempts": attempts}

    once, lasting = unit("once", error=error(1)), [unit("lasting", n, error=error(n + 1)) for n in range(2)]
    found = findings(worker("u", [0, 1], [once, *lasting]))
    assert [(wrong, what) for wrong, what, _, _ in found] == [
        (True, "lasting: the receiver does not take 2 partitions"),
        (False, "once: the receiver does not take 1 partition"),
    ]


def test_lanes_workers_and_subscriptions_that_are_away() -> None:
    found = findings(worker("u", [1], [], "stopped", unreadable={"b": "damaged"}, subscriptions=["c"]), silent="v")
    assert [what for _, what, _, _ in found] == [
        "worker v does not answer",
        "lane 0 served by nobody",
        "lane 1 is stopped",
        "the subscription b cannot be read",
    ]
    paused = findings(worker("u", [0, 1], [unit(is_paused=True)], subscriptions=["a", "c"]))
    assert [(wrong, what) for wrong, what, _, _ in paused] == [
        (False, "nothing is delivered to c"),
        (False, "paused: a"),
    ]


def test_the_lag_of_a_subscription_is_that_of_all_workers() -> None:
    both = AllWorkers(
        {"u": worker("u", [0], [unit(), unit("b", lag_records=None)]), "v": worker("v", [1], [unit(partition=1)])}
    )
    assert {name: one.lag_records for name, one in subscriptions_of(both).items()} == {"a": 6, "b": None}
