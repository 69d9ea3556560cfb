"""A mirror (from dc1 to dc2 unless said otherwise) whose workers a test starts one by one, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from logferry.ops.stack.ports import free_block
from logferry.ops.stack.processes import Child
from logferry.ops.stack.service_workers import Setting, Worker, configuration
from logferry.ops.stack.stack import Stack

_BROKEN_MIRROR = Path(__file__).parent / "crash" / "broken_mirror.py"


class Mirror:
    """Workers of a mirror, started one by one, whole or broken. ``dc``: where to; ``remote``: where from."""

    def __init__(
        self, stack: Stack, folder: Path, prefix: str, workers: int = 1, dc: str = "dc2", **settings: Setting
    ) -> None:
        self._folder, self._port, self._dc = folder, free_block(workers), dc
        self.pairs = f"{prefix}.mirror.{dc}.pairs"
        self.file = folder / f"mirror-{dc}.toml"
        self.file.write_text(
            configuration(
                {
                    "dc": dc,
                    "prefix": prefix,
                    "listen": f"127.0.0.1:{self._port}",
                    "workers": workers,
                    "accept_weak_kafka": ["replication", "min-isr"],
                    "remote": [
                        {
                            "dc": "dc1",
                            "topics": [f"{prefix}*"],
                            "kafka": {"bootstrap_servers": stack.cluster("dc1").bootstrap},
                        }
                    ],
                    "kafka": {"bootstrap_servers": stack.cluster(dc).bootstrap},
                }
                | settings
            )
        )

    def start(self, broken: str | None = None, number: int = 0) -> Worker:
        log = self._folder / f"mirror-{self._dc}-{number}.log"
        worker = Worker(f"{self._dc}/mirror-{number}", self.file, number, self._port + number, log, "logferry.mirror")
        if broken is not None:
            command = [sys.executable, str(_BROKEN_MIRROR), broken, "--config", str(self.file)]
            worker.child = Child(f"{broken}-{number}", [*command, "--worker", str(number)], log)
        worker.child.start()
        return worker


def remote(stack: Stack, dc: str, *prefixes: str, **settings: Setting) -> Setting:
    """An entry of a mirror's configuration: ``prefixes`` are the data centres whose topics are taken there."""
    kafka = {"bootstrap_servers": stack.cluster(dc).bootstrap}
    return {"dc": dc, **({"prefixes": prefixes} if prefixes else {}), **settings, "kafka": kafka}


async def make_topic(stack: Stack, name: str, partitions: int = 4, dc: str = "dc1") -> str:
    """Its full name."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{stack.urls(dc)[0]}/v1/topics/{name}", json={"partitions": partitions}) as answer:
            assert answer.status == 201, await answer.text()
    return f"{dc}.{name}"


async def stopped(urls: Sequence[str] | str, topic: str) -> dict[str, Any]:
    """What the workers say of a partition of the topic once it stands still."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            for url in [urls] if isinstance(urls, str) else urls:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/v1/status") as answer:
                        for found in (await answer.json())["partitions"]:
                            if found["topic"] == topic and "stop" in found:
                                return dict(found["stop"])
            await asyncio.sleep(0.1)
