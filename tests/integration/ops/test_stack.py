"""The local stack with real processes: it starts, answers, survives kills, refuses bad folders, leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.structs import TopicPartition
from logferry.ops.cli.problems import Unavailable, UsageError
from logferry.ops.stack.kafka_cluster import FolderInUse, FolderUnusable, KafkaCluster, live_brokers
from logferry.ops.stack.processes import free_ports
from logferry.ops.stack.stack import Stack

BOUND_S = 60


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Bounded: the condition is about another process."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND_S} s: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A zombie, whose parent has not looked yet, is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def create(cluster: KafkaCluster, topic: str) -> None:
    """With one partition, and a replica on every broker."""
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, cluster.brokers)])
    finally:
        await admin.close()


async def write(cluster: KafkaCluster, topic: str, value: bytes) -> None:
    """One record that enough replicas have."""
    async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, acks="all") as producer:
        await producer.send_and_wait(topic, value, partition=0)


async def read(cluster: KafkaCluster, topic: str) -> bytes | None:
    """The first record."""
    async with AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap, auto_offset_reset="none") as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        value: bytes | None = (await consumer.getone()).value
        return value


# ---- a cluster ---------------------------------------------------------------------------------------------


async def test_the_fixture_answers(kafka: KafkaCluster, topic_name: str) -> None:
    await create(kafka, topic_name)
    await write(kafka, topic_name, b"here")
    assert await read(kafka, topic_name) == b"here"


@pytest.mark.long
async def test_data_and_ports_survive_a_kill_and_a_reopening(tmp_path: Path) -> None:
    with KafkaCluster("dc1", tmp_path / "data") as cluster:
        before = cluster.bootstrap
        await create(cluster, "t")
        await write(cluster, "t", b"kept")
        killed = cluster.pids[1]
        cluster.kill(1)
        assert not is_alive(killed)
        assert cluster.pids == {}
        assert cluster.children[1].exit_status == -signal.SIGKILL
        cluster.restart(1)
        assert cluster.pids[1] != killed
        assert await read(cluster, "t") == b"kept"
        last = cluster.pids[1]
    assert not is_alive(last)
    with KafkaCluster("dc1", tmp_path / "data") as cluster:
        assert cluster.bootstrap == before
        assert await read(cluster, "t") == b"kept"


@pytest.mark.long
async def test_three_brokers_carry_on_without_one(tmp_path: Path) -> None:
    with KafkaCluster("dc1", tmp_path / "data", brokers=3) as cluster:
        ports = [int(server.rpartition(":")[2]) for server in cluster.bootstrap.split(",")]
        assert [live_brokers(port) for port in ports] == [{1, 2, 3}] * 3
        await create(cluster, "t")
        cluster.kill(2)
        await write(cluster, "t", b"two of three")
        cluster.restart(2)
        assert live_brokers(ports[1]) == {1, 2, 3}
        assert await read(cluster, "t") == b"two of three"


def test_a_second_owner_is_refused(kafka: KafkaCluster) -> None:
    program = (
        "import sys; from pathlib import Path; from logferry.ops.stack.kafka_cluster import *\n"
        "try: KafkaCluster('x', Path(sys.argv[1])).start()\n"
        "except FolderInUse as problem: print(problem)"
    )
    run = subprocess.run([sys.executable, "-c", program, kafka.data], capture_output=True, text=True, check=True)
    assert f"{kafka.data} is in use by process {os.getpid()}" in run.stdout
    with pytest.raises(FolderInUse):
        KafkaCluster("x", kafka.data).start()


def test_a_lock_file_without_an_owner_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1\n")
    with KafkaCluster("dc1", tmp_path) as cluster:
        assert len(cluster.pids) == 1


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cluster that ran and was stopped; to be copied."""
    folder = tmp_path_factory.mktemp("closed") / "data"
    with KafkaCluster("dc1", folder):
        pass
    return folder


def no_meta(data: Path) -> None:
    (data / "kafka-1" / "log" / "meta.properties").unlink()


def half_meta(data: Path) -> None:
    meta = data / "kafka-1" / "log" / "meta.properties"
    meta.write_text(meta.read_text()[:40])


def other_cluster(data: Path) -> None:
    meta = data / "kafka-1" / "log" / "meta.properties"
    lines = [line for line in meta.read_text().splitlines() if not line.startswith("cluster.id")]
    meta.write_text("\n".join([*lines, "cluster.id=AnotherClusterAltogeth"]))


def other_node(data: Path) -> None:
    meta = data / "kafka-1" / "log" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=7"))


def half_facts(data: Path) -> None:
    (data / "cluster.json").write_text('{"format": 1, "clus')


def no_facts(data: Path) -> None:
    (data / "cluster.json").unlink()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (no_meta, "half-formatted: it has no meta.properties"),
        (half_meta, "half-written: no "),
        (other_cluster, "belongs to the cluster AnotherClusterAltogeth"),
        (other_node, "belongs to node 7"),
        (half_facts, r"cluster\.json cannot be read"),
        (no_facts, r"has no cluster\.json"),
    ],
)
def test_a_folder_that_is_half_of_something_is_refused(
    closed: Path, tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(closed, data)
    harm(data)
    with pytest.raises(FolderUnusable, match=said):
        KafkaCluster("dc1", data).start()


def test_another_number_of_brokers_is_refused(closed: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(closed, data)
    with pytest.raises(FolderUnusable, match="1 brokers, but 3 were requested"):
        KafkaCluster("dc1", data, brokers=3).start()


def test_a_format_that_was_cut_off_is_done_again(closed: Path, tmp_path: Path) -> None:
    """The crash window: formatted beside its place, not moved in yet."""
    data = tmp_path / "data"
    shutil.copytree(closed, data)
    (data / "kafka-1" / "log").rename(data / "kafka-1" / "log.new")
    with KafkaCluster("dc1", data) as cluster:
        assert len(cluster.pids) == 1


def test_a_broker_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = KafkaCluster("dc1", tmp_path / "data", settings={"min.insync.replicas": "none"})
    with pytest.raises(Unavailable, match=r"min\.insync\.replicas"):
        cluster.start()
    assert cluster.pids == {}
    with KafkaCluster("dc1", tmp_path / "data") as mended:
        assert len(mended.pids) == 1


# ---- nothing outlives its owner ----------------------------------------------------------------------------


def test_a_killed_owner_leaves_no_process_and_a_folder_that_opens(tmp_path: Path) -> None:
    """The broker was started by a thread that is gone: it must outlive the thread, and not the process."""
    program = (
        "import json, sys, threading, time; from pathlib import Path\n"
        "from logferry.ops.stack.kafka_cluster import KafkaCluster\n"
        "cluster = KafkaCluster('dc1', Path(sys.argv[1]))\n"
        "starter = threading.Thread(target=cluster.start); starter.start(); starter.join()\n"
        "cluster.kill(1); restarter = threading.Thread(target=cluster.restart, args=(1,))\n"
        "restarter.start(); restarter.join()\n"
        "print(json.dumps(cluster.pids), flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        line = owner.stdout.readline()
        pid = json.loads(line)["1"]
        assert is_alive(pid)
        owner.kill()
    wait_until(lambda: not is_alive(pid), f"the end of Kafka, process {pid}")
    with KafkaCluster("dc1", tmp_path / "data") as cluster:
        assert len(cluster.pids) == 1


# ---- the whole stack ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_stack_starts_again_what_dies_and_stops_all(tmp_path: Path) -> None:
    with Stack(tmp_path, workers=2) as stack:
        urls, before = stack.urls("dc1"), stack.pids
        assert sorted(before) == ["dc1/gateway-0", "dc1/gateway-1", "dc1/kafka-1"]
        stack.kill("gateway-0")
        wait_until(lambda: stack.pids.get("dc1/gateway-0") not in (None, before["dc1/gateway-0"]), "a new gateway-0")
        stack.wait_ready()
        assert stack.urls("dc1") == urls
        stack.restart("kafka-1")
        stack.restart("gateway-1")
        after = stack.pids
        assert all(after[name] != before[name] for name in before)
    assert not any(is_alive(pid) for pid in (*before.values(), *after.values()))
    assert stack.pids == {}


def test_a_gateway_that_refuses_its_configuration_is_shown_and_nothing_is_left(tmp_path: Path) -> None:
    stack = Stack(tmp_path, gateway_settings={"limits": {"chunk_bytes": 1}})
    with pytest.raises(UsageError, match=r"limits\.chunk_bytes"):
        stack.start()
    assert stack.pids == {}


def test_up_prints_one_line_and_stops_on_sigterm(tmp_path: Path) -> None:
    port = free_ports(2)[0]
    command = [sys.executable, "-m", "logferry.ops", "up", "--json", "--no-restart", "--data", str(tmp_path)]
    with (tmp_path / "said").open("w") as said:
        with subprocess.Popen(
            [*command, "--dc", "a,b", "--port", str(port)], stdout=subprocess.PIPE, stderr=said, text=True
        ) as up:
            assert up.stdout is not None
            facts = json.loads(up.stdout.readline())
            assert [facts[dc]["gateway"] for dc in ("a", "b")] == [
                [f"http://127.0.0.1:{port}"],
                [f"http://127.0.0.1:{port + 1}"],
            ]
            names = [f"{dc}/{name}" for dc in facts for name in sorted(facts[dc]["pids"])]
            pids = [pid for dc in facts.values() for pid in dc["pids"].values()]
            processes = ("gateway-0", "kafka-1", "mirror-0")
            assert names == [f"{dc}/{name}" for dc in ("a", "b") for name in processes]
            assert all(map(is_alive, pids))
            assert all(live_brokers(int(facts[dc]["kafka"].rpartition(":")[2])) == {1} for dc in facts)
            again = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, check=False)
            assert again.returncode == 2
            assert f"port {port} is in use" in again.stderr
            os.kill(facts["a"]["pids"]["gateway-0"], signal.SIGKILL)
            up.terminate()
            assert up.stdout.read() == ""
        assert up.returncode == 0
    assert not any(map(is_alive, pids))
