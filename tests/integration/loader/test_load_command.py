"""The loader's command as a user runs it: what it prints, and its exit status."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from logferry.loaders.location import Location
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports

from tests.support.loader import Topic, check_exact, chunks_of
from tests.support.loader_process import LoaderProcess, loader_env, run_module, run_table

pytestmark = pytest.mark.spark


@pytest.mark.long
async def test_two_tables_by_configuration_and_one_of_them_refused(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
):
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create(partitions=2)
    await topic.write(chunks_of("a", b"1\n2\n") + chunks_of("b", b"\xff\n"), partitions=2)
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "letter.txt").write_text("dear")
    settings = tmp_path / "load.toml"
    settings.write_text(
        f'kafka.bootstrap_servers = "{kafka.bootstrap}"\n'
        f'spark = {{ master = "local[1]", driver_memory = "512m", scratch = "{tmp_path / "scratch"}" }}\n'
        + "".join(
            f'[[tables]]\npath = "{tmp_path / name}"\ntopics = ["{topic.name}"]\n' for name in ("refused", "logs")
        )
    )
    ended = run_module(["--config", str(settings), "--once"])
    assert ended.returncode == 1, ended.stderr
    assert "refused is not empty, and not a Delta table" in ended.stdout
    assert "batch 0: 2 rows, 1 quarantined" in ended.stdout
    assert f"{topic.name} " in ended.stdout
    assert ended.stderr == ""
    assert not list((tmp_path / "scratch").iterdir())
    check_exact(tmp_path / "logs", topic.committed)


def test_kafka_away(tmp_path: Path):
    (port,) = free_ports(1)
    table = tmp_path / "logs"
    address = f"127.0.0.1:{port}"
    ended = run_module(["--table", str(table), "--topics", "dc1.a", "--bootstrap", address, "--json"])
    assert ended.returncode == 3, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["exit"] == 3
    assert address in summary["tables"][0]["error"]
    assert not table.exists()


async def test_following_until_a_signal(kafka: KafkaCluster, topic_name: str, tmp_path: Path):
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    loader = LoaderProcess(kafka.bootstrap, Location.of(tmp_path / "t"), topic.name, "--follow", scratch=tmp_path)
    try:
        await until(lambda: last_batch(open_table(Location.of(tmp_path / "t"))) == 0)
        await topic.write(chunks_of("b", b"2\n"))
        await until(lambda: last_batch(open_table(Location.of(tmp_path / "t"))) == 1)
        loader.process.terminate()
        status, summary, err = loader.finish()
    finally:
        loader.process.kill()
    assert (status, summary["rows"]) == (0, 2), err
    assert "ends after the batches in progress" in err
    check_exact(tmp_path / "t", topic.committed)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_state_and_reset(kafka: KafkaCluster, topic_name: str, tmp_path: Path):
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create()
    await topic.write(chunks_of("a", b"1\n", b"2\n"))
    table = str(tmp_path / "t")
    job = ["--topics", topic.name, "--bootstrap", kafka.bootstrap, "--master", "local[1]"]
    assert run_module(["--table", table, *job]).returncode == 0
    refused = run_table(["reset", table, *job, "--to", f"{topic.name}=earliest"])
    assert refused.returncode == 2
    assert f"{topic.name} 0: 3 → 0: 3 offsets will be loaded again" in refused.stdout
    assert "repeat with --yes" in refused.stdout
    agreed = run_table(["reset", table, *job, "--to", f"{topic.name}:0=1", "--yes"])
    assert agreed.returncode == 0
    state = run_table(["state", table], dict(os.environ))
    assert state.returncode == 0
    assert "holds batch 1 (reset, lines/1, offsets of dc1" in state.stdout
    facts = json.loads(run_table(["state", table, "--json"], dict(os.environ)).stdout)
    assert [position["offset"] for position in facts[0]["positions"]] == [1]


TABLE = ["--table", "t", "--topics", "dc1.a"]
BOOTSTRAP = ["--bootstrap", "127.0.0.1:1"]
WRONG_USE = {
    "nothing": ([], "missing: --table, --topics, --bootstrap"),
    "no address": (TABLE, "missing: --bootstrap"),
    "an option that is none": (["--tabel", "x"], "unrecognized arguments"),
    "a data centre that is none": ([*TABLE, *BOOTSTRAP, "--dc", "DC 1"], "dc: "),
    "file and options": (["--config", "x.toml", *TABLE], "--config excludes --table"),
    "no file": (["--config", "/nowhere/x.toml"], "/nowhere/x.toml: No such file"),
    "two things at once": ([*TABLE, *BOOTSTRAP, "--follow", "--once"], "exclude each other"),
    "a limit without an end": ([*TABLE, *BOOTSTRAP, "--follow", "--stop-s", "5"], "--follow and --stop-s exclude"),
    "a setting without a value": (
        [*TABLE, *BOOTSTRAP, "--spark-conf", "spark.x"],
        "--spark-conf 'spark.x': NAME=VALUE expected",
    ),
    "a setting that is ours": ([*TABLE, *BOOTSTRAP, "--spark-conf", "spark.master=x"], "this is set by the loader"),
    "the work of another command": ([*TABLE, *BOOTSTRAP, "--reset", "dc1.a=latest"], "unrecognized arguments"),
    "a format that is none": ([*TABLE, *BOOTSTRAP, "--parser", "xml"], "tables.0.parser.format"),
    "jars that are none": ([*TABLE, *BOOTSTRAP, "--jars", "/nowhere/a.jar"], "/nowhere/a.jar is not a file"),
}


JOB = ["t", "--topics", "dc1.a", *BOOTSTRAP]
WRONG_TABLE_USE = {
    "no command": ([], "required: COMMAND"),
    "a command that is none": (["statee", "t"], "invalid choice: 'statee'"),
    "the state of nothing": (["state"], "missing: PATH of a table (or --config FILE)"),
    "no table": (["reset", "--to", "dc1.a=latest", "--topics", "dc1.a", *BOOTSTRAP], "missing: PATH"),
    "file and options": (["reset", *JOB, "--to", "dc1.a=latest", "--config", "x.toml"], "--config excludes --topics"),
    "a position that is none": (["reset", *JOB, "--to", "dc1.a"], "reset target 'dc1.a': TOPIC="),
    "nothing to reset": (["reset", *JOB], "required: --to"),
    "an option of loads": (["reload", *JOB, "--from", "dc1.a", "--stop-records", "5"], "unrecognized arguments"),
    "a move to elsewhere": (["move", *JOB, "--to", "dc2", "--dc", "dc1"], "needs the configuration of dc2"),
    "two tables to wait for": (["segments", "wait", "t", "u", "2026-11-20"], "the PATH of one table"),
}


@pytest.mark.parametrize("case", WRONG_TABLE_USE)
def test_wrong_use_of_a_table_command(case: str):
    arguments, said = WRONG_TABLE_USE[case]
    ended = run_table(arguments, dict(os.environ))
    assert ended.returncode == 2
    assert said in ended.stdout + ended.stderr


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_use(case: str):
    arguments, said = WRONG_USE[case]
    ended = run_module(arguments, dict(os.environ))
    assert ended.returncode == 2
    assert said in ended.stdout + ended.stderr


def test_no_jars_known():
    env = {name: value for name, value in os.environ.items() if name != "LOGFERRY_SPARK_JARS"}
    ended = run_module([*TABLE, *BOOTSTRAP], env)
    assert ended.returncode == 2
    assert "LOGFERRY_SPARK_JARS" in ended.stdout


def test_no_java(tmp_path: Path):
    """The error quotes Spark's launcher."""
    env = {**loader_env(), "JAVA_HOME": str(tmp_path)}
    ended = run_module([*TABLE, *BOOTSTRAP], env)
    assert ended.returncode == 3
    assert f"Spark cannot start (JAVA_HOME is {tmp_path})" in ended.stdout
