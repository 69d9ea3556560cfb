"""A worker whose clock is wrong, or is set while it runs, on brokers whose clocks are right.

By libfaketime (Debian's package faketime), which changes the wall clock of one process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import pytest
from logferry.gateway.contract.chunk import NDJSON
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import Gateway, gateway, open_session, write

LIBRARIES: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
# By how much a clock is wrong, and what is said of it.
AHEAD: Final = ("+30d", "30.0 days ahead of Kafka's")
BEHIND: Final = ("-30d", "30.0 days behind")
pytestmark = pytest.mark.skipif(not LIBRARIES, reason="libfaketime is missing: apt-get install faketime")
_HOUR_MS: Final = 3_600_000


@contextmanager
def shifted(
    kafka: KafkaCluster, folder: Path, name: str, shift: str
) -> Iterator[tuple[Gateway, Callable[[str], None]]]:
    """One worker with a clock that is wrong by ``shift``; the function sets it. Sources expire after an hour."""
    folder.mkdir(exist_ok=True)
    clock = folder / "clock"

    def set_clock(by: str) -> None:
        fresh = clock.with_suffix(".new")
        fresh.write_text(by, encoding="ascii")
        fresh.rename(clock)

    def command(file: Path, number: int) -> list[str]:
        settings = [
            f"LD_PRELOAD={LIBRARIES[0]}",
            f"FAKETIME_TIMESTAMP_FILE={clock}",
            "FAKETIME_NO_CACHE=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "FAKETIME_DONT_RESET=1",
        ]
        worker = [sys.executable, "-m", "logferry.gateway", "--config", str(file), "--worker", str(number)]
        return ["env", *settings, *worker]

    set_clock(shift)
    with gateway(kafka, folder, name, 1, command, source_retention_ms=_HOUR_MS) as running:
        yield running, set_clock


async def warnings(running: Gateway) -> str:
    return " ".join((await running.ask("GET", "/v1/status")).document["warnings"])


async def wait_warned(running: Gateway, text: str | None) -> None:
    """Until the status has the warning; None: until it has none."""
    for _ in range(300):
        found = await warnings(running)
        if (not found) if text is None else text in found:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"the warnings are: {found}")


async def sources(running: Gateway, topic: str) -> set[str]:
    answer = await running.ask("GET", f"/v1/topics/{topic}/sources")
    return {row["source_id"] for row in answer.document["sources"]}


async def check_nothing_is_lost(running: Gateway, topic: str, seqno: int) -> None:
    """Through several searches for sources that expired: all are known, and what they wrote is of now."""
    until = time.monotonic() + 4  # a search each 0.9 s
    while time.monotonic() < until:
        assert await sources(running, topic) == {"a", "b"}
        await asyncio.sleep(0.2)
    again = await write(running, topic, "a", f"seqno={seqno - 1}")
    assert again.document["duplicates"] == 1
    assert (await write(running, topic, "a", f"seqno={seqno}")).document["written"] == 1
    await running.ask("POST", f"/v1/topics/{topic}/sources/b/heartbeat", json={"position": seqno})
    assert (await open_session(running, topic, "b"))["session"] < (time.time() + 60) * 1000
    rows = (await running.ask("GET", f"/v1/topics/{topic}/sources")).document["sources"]
    path = f"/v1/topics/dc1.{topic}/partitions/0/chunks"
    async with asyncio.timeout(60):
        while True:  # Kafka shows a transaction a moment after its answer
            page = await running.ask("GET", path, headers={"Accept": NDJSON})
            stored = [json.loads(line) for line in page.body.splitlines()]
            if len(stored) > seqno:
                break
    stamps = [record[name] for record in stored for name in ("recorded_ms", "created_ms")]
    stamps += [row["written_ms"] for row in rows] + [row["heartbeat_ms"] for row in rows if row["heartbeat_ms"]]
    now_ms = time.time() * 1000
    stamps.append(parsedate_to_datetime(page.headers["Date"]).timestamp() * 1000)
    assert all(now_ms - 300_000 < stamp < now_ms + 60_000 for stamp in stamps)
    assert len(stored) == seqno + 1


@pytest.mark.parametrize(("shift", "said"), [AHEAD, pytest.param(*BEHIND, marks=pytest.mark.long)])
async def test_a_worker_that_starts_with_a_wrong_clock(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, shift: str, said: str
) -> None:
    """Without a guard, one ahead forgets every source, and brokers delete what one behind has acknowledged."""
    name = f"wrong{shift[1:]}{'a' if shift[0] == '+' else 'b'}"
    with shifted(kafka, tmp_path / "right", name, "+0") as (running, _):
        await running.make_topic(topic_name)
        for source in ("a", "b"):
            await write(running, topic_name, source, "seqno=1")
        assert not await warnings(running)
    with shifted(kafka, tmp_path / "wrong", name, shift) as (running, _):
        assert said in await warnings(running)
        assert "no source expires" in await warnings(running)
        await check_nothing_is_lost(running, topic_name, 2)


@pytest.mark.parametrize(("shift", "said"), [BEHIND, pytest.param(*AHEAD, marks=pytest.mark.long)])
async def test_a_clock_that_is_set_while_the_worker_runs(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, shift: str, said: str
) -> None:
    name = f"step{shift[1:]}{'a' if shift[0] == '+' else 'b'}"
    with shifted(kafka, tmp_path, name, "+0") as (running, set_clock):
        await running.make_topic(topic_name)
        for source in ("a", "b"):
            await write(running, topic_name, source, "seqno=1")
        set_clock(shift)
        await wait_warned(running, said)
        await check_nothing_is_lost(running, topic_name, 2)
        set_clock("+0")
        await wait_warned(running, None)
