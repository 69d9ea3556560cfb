"""Metrics that cannot be sent to Graphite harm nobody: the next ones are tried again. Without Kafka."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from logferry.gateway.config import Graphite
from logferry.gateway.service import worker
from logferry.gateway.service.worker import send_to_graphite


async def test_no_failure_of_graphite_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    came = asyncio.Event()
    outcomes: list[Exception | None] = [OSError("refused"), UnicodeError("label too long"), RuntimeError("odd"), None]
    loop = asyncio.get_running_loop()

    class Bridge:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def push(self, prefix: str) -> None:
            assert prefix.startswith("logs.dc1.")
            outcome = outcomes.pop(0)
            if not outcomes:
                loop.call_soon_threadsafe(came.set)
                outcomes.append(None)
            if outcome is not None:
                raise outcome

    monkeypatch.setattr(worker, "GraphiteBridge", Bridge)
    settings = Graphite(host="graphite", prefix="logs").model_copy(update={"interval_s": 0.01})
    task = asyncio.create_task(send_to_graphite(settings, "dc1", 0))
    async with asyncio.timeout(60):
        await came.wait()
        said: list[Any] = []
        while "graphite_back" not in [event["event"] for event in said]:
            await asyncio.sleep(0.01)
            said += [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert not task.done()
    task.cancel()
    assert [event["event"] for event in said] == ["graphite_unreachable", "graphite_back"]
