"""What is wrong by what the workers say, and what an operator is shown of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from logferry.gateway.api.diagnosis import Diagnosis, ServiceStatus, SilentWorker, diagnose
from logferry.gateway.api.status import partitions_status
from logferry.gateway.api.status_schemas import (
    BrokerStatus,
    GroupStatus,
    KafkaStatus,
    LaneStatus,
    PartitionsStatus,
    Status,
    ThrottledStatus,
    Usage,
    WaitStatus,
)
from logferry.gateway.kafka.requests import PartitionMetadata, TopicMetadata
from logferry.gateway.topics.open_transactions import OverdueTransaction
from logferry.ops.status import render
from rich.console import Console

NOW_MS = 1_700_000_000_000
A, B = "http://a:1", "http://b:1"
WELL = PartitionsStatus(total=9, without_leader=0, under_replicated=0, examples=[])


def lane(number: int, **changes: Any) -> LaneStatus:
    serving = LaneStatus(
        lane=number,
        topic="state",
        partition=number,
        state="serving",
        why="open",
        since_ms=NOW_MS - 3_600_000,
        sources=5,
        in_flight_bytes=0,
        transaction_ms=None,
        committed_ms=NOW_MS - 100,
        last_wait=WaitStatus(reason="taken over", began_ms=NOW_MS - 3_600_200, ended_ms=NOW_MS - 3_600_000),
        last_error=None,
        last_error_ms=None,
    )
    return serving.model_copy(update=changes)


def kafka(**changes: Any) -> KafkaStatus:
    broker = BrokerStatus(id=1, host="k", port=9092, error=None)
    answers = KafkaStatus(
        cluster_id="c", reachable=True, answered_ms=NOW_MS, error=None, brokers=[broker], partitions=WELL
    )
    return answers.model_copy(update=changes)


def group(**changes: Any) -> GroupStatus:
    owners = {"0": A, "1": A, "2": B, "3": B}
    seen = GroupStatus(name="g", members=[A, B], owners=owners, seen_ms=NOW_MS - 1000, error=None)
    return seen.model_copy(update=changes)


def worker(url: str = A, lanes: list[LaneStatus] | None = None, **changes: Any) -> Status:
    status = Status(
        version="1",
        dc="dc1",
        url=url,
        now_ms=NOW_MS,
        started_ms=NOW_MS - 3_600_300,
        lanes_total=4,
        lanes=[lane(number) for number in ((0, 1) if url == A else (2, 3))] if lanes is None else lanes,
        group=group(),
        kafka=kafka(),
        limits={"connections": Usage(used=7, limit=100)},
        throttled=[],
    )
    return status.model_copy(update=changes)


def service(*workers: Status, **silent: SilentWorker) -> ServiceStatus:
    return ServiceStatus(
        {worker.url: worker for worker in workers}, {f"http://{url}:1": s for url, s in silent.items()}
    )


def test_all_is_well() -> None:
    assert diagnose(service(worker(A), worker(B))) == []


AWAY = kafka(
    reachable=False,
    answered_ms=NOW_MS - 18_000,
    error="no broker answers",
    partitions=None,
    brokers=[BrokerStatus(id=1, host="k", port=9092, error="no answer within 2 s")],
)
HALF = kafka(brokers=[BrokerStatus(id=2, host="k", port=9093, error="refused")])
OPENING = {
    "state": "fencing",
    "why": "it failed (NotCommitted)",
    "since_ms": NOW_MS - 2000,
    "last_wait": WaitStatus(reason="it failed (NotCommitted)", began_ms=NOW_MS - 30_000, ended_ms=None),
    "last_error": "while serving: NotCommitted: k",
    "last_error_ms": NOW_MS - 12_000,
}
MENDED = {
    "last_wait": WaitStatus(reason="it failed (OSError)", began_ms=NOW_MS - 40_000, ended_ms=NOW_MS - 30_000),
    "last_error": "while serving: OSError: k",
    "last_error_ms": NOW_MS - 39_000,
}
SLOW = {"last_wait": WaitStatus(reason="a commit took long", began_ms=NOW_MS - 9000, ended_ms=NOW_MS - 6000)}
MOVED = {"last_wait": WaitStatus(reason="taken over", began_ms=NOW_MS - 9000, ended_ms=NOW_MS - 8800)}
THROTTLED = ThrottledStatus(scope="token", name="web", count=12, wait_s=3.0, last_ms=NOW_MS - 4000)


def left_open(partition: int, offset: int, since_ms: int) -> OverdueTransaction:
    return OverdueTransaction(topic="dc1.x", partition=partition, offset=offset, producer_id=4711, since_ms=since_ms)


LEFT_OPEN = (
    "producer id 4711: find its program by kafka-transactions.sh list; "
    "if the list lacks it: runbook, Hanging transactions"
)

CASES: dict[str, tuple[ServiceStatus, list[Diagnosis]]] = {
    "kafka is away for all": (
        service(worker(A, kafka=AWAY), worker(B, kafka=AWAY)),
        [Diagnosis(True, "Kafka does not answer", "k:9092: no answer within 2 s", 18.0)],
    ),
    "kafka is away for one": (
        service(worker(A), worker(B, kafka=AWAY)),
        [Diagnosis(True, f"Kafka does not answer {B}", "k:9092: no answer within 2 s", 18.0)],
    ),
    "a broker of several is away": (
        service(worker(A, kafka=HALF), worker(B, kafka=HALF)),
        [Diagnosis(True, "Kafka's broker 2 (k:9093) does not answer", "refused")],
    ),
    "partitions without a leader come before those without replicas": (
        service(
            worker(
                A,
                kafka=kafka(
                    partitions=PartitionsStatus(
                        total=9, without_leader=1, under_replicated=2, examples=["dc1.x-0", "dc1.x-1"]
                    )
                ),
            ),
            worker(B),
        ),
        [
            Diagnosis(True, "1 partition of Kafka without a leader", "dc1.x-0, dc1.x-1"),
            Diagnosis(False, "2 partitions of Kafka lack replicas in sync", "dc1.x-0, dc1.x-1"),
        ],
    ),
    "a program leaves a transaction open in partitions of two workers": (
        service(
            worker(A, open_transactions=[left_open(0, 70, NOW_MS - 90_000)]),
            worker(B, open_transactions=[left_open(1, 8, NOW_MS - 95_000)]),
        ),
        [
            Diagnosis(
                True,
                "an open transaction hides the records of dc1.x-0 from offset 70, dc1.x-1 from offset 8",
                LEFT_OPEN,
                95.0,
            )
        ],
    ),
    "a worker is silent, and so are its lanes": (
        service(worker(A), b=SilentWorker("timed out")),
        [
            Diagnosis(True, f"worker {B} does not answer", "timed out"),
            Diagnosis(
                True, "lanes 2 to 3 are served by nobody", f"the group assigned it to {B}, which does not answer"
            ),
        ],
    ),
    "a worker that was not asked is no fault": (
        service(worker(A), worker(B), c=SilentWorker("it was not asked", wrong=False)),
        [Diagnosis(False, "worker http://c:1 does not answer", "it was not asked")],
    ),
    "nobody has a lane yet": (
        service(worker(A, group=group(owners={})), worker(B, [lane(3)], group=group(owners={}))),
        [Diagnosis(True, "lane 2 is served by nobody", "the group has assigned it to no worker yet")],
    ),
    "a lane is on its way": (
        service(worker(A), worker(B, [lane(3)])),
        [Diagnosis(True, "lane 2 is served by nobody", f"the group assigned it to {B}, which does not have it yet")],
    ),
    "lanes that do not serve, with the error and since when they do not": (
        service(worker(A, [lane(0, **OPENING), lane(1)]), worker(B, [lane(2, **OPENING), lane(3, **OPENING)])),
        [Diagnosis(True, "lanes 0, 2 to 3 are fencing", "while serving: NotCommitted: k", 30.0)],
    ),
    "an error of long ago is not the reason": (
        service(worker(A, [lane(0, **{**OPENING, "last_error_ms": NOW_MS - 99_000}), lane(1)]), worker(B)),
        [Diagnosis(True, "lane 0 is fencing", "it failed (NotCommitted)", 30.0)],
    ),
    "of two that have a lane the one that serves it counts": (
        service(worker(A), worker(B, [lane(0, state="closing"), lane(2), lane(3)])),
        [],
    ),
    "a commit that is not answered": (
        service(worker(A, [lane(0, transaction_ms=NOW_MS - 7000), lane(1)]), worker(B)),
        [Diagnosis(True, "lane 0 is waiting for a commit", "Kafka has not answered it yet", 7.0)],
    ),
    "a commit that has just begun": (
        service(worker(A, [lane(0, transaction_ms=NOW_MS - 700), lane(1)]), worker(B)),
        [],
    ),
    "the group is not seen": (
        service(worker(A, group=group(seen_ms=NOW_MS - 20_000, error="cut")), worker(B)),
        [Diagnosis(True, f"worker {A} does not see the other workers", "cut", 20.0)],
    ),
    "a limit is reached": (
        service(worker(A, limits={"sessions": Usage(used=96, limit=100)}), worker(B)),
        [Diagnosis(True, f"worker {A} is at its limit of sessions", "96 of 100")],
    ),
    "a limit of nothing is not reached by nothing": (
        service(worker(A, limits={"sessions": Usage(used=0, limit=0)}), worker(B)),
        [],
    ),
    "lanes that have mended": (
        service(worker(A, [lane(0, **MENDED), lane(1, **SLOW)]), worker(B, [lane(2, **MOVED), lane(3)])),
        [
            Diagnosis(False, "lane 0 had to wait, and can serve again", "while serving: OSError: k", 30.0),
            Diagnosis(False, "lane 1 had to wait, and can serve again", "a commit took long", 6.0),
        ],
    ),
    "a quota is hit": (
        service(worker(A, throttled=[THROTTLED]), worker(B)),
        [Diagnosis(False, "the token web is over its quota", f"{A} refused 12 requests; the last 4 s ago")],
    ),
    "a young worker": (
        service(worker(A, started_ms=NOW_MS - 12_000), worker(B)),
        [
            Diagnosis(
                False,
                "1 worker started a short time ago",
                f"{A} 12 s ago; if no operator restarted it, its log has the reason",
            )
        ],
    ),
    "different versions": (
        service(worker(A), worker(B, version="2")),
        [Diagnosis(False, "the workers have different versions", "1, 2")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong(case: str) -> None:
    seen, expected = CASES[case]
    assert diagnose(seen) == expected


def test_what_is_wrong_comes_before_what_is_worth_knowing() -> None:
    seen = service(worker(A, throttled=[THROTTLED], kafka=AWAY), worker(B, [lane(2, **MENDED), lane(3, **OPENING)]))
    assert [finding.wrong for finding in diagnose(seen)] == [True, True, False, False]


def test_partitions_are_counted_and_the_worst_named_first() -> None:
    whole, thin, lost = PartitionMetadata(0, 1, 0, (1, 2), (1, 2)), (1, 1, 0, (1, 2), (1,)), (2, -1, 0, (1, 2), ())
    topic = TopicMetadata("dc1.x", bytes(16), False, (whole, PartitionMetadata(*thin), PartitionMetadata(*lost)))
    assert partitions_status([topic]) == PartitionsStatus(
        total=3, without_leader=1, under_replicated=1, examples=["dc1.x-2", "dc1.x-1"]
    )


# ---- shown ------------------------------------------------------------------------------------------------------


def shown(seen: ServiceStatus, width: int = 140) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    render.print_status(seen, diagnose(seen), NOW_MS / 1000, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_healthy_one_says_so_first() -> None:
    lines = shown(service(worker(A), worker(B)))
    assert lines[0].startswith("dc1: no problem found  at ")
    assert any(A in line and "2 serve" in line and "7 of 100" in line and "answers" in line for line in lines)
    row = next(line for line in lines if line.split()[:2] == ["3", "serving"])
    assert row.split()[:4] == ["3", "serving", "1", "h"]
    assert row.endswith("1 h ago, 0.2 s: taken over")
    assert "Kafka cluster c" in lines


def test_problems_come_first_with_reason_and_duration() -> None:
    seen = service(worker(A, [lane(0, **OPENING), lane(1)], kafka=AWAY), b=SilentWorker("[Errno 111] refused"))
    lines = shown(seen)
    assert lines[0].startswith("dc1: 4 problems found")
    assert lines[1:3] == [f"  ✗ worker {B} does not answer", "      [Errno 111] refused"]
    assert lines[3].startswith("  ✗ Kafka does not answer  for 18 s, since ")
    assert lines[4] == "      k:9092: no answer within 2 s"
    assert lines[5].startswith("  ✗ lane 0 is fencing  for 30 s, since ")
    assert any("1 serve, 1 not" in line and "does not answer" in line for line in lines)
    assert any("now, 30 s: it failed (NotCommitted)" in line for line in lines)
    assert any(line.split() == ["2", "nobody"] for line in lines)


def test_of_many_lanes_those_in_trouble_are_shown() -> None:
    lanes = [lane(number) for number in range(500)]
    lanes[444] = lane(444, **OPENING)
    lines = shown(service(worker(A, lanes, lanes_total=500)))
    assert any(line.split()[:2] == ["444", "fencing"] for line in lines)
    assert any("and 436 more; --json lists all" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (352_800, "4 d 2 h"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert render.span(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (268_435_456, "268.4 MB"), (5 * 10**13, "50.0 TB")],
)
def test_sizes(number: int, text: str) -> None:
    lines = shown(service(worker(A, [lane(0, in_flight_bytes=number)], lanes_total=1)))
    assert any(line.split()[:2] == ["0", "serving"] and f" {text} " in line for line in lines)


def test_a_risk_of_the_configuration_is_named_once_and_is_not_wrong() -> None:
    risky = [worker(url, warnings=["tokens are shown: configure tls"]) for url in (A, B)]
    assert diagnose(service(*risky)) == [Diagnosis(False, "tokens are shown", "configure tls")]


def test_what_workers_say_does_not_steer_the_terminal() -> None:
    evil = "x\x1b]0;title\x07\x9b31m\u202e[red]y"
    bad = worker(A, [lane(0, state="waiting", why=evil, topic=evil)], version=evil, warnings=[f"{evil}: {evil}"])
    shown = io.StringIO()
    console = Console(file=shown, width=200, force_terminal=True)
    found = service(bad, evil=SilentWorker(evil))
    render.print_status(found, diagnose(found), NOW_MS / 1000, console)
    text = shown.getvalue()
    for sign in ("\x1b]0", "\x07", "\x9b", "\u202e"):
        assert sign not in text
    assert "x\\x1b]0;title\\x07\\x9b31m\\u202e[red]y" in text
