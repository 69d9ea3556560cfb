"""A mirror from dc1 to dc2 whose workers a test starts one by one, whole or broken, and what it says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp
from logferry.ops.children import Child
from logferry.ops.gateways import Setting, Worker, configuration
from logferry.ops.ports import free_block
from logferry.ops.stack import Stack

_BROKEN_MIRROR = Path(__file__).parent / "crash" / "broken_mirror.py"


class Mirror:
    """Workers of a mirror from dc1 to dc2, started one by one, whole or broken."""

    def __init__(self, stack: Stack, folder: Path, prefix: str, workers: int = 1, **settings: Setting) -> None:
        self._folder, self._port = folder, free_block(workers)
        self.pairs = f"{prefix}.mirror.dc2.pairs"
        self.file = folder / "mirror.toml"
        self.file.write_text(
            configuration(
                {
                    "dc": "dc2",
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
                    "kafka": {"bootstrap_servers": stack.cluster("dc2").bootstrap},
                }
                | settings
            )
        )

    def start(self, broken: str | None = None, number: int = 0) -> Worker:
        log = self._folder / f"mirror-{number}.log"
        worker = Worker(f"mirror-{number}", self.file, number, self._port + number, log, "logferry.mirror")
        if broken is not None:
            command = [sys.executable, str(_BROKEN_MIRROR), broken, "--config", str(self.file)]
            worker.child = Child(f"{broken}-{number}", [*command, "--worker", str(number)], log)
        worker.child.start()
        return worker


async def make_topic(stack: Stack, name: str, partitions: int = 4) -> str:
    """In dc1; its full name."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{stack.urls('dc1')[0]}/v1/topics/{name}", json={"partitions": partitions}) as answer:
            assert answer.status == 201, await answer.text()
    return f"dc1.{name}"
