"""A record of the state topic that cannot be decoded: its lane stops alone, by name, and a command repairs it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import LANES, Gateway, gateway, log_of, write

_PATIENCE_S = 60


def source_of(lane: int) -> str:
    return next(name for name in map(str, range(99)) if lane_of(name, LANES) == lane)


async def poison(kafka: KafkaCluster, topic: str, lane: int, key: bytes) -> int:
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)
    await producer.start()
    try:
        return int((await producer.send_and_wait(topic, b"\x09 of a newer version", key=key, partition=lane)).offset)
    finally:
        await producer.stop()


def forget(running: Gateway, record: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "logferry.ops.cli.main", "lanes", "--config"]
    command += [str(next(running.folder.glob("*.toml"))), "--forget", record, "--yes"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)


async def test_the_lane_stops_alone_and_is_repaired(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    bad, good = source_of(1), source_of(2)
    with gateway(kafka, tmp_path, topic_name, workers=2) as running:
        await running.make_topic(topic_name)
        for source in (bad, good):
            await write(running, topic_name, source, "seqno=1")
        key = SourceIdentity(f"dc1.{topic_name}", None, "other").state_key()
        offset = await poison(kafka, running.state_topic, 1, key)
        owner = await running.owner(bad)
        running.workers[owner].child.send(signal.SIGKILL)
        left = 1 - owner
        pid = running.workers[left].child.pid
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                lanes = (await running.ask("GET", "/v1/status", left)).document["lanes"]
                stopped = [lane for lane in lanes if lane["state"] == "stopped"]
                if stopped and len(lanes) == LANES and sum(lane["state"] == "serving" for lane in lanes) == LANES - 1:
                    break
                await asyncio.sleep(0.1)
        [lane] = stopped
        assert lane["lane"] == 1
        assert f"{running.state_topic}-1: the record at offset {offset} cannot be decoded" in lane["last_error"]
        assert f"--forget 1:{offset}" in lane["last_error"]
        for seqno in range(2, 30):
            await write(running, topic_name, good, f"seqno={seqno}&prev={seqno - 1}", worker=left)
        refused = await write(running, topic_name, bad, "seqno=2&prev=1", worker=left, expect=503)
        assert "lane 1 is stopped" in refused.document["detail"]
        readable = forget(running, f"2:{await first_offset(kafka, running.state_topic, 2)}")
        assert (readable.returncode, "can be decoded" in readable.stderr) == (1, True), readable
        done = forget(running, f"1:{offset}")
        assert done.returncode == 0, done
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                again = await write(running, topic_name, bad, "seqno=2&prev=1", worker=left, expect=None)
                if again.status == 200:
                    break
                await asyncio.sleep(0.1)
        assert running.workers[left].child.pid == pid, "a worker ended for it"
        assert sorted(await log_of(running, topic_name), key=str) == sorted(
            [(bad, 1, None), (bad, 2, 1), (good, 1, None), *((good, n, n - 1) for n in range(2, 30))], key=str
        )


async def first_offset(kafka: KafkaCluster, topic: str, partition: int) -> int:
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        tp = TopicPartition(topic, partition)
        consumer.assign([tp])
        return int((await consumer.getone()).offset)
    finally:
        await consumer.stop()
