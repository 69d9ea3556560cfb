"""A fleet of push-clients under faults from a seed: what is stored is what the files held, byte for byte, none twice.

`LOGFERRY_SEED` draws the same faults again, `LOGFERRY_FAULT_SECONDS` and `LOGFERRY_FLEET` set the length and the
number of clients. `fleet` says what may be lost, which is counted and printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.stack.stack import Stack

from tests.crash.client.fleet import Host, Incarnation, StoredChunk, judge
from tests.soak.links import Mode, Relay
from tests.soak.world import CLOCK_CODE
from tests.support.checker import committed_records
from tests.support.kafka import make_topic

_FAR = "127.0.0.2"  # where the clients reach the gateways, through relays
_BOUND_S = 400
_AT_ONCE = 4
_LINKS = ("link refused", "link silent", "link slow", "answers lost")


class Surroundings:
    """Faults of all clients together: gateways, links to them, brokers. One after the other."""

    def __init__(self, stack: Stack, relays: list[Relay], rng: random.Random, done: Counter[str]) -> None:
        self._stack, self._relays, self._rng, self._done = stack, relays, rng, done
        self._names = sorted(stack.pids)

    async def disturb(self, until: asyncio.Event, every_s: float) -> None:
        verbs: dict[Callable[[], Awaitable[None]], int] = {
            self._kill_gateway: 4, self._freeze_gateway: 3, self._kill_broker: 1, self._cut: 3, self._trouble_link: 6,
        }  # fmt: skip
        while not until.is_set():
            await self._rng.choices(list(verbs), list(verbs.values()))[0]()
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), self._rng.expovariate(1 / every_s))

    def _any(self, kind: str) -> str:
        return self._rng.choice([name for name in self._names if f"/{kind}-" in name])

    async def _kill_gateway(self) -> None:
        await asyncio.to_thread(self._stack.kill, self._any("gateway"))
        self._done["gateway killed"] += 1

    async def _kill_broker(self) -> None:
        await asyncio.to_thread(self._stack.kill, self._any("kafka"))
        self._done["broker killed"] += 1

    async def _freeze_gateway(self) -> None:
        child = self._stack.child(self._any("gateway"))
        child.send(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(1, 9))
        child.send(signal.SIGCONT)
        self._done["gateway frozen"] += 1

    async def _cut(self) -> None:
        self._rng.choice(self._relays).cut()
        self._done["link cut"] += 1

    async def _trouble_link(self) -> None:
        mode = cast(Mode, self._rng.choice(_LINKS))
        await self._rng.choice(self._relays).disturb(mode, self._rng.uniform(1, 8))
        self._done[mode] += 1


async def run_fleet(folder: Path, topic_name: str, clients: int, seconds: float, brokers: int) -> None:
    seed = int(os.environ.get("LOGFERRY_SEED") or random.SystemRandom().randrange(10**6))
    seconds = float(os.environ.get("LOGFERRY_FAULT_SECONDS") or seconds)
    clients = int(os.environ.get("LOGFERRY_FLEET") or clients)
    print(f"LOGFERRY_SEED={seed}: {clients} clients, {seconds:.0f} s")
    (folder / "clock").mkdir()
    (folder / "clock" / "sitecustomize").with_suffix(".py").write_text(CLOCK_CODE, encoding="ascii")
    settings = {"advertised_host": _FAR, "worker_hosts": [_FAR]}
    rng, done = random.Random(seed), Counter[str]()
    with Stack(folder / "stack", brokers=brokers, workers=2, lanes=4, gateway_settings=settings) as stack:
        ports = [urlsplit(url).port or 0 for url in stack.urls()]
        relays = [Relay(_FAR, port, port) for port in ports]
        for relay in relays:
            await relay.start()
        topic = await make_topic(stack.urls()[0], topic_name)
        hosts = []
        for number in range(clients):
            urls = rng.sample([f"http://{_FAR}:{port}" for port in ports], len(ports))
            push = ["--topic", topic_name, *(part for url in urls for part in ("--url", url))]
            hosts.append(Host(number, folder, seed, push, folder / "clock", done))
        try:
            until = asyncio.Event()
            began = time.monotonic()
            async with asyncio.TaskGroup() as running:
                for host in hosts:
                    running.create_task(host.write(until, 0.5))
                    host.client.start()
                    running.create_task(host.disturb(until, max(8.0, seconds / 12)))
                running.create_task(Surroundings(stack, relays, rng, done).disturb(until, 8))
                await asyncio.sleep(seconds)
                until.set()
            print(f"faults ended after {time.monotonic() - began:.0f} s")
            await asyncio.to_thread(stack.wait_ready)
            at_once = asyncio.Semaphore(_AT_ONCE)

            async def finish(host: Host) -> None:
                async with at_once:
                    await asyncio.to_thread(host.finish, _BOUND_S)

            await asyncio.gather(*map(finish, hosts))
            print(f"all sent after {time.monotonic() - began:.0f} s")
            records = await committed_records(stack.cluster().bootstrap, topic)
        finally:
            for host in hosts:
                host.client.stop(5)
            for relay in relays:
                relay.close()
    stored = []
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        chunk = chunk_of_record(record.value or b"", record.headers)
        stored.append(StoredChunk((record.key or b"").decode(), chunk.seqno, chunk.data))
    verdict = judge(
        {host.name: host.incarnations for host in hosts}, stored, {host.name for host in hosts if host.forgets}
    )
    print("faults:", ", ".join(f"{count:,} {what}" for what, count in sorted(done.items())))
    print(f"{len(stored):,} chunks;", ", ".join(f"{count:,} {what}" for what, count in sorted(verdict.counts.items())))
    unsaid = [name for host in hosts for name in host.unsaid(verdict.ended_early[host.name])]
    print(f"{sum(map(len, verdict.ended_early.values()))} sources ended early, {len(unsaid)} of them unsaid")
    assert verdict.problems == [], f"LOGFERRY_SEED={seed}"
    assert unsaid == [], f"LOGFERRY_SEED={seed}: the clients' logs do not name them"


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_fifty_clients_for_twenty_minutes(topic_name: str, tmp_path: Path) -> None:
    await run_fleet(tmp_path, topic_name, clients=50, seconds=1200, brokers=3)


@pytest.mark.timeout(900)
async def test_eight_clients_for_seconds(topic_name: str, tmp_path: Path) -> None:
    await run_fleet(tmp_path, topic_name, clients=8, seconds=15, brokers=1)


def test_the_verdict_finds_what_is_wrong() -> None:
    def file(name: str, text: bytes, owed: int | None = None) -> Incarnation:
        return Incarnation(name, bytearray(text), owed)

    files = {"h": [file("a", b"first\nsecond\n"), file("b", b"cut\nwindow\n", owed=4), file("c", b"gone\n", owed=0)]}
    good = [
        StoredChunk("h:a#1", 6, b"first\n"),
        StoredChunk("h:a#1", 13, b"second\n"),
        StoredChunk("h:b#2", 4, b"cut\n"),
    ]
    verdict = judge(files, good, set())
    assert (verdict.problems, verdict.ended_early) == ([], {"h": ["h:b#2"]})
    assert verdict.counts["bytes stored"] == 17
    assert verdict.counts["files that lost some, "] == 2
    for wrong in (
        good[:1] + good[2:],  # lost at the end
        good[1:],  # lost at the beginning
        good[:2],  # what is owed of a file that was cut
        [*good, StoredChunk("h:a#4", 6, b"first\n")],  # doubled by another source
        [*good, StoredChunk("h:a#1", 13, b"second\n")],  # doubled by the same one
        [good[0], good[1]._replace(data=b"secOnd\n"), good[2]],  # altered
        [*good, StoredChunk("x:d#5", 6, b"never\n")],  # never written
    ):
        assert judge(files, wrong, set()).problems, wrong
    assert judge(files, [*good, StoredChunk("h:a#4", 6, b"first\n")], {"h"}).problems == []
