"""A gateway of real worker processes on a Kafka that runs already, with a state of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from logferry.ops.stack.processes import Child, Setting, configuration, free_ports, stop_all

_READY_S = 120
_STOP_S = 60
_numbers = itertools.count(1)


class Gateway:
    """Workers on ``host``. ``tables``: TOML that follows the plain settings; ``data_centre`` is the one it serves.

    Use as ``async with``: entering returns when every worker owns its lanes.
    """

    def __init__(
        self,
        folder: Path,
        kafka: str,
        workers: int = 1,
        tables: str = "",
        scheme: str = "http",
        verify: ssl.SSLContext | bool = True,
        settings: Mapping[str, Setting] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder, self.file = folder, folder / "gateway.toml"
        self.prefix = f"logferry-{os.getpid()}-{next(_numbers)}"
        port = free_ports(workers)[0]
        self.urls = [f"{scheme}://{host}:{port + worker}" for worker in range(workers)]
        self._verify = verify
        self._settings: dict[str, Setting] = {
            "dc": "dc1",
            "data_centres": ["dc1", "dc2"],
            "listen": f"{host}:{port}",
            "workers": workers,
            "lanes": 4,
            "prefix": self.prefix,
            "accept_weak_kafka": ["replication", "min-isr"],
            **(settings or {}),
        }
        self._kafka = kafka
        self.write(tables)
        command = [sys.executable, "-m", "logferry.gateway", "--config", str(self.file), "--worker"]
        self.workers = [
            Child(f"{self.prefix}/{worker}", [*command, str(worker)], folder / f"worker-{worker}.log")
            for worker in range(workers)
        ]

    def write(self, tables: str) -> None:
        """Rewrites the configuration. The workers read it on SIGHUP."""
        settings: dict[str, Setting] = dict(self._settings)
        if "[kafka]" not in tables:
            settings["kafka"] = {"bootstrap_servers": self._kafka}
        self.file.write_text(configuration(settings) + "\n" + tables, encoding="utf-8")

    async def __aenter__(self) -> Gateway:
        for worker in self.workers:
            worker.start()
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._verify))
        try:
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()
        killed = await asyncio.to_thread(stop_all, self.workers, _STOP_S)
        assert not killed, f"did not stop in order: {killed}"

    async def _ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        for url, worker in zip(self.urls, self.workers, strict=True):
            while not await self._is_ready(url):
                assert worker.running, worker.log_tail()
                assert time.monotonic() < deadline, worker.log_tail()
                await asyncio.sleep(0.05)

    async def _is_ready(self, url: str) -> bool:
        try:
            async with self.session.get(url + "/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    # ---- talking to it ----------------------------------------------------------------------------------------

    async def ask(
        self, method: str, path: str, token: str | None = None, worker: int = 0, **request: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, document and headers of the answer."""
        headers = dict(request.pop("headers", {}))
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        url = self.urls[worker] + path
        async with self.session.request(method, url, headers=headers, allow_redirects=False, **request) as answer:
            body = await answer.read()
            document = json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body
            return answer.status, document, answer.headers

    # ---- what it says -----------------------------------------------------------------------------------------

    def said(self) -> str:
        """All that the workers ever wrote to their logs."""
        return "".join(worker.log.read_text(encoding="utf-8") for worker in self.workers)

    async def reload(self, tables: str) -> list[dict[str, Any]]:
        """Writes the configuration, sends SIGHUP, and returns what each worker says of it."""
        self.write(tables)
        before = [self._said_of_reloading(worker) for worker in self.workers]
        for worker in self.workers:
            worker.send(signal.SIGHUP)
        found = []
        for worker, seen in zip(self.workers, before, strict=True):
            async with asyncio.timeout(_READY_S):
                while len(events := self._said_of_reloading(worker)) == len(seen):
                    assert worker.running, worker.log_tail()
                    await asyncio.sleep(0.02)
            found.append(events[-1])
        return found

    def _said_of_reloading(self, worker: Child) -> list[dict[str, Any]]:
        lines = worker.log.read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event["event"] in ("configuration_reloaded", "configuration_not_reloaded")]
