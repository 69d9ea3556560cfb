"""`logferry doctor` against real Kafka and a real gateway: each finding is provoked once, and named with its remedy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from logferry.gateway.config import load
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.service.preflight import check
from logferry.ops.doctor.command import main
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports

from tests.support.gateway import Gateway
from tests.support.kafka import alter_topic
from tests.support.kafka_rights import documented, grant
from tests.support.secured_kafka import PASSWORD, Right, SecuredKafka, as_toml

WEAK: Final = 'accept_weak_kafka = ["replication", "min-isr"]\n'
GATEWAY: Final = 'dc = "dc1"\n' + WEAK


def diagnosed(capsys: pytest.CaptureFixture[str], **files: Path) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and the checks. No output ever holds a password."""
    status = main([*(f"--{name}={file}" for name, file in files.items()), "--json"])
    said = capsys.readouterr()
    assert PASSWORD not in said.out + said.err
    assert json.dumps(PASSWORD)[1:-1] not in said.out
    return status, json.loads(said.out)["checks"]


def texts(checks: list[dict[str, Any]], state: str, area: str) -> list[str]:
    found = [check for check in checks if (check["state"], check["area"]) == (state, area)]
    assert all(check["remedy"] or state == "ok" for check in found), "each finding says what to do"
    return [check["text"] for check in found]


async def prepared(bootstrap: str, file: Path, *topics: str) -> None:
    """The gateway's topics as its own first start makes them, and data topics."""
    kafka = KafkaClient({"bootstrap_servers": bootstrap}, "tests")
    await kafka.start()
    try:
        await check(kafka, load(file), ())
        for topic in topics:
            await kafka.create_topic(topic, 1, 1, {})
            while topic not in (await kafka.describe([topic])).topics:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        await kafka.close()


# ---- rights ------------------------------------------------------------------------------------------------------

USERS: Final = ("gateway", "reader", "blind", "keeper")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A Kafka with an authorizer, the gateway's topics, and the documented rights of ``gateway`` alone."""
    folder = tmp_path_factory.mktemp("doctor")
    kafka = SecuredKafka(folder / "files", USERS, {"auto.create.topics.enable": "false"})
    with kafka:
        (folder / "files" / "password").chmod(0o600)
        (folder / "files" / "wrong-password").chmod(0o600)
        plain = folder / "plain.toml"
        plain.write_text(GATEWAY + f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\n')
        asyncio.run(prepared(kafka.bootstrap, plain, "dc1.nginx", "dc2.nginx"))
        configs: Right = ("CLUSTER", "kafka-cluster", "LITERAL", "DESCRIBE_CONFIGS")
        asyncio.run(grant(kafka.bootstrap, "gateway", [*documented("Gateway of `dc1`"), configs]))
        reads: list[Right] = [
            ("TOPIC", "dc1.", "PREFIXED", "READ"),
            ("TOPIC", "logferry.gateway.dc1.state", "LITERAL", "READ"),
            ("GROUP", "logferry.gateway.dc1", "LITERAL", "DESCRIBE"),
        ]
        asyncio.run(grant(kafka.bootstrap, "reader", reads))
        asyncio.run(grant(kafka.bootstrap, "keeper", documented("Keeper of `dc1`")))
        yield kafka


def gateway_file(kafka: SecuredKafka, folder: Path, user: str, **changes: str) -> Path:
    file = folder / "gateway.toml"
    settings = kafka.plain_settings(user, "PLAIN") | changes
    file.write_text(f'{GATEWAY}data_centres = ["dc2"]\n{as_toml("kafka", settings)}')
    return file


def test_a_gateway_with_the_documented_rights_is_well(
    secured: SecuredKafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, checks = diagnosed(capsys, gateway=gateway_file(secured, tmp_path, "gateway"))
    assert [check for check in checks if check["state"] != "ok"] == []
    assert status == 0
    areas = {check["area"] for check in checks}
    assert areas == {
        "configuration",
        "versions",
        "files",
        "names",
        "ports",
        "certificates",
        "Kafka",
        "rights",
        "clocks",
    }
    assert main([f"--gateway={tmp_path / 'gateway.toml'}"]) == 0
    assert capsys.readouterr().out.startswith("0 wrong, 0 warnings, ")


def test_each_missing_right_is_named_with_its_grant(
    secured: SecuredKafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, checks = diagnosed(capsys, gateway=gateway_file(secured, tmp_path, "reader"))
    assert status == 1
    wrong = texts(checks, "wrong", "rights")
    assert "dc1.nginx: no WRITE, DESCRIBE_CONFIGS" in wrong
    assert "logferry.gateway.dc1.state: no WRITE, DESCRIBE_CONFIGS" in wrong
    assert "group logferry.gateway.dc1: no READ" in wrong
    assert "transactional id logferry.gateway.dc1.lane-0: no DESCRIBE" in wrong
    assert any(text.startswith("no DESCRIBE on the cluster") for text in wrong)
    warnings = texts(checks, "warning", "rights")
    assert "dc1.nginx: no ALTER (grows topics over HTTP)" in warnings
    assert "no topic dc2.* is visible" in warnings
    assert "__transaction_state: no READ (completes hanging transactions)" in warnings
    assert "__transaction_state: no DESCRIBE, DESCRIBE_CONFIGS" in wrong
    assert "logferry.gateway.dc1.lanes: no READ" in wrong
    remedies = [check["remedy"] for check in checks]
    assert any("--topic dc1.nginx --operation Write --operation DescribeConfigs" in remedy for remedy in remedies)
    assert any(text.startswith("the controllers' time") for text in texts(checks, "wrong", "clocks"))
    assert any("brokers' settings may not be read" in text for text in texts(checks, "warning", "Kafka"))


def test_a_user_without_any_right(secured: SecuredKafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, checks = diagnosed(capsys, gateway=gateway_file(secured, tmp_path, "blind"))
    assert status == 1
    assert "no topic dc1.* is visible" in texts(checks, "warning", "rights")
    assert "group logferry.gateway.dc1: no READ" in texts(checks, "wrong", "rights")


def keeper_file(kafka: SecuredKafka, folder: Path, user: str, *, act: bool = True) -> Path:
    file = folder / "keeper.toml"
    file.write_text(
        f'dc = "dc1"\nact = {str(act).lower()}\n{WEAK}{as_toml("kafka", kafka.plain_settings(user, "PLAIN"))}'
        '[[deletion.policies]]\ntopics = ["dc1.nginx"]\n'
        '[[readers]]\ntopics = ["*"]\nconsumer = "alerts"\n[[readers]]\ntopics = ["*"]\ndeliver = "*"\n'
    )
    return file


def test_a_keeper_with_the_documented_rights_is_well(
    secured: SecuredKafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first start creates the log; deliver has not run here."""
    status, checks = diagnosed(capsys, keeper=keeper_file(secured, tmp_path, "keeper"))
    assert (status, [check for check in checks if check["state"] == "wrong"]) == (0, [])
    named = {text.removeprefix("no topic ").partition(" ")[0] for text in texts(checks, "warning", "rights")}
    assert named == {f"logferry.{one}" for one in ("keeper.dc1.log", "deliver.dc1.state", "deliver.dc1.subscriptions")}
    assert any("logferry.keeper.dc1.log is not there" in text for text in texts(checks, "warning", "Kafka"))
    right = texts(checks, "ok", "rights")
    assert {
        *("cluster: DESCRIBE, DESCRIBE_CONFIGS, ALTER, ALTER_CONFIGS", "dc1.nginx: DELETE"),
        *("group logferry.keeper.dc1: READ", "group alerts: DESCRIBE"),
        "transactional id logferry.keeper.dc1.log.act: DESCRIBE",
    } <= set(right)
    assert {"versions", "files", "names", "ports", "certificates", "clocks"} <= {check["area"] for check in checks}


def test_each_right_that_a_keeper_lacks_is_named_and_one_that_does_not_act_needs_fewer(
    secured: SecuredKafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, checks = diagnosed(capsys, keeper=keeper_file(secured, tmp_path, "reader"))
    assert status == 1
    wrong = texts(checks, "wrong", "rights")
    assert {
        "no DESCRIBE on the cluster: disks and the brokers' time are unknown",
        "cluster: no DESCRIBE_CONFIGS, ALTER, ALTER_CONFIGS",
        "dc1.nginx: no DESCRIBE_CONFIGS, ALTER_CONFIGS",
        "dc1.nginx: no DELETE",
        "group logferry.keeper.dc1: no READ",
        "group alerts: no DESCRIBE",
        "transactional id logferry.keeper.dc1.log.act: no DESCRIBE",
    } <= set(wrong)
    _, checks = diagnosed(capsys, keeper=keeper_file(secured, tmp_path, "reader", act=False))
    wrong = texts(checks, "wrong", "rights")
    assert "cluster: no DESCRIBE_CONFIGS" in wrong
    assert "group alerts: no DESCRIBE" in wrong
    assert not [text for text in wrong if "keeper" in text or "ALTER" in text or "DELETE" in text]


@pytest.mark.parametrize(
    ("changes", "area", "text"),
    [
        ({"sasl_password_file": "wrong-password"}, "Kafka", "Authentication failed"),
        ({"sasl_password_file": "missing"}, "files", "No such file or directory"),
        ({"ca_file": "other-ca.pem"}, "certificates", "certificate"),
        ({"bootstrap_servers": "EXPIRED"}, "certificates", "certificate has expired"),
    ],
    ids=["password", "file", "authority", "expired"],
)
def test_a_connection_that_kafka_refuses(
    secured: SecuredKafka,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    area: str,
    text: str,
) -> None:
    given = {
        name: secured.address(value) if name == "bootstrap_servers" else str(secured.folder / value)
        for name, value in changes.items()
    }
    status, checks = diagnosed(capsys, gateway=gateway_file(secured, tmp_path, "gateway", **given))
    assert status == 1
    assert any(text in found for found in texts(checks, "wrong", area))


# ---- settings ----------------------------------------------------------------------------------------------------


def test_kafka_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(GATEWAY + f'[kafka]\nbootstrap_servers = "127.0.0.1:{free_ports(1)[0]}"\n')
    status, checks = diagnosed(capsys, gateway=file)
    assert status == 1
    assert any("Connection refused" in text for text in texts(checks, "wrong", "ports"))
    assert any("no broker of" in text for text in texts(checks, "wrong", "Kafka"))


def test_each_setting_of_kafka_that_is_wrong_is_named(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dc, prefix = f"d{abs(hash(topic_name)) % 10**6}", topic_name[-60:]
    file = tmp_path / "gateway.toml"
    text = f'dc = "{dc}"\nprefix = "{prefix}"\n{WEAK}[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\n'
    file.write_text(text)
    _, checks = diagnosed(capsys, gateway=file)
    state = f"{prefix}.gateway.{dc}.state"
    assert any(f"{state} is not there" in text for text in texts(checks, "warning", "Kafka"))
    asyncio.run(prepared(kafka.bootstrap, file, f"{dc}.compacted", f"{dc}.short", f"{dc}.good"))
    status, checks = diagnosed(capsys, gateway=file)
    assert (status, texts(checks, "wrong", "Kafka")) == (0, [])

    changes = {
        f"{dc}.compacted": {"cleanup_policy": "compact"},
        f"{dc}.short": {"retention_ms": "3600000"},
        state: {"segment_bytes": str(3 << 20)},
    }
    for topic, settings in changes.items():
        asyncio.run(alter_topic(kafka.bootstrap, topic, **settings))
    status, checks = diagnosed(capsys, gateway=file)
    assert status == 1
    wrong = texts(checks, "wrong", "Kafka")
    assert sorted(text.partition(":")[0] for text in wrong) == sorted([f"{dc}.compacted", state])
    assert any("segment.bytes=3145728, needed is at most 2097152" in text for text in wrong)
    [short] = [text for text in texts(checks, "warning", "Kafka") if "retention" in text]
    assert short == f"{dc}.short: retention.ms=3600000: an outage of 1.0 h loses records"

    file.write_text(text.replace(WEAK, "") + "")
    _, checks = diagnosed(capsys, gateway=file)
    weak = [text for text in texts(checks, "wrong", "Kafka") if "too weak" in text]
    assert len(weak) == 5, "the three topics, the state topic, and the transaction log"
    assert "min-isr (min.insync.replicas=1, needed is 2)" in weak[0]

    lanes = text.replace("[kafka]", "lanes = 3\n[kafka]")
    file.write_text(lanes)
    _, checks = diagnosed(capsys, gateway=file)
    assert any(text.startswith("lanes: 3 is configured") for text in texts(checks, "wrong", "Kafka"))


def test_a_log_of_acts_that_loses_records_is_named(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = topic_name[-60:]
    log, file = f"{prefix}.keeper.dc1.log", tmp_path / "keeper.toml"
    text = f'dc = "dc1"\nprefix = "{prefix}"\nact = true\n{WEAK}[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\n'
    file.write_text(text)

    async def create() -> None:
        client = KafkaClient({"bootstrap_servers": kafka.bootstrap}, "tests")
        await client.start()
        try:
            await client.create_topic(log, 2, 1, {"cleanup.policy": "compact"})
            while log not in (await client.describe([log])).topics:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        finally:
            await client.close()

    asyncio.run(create())
    status, checks = diagnosed(capsys, keeper=file)
    wrong = texts(checks, "wrong", "Kafka")
    assert status == 1
    assert f"{log}: cleanup.policy=compact: Kafka would remove records" in wrong
    assert any(one.startswith(f"{log} has 2 partitions") for one in wrong)
    file.write_text(text.replace(WEAK, ""))
    _, checks = diagnosed(capsys, keeper=file)
    assert any(log in one and "too weak" in one for one in texts(checks, "wrong", "Kafka"))


def test_a_partition_without_a_leader_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with KafkaCluster("doctor", tmp_path / "kafka", brokers=3) as kafka:
        file = tmp_path / "gateway.toml"
        file.write_text(GATEWAY + f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\n')
        asyncio.run(prepared(kafka.bootstrap, file))

        async def leader() -> int:
            client = KafkaClient({"bootstrap_servers": kafka.bootstrap}, "tests")
            await client.start()
            try:
                await client.create_topic("dc1.one", 1, 1, {})
                while True:
                    node = await client.present_leader("dc1.one", 0)
                    if node >= 0:
                        return node
                    await asyncio.sleep(0.05)
            finally:
                await client.close()

        kafka.kill(asyncio.run(leader()))
        # Until the controller has missed the broker, which takes seconds; the test's own limit ends it.
        found: list[str] = []
        while not found:
            status, checks = diagnosed(capsys, gateway=file)
            found = [text for text in texts(checks, "wrong", "Kafka") if "without a leader" in text]
        assert (status, found) == (1, ["dc1.one has partitions without a leader: 0"])


# ---- other roles -------------------------------------------------------------------------------------------------


def test_a_push_client_of_a_gateway_that_serves(
    workers: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "push.toml"
    state = tmp_path / "state"
    file.write_text(
        f'url = "{workers.urls[0]}"\ntopic = "t"\nstate_dir = "{state}"\n[[files]]\npaths = ["/var/log/x*.log"]\n'
    )
    status, checks = diagnosed(capsys, push=file)
    assert (status, texts(checks, "wrong", "ports")) == (0, [])
    assert texts(checks, "ok", "clocks")


@pytest.mark.parametrize("name", ["mirror", "deliver", "keeper", "load", "audit"])
def test_the_other_roles_connect(
    name: str, kafka: KafkaCluster, tmp_path: Path, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    access = f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\n'
    service = f'dc = "dc9"\nprefix = "{topic_name[-60:]}"\n{WEAK}'
    files = {
        "mirror": service + access + f'[[remote]]\ndc = "dc1"\nkafka = {{ bootstrap_servers = "{kafka.bootstrap}" }}\n',
        "deliver": service + access,
        "keeper": service + access,
        "load": access + f'[[tables]]\npath = "{tmp_path}/t"\ntopics = ["*.{topic_name}"]\n',
        "audit": 'dc = "dc1"\n' + access,
    }
    file = tmp_path / f"{name}.toml"
    file.write_text(files[name])
    status, checks = diagnosed(capsys, **{name: file})
    assert (status, [check for check in checks if check["state"] == "wrong"]) == (0, [])
    assert sum(check["text"] == "connected" for check in checks) == (2 if name == "mirror" else 1)
