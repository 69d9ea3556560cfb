"""Workers killed under a browser that reads Server-Sent Events: it shows every chunk once and in order.

Chromium's own EventSource, in a page that knows nothing of positions. Before the gateway is a proxy that serves the
page, as in production: each connection goes to a worker that answers, and is cut with it. The proxy also cuts some
itself, after some bytes: between two events of one write, and in the midst of one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import Gateway, gateway, source_path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")

_PARTITIONS = 2
_CHUNKS = 400
_KILLS = 3
_CUTS = 12
SEED = int(os.environ.get("LOGFERRY_SEED", random.randrange(10**6)))
_PATIENCE_S = 120
_PAGE = """<!doctype html><script>
const seen = [];
for (const partition of [%(partitions)s]) {
  const events = new EventSource(`/v1/topics/%(topic)s/partitions/${partition}/chunks`);
  events.onopen = () => seen.push({open: partition});
  events.onmessage = (event) => {
    const row = JSON.parse(event.data);
    seen.push([row.source_id, row.seqno, row.data]);
  };
  events.addEventListener("problem", (event) => seen.push({problem: event.data}));
}
// One report at a time: two under way could overtake each other.
let isReporting = false;
setInterval(async () => {
  if (isReporting || !seen.length) return;
  isReporting = true;
  await fetch("/seen", {method: "POST", body: JSON.stringify(seen.splice(0))});
  isReporting = false;
}, 50);
</script>"""


class BrowserProxy:
    """``seen``: what the page has reported of chunks, in order; ``opened``: connections by partition."""

    def __init__(self, at: Gateway, page: str) -> None:
        self.at, self.page, self.rng = at, page, random.Random(SEED)
        self.seen: list[tuple[str, int, str]] = []
        self.problems: list[str] = []
        self.opened = self.passed_on = 0
        self.news = asyncio.Event()

    async def serve_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page, content_type="text/html")

    async def take_report(self, request: web.Request) -> web.Response:
        for one in await request.json():
            if isinstance(one, list):
                self.seen.append((one[0], one[1], one[2]))
            elif "problem" in one:
                self.problems.append(one["problem"])
            else:
                self.opened += 1
        self.news.set()
        return web.Response()

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        urls = self.rng.sample(self.at.urls, len(self.at.urls))
        self.passed_on += 1
        room = self.rng.randrange(4000, 60_000) if self.passed_on <= _CUTS else sys.maxsize
        headers = {name: request.headers[name] for name in ("Accept", "Last-Event-ID") if name in request.headers}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            for url in urls:
                with suppress(aiohttp.ClientError):  # it may die before it answers
                    async with session.get(url + request.raw_path, headers=headers) as answer:
                        response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
                        await response.prepare(request)
                        try:
                            async for piece in answer.content.iter_any():
                                await response.write(piece[:room])
                                room -= len(piece)
                                if room <= 0:
                                    raise ConnectionError
                        except (aiohttp.ClientError, ConnectionError):
                            if request.transport is not None:
                                request.transport.abort()
                        return response
        raise web.HTTPBadGateway  # this ends an EventSource, and the test

    async def until_seen(self, count: int) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while len(self.seen) < count:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise AssertionError(f"{len(self.seen)} chunks of {count}, {self.problems}") from None


@asynccontextmanager
async def browser(proxy: BrowserProxy, profile: Path) -> AsyncIterator[None]:
    """Chromium with the page, behind the proxy."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/", proxy.serve_page)
    app.router.add_post("/seen", proxy.take_report)
    app.router.add_get("/v1/{path:.*}", proxy.pass_on)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    with (profile / "chromium.log").open("wb") as log:
        running = await asyncio.create_subprocess_exec(
            *[str(CHROMIUM), *options, f"--user-data-dir={profile / 'data'}", f"http://127.0.0.1:{port}/"],
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        running.terminate()
        await running.wait()
        await runner.cleanup()


async def test_a_browser_shows_every_chunk_once_while_workers_are_killed(kafka: KafkaCluster, tmp_path: Path) -> None:
    print(f"LOGFERRY_SEED={SEED}")
    with gateway(kafka, tmp_path, "browsed") as at:
        topic = await at.make_topic("browsed", _PARTITIONS)
        page = _PAGE % {"topic": topic, "partitions": ",".join(map(str, range(_PARTITIONS)))}
        proxy = BrowserProxy(at, page)
        async with browser(proxy, tmp_path):
            sources = [f"web{number}" for number in range(4)]
            each = _CHUNKS // len(sources)
            writing = asyncio.gather(*(write(at, source, each) for source in sources))
            for kill in range(_KILLS):
                await proxy.until_seen((kill + 1) * _CHUNKS // (_KILLS + 2))
                worker = at.workers[kill % 2]
                worker.child.send(signal.SIGKILL)
                worker.child.wait_for_end(10)
                worker.child.restart()
                at.wait_ready()
            await writing
            await proxy.until_seen(_CHUNKS)
        assert proxy.problems == [], [json.loads(one)["detail"] for one in proxy.problems]
        assert proxy.opened >= _CUTS, "too few connections were cut"
        for source in sources:
            found = [(seqno, data) for of, seqno, data in proxy.seen if of == source]
            assert found == [(seqno, line(source, seqno)) for seqno in range(1, each + 1)]


def line(source: str, seqno: int) -> str:
    """Of some KiB, so that a cut meets the midst of an event."""
    return f"{source} {seqno} ".ljust(4000 + 997 * (seqno % 7), "ж") + "\n"


async def write(at: Gateway, source: str, count: int) -> None:
    """Each chunk until a worker has acknowledged it; the others are killed now and then."""
    async with aiohttp.ClientSession() as session:
        for seqno in range(1, count + 1):
            path = source_path("browsed", source, f"/chunks?seqno={seqno}&prev={seqno - 1}")
            status, worker = 0, seqno
            while status != 200:
                worker += 1
                with suppress(aiohttp.ClientError, TimeoutError):
                    url = at.urls[worker % 2] + path
                    async with session.post(url, data=line(source, seqno).encode()) as answer:
                        status = answer.status
                        await answer.read()
                if status != 200:
                    await asyncio.sleep(0.02)
