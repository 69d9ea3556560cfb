"""Subscriptions of a worker's file: one that another host's file lacks is not lost with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.delivery import Deliver, deliver, receiver, send
from tests.support.gateway import Gateway


def _started(running: Deliver) -> None:
    running.workers[0].child.stop(15)
    running.workers[0].child.restart()


async def test_what_leaves_the_file_rests_and_goes_on_where_it_was(
    kafka: KafkaCluster, workers: Gateway, topic_name: str, tmp_path: Path
) -> None:
    topic = await workers.make_topic(topic_name)
    path = f"/v1/subscriptions/{topic_name}"

    async def found() -> Any:
        return (await workers.ask("GET", path)).document

    async with receiver() as got:
        own = {"topics": [topic], "url": got.url, "max_wait_ms": 20}
        with deliver(kafka, tmp_path, "shared", subscriptions={topic_name: own}) as running:
            with_it = running.file.read_text()
            without_it = re.sub(r"\n\[subscriptions.*?(?=\n\[kafka)", "", with_it, flags=re.DOTALL)
            await running.until(lambda units: topic_name in {unit["subscription"] for unit in units}, "the unit")
            await send(workers, topic_name, "a", range(1, 4))
            await got.until(lambda: len(got.rows) == 3, "the first")
            assert (await workers.ask("DELETE", path, expect=None)).status == 409

            running.file.write_text(without_it)
            _started(running)
            await running.until(
                lambda units: any(u["subscription"] == topic_name and u["is_paused"] for u in units), "rest"
            )
            assert "subscription_left_configuration" in running.log()
            assert (await found())["left_configuration"] is True
            assert (await workers.ask("POST", path + "/resume", expect=None)).status == 409
            await send(workers, topic_name, "a", range(4, 7))

            running.file.write_text(with_it)
            _started(running)
            await got.until(lambda: len(got.rows) == 6, "what came meanwhile")
            assert [(row["seqno"]) for row in got.rows] == [1, 2, 3, 4, 5, 6]
            assert (await found())["left_configuration"] is False
            assert len({one.replay for one in got.seen}) == 1

            running.file.write_text(without_it)
            _started(running)
            await running.until(
                lambda units: any(u["subscription"] == topic_name and u["is_paused"] for u in units), "rest"
            )
            assert (await workers.ask("DELETE", path)).status == 200
