"""Benchmark of the console: how long the gateway takes to answer what a page asks for."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, Final

import aiohttp
from logferry.ops.bench.harness.figures import Figure
from logferry.ops.bench.harness.gateways import running_stack

_SOURCES: Final = 10_000
_PARTITIONS: Final = 1000
_ROUNDS: Final = 40
_AT_ONCE: Final = 64
_TOPIC: Final = "console"


def console_page_ms() -> Figure:
    """p95 of each request that a page of the console repeats, one at a time, at a data centre of two workers.

    10,000 sources with a chunk each in 1,000 partitions, and a consumer that has read nothing of them. ``ours`` has
    the p95 of each; the value is that of the slowest. A list of all sources takes ten of its requests.
    """
    with running_stack(workers=2) as stack:
        measured = asyncio.run(_measured(stack.urls()[0]))
    return Figure("ms", measured, {}, _ROUNDS, value=max(measured.values()))


async def _measured(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=_AT_ONCE)) as session:
        await _ask(session, "PUT", f"/v1/topics/{_TOPIC}", json={"partitions": _PARTITIONS})
        await asyncio.gather(*(_write(session, number) for number in range(_SOURCES)))
        offsets = "/v1/consumers/console/offsets"
        await _ask(session, "PUT", offsets, json={"topic": f"dc1.{_TOPIC}", "to": "earliest"})
        last_page = (await _ask(session, "GET", f"/v1/topics/{_TOPIC}/sources"))["next"]
        paths = {
            "workers": "/v1/workers",
            "mirror": "/v1/mirror",
            "topics": "/v1/topics",
            "topics_sizes": "/v1/topics?sizes=true",
            "topics_at": "/v1/topics?at_ms={at_ms}",
            "sources_page": f"/v1/topics/{_TOPIC}/sources?after={last_page}",
            "sources_silent": f"/v1/topics/{_TOPIC}/sources?idle_for_ms=3600000",
            "source": f"/v1/topics/{_TOPIC}/sources/host7",
            "consumers": "/v1/consumers",
            "offsets": f"{offsets}?records_only=true",
            "subscriptions": "/v1/subscriptions",
        }
        return {name: await _p95_ms(session, path) for name, path in paths.items()}


async def _p95_ms(session: aiohttp.ClientSession, path: str) -> float:
    took_ms = []
    for number in range(_ROUNDS):
        began = time.perf_counter()
        await _ask(session, "GET", path.replace("{at_ms}", str(int(time.time() - 3600 + number) * 1000)))
        took_ms.append(1000 * (time.perf_counter() - began))
    return round(statistics.quantiles(took_ms, n=20)[-1], 1)


async def _write(session: aiohttp.ClientSession, number: int) -> None:
    await _ask(session, "POST", f"/v1/topics/{_TOPIC}/sources/host{number}/chunks?seqno=100&prev=0", data=b"x" * 100)


async def _ask(session: aiohttp.ClientSession, method: str, path: str, **request: Any) -> Any:
    """The answer; what changes something is asked for until it is done, which may be repeated."""
    while True:
        async with session.request(method, path, **request) as answer:
            if answer.status != 503 or method == "GET":
                answer.raise_for_status()
                return await answer.json()
        await asyncio.sleep(1)
