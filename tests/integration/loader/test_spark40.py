"""The loader with the older Spark that is allowed, as a user installs it: load, reload, compact and audit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from logferry.loaders.config import TESTED_PYSPARK
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import World
from tests.support.interpreters import built_wheel
from tests.support.loader_process import java_env

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def logferry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment of its own. The wheel's own constraints decide whether pip takes this pyspark."""
    folder = tmp_path_factory.mktemp("spark40")
    wheel = built_wheel(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "venv")]
    install = ["install", "-q", f"{wheel}[ops]", f"pyspark=={TESTED_PYSPARK['4.0']}"]
    subprocess.run([*pip, *install], check=True, timeout=1200)
    return folder / "venv" / "bin" / "logferry"


async def test_load_reload_compact_and_audit(logferry: Path, kafka: KafkaCluster, topic_name: str, tmp_path: Path):
    world = World(kafka.bootstrap, topic_name)
    await world.create()
    await world.write(world.plan())
    table, topic = tmp_path / "t", world.topic
    job = ["--topics", topic, "--bootstrap", kafka.bootstrap, "--master", "local[2]"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOGFERRY_SPARK_JARS")}

    def run(*arguments: str) -> str:
        command = [str(logferry), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**env, **java_env()}, cwd=tmp_path)
        assert done.returncode == 0, (arguments, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    assert "batch 0" in run("load", "--table", str(table), *job)
    await world.write(world.plan(["web7"]))
    assert "batch 1" in run("load", "--table", str(table), *job)
    assert "replaced" in run("table", "reload", str(table), *job, "--from", topic, "--yes")
    run("table", "compact", str(table))
    (tmp_path / "audit.toml").write_text(
        f'dc = "dc1"\nprefix = "{world.prefix}"\ntopics = ["{topic_name}"]\ntables = ["{table}"]\n'
        f'kafka.bootstrap_servers = "{kafka.bootstrap}"\n'
    )
    assert "exact" in run("audit", "--config", "audit.toml", "--brief")
