"""The loader on a cluster: by spark-submit, and with a master of its own choice; other processes make the rows."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.ops.bench.harness.spark_cluster import SPARK, Standalone, standalone
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Sent, Topic, check_exact, chunks_of, rows_of, stored
from tests.support.loader_process import STEPS, loader_env, run_module, wait_for
from tests.support.spark_cluster import tasks_by_executor, told_by

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ON_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("spark") / "standalone") as found:
        yield found


@pytest.fixture
async def topic(kafka: KafkaCluster, topic_name: str) -> Topic:
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create(partitions=4)
    return topic


async def write(topic: Topic, round_: int) -> list[Sent]:
    chunks = [
        one
        for source in range(8)
        for one in chunks_of(f"web{source}", *(b"%d\n" % n * 100 + b"\xff\n" for n in range(20)), start=round_ * 10**6)
    ]
    await topic.write(chunks, partitions=4)
    return chunks


def config(topic: Topic, tmp_path: Path, pattern: str = "", **spark: Any) -> Path:
    """``pattern``: of the topics, if it is not this one alone."""
    file = tmp_path / "load.toml"
    conf = "\n".join(f'"{name}" = "{value}"' for name, value in spark.pop("conf", {}).items())
    said = "\n".join(f'{name} = "{value}"' for name, value in spark.items())
    file.write_text(
        f'kafka.bootstrap_servers = "{topic.bootstrap}"\n[spark]\n{said}\n[spark.conf]\n{conf}\n'
        f'[[tables]]\npath = "{tmp_path / "logs"}"\ntopics = ["{pattern or topic.name}"]\nmax_records = 400\n'
    )
    return file


def submit(options: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """``spark-submit OPTIONS $(logferry load --print-submit) ARGUMENTS``, without what a user would not set."""
    printed = run_module(["--print-submit"])
    assert printed.returncode == 0, printed.stderr
    command = [str(SPARK / "bin" / "spark-submit"), *options, *shlex.split(printed.stdout), *arguments]
    env = {**loader_env(), "SPARK_HOME": str(SPARK), "PYSPARK_PYTHON": sys.executable}
    del env["LOGFERRY_SPARK_JARS"]
    return subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, check=False)


def conf_options(conf: dict[str, str]) -> list[str]:
    return [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]


@pytest.mark.long
async def test_by_spark_submit(cluster: Standalone, topic: Topic, tmp_path: Path):
    """The configuration's own master and memory give way to spark-submit's."""
    sent = await write(topic, 0)
    file = config(topic, tmp_path, master="local[7]", driver_memory="9m")
    asked = conf_options({**ON_LOOPBACK, **told_by(tmp_path / "events")})
    done = submit(["--master", cluster.url, "--executor-memory", "512m", *asked], "--config", str(file), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["exit"], len(summary["tables"][0]["batches"])) == (0, 1)
    check_exact(tmp_path / "logs", sent)
    tasks = tasks_by_executor(tmp_path / "events")
    assert set(tasks) == {"0", "1"}, "each worker's executor, and never the driver"
    again = submit(["--master", cluster.url, *asked[:4]], "--config", str(file), "--json")
    assert (again.returncode, json.loads(again.stdout.splitlines()[-1])["rows"]) == (0, 0)


@pytest.mark.long
async def test_by_the_master_of_the_configuration(cluster: Standalone, topic: Topic, tmp_path: Path):
    sent = await write(topic, 0)
    conf = {**ON_LOOPBACK, **told_by(tmp_path / "events"), "spark.executor.memory": "512m"}
    file = config(topic, tmp_path, master=cluster.url, conf=conf)
    done = run_module(["--config", str(file), "--json"])
    assert done.returncode == 0, (done.stdout, done.stderr)
    check_exact(tmp_path / "logs", sent)
    assert set(tasks_by_executor(tmp_path / "events")) == {"0", "1"}


@pytest.mark.long
@pytest.mark.parametrize("step", ["ledger", "mid-write", "mid-write of what is kept"])
async def test_an_executor_is_killed(step: str, cluster: Standalone, topic: Topic, tmp_path: Path):
    """Spark repeats lost tasks if it can; else the next load repeats the batch. Each row is in the table once."""
    sent, table = await write(topic, 0) + await write(topic, 1), tmp_path / "logs"
    is_kept = step.endswith("kept")
    if is_kept:
        # Sources of several data centres are looked at first, and the batch is kept meanwhile, by executors.
        other = Topic(topic.bootstrap, topic.name.replace("dc1.", "dc2."))
        await other.create()
        await other.write(chunks_of("elsewhere", b"line\n"))
        sent += other.committed
    pattern = topic.name.replace("dc1.", "*.")
    file = config(topic, tmp_path, pattern, master=cluster.url, conf={**ON_LOOPBACK, "spark.executor.memory": "512m"})
    command = [sys.executable, "-m", "logferry.loaders", "--config", str(file), "--json"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=loader_env())  # noqa: ASYNC220
    try:
        watch = STEPS[step.partition(" ")[0]]
        wait_for(lambda: watch(TablePaths.of(table)) > (step == "ledger"), step)
        victims = cluster.executors()
        assert victims
        for victim in victims if is_kept else victims[:1]:
            os.kill(victim, signal.SIGKILL)
    finally:
        out, err = first.communicate()
    said = json.loads(out)["tables"][0]["error"]
    assert first.returncode == (3 if said else 0), (out, err)
    again = run_module(["--config", str(file), "--json"])
    assert again.returncode == 0, (again.stdout, again.stderr)
    check_exact(table, sent)
    if is_kept:
        assert "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND" in said, "or it was over too soon to show anything"


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_a_load_that_follows_repeats_the_batch_of_dead_executors(
    cluster: Standalone, topic: Topic, tmp_path: Path
):
    """All executors of a kept batch end: the load says so, and does the batch again without being started again."""
    sent, table = await write(topic, 0) + await write(topic, 1), tmp_path / "logs"
    other = Topic(topic.bootstrap, topic.name.replace("dc1.", "dc2."))
    await other.create()
    await other.write(chunks_of("elsewhere", b"line\n"))
    sent += other.committed
    conf = {**ON_LOOPBACK, "spark.executor.memory": "512m"}
    file = config(topic, tmp_path, topic.name.replace("dc1.", "*."), master=cluster.url, conf=conf)
    command = [sys.executable, "-m", "logferry.loaders", "--config", str(file), "--follow"]
    loader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=loader_env())  # noqa: ASYNC220
    rows = len(rows_of(sent)[0])
    try:
        wait_for(lambda: STEPS["mid-write"](TablePaths.of(table)) > 0, "mid-write", within_s=400)
        for victim in cluster.executors():
            os.kill(victim, signal.SIGKILL)
        wait_for(
            lambda: last_batch(open_table(Location.of(table))) >= 0 and len(stored(table)) == rows,
            "the rows",
            within_s=400,
        )
        loader.terminate()
        out, err = loader.communicate()
    finally:
        if loader.returncode is None:
            loader.kill()
            loader.communicate()
    assert loader.returncode == 0, (out, err)
    check_exact(table, sent)
    assert b"CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND" in out, "or it was over too soon to show anything"


@pytest.mark.long
def test_spark_submit_without_the_jars(tmp_path: Path):
    script = shlex.split(run_module(["--print-submit"]).stdout)[-1]
    env = {**loader_env(), "SPARK_HOME": str(SPARK), "PYSPARK_PYTHON": sys.executable}
    options = ["--table", str(tmp_path / "logs"), "--topics", "dc1.a", "--bootstrap", "127.0.0.1:1"]
    command = [str(SPARK / "bin" / "spark-submit"), *conf_options(ON_LOOPBACK), script, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "no jar holds org.apache.spark.sql.kafka010" in done.stdout
    assert not (tmp_path / "logs").exists()


def test_what_spark_submit_is_given():
    jars = os.pathsep.join([__file__, sys.executable])
    printed = run_module(["--print-submit"], {**os.environ, "LOGFERRY_SPARK_JARS": jars})
    assert printed.returncode == 0
    *options, script = shlex.split(printed.stdout)
    assert options == ["--jars", f"{__file__},{Path(sys.executable).absolute()}", "--driver-java-options", "-Xss128m"]
    assert [path.name for path in Path(script).parent.glob("*.py") if path.name != "__init__.py"] == [Path(script).name]
