"""The brokers' clock: what is stamped with it, and when nothing expires because clocks differ."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from aiokafka.errors import KafkaConnectionError
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes
from logferry.gateway.kafka.requests import DescribeQuorumRequest, read_controller_ms
from logferry.gateway.service import worker

NOW_S = 1_800_000_000.0
DAYS_30 = 30 * 86_400.0


class Host:
    """The clocks of a host: one that is set, and one that only runs."""

    def __init__(self, wall_s: float = NOW_S) -> None:
        self.wall_s, self.boot_s = wall_s, 1000.0
        self.clock = BrokerClock(lambda: self.wall_s, lambda: self.boot_s)

    def run(self, seconds: float) -> None:
        self.wall_s += seconds
        self.boot_s += seconds

    def answer(self, broker_s: float) -> None:
        self.clock.answered(int(broker_s * 1000), self.boot_s)


def test_before_the_first_answer_the_own_clock_stamps_and_nothing_expires() -> None:
    host = Host()
    assert host.clock.now_ms() == NOW_S * 1000
    assert host.clock.ahead_s is None
    assert host.clock.stop is not None
    assert "no source expires" in str(host.clock.warning)


@pytest.mark.parametrize(
    ("ahead_s", "stops", "said"),
    [
        (0, False, None),
        (4, False, None),
        (-4, False, None),
        (6, False, "6 s ahead of Kafka's"),
        (-6, False, "6 s behind Kafka's"),
        (301, True, "no source expires: this host's clock is 301 s ahead of"),
        (-301, True, "no source expires: this host's clock is 301 s behind"),
        (DAYS_30, True, "30.0 days ahead of"),
        (-DAYS_30, True, "30.0 days behind"),
    ],
)
def test_a_wrong_clock_stamps_the_brokers_time_and_is_named(ahead_s: float, stops: bool, said: str | None) -> None:
    host = Host(NOW_S + ahead_s)
    host.answer(NOW_S)
    host.run(10)
    assert host.clock.now_ms() == (NOW_S + 10) * 1000
    assert host.clock.ahead_s == pytest.approx(ahead_s)
    assert (host.clock.stop is not None) == stops
    assert (host.clock.warning is None) == (said is None)
    assert (said or "") in str(host.clock.warning)


@pytest.mark.parametrize("step_s", [DAYS_30, -DAYS_30])
def test_a_step_stops_expiry_at_once_and_changes_no_stamp(step_s: float) -> None:
    host = Host()
    host.answer(NOW_S)
    host.wall_s += step_s
    assert host.clock.now_ms() == NOW_S * 1000
    assert host.clock.stop is not None
    host.wall_s -= step_s
    assert host.clock.stop is None


@pytest.mark.parametrize("jump_s", [DAYS_30, -DAYS_30])
def test_a_cluster_whose_time_jumps_is_not_followed_but_named(jump_s: float) -> None:
    host = Host()
    host.answer(NOW_S)
    host.answer(NOW_S + jump_s)
    assert host.clock.now_ms() == NOW_S * 1000
    assert "Kafka's time jumped by 30.0 days" in str(host.clock.stop)
    host.answer(NOW_S + 1)
    assert host.clock.stop is None


def test_a_host_that_was_paused_follows_where_both_clocks_agree() -> None:
    """The boot clock of a paused virtual machine may stop."""
    host = Host()
    host.answer(NOW_S)
    host.wall_s += 7200
    host.answer(NOW_S + 7200)
    assert host.clock.now_ms() == (NOW_S + 7200) * 1000
    assert host.clock.stop is None


def test_a_small_drift_is_followed() -> None:
    host = Host()
    host.answer(NOW_S)
    host.answer(NOW_S + 2)
    assert host.clock.now_ms() == (NOW_S + 2) * 1000


def test_the_middle_of_question_and_answer_counts() -> None:
    host = Host()
    asked_s = host.boot_s
    host.run(2)
    host.clock.answered(int(NOW_S * 1000), asked_s)
    assert host.clock.now_ms() == (NOW_S + 1) * 1000


def test_an_answer_is_worth_an_hour() -> None:
    host = Host()
    host.answer(NOW_S)
    host.run(3599)
    host.clock.failed("no broker answers")
    assert host.clock.stop is None
    host.run(2)
    host.clock.failed("no broker answers")
    assert host.clock.stop == "no broker answers"
    assert host.clock.now_ms() == (NOW_S + 3601) * 1000


# ---- what asks and what obeys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_wrong", "searched"), [(False, True), (True, False)])
async def test_sources_are_retired_only_while_the_clocks_agree(is_wrong: bool, searched: bool) -> None:
    """A host that is a month ahead would forget every source."""
    host, asked, rounds = Host(), list[int](), asyncio.Event()
    host.answer(NOW_S - DAYS_30 if is_wrong else NOW_S)

    async def find_expired(now_ms: int) -> None:
        asked.append(now_ms)

    class Lanes(dict[int, Any]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            if self.looks == 5:
                rounds.set()
            return super().values()

    lanes = Lanes({0: SimpleNamespace(find_expired=find_expired)})
    ownership: Any = SimpleNamespace(lanes=lanes)
    task = asyncio.create_task(worker.retire_sources(ownership, host.clock, 4))
    await asyncio.wait_for(rounds.wait(), 30)
    task.cancel()
    assert bool(asked) == searched
    assert set(asked) <= {int(NOW_S * 1000)}


def quorum(caught_up_ms: int, code: int = 0, partition_code: int = 0) -> Any:
    voters: list[Any] = [(1, 90, 5, 6, {}), (2, 100, caught_up_ms, caught_up_ms, {})]
    topics: list[Any] = [("__cluster_metadata", [(0, partition_code, 2, 7, 100, voters, [], {})], {})]
    return SimpleNamespace(error_code=code, topics=topics)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (quorum(1234), (0, 1234)),
        (quorum(-1), (0, 0)),
        (quorum(1234, code=31), (31, 0)),
        (quorum(1234, partition_code=3), (3, 0)),
        (SimpleNamespace(error_code=0, topics=[]), (0, 0)),
    ],
)
def test_the_controllers_own_state_is_its_time(answer: Any, found: tuple[int, int]) -> None:
    assert read_controller_ms(answer) == found


class Cluster:
    """Brokers, of which some do not answer."""

    def __init__(self, host: Host, *answers: Any) -> None:
        self.clock, self._answers = host.clock, list(answers)

    def brokers(self) -> list[tuple[int, str, int]]:
        return [(number, "h", 9092) for number in range(len(self._answers))]

    async def send(self, node: int, request: DescribeQuorumRequest) -> Any:
        answer = self._answers[node]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_the_first_broker_that_answers_is_believed() -> None:
    host = Host()
    cluster: Any = Cluster(host, KafkaConnectionError(), quorum(int(NOW_S * 1000)))
    assert await worker.compare_clocks(cluster) is None
    assert host.clock.stop is None


@pytest.mark.parametrize("answers", [(), (KafkaConnectionError(),), (quorum(1, code=31),), (quorum(0),)])
async def test_where_none_says_its_time_nothing_expires(answers: tuple[Any, ...]) -> None:
    host = Host()
    cluster: Any = Cluster(host, *answers)
    assert "no source expires" in str(await worker.compare_clocks(cluster))


async def test_a_difference_is_logged_once_and_so_is_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    host = Host(NOW_S + DAYS_30)
    cluster: Any = Cluster(host, quorum(int(NOW_S * 1000)))
    warning = await worker.compare_clocks(cluster)
    warning = await worker.compare_clocks(cluster, warning)
    assert capsys.readouterr().err.count("clock_differs") == 1
    host.wall_s -= DAYS_30
    assert await worker.compare_clocks(cluster, warning) is None
    assert capsys.readouterr().err.count("clocks_agree") == 1


async def test_answers_are_dated_as_the_states_in_them() -> None:
    """A loader takes the difference between its clock and this date into account when it judges a source as silent."""
    host = Host(NOW_S + DAYS_30)
    host.answer(NOW_S)
    routes = Routes(Gate(Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})))
    routes.clock = host.clock

    async def handler(call: Call) -> web.StreamResponse:
        return web.Response()

    routes.add("GET", "/x", "x", handler, Right.OPEN)
    dates = []
    for _ in range(2):
        dates.append((await routes(make_mocked_request("GET", "/x"))).headers["Date"])
        host.run(1)
    assert dates == ["Fri, 15 Jan 2027 08:00:00 GMT", "Fri, 15 Jan 2027 08:00:01 GMT"]
