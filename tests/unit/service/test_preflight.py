"""What a broker must take, before a worker serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import errors
from logferry.gateway.errors import WeakKafka
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import BrokerAbilities
from logferry.gateway.service import preflight, processes
from logferry.gateway.service.preflight import LaneSettings, check, check_abilities

_ENOUGH = BrokerAbilities(produce=13, end_txn=5, transactions=2)


def test_a_broker_of_this_age_is_taken() -> None:
    check_abilities({"a:9092": _ENOUGH, "b:9092": BrokerAbilities(14, 6, 3)})


@pytest.mark.parametrize("field", BrokerAbilities._fields)
def test_an_older_broker_is_refused_by_its_address(field: str) -> None:
    old = _ENOUGH._replace(**{field: getattr(_ENOUGH, field) - 1})
    with pytest.raises(WeakKafka, match=r"b:9092.*transaction\.version"):
        check_abilities({"a:9092": _ENOUGH, "b:9092": old})


class LaggingKafka:
    """Three brokers, of which one at first does not know a topic that another one has named."""

    def __init__(self, lagging_answers: int) -> None:
        self.left = lagging_answers
        self.risks: list[str] = []
        self.settings = {"transaction.partition.verification.enable": "true", "auto.create.topics.enable": "false"}
        partition = SimpleNamespace(leader=1, replicas=[1, 2, 3])
        self.view = SimpleNamespace(name="state", partitions=[partition])

    async def abilities(self) -> dict[str, BrokerAbilities]:
        return {"a:9092": _ENOUGH}

    async def broker_settings(self) -> dict[int, dict[str, str]]:
        return {1: self.settings}

    async def describe(self, topics: list[str] | None = None) -> Any:
        return SimpleNamespace(brokers={1: "a"}, topics=dict.fromkeys(topics or ["dc1.t"], self.view))

    async def find_transaction_coordinator(self, transactional_id: str) -> int:
        return 1

    def _answer(self, found: Callable[[], Any]) -> Any:
        if self.left:
            self.left -= 1
            raise errors.UnknownTopicOrPartitionError("__transaction_state")
        return found()

    async def describe_topic(self, topic: str) -> Any:
        return self._answer(lambda: self.view)

    async def configs(self, topics: list[str]) -> Any:
        settings = {
            "cleanup.policy": "compact",
            "segment.bytes": "1048576",
            "min.cleanable.dirty.ratio": "0.1",
            "delete.retention.ms": str(30 * 86_400_000),
            "min.insync.replicas": "2",
            "unclean.leader.election.enable": "false",
        }
        return self._answer(lambda: dict.fromkeys(topics, settings))


class ComingBrokers:
    """``settings``: of the brokers that answer now; an exception is raised. ``looks``: how often they were asked."""

    def __init__(self) -> None:
        self.risks: list[str] = []
        self.settings: dict[int, dict[str, str]] | Exception = {1: self.of("true")}
        self.known = {"a:9092": _ENOUGH}
        self.looks = 0

    @staticmethod
    def of(verification: str) -> dict[str, str]:
        return {"transaction.partition.verification.enable": verification}

    async def abilities(self) -> dict[str, BrokerAbilities]:
        self.looks += 1
        return self.known

    async def broker_settings(self) -> dict[int, dict[str, str]]:
        if isinstance(self.settings, Exception):
            raise self.settings
        return self.settings

    async def look(self, *accepted: str) -> list[str]:
        """What is warned of after a whole look, and some of a second one."""
        watching = asyncio.create_task(processes.watch_brokers(cast(KafkaClient, self), accepted))
        self.looks = 0
        async with asyncio.timeout(60):
            while self.looks < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        watching.cancel()
        return self.risks


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> ComingBrokers:
    monkeypatch.setattr(processes, "BROKERS_S", 0)
    return ComingBrokers()


async def test_a_broker_that_comes_later_is_checked_too(
    brokers: ComingBrokers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await brokers.look() == []
    brokers.settings = {1: brokers.of("true"), 2: brokers.of("false")}
    for _ in range(2):
        (warning,) = await brokers.look()
        assert warning.startswith("Kafka's broker 2: ")
    assert capsys.readouterr().err.count('"broker_too_weak"') == 1
    assert await brokers.look("partition-verification") == []
    brokers.settings[3] = {"auto.create.topics.enable": "true"}
    (warning,) = await brokers.look("partition-verification")
    assert warning.startswith("a deleted topic may come back")
    brokers.known["b:9092"] = _ENOUGH._replace(transactions=1)
    (warning,) = await brokers.look()
    assert "b:9092 is too old" in warning


@pytest.mark.parametrize("error", [errors.ClusterAuthorizationFailedError("no"), TimeoutError(), OSError()])
async def test_while_nothing_is_answered_a_weak_broker_stays_named(brokers: ComingBrokers, error: Exception) -> None:
    brokers.settings = {2: brokers.of("false")}
    warnings = await brokers.look()
    assert len(warnings) == 1
    brokers.settings = error
    assert await brokers.look() == warnings
    brokers.settings = {2: brokers.of("true")}
    assert await brokers.look() == []


class Lanes:
    state_topic, lanes = "state", 1
    accept_weak_kafka: tuple[str, ...] = ()

    def lane(self, number: int, /) -> Any:
        return SimpleNamespace(transactional_id="lane-0")


async def test_a_broker_that_lags_behind_in_its_metadata_is_asked_again() -> None:
    kafka = LaggingKafka(lagging_answers=7)
    await check(cast(KafkaClient, kafka), cast(LaneSettings, Lanes()), ("dc1.",))
    assert kafka.left == 0


async def test_a_broker_that_verifies_no_transactions_is_refused_unless_accepted() -> None:
    kafka = LaggingKafka(lagging_answers=0)
    kafka.settings["transaction.partition.verification.enable"] = "false"
    lanes = Lanes()
    with pytest.raises(WeakKafka, match=r"broker 1: transaction\.partition\.verification\.enable=false"):
        await check(cast(KafkaClient, kafka), cast(LaneSettings, lanes), ())
    lanes.accept_weak_kafka = ("partition-verification",)
    await check(cast(KafkaClient, kafka), cast(LaneSettings, lanes), ())


async def test_brokers_that_create_topics_by_themselves_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    kafka = LaggingKafka(lagging_answers=0)
    kafka.settings["auto.create.topics.enable"] = "true"
    await check(cast(KafkaClient, kafka), cast(LaneSettings, Lanes()), ())
    (risk,) = kafka.risks
    assert '"topics_created_by_use", "brokers": [1]' in capsys.readouterr().err
    assert "auto.create.topics.enable" in risk.partition(": ")[2]
    kafka.settings["auto.create.topics.enable"] = "false"
    await check(cast(KafkaClient, kafka), cast(LaneSettings, Lanes()), ())
    assert kafka.risks == []


async def test_settings_that_may_not_be_read_are_no_reason_to_refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kafka = LaggingKafka(lagging_answers=0)

    async def denied() -> dict[int, dict[str, str]]:
        raise errors.ClusterAuthorizationFailedError

    monkeypatch.setattr(kafka, "broker_settings", denied)
    await check(cast(KafkaClient, kafka), cast(LaneSettings, Lanes()), ())
    assert '"broker_settings_hidden"' in capsys.readouterr().err


@pytest.mark.parametrize(("leader", "said"), [(None, "is not visible"), (-1, "has partitions without a leader")])
async def test_a_topic_that_does_not_appear_is_named(
    monkeypatch: pytest.MonkeyPatch, leader: int | None, said: str
) -> None:
    monkeypatch.setattr(preflight, "_CONNECT_DEADLINE_S", 0.05)
    topics = {} if leader is None else {"state": SimpleNamespace(partitions=[SimpleNamespace(leader=leader)])}

    class Kafka:
        async def describe(self, topics_: list[str]) -> Any:
            return SimpleNamespace(topics=topics)

    with pytest.raises(errors.LeaderNotAvailableError, match=said):
        await preflight.wait_until_created(cast(KafkaClient, Kafka()), "state")
