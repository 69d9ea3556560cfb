"""Overload: for a minute several times what Kafka takes. Memory stays flat, the rest waits, and the log is exact."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import History, read_back, violations
from tests.support.served_gateway import Gateway

MIB = 1 << 20
CHUNK_BYTES = 256 * 1024
WRITERS = 128
# For each of the four lanes' producers.
KAFKA_BYTES_PER_S = MIB
PROCESS_BYTES = 12 * MIB
OVERLOAD_S, WARM_UP_S = 60, 20
LIMITS = f"[limits]\nprocess_bytes = {PROCESS_BYTES}\nlane_bytes = {4 * MIB}\nrequest_timeout_s = 15\n"


@pytest.fixture
def slow_kafka(tmp_path: Path) -> Iterator[KafkaCluster]:
    """A broker that takes so much from each producer, and no more."""
    with KafkaCluster("slow", tmp_path / "kafka") as cluster:
        command = [str(find_java().executable), "-cp", ":".join(map(str, kafka_jars())), "kafka.admin.ConfigCommand"]
        command += ["--bootstrap-server", cluster.bootstrap, "--alter", "--entity-type", "clients", "--entity-default"]
        command += ["--add-config", f"producer_byte_rate={KAFKA_BYTES_PER_S}"]
        subprocess.run(command, check=True, capture_output=True)
        yield cluster


@dataclass
class Pusher:
    """A source that sends again at once, whatever the answer."""

    name: str
    url: str
    history: History
    rng: random.Random
    offered_bytes: int = 0
    recorded: int = 0
    told: Counter[str] = field(default_factory=Counter)

    async def run(self, session: aiohttp.ClientSession, until_s: float) -> None:
        while time.monotonic() < until_s:
            data = self.rng.randbytes(CHUNK_BYTES)
            seqno = self.recorded + len(data)
            while not await self._attempt(session, seqno, data):
                if time.monotonic() >= until_s + 60:
                    raise TimeoutError(f"{self.name} is not let in, though nobody else is there any more")
                await asyncio.sleep(self.rng.uniform(0.1, 0.5))  # a client's pause before the next attempt
            self.recorded = seqno

    async def _attempt(self, session: aiohttp.ClientSession, seqno: int, data: bytes) -> bool:
        url = f"{self.url}/v1/topics/overload/sources/{self.name}/chunks?seqno={seqno}&prev={self.recorded}"
        self.offered_bytes += len(data)
        try:
            async with session.post(url, data=data) as response:
                body = await response.text()
                self._note(seqno, data, response, body)
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            # Refused before its body was read: the connection may end before the answer is seen.
            self.told["cut"] += 1
            self.history.note(self.name, seqno, data, "unknown")
            return False

    def _note(self, seqno: int, data: bytes, response: aiohttp.ClientResponse, body: str) -> None:
        if response.status == 200:
            self.told["ok"] += 1
            self.history.note(self.name, seqno, data, "ok")
        elif response.status == 503 and int(response.headers["Retry-After"]) >= 1:
            self.told["overloaded" if "/overloaded" in body else "other 503"] += 1
            self.history.note(self.name, seqno, data, "fail")
        elif response.status == 500 and "/outcome-unknown" in body:
            self.told["unknown"] += 1
            self.history.note(self.name, seqno, data, "unknown")
        else:
            self.history.protests.append(f"{self.name}: {response.status} {body}")
            raise AssertionError(body)


def rss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_minute_of_several_times_what_kafka_takes(slow_kafka: KafkaCluster, tmp_path: Path) -> None:
    history, samples = History(), []
    async with Gateway(tmp_path, slow_kafka.bootstrap, 1, LIMITS) as gateway:
        assert (await gateway.ask("PUT", "/v1/topics/overload", data='{"partitions": 4}'))[0] == 201
        (pid,) = (worker.pid for worker in gateway.workers)
        assert pid is not None
        idle_bytes = rss_bytes(pid)
        pushers = [Pusher(f"s{n}", gateway.urls[0], history, random.Random(n)) for n in range(WRITERS)]
        started = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
            tasks = [asyncio.create_task(pusher.run(session, started + OVERLOAD_S)) for pusher in pushers]
            try:
                while not all(task.done() for task in tasks):
                    samples.append((time.monotonic() - started, rss_bytes(pid)))
                    await asyncio.wait(tasks, timeout=0.5)  # the interval of the samples
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.gather(*tasks, return_exceptions=True)
        elapsed_s = time.monotonic() - started
    told: Counter[str] = sum((pusher.told for pusher in pushers), Counter())
    offered, taken = sum(pusher.offered_bytes for pusher in pushers), told["ok"] * CHUNK_BYTES
    early = max(size for at_s, size in samples if at_s < WARM_UP_S)
    late = max(size for at_s, size in samples if WARM_UP_S <= at_s < OVERLOAD_S)
    print(
        f"offered {offered / MIB / elapsed_s:.1f} MiB/s, taken {taken / MIB / elapsed_s:.1f} MiB/s, told {dict(told)}"
    )
    print(f"RSS: idle {idle_bytes >> 20} MiB, first {WARM_UP_S} s {early >> 20} MiB, then {late >> 20} MiB")
    assert offered > 3 * taken
    assert told["overloaded"] > 100
    assert late <= 1.1 * early + 16 * MIB
    assert late <= idle_bytes + 6 * PROCESS_BYTES
    assert min(pusher.told["ok"] for pusher in pushers) >= 1, "a source got nothing at all"
    assert violations(history, await read_back(slow_kafka.bootstrap, "dc1.overload")) == []
