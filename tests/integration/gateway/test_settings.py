"""A worker refuses to start where the promise could not be kept, and names the setting: exit status 2."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Setting, configuration, free_ports

from tests.support.gateway import gateway

ACCEPTED: Setting = ["replication", "min-isr"]
# What a state topic must be: the pairs are strings of Kafka's.
STATE = {
    "cleanup.policy": "compact",
    "segment.bytes": str(2 << 20),
    "min.cleanable.dirty.ratio": "0.2",
    "delete.retention.ms": str(2 * 86_400_000),
}


@pytest.fixture
async def admin(kafka: KafkaCluster) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await client.start()
    yield client
    await client.close()


def started(tmp_path: Path, bootstrap: str, **settings: Setting) -> tuple[int, dict[str, str]]:
    """Runs a worker that must end by itself: its exit status, and the error that it logged."""
    asked: dict[str, Setting] = {"dc": "dc1", "listen": f"127.0.0.1:{free_ports(1)[0]}", "accept_weak_kafka": ACCEPTED}
    file = tmp_path / "gateway.toml"
    file.write_text(configuration({**asked, **settings, "kafka": {"bootstrap_servers": bootstrap}}), encoding="utf-8")
    command = [sys.executable, "-m", "logferry.gateway", "--config", str(file), "--worker", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    [error] = [event for event in said if event["level"] == "error"]
    return ended.returncode, error


def refusal(tmp_path: Path, bootstrap: str, **settings: Setting) -> str:
    """The reason of a worker that must refuse to start."""
    status, error = started(tmp_path, bootstrap, **settings)
    assert (status, error["event"]) == (2, "refused_to_start")
    return error["reason"]


@pytest.mark.parametrize(
    ("accepted", "named"),
    [([], ["replication", "min-isr"]), (["min-isr"], ["replication"])],
)
def test_weak_kafka_is_refused_by_name(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, accepted: list[str], named: list[str]
) -> None:
    reason = refusal(tmp_path, kafka.bootstrap, prefix=prefix(topic_name), accept_weak_kafka=accepted)
    for name in ("replication", "min-isr"):
        assert (f"{name} (" in reason) is (name in named)
    assert "accept_weak_kafka = [" + ", ".join(f'"{name}"' for name in named) + "]" in reason


def prefix(topic_name: str) -> str:
    return topic_name[-60:]


async def test_an_unclean_election_is_refused_by_name(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, admin: AIOKafkaAdminClient
) -> None:
    """Of the state topic; a data topic is refused alone, when it is written to."""
    state = f"{prefix(topic_name)}.gateway.dc1.state"
    settings = {**STATE, "unclean.leader.election.enable": "true"}
    await admin.create_topics([NewTopic(state, 8, 1, topic_configs=settings)])
    reason = refusal(tmp_path, kafka.bootstrap, prefix=prefix(topic_name))
    assert state in reason
    assert 'accept_weak_kafka = ["unclean-election"]' in reason


async def test_another_number_of_lanes_is_refused(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, admin: AIOKafkaAdminClient
) -> None:
    """It would send sources to lanes that know nothing of them."""
    state = f"{prefix(topic_name)}.gateway.dc1.state"
    await admin.create_topics([NewTopic(state, 4, 1, topic_configs=STATE)])
    reason = refusal(tmp_path, kafka.bootstrap, prefix=prefix(topic_name), lanes=5)
    assert reason.startswith(f"lanes: 5 is configured, but {state} has 4 partitions")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cleanup.policy", "compact,delete"),
        ("segment.bytes", str(3 << 20)),
        ("delete.retention.ms", "60000"),
    ],
)
async def test_a_state_topic_that_is_not_what_it_must_be_is_refused(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, admin: AIOKafkaAdminClient, setting: str, value: str
) -> None:
    state = f"{prefix(topic_name)}.gateway.dc1.state"
    await admin.create_topics([NewTopic(state, 8, 1, topic_configs={**STATE, setting: value})])
    reason = refusal(tmp_path, kafka.bootstrap, prefix=prefix(topic_name))
    assert f"{setting}={value}" in reason
    assert state in reason


def test_a_wrong_configuration_is_refused_by_its_path(kafka: KafkaCluster, tmp_path: Path) -> None:
    assert "limits.chunk_byte:" in refusal(tmp_path, kafka.bootstrap, limits={"chunk_byte": 5000})


def test_a_port_in_use_is_reported(kafka: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        status, error = started(tmp_path, kafka.bootstrap, prefix=prefix(topic_name), listen=listen)
    assert (status, error["event"], error["listen"]) == (2, "cannot_listen", listen)


@pytest.mark.long
def test_kafka_that_is_not_there_is_status_3(tmp_path: Path) -> None:
    bootstrap = f"127.0.0.1:{free_ports(1)[0]}"
    status, error = started(tmp_path, bootstrap)
    assert (status, error["event"]) == (3, "kafka_away")
    assert bootstrap in error["reason"]


async def test_what_the_gateway_creates_carries_the_promise(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, admin: AIOKafkaAdminClient
) -> None:
    with gateway(kafka, tmp_path, prefix(topic_name), workers=1) as running:
        topic = await running.make_topic(topic_name, 3)
        [state] = await admin.describe_topics([running.state_topic])
        assert len(state["partitions"]) == 4
        found = {}
        for name in (topic, running.state_topic):
            [response] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
            found[name] = {entry[0]: entry[1] for entry in response.resources[0][4]}
    for name in found:
        assert found[name]["unclean.leader.election.enable"] == "false"
        assert found[name]["compression.type"] == "producer"
    assert found[topic]["cleanup.policy"] == "delete"
    assert int(found[topic]["max.message.bytes"]) > 16 << 20
    assert {name: found[running.state_topic][name] for name in STATE} == STATE
    assert int(found[running.state_topic]["max.compaction.lag.ms"]) <= 86_400_000
    assert int(found[running.state_topic]["segment.ms"]) <= 86_400_000


async def test_brokers_that_create_topics_by_use_are_a_risk_in_the_status(tmp_path: Path) -> None:
    with (
        KafkaCluster("creating", tmp_path / "kafka", settings={"auto.create.topics.enable": "true"}) as cluster,
        gateway(cluster, tmp_path, "creating", 1) as running,
    ):
        (risk,) = (await running.ask("GET", "/v1/status")).document["warnings"]
    assert "auto.create.topics.enable=false" in risk
