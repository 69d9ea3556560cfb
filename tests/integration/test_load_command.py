"""The loader's command as a user runs it: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from logferry.ops.kafka import Cluster
from logferry.ops.ports import free_ports

from tests.loading import Topic, check_exact, chunks_of, loader_env, run_module

pytestmark = pytest.mark.spark


async def test_two_tables_by_configuration_and_one_of_them_refused(kafka: Cluster, topic_name: str, tmp_path: Path):
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


TABLE = ["--table", "t", "--topics", "dc1.a"]
BOOTSTRAP = ["--bootstrap", "127.0.0.1:1"]
WRONG_USE = {
    "nothing": ([], "missing: --table, --topics, --bootstrap"),
    "no address": (TABLE, "missing: --bootstrap"),
    "an option that is none": (["--tabel", "x"], "unrecognized arguments"),
    "a data centre that is none": ([*TABLE, *BOOTSTRAP, "--dc", "DC 1"], "dc: "),
    "file and options": (["--config", "x.toml", *TABLE], "--config stands alone"),
    "no file": (["--config", "/nowhere/x.toml"], "/nowhere/x.toml: No such file"),
    "jars that are none": ([*TABLE, *BOOTSTRAP, "--jars", "/nowhere/a.jar"], "/nowhere/a.jar is not a file"),
}


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
    """Said with what Spark's own launcher said."""
    env = {**loader_env(), "JAVA_HOME": str(tmp_path)}
    ended = run_module([*TABLE, *BOOTSTRAP], env)
    assert ended.returncode == 3
    assert f"Spark cannot start (JAVA_HOME is {tmp_path})" in ended.stdout
