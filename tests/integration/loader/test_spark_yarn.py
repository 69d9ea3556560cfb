"""The loader in YARN's cluster mode: the driver runs in a container, with nothing of the host that submits it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from logferry.loaders.location import Location
from logferry.ops.bench.harness.spark_cluster import SPARK
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.hdfs_cluster import HdfsCluster
from logferry.ops.stack.processes import free_ports

from tests.support.loader import Topic, check_exact, chunks_of
from tests.support.loader_process import run_module
from tests.support.yarn_cluster import YarnCluster

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with HdfsCluster(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def yarn(hdfs: HdfsCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[YarnCluster]:
    with YarnCluster(tmp_path_factory.mktemp("yarn"), hdfs.uri) as cluster:
        yield cluster


def submit(yarn: YarnCluster, folder: Path, config: str) -> subprocess.CompletedProcess[str]:
    """The command of the guide. ``load.toml`` is not in the folder in which it is called."""
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "load.toml").write_text(config)
    settings = {
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": sys.executable,
        "spark.yarn.maxAppAttempts": "1",
        # For a node with little memory, and without an upload of Spark itself.
        "spark.yarn.jars": f"local:{SPARK}/jars/*",
        "spark.yarn.appMasterEnv.JAVA_HOME": str(find_java().home),
        "spark.executorEnv.JAVA_HOME": str(find_java().home),
        "spark.executor.instances": "1",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    sizes = ["--driver-memory", "512m", "--executor-memory", "512m"]
    printed = shlex.split(run_module(["--print-submit"]).stdout)
    mode = ["--master", "yarn", "--deploy-mode", "cluster", "--files", str(folder / "conf" / "load.toml")]
    command = [str(SPARK / "bin" / "spark-submit"), *mode, *sizes, *conf, *printed, "--config", "load.toml", "--json"]
    env = {
        **os.environ,
        "HADOOP_CONF_DIR": str(yarn.folder),
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": str(SPARK),
        "PYSPARK_PYTHON": sys.executable,
    }
    given = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 850}
    return subprocess.run(command, env=env, cwd=folder, check=False, **given)  # type: ignore[call-overload,no-any-return]


async def test_a_load_in_a_container(yarn: YarnCluster, hdfs: HdfsCluster, topic: Topic, tmp_path: Path):
    await topic.create(partitions=2)
    await topic.write(chunks_of("a", b"1\n2\n") + chunks_of("b", b"\xff\n"), partitions=2)
    table = f"{hdfs.uri}/warehouse/logs"
    config = f'kafka.bootstrap_servers = "{{}}"\n[[tables]]\npath = "{table}"\ntopics = ["{topic.name}"]\n'
    done = submit(yarn, tmp_path, config.format(topic.bootstrap))
    assert done.returncode == 0, (done.stderr[-3000:], yarn.logs())
    assert "final status: SUCCEEDED" in done.stderr
    assert '"exit": 0' in yarn.logs()
    check_exact(Location.of(table), topic.committed)
    away = submit(yarn, tmp_path, config.format(f"127.0.0.1:{free_ports(1)[0]}"))
    assert away.returncode == 1, away.stderr[-3000:]
    assert "final status: FAILED" in away.stderr
    assert "exited with status 3" in away.stderr, "the diagnostics name the loader's own exit status"
