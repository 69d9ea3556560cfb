"""A program that joins the group of a consumer while its readers run: it takes partitions from them, and is named."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import Gateway, gateway

STOCK = {
    "consumer": ["group.protocol=consumer"],
    "classic": ["partition.assignment.strategy=org.apache.kafka.clients.consumer.RoundRobinAssignor"],
}


@contextmanager
def stock_consumer(bootstrap: str, topic: str, group: str, settings: list[str], log: Path) -> Iterator[None]:
    """Kafka's own consumer, with the client id ``foreign``."""
    command = [str(find_java().executable), "-Xmx256m", "-cp", ":".join(map(str, kafka_jars()))]
    command += ["org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", bootstrap]
    command += ["--topic", topic, "--group", group]
    for setting in ["client.id=foreign", *settings]:
        command += ["--command-property", setting]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield
        finally:
            process.terminate()


async def wait_warned(running: Gateway, text: str | None) -> None:
    """Until the status has the warning; None: until it has none."""
    for _ in range(600):
        found = " ".join((await running.ask("GET", "/v1/status")).document["warnings"])
        if (not found) if text is None else text in found:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"the warnings are: {found!r}")


@pytest.mark.parametrize("protocol", [pytest.param("consumer", marks=pytest.mark.long), "classic"])
async def test_a_program_that_joins_later_is_named(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, protocol: str
) -> None:
    consumer = f"shared-{protocol}"
    with gateway(kafka, tmp_path, f"foreign-{protocol}", 1) as running:
        topic = await running.make_topic(topic_name, 4)
        path = f"/v1/consumers/{consumer}/stream?topic={topic}"
        async with aiohttp.ClientSession() as client, client.get(running.urls[0] + path) as stream:
            assert stream.status == 200
            seen = b""
            async with asyncio.timeout(60):
                while b"caught_up" not in seen:
                    seen += await stream.content.readany()
            with stock_consumer(kafka.bootstrap, topic, consumer, STOCK[protocol], tmp_path / "stock.log"):
                await wait_warned(running, f"the group {consumer} has members that are not read sessions")
                await wait_warned(running, "foreign, or give them another group")
                refused = await running.ask("GET", path, expect=409)
                assert refused.problem == "conflict"
            await wait_warned(running, None)
    assert (tmp_path / f"foreign-{protocol}-0.log").read_text(encoding="utf-8").count("consumer_shared") == 1
