"""Workers killed while agents send, each as the guide configures it: every line of the file is stored.

The agents repeat a request until it is acknowledged, so a line that is missing was lost after its acknowledgement.
They have no keys: a line may be stored twice, but the first of each is in its place.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.agents import agent, block, needs
from tests.support.checker import committed_records
from tests.support.gateway import gateway

_KILLS = 4
_BETWEEN = 400
_LINES_AT_ONCE = 20
_PACE_S = 0.01


async def write_lines(log: Path, is_over: asyncio.Event) -> int:
    """A program that logs at a steady rate until it is over; how many lines it has written."""
    number = 0
    with log.open("ab", buffering=0) as file:
        while not is_over.is_set():
            file.write(b"".join(b"line %d\n" % one for one in range(number, number + _LINES_AT_ONCE)))
            number += _LINES_AT_ONCE
            await asyncio.sleep(_PACE_S)
    return number


async def stored(bootstrap: str, topic: str) -> list[int]:
    """The numbers of the lines, in their order in the only partition."""
    records = sorted(await committed_records(bootstrap, topic), key=lambda record: record.offset)
    data = [chunk_of_record(record.value or b"", record.headers).data for record in records]
    return [int(number) for number in re.findall(rb"\bline (\d+)", b"".join(data))]


@pytest.mark.parametrize(
    ("name", "program"),
    [
        pytest.param("rsyslog.conf", "rsyslogd", marks=needs("rsyslogd", "omelasticsearch")),
        pytest.param("syslog-ng.conf", "syslog-ng", marks=needs("syslog-ng")),
        pytest.param("collector.yaml", "otelcol", marks=needs("otelcol")),
    ],
)
async def test_no_line_of_an_agent_is_lost_while_workers_are_killed(
    kafka: KafkaCluster, tmp_path: Path, name: str, program: str
) -> None:
    log, is_over = tmp_path / "app.log", asyncio.Event()
    log.touch()
    topic = f"agent-{program}"
    rules = [{"name": "*", "topic": topic}]
    on: dict[str, Any] = {"lines": True, "elasticsearch": rules, "otlp": rules}
    with gateway(kafka, tmp_path, topic, receivers=on) as at:
        await at.make_topic(topic, 1)
        replaced = {
            "syslog-ng": {"http://127.0.0.1:8080": at.urls[0], "/topics/app/": f"/topics/{topic}/",
                          "/var/lib/syslog-ng": str(tmp_path)},
            "otelcol": {"http://127.0.0.1:8080": at.urls[0], "/var/lib/otelcol": str(tmp_path)},
            "rsyslogd": {"http://127.0.0.1:8080": at.urls[0], '"8080"': f'"{at.urls[0].rpartition(":")[2]}"'},
        }[program]  # fmt: skip
        child = await asyncio.to_thread(
            agent, program, tmp_path, block(name, {**replaced, "/var/log/app.log": str(log)})
        )
        writing = asyncio.create_task(write_lines(log, is_over))

        async def wait_stored(count: int) -> None:
            async with asyncio.timeout(180):
                while len(set(await stored(kafka.bootstrap, f"dc1.{topic}"))) < count:
                    assert child.running, child.log_tail()
                    await asyncio.sleep(0.1)

        try:
            for kill in range(_KILLS):
                await wait_stored(len(set(await stored(kafka.bootstrap, f"dc1.{topic}"))) + _BETWEEN)
                await asyncio.to_thread(at.workers[kill % 2].child.restart)
                await asyncio.to_thread(at.wait_ready)
            is_over.set()
            count = await writing
            await wait_stored(count)
        finally:
            is_over.set()
            await asyncio.to_thread(child.stop, 20)
    found = list(dict.fromkeys(await stored(kafka.bootstrap, f"dc1.{topic}")))
    # rsyslog repeats the lines of a failed request one by one, behind others.
    assert (sorted(found) if program == "rsyslogd" else found) == list(range(count))
