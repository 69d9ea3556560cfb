"""A program that began a transaction in a topic of the gateway and does not end it, as `logferry status` shows it.

The workers are the real ones, with shorter times: they look twice a second, and a second is too long.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from logferry.ops.cli import main
from logferry.ops.stack.kafka_cluster import KafkaCluster
from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateway import Gateway, gateway

_BOUND_S = 60
_SHORT = """
import sys
from logferry.gateway.topics import open_transactions
open_transactions.LOOK_S, open_transactions.OVERDUE_S = 0.5, 1.0
from logferry.gateway.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def command(file: Path, number: int) -> list[str]:
    return [sys.executable, "-c", _SHORT, "--config", str(file), "--worker", str(number)]


async def findings(running: Gateway, capsys: pytest.CaptureFixture[str], *, some: bool) -> tuple[int, str]:
    """Exit status and output of the command, as soon as it names an open transaction, or none."""
    deadline = time.monotonic() + _BOUND_S
    while True:
        status = await asyncio.to_thread(main.main, ["status", "--url", running.urls[0]])
        output = capsys.readouterr().out
        if ("open transaction" in output) is some:
            return status, output
        assert time.monotonic() < deadline, output


async def oldest_s(running: Gateway) -> float:
    """Over all workers."""
    found = []
    for number in range(len(running.urls)):
        text = (await running.ask("GET", "/metrics", worker=number)).body.decode()
        for family in text_string_to_metric_families(text):
            found += [s.value for s in family.samples if s.name == "logferry_oldest_open_transaction_seconds"]
    assert len(found) == len(running.urls)
    return max(found)


async def test_a_transaction_of_another_program_that_stays_open_is_named(
    kafka: KafkaCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], topic_name: str
) -> None:
    with gateway(kafka, tmp_path, "hidden", 2, command) as running:
        await running.make_topic(topic_name)
        program = AIOKafkaProducer(
            bootstrap_servers=kafka.bootstrap, transactional_id=topic_name, transaction_timeout_ms=600_000
        )
        await program.start()
        try:
            await program.begin_transaction()
            sent = await program.send_and_wait(f"dc1.{topic_name}", b"line", partition=0)
            exit_status, output = await findings(running, capsys, some=True)
            assert exit_status == 1
            where = f"dc1.{topic_name}-0 from offset {sent.offset}"
            assert f"an open transaction hides the records of {where}" in output
            assert f"producer id {program._txn_manager.producer_id}" in output
            assert "kafka-transactions.sh" in output
            assert await oldest_s(running) >= 1
            documents = [(await running.ask("GET", "/v1/status", worker=n)).document for n in range(2)]
            (one,) = (one for document in documents for one in document["open_transactions"])
            assert (one["topic"], one["partition"], one["offset"]) == (f"dc1.{topic_name}", 0, sent.offset)
            await program.abort_transaction()
            assert (await findings(running, capsys, some=False))[0] == 0
        finally:
            await program.stop()
        logs = "".join(path.read_text() for path in tmp_path.glob("hidden-*.log"))
        (event,) = (json.loads(line) for line in logs.splitlines() if '"transaction_open"' in line)
        assert (event["topic"], event["partition"], event["offset"]) == (f"dc1.{topic_name}", 0, sent.offset)
