"""A gateway of one worker that reports what holds its event loop, and what counts as too long.

The limit is relative to a fixed piece of work, which the same thread does after each callback that took long.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support import measured_worker
from tests.support.gateway import Gateway, gateway

# About 20 ms, where ten are the aim: a callback has a margin of two before it fails a test.
LIMIT_UNITS: Final = 25.0


@dataclass(frozen=True)
class Measured:
    """The gateway, and its reports so far."""

    gateway: Gateway
    log: Path

    def _reports(self) -> list[dict[str, Any]]:
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"held_ms"')]

    async def during(self, work: Callable[[], Awaitable[object]]) -> list[dict[str, Any]]:
        """The reports of callbacks from the beginning of the work until it is done and the loop is free again."""
        before = len(self._reports())
        await work()
        await self.gateway.ask("GET", "/healthz")
        return self._reports()[before:]


@contextmanager
def measured_gateway(kafka: KafkaCluster, folder: Path, name: str = "held", **settings: Any) -> Iterator[Measured]:
    def command(file: Path, number: int) -> list[str]:
        return [sys.executable, measured_worker.__file__, "--config", str(file), "--worker", str(number)]

    with gateway(kafka, folder, name, workers=1, command=command, **settings) as running:
        yield Measured(running, folder / f"{name}-0.log")


async def least_held(ask: Callable[[], Awaitable[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """In one of six attempts: another program on the machine takes time of ours, too, but not each time."""
    for attempt in range(6):
        reports = await ask()
        found = [report for report in reports if report["held_ms"] > LIMIT_UNITS * report["unit_ms"]]
        if not found:
            break
        print(f"attempt {attempt}: {found}")
    return found
