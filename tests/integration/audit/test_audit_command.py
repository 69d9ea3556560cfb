"""`logferry audit` as it is called: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from logferry.ops.audit.command import main
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import World


@pytest.fixture
async def world(kafka: KafkaCluster, topic_name: str) -> World:
    found = World(kafka.bootstrap, topic_name)
    await found.create()
    return found


def run(world: World, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "gateway.toml"
    config.write_text(f'dc = "dc1"\nprefix = "{world.prefix}"\nkafka.bootstrap_servers = "{world.bootstrap}"\n')
    command = [sys.executable, "-W", "error", "-m", "logferry.ops.cli.main", "audit", *arguments]
    if "--bootstrap" not in arguments:
        command += ["--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


async def test_exact(world: World, tmp_path: Path):
    path = tmp_path / "web1.log"
    plan = world.plan()
    path.write_bytes(b"".join(record.chunk.data for record in plan.records if record.source_id == "web1") + b"more")
    for index in plan.of("web1"):
        chunk = plan.records[index].chunk
        plan.records[index] = plan.records[index]._replace(chunk=chunk._replace(attributes={"path": str(path)}))
    await world.write(plan)
    table = world.load().write(tmp_path / "t")
    done = run(world, tmp_path, "--topic", world.name, "--table", str(table), "--file", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("exact: 15 chunks of 3 sources, 60 lines, ")
    assert done.stdout.splitlines()[-1].endswith("nothing lost, nothing doubled")
    assert "not-sent-yet" in done.stdout
    assert "2 batches, 60 rows: 60 compared with the log" in done.stdout


async def test_refuted(world: World, tmp_path: Path):
    plan = world.plan(["[red]web1"])
    plan.records.append(plan.records[2])
    await world.write(plan)
    done = run(world, tmp_path, "--topic", world.name)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "NOT exact: 1 × double"
    assert f"double: {world.topic}-{plan.records[0].partition} offset 5 [red]web1" in done.stdout


async def test_a_file_that_differs(world: World, tmp_path: Path):
    path = tmp_path / "web1.log"
    path.write_bytes(b"x" * 400)
    plan = world.plan(["web1"])
    chunk = plan.records[0].chunk
    plan.records[0] = plan.records[0]._replace(chunk=chunk._replace(attributes={"path": str(path)}))
    await world.write(plan)
    done = run(world, tmp_path, "--topic", world.name, "--file", str(path))
    assert done.returncode == 1
    assert "the first difference is at position 0" in done.stdout


async def test_json(world: World, tmp_path: Path):
    plan = world.plan()
    plan.records.append(plan.records[2])
    await world.write(plan)
    done = run(world, tmp_path, "--topic", world.name, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["verdict"] == "NOT exact: 1 × double"
    assert report["exact"] is False
    assert report["topics"] == [world.topic]
    assert report["counts"]["chunks"] == 16
    assert report["counts"]["refuting"] == {"double": 1}
    assert report["sources"][0]["doubles"] == 1
    assert report["findings"][0]["kind"] == "double"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--topic", "missing"], 2, "this Kafka has no topic dc1.missing"),
        (["--dc", "DC 1"], 2, "dc: 'DC 1' is not"),
        (["--dc", "dc8"], 2, ".gateway.dc8.state; check --bootstrap, --dc and the prefix"),
        (["--file", "/nowhere/access.log"], 2, "--file /nowhere/access.log: no such file"),
        (["--config", "/nowhere/gateway.toml", "--bootstrap", "127.0.0.1:1"], 2, "No such file"),
        (["--unknown"], 2, "unrecognized arguments"),
        (["--bootstrap", "127.0.0.1:1"], 3, "Kafka at 127.0.0.1:1 cannot be read"),
        (["--table", "/nowhere/t"], 3, "no Delta table"),
    ],
)
async def test_what_cannot_be_done(world: World, tmp_path: Path, arguments: list[str], status: int, said: str):
    done = run(world, tmp_path, *arguments)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_without_configuration_and_address(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "--config FILE or --bootstrap" in capsys.readouterr().err


def test_kafkas_security_is_that_of_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "gateway.toml"
    config.write_text(
        f'dc = "dc1"\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\nsecurity_protocol = "SASL_SSL"\n'
        f'sasl_username = "auditor"\nsasl_password_file = "{tmp_path}/password"\n'
    )
    assert main(["--config", str(config)]) == 2
    assert f"kafka.sasl_password_file: {tmp_path}/password" in capsys.readouterr().err
    (tmp_path / "password").write_text("secret")
    assert main(["--config", str(config)]) == 3
    assert "secret" not in capsys.readouterr().err
