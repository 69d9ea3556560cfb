"""A state of `deliver` that cannot be decoded stops its lane, by name, and `logferry lanes --deliver` repairs it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from logferry.gateway.contract.delivery_state import UnitKey
from logferry.ops.cli import main
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.delivery import PushReceiver, Received, deliver, receiver, send, subscribe
from tests.support.gateway import Gateway

LANES = 4


async def test_it_is_forgotten_and_the_receiver_leaves_out_what_it_has(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The epoch rises all the same, so the receiver does not take the worker for one that was replaced."""
    topic = await workers.make_topic(topic_name)
    key = UnitKey(topic_name, topic, 0)
    lane = key.lane(LANES)
    newest = 0

    async def behave(got: Received) -> int | None:
        nonlocal newest
        if got.epoch < newest:
            return 409
        newest = got.epoch
        return None

    async with receiver(PushReceiver(behave)) as got:
        with deliver(kafka, tmp_path, "shared", lanes=LANES) as running:
            await subscribe(workers, topic_name, topic, got.url)
            written = await send(workers, topic_name, "a", range(1, 4))
            await got.until(lambda: len({row["seqno"] for row in got.rows}) == len(written), "all")
            worker = running.workers[0]
            worker.child.send(signal.SIGKILL)
            producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)
            await producer.start()
            state = "shared.deliver.dc1.state"
            offset = (
                await producer.send_and_wait(state, b"of a newer version", key=key.encode(), partition=lane)
            ).offset
            await producer.stop()
            worker.child.restart()

            async def command(*argv: str) -> tuple[int, str]:
                found = await asyncio.to_thread(main.main, list(argv))
                said = capsys.readouterr()
                return found, said.out + said.err

            async with asyncio.timeout(60):
                while f"lane {lane} is stopped" not in (said := (await command("status", "--deliver", worker.url))[1]):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            assert f"logferry lanes --deliver --config FILE --forget {lane}:{offset}" in said
            # Whoever asks for its progress meanwhile is answered with the reason.
            refused = await workers.ask("GET", f"/v1/subscriptions/{topic_name}", expect=503)
            assert f"{state}-{lane}: the record at offset {offset} cannot be decoded" in refused.document["detail"]
            options = ["lanes", "--deliver", "--config", str(running.file), "--yes", "--forget"]
            result, said = await command(*options, f"{lane}:{offset - 1}")
            assert result == 1, said
            result, said = await command(*options, f"{lane}:{offset}")
            assert (result, "begins where its subscription began" in said) == (0, True), said
            written += await send(workers, topic_name, "a", range(4, 6))
            await got.until(lambda: len({row["seqno"] for row in got.rows}) == len(written), "all that came later")
            units = [unit for unit in await running.units() if unit["subscription"] == topic_name]
            assert [unit["stop"] for unit in units] == [None]
