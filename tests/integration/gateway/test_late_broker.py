"""A broker that is down when the workers start, and whose settings are too weak, as the status names it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import gateway

_BOUND_S = 60
_SHORT = """
import sys
from logferry.gateway.service import processes
processes.BROKERS_S = 0.5
from logferry.gateway.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def settings_of(node: int, _broker: int, _controller: int) -> Mapping[str, str]:
    return {"transaction.partition.verification.enable": "false"} if node == 3 else {}


def command(file: Path, number: int) -> list[str]:
    return [sys.executable, "-c", _SHORT, "--config", str(file), "--worker", str(number)]


async def test_a_weak_broker_that_was_down_at_the_start(tmp_path: Path) -> None:
    with KafkaCluster("late", tmp_path / "kafka", brokers=3, settings_of=settings_of) as cluster:
        cluster.kill(3)
        with gateway(cluster, tmp_path, "late", 1, command) as running:
            assert (await running.ask("GET", "/v1/status")).document["warnings"] == []
            await asyncio.to_thread(cluster.restart, 3)
            deadline = time.monotonic() + _BOUND_S
            while not (warnings := (await running.ask("GET", "/v1/status")).document["warnings"]):
                assert time.monotonic() < deadline
            (warning,) = warnings
            assert "Kafka's broker 3: transaction.partition.verification.enable=false" in warning
        lines = (tmp_path / "late-0.log").read_text().splitlines()
        (event,) = (json.loads(line) for line in lines if '"broker_too_weak"' in line)
        assert "broker 3" in event["reason"]
