"""Workers killed at each step of the archive's calls, and clients as well: a file is visible whole and once, or not.

Clients run the protocol against all workers in turn and repeat each call until they know. Some are killed between two
calls: they never come back, or start again under the same id. The stored topic is read by a plain consumer.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.crash.gateway.archive_worker import STEPS
from tests.support.checker import committed_records
from tests.support.gateway import Gateway, gateway

_WORKER = Path(__file__).with_name("archive_worker.py")
_CLIENTS = 6
_WITHIN_S = 4.0
_PATIENCE_S = 240


class Gone(Exception):
    """The transaction is not there any more; nothing of it is visible."""


@dataclass
class ArchiveClients:
    """``committed``: the content of each transaction that was acknowledged. ``abandoned``: by a client that was killed,
    or (``gone``) knew it to be gone."""

    at: Gateway
    session: aiohttp.ClientSession
    seed: int
    committed: dict[str, list[bytes]] = field(default_factory=dict)
    started: dict[str, list[bytes]] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def run(self, client: int) -> None:
        rng, number = random.Random(self.seed * 1000 + client), 0
        while not self.is_over:
            number += 1
            name = f"{client}-{number}"
            pieces = [b"%s %d %d\n" % (name.encode(), n, rng.random() * 1e9) * 20 for n in range(rng.randint(1, 4))]
            self.started[name] = pieces
            while name not in self.committed and name not in self.abandoned:
                # A client that is killed forgets all but its file; every fourth one never comes back.
                dies_after = rng.randint(1, len(pieces) + 2) if rng.random() < 0.3 else 1 << 30
                how = await self._transaction(name, pieces, rng, dies_after)
                self.counts[how] += 1
                if how == "committed":
                    self.committed[name] = pieces
                elif rng.random() < 0.25:
                    self.abandoned.add(name)
                    if how == "gone":
                        self.gone.add(name)

    async def _transaction(self, name: str, pieces: list[bytes], rng: random.Random, dies_after: int) -> str:
        """``committed``, ``killed``: the client, or ``gone``: it has to begin again."""
        calls, digest = 0, ""
        steps: list[tuple[str, bytes | None]] = [
            *((f"store?piece={n}", piece) for n, piece in enumerate(pieces, 1)),
            ("commit_request?", None),
            ("commit?", None),
        ]
        try:
            for path, data in steps:
                if calls == dies_after:
                    return "killed"
                calls += 1
                query = f"&digest={digest}" if digest else "&host=h&file=f&log_type=l"
                digest = (await self._insist(f"/v1/archive/{name}/{path}{query}", data, rng))["digest"]
        except Gone:
            return "gone"
        return "committed"

    async def _insist(self, path: str, data: bytes | None, rng: random.Random) -> dict[str, Any]:
        """The same call again, at another worker, until the answer is certain."""
        while True:
            url = self.at.urls[rng.randrange(len(self.at.urls))] + path.replace("?&", "?")
            try:
                async with self.session.post(url, data=data) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        found: dict[str, Any] = await answer.json()
                        return found
                    if answer.status == 404 and "unknown-transaction" in text:
                        raise Gone
                    assert answer.status in (429, 500, 503), f"{path}: {answer.status} {text}"
            except (aiohttp.ClientError, TimeoutError):
                pass
            self.counts["repeated calls"] += 1
            await asyncio.sleep(0.02)

    async def until(self, more: int) -> None:
        """Until so many more files are acknowledged."""
        wanted = len(self.committed) + more
        async with asyncio.timeout(_PATIENCE_S):
            while len(self.committed) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "steps",
    [("commit-written", "commit-committed"), pytest.param(STEPS, marks=pytest.mark.long)],
    ids=["commit", "all"],
)
async def test_a_file_is_whole_and_once_whatever_is_killed(
    kafka: KafkaCluster, tmp_path: Path, steps: tuple[str, ...]
) -> None:
    topic = f"files-{len(steps)}"

    def command(file: Path, number: int) -> list[str]:
        return [sys.executable, str(_WORKER), str(tmp_path), "--config", str(file), "--worker", str(number)]

    settings: dict[str, Any] = {"topics": [{"name": "*", "topic": topic}], "commit_within_s": _WITHIN_S}
    with gateway(kafka, tmp_path, f"archived-{len(steps)}", command=command, receivers={"archive": settings}) as at:
        await at.make_topic(topic, 3)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            clients = ArchiveClients(at, session, seed=7)
            tasks = [asyncio.create_task(clients.run(client)) for client in range(_CLIENTS)]
            for step in steps:
                (tmp_path / "part").write_text(step)
                (tmp_path / "part").rename(tmp_path / "step")
                async with asyncio.timeout(_PATIENCE_S):
                    while all(worker.child.running for worker in at.workers):
                        for task in tasks:
                            if task.done():
                                task.result()
                        await asyncio.sleep(0.02)
                await clients.until(3)
                for worker in at.workers:
                    if not worker.child.running:
                        await asyncio.to_thread(worker.child.restart)
                await asyncio.to_thread(at.wait_ready)
                await clients.until(3)
            clients.is_over = True
            await asyncio.gather(*tasks)
        stored = await files(kafka, topic)
    assert not (tmp_path / "step").exists()
    assert all(clients.counts[what] for what in ("killed", "repeated calls"))
    assert not clients.gone & stored.keys(), "visible, and a client knows it to be gone"
    for name, pieces in stored.items():
        # Also of a client that died before it had its answer.
        assert pieces == clients.started[name], f"{name} is visible, and not as it was sent"
    missing = clients.committed.keys() - stored.keys()
    assert not missing, f"acknowledged, and not visible: {missing}"


async def files(kafka: KafkaCluster, topic: str) -> dict[str, list[bytes]]:
    """The pieces of each transaction that is visible, which stand side by side and once."""
    found: dict[str, list[bytes]] = {}
    at: dict[str, tuple[int, int, int]] = {}
    records = await committed_records(kafka.bootstrap, f"dc1.{topic}")
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        name = (record.key or b"").decode().removeprefix("archive/-/")
        chunk = chunk_of_record(record.value or b"", record.headers)
        place = (record.partition, record.offset, chunk.seqno)
        before = at.get(name)
        assert before is None or place == (before[0], before[1] + 1, before[2] + 1), f"{name}: {place} after {before}"
        at[name] = place
        found.setdefault(name, []).append(chunk.data)
    return found
