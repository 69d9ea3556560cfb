"""Quotas from outside: a caller over its rate gets the time to wait, the others do not notice, and workers share it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Setting
from yarl import URL

from tests.support.raw_connection import Line
from tests.support.served_gateway import Gateway

RATE = 20_000
REQUESTS, READ, CONNECTIONS = 40, 400_000, 12
TABLES = "".join(
    f'[[tokens]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
    f'write = ["*"]\nread = ["*"]\nadmin = ["*"]\n{quota}\n'
    for name, quota in (
        ("limited", f"bytes_per_s = {RATE}"),
        ("asking", f"requests_per_s = {REQUESTS}"),
        ("reading", f"read_bytes_per_s = {READ}"),
        ("opening", f"connections = {CONNECTIONS}"),
        ("tailing", "read_bytes_per_s = 1000"),
        ("free", ""),
    )
)
TABLES += '[[quotas]]\ntopic = "few-*"\nchunks_per_s = 50\n'


def with_key(folder: Path) -> dict[str, Setting]:
    (folder / "worker.key").write_text("k" * 32)
    return {"worker_key_file": str(folder / "worker.key")}


@pytest.fixture
async def gateway(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, kafka.bootstrap, 1, TABLES, settings=with_key(tmp_path)) as gateway:
        for topic in ("quota-a", "quota-b", "few-chunks"):
            status, document, _ = await gateway.ask("PUT", f"/v1/topics/{topic}", "free", data='{"partitions": 2}')
            assert status in (200, 201), document
        yield gateway


async def recorded(gateway: Gateway, topic: str, source: str) -> int | None:
    _, document, _ = await gateway.ask("GET", f"/v1/topics/{topic}/sources/{source}", "free")
    found = document["recorded_seqno"]
    assert found is None or isinstance(found, int)
    return found


async def test_a_token_over_its_bytes_is_refused_and_what_was_refused_is_not_recorded(gateway: Gateway) -> None:
    async def write(token: str, topic: str, source: str, seqno: int, size: int) -> tuple[int, dict[str, str]]:
        path = f"/v1/topics/{topic}/sources/{source}/chunks?seqno={seqno}"
        status, document, headers = await gateway.ask("POST", path, token, data=b"x" * size)
        if status == 429:
            assert document["type"].endswith("/quota")
            assert document["status"] == 429
            assert "limited" in document["detail"]
        return status, dict(headers)

    source = f"s{time.time_ns()}"
    # Far over the burst: it is taken, and leaves a debt of ten seconds.
    assert (await write("limited", "quota-a", source, 1, 11 * RATE))[0] == 200
    for topic in ("quota-a", "quota-b"):
        status, headers = await write("limited", topic, source, 2, 10)
        assert status == 429
        assert 1 <= int(headers["Retry-After"]) <= 10
    assert await recorded(gateway, "quota-a", source) == 1
    assert await recorded(gateway, "quota-b", source) is None
    assert (await write("free", "quota-a", source, 2, 10 * RATE))[0] == 200
    # After that wait it continues.
    await asyncio.sleep(int(headers["Retry-After"]))
    assert (await write("limited", "quota-a", source, 3, 10))[0] == 200
    _, metrics, _ = await gateway.ask("GET", "/metrics", "free")
    lines = dict(line.rsplit(" ", 1) for line in metrics.decode().splitlines() if not line.startswith("#"))
    assert float(lines['logferry_throttled_total{name="limited",scope="token"}']) == 2
    assert 2 < float(lines['logferry_throttled_seconds_total{name="limited",scope="token"}']) <= 20


async def test_the_chunks_of_a_request_are_counted(gateway: Gateway) -> None:
    source = f"s{time.time_ns()}"
    body = b"".join(pack_chunk(Chunk(seqno, seqno - 1, None, {}, b"x")) for seqno in range(1, 501))
    path = f"/v1/topics/few-chunks/sources/{source}/chunks"
    status, document, _ = await gateway.ask("POST", path, "free", data=body, headers={"Content-Type": MSGPACK})
    assert (status, document["written"]) == (200, 500)
    status, document, headers = await gateway.ask("POST", path + "?seqno=600", "free", data=b"x")
    assert (status, document["type"].rpartition("/")[2]) == (429, "quota")
    assert "dc1.few-chunks" in document["detail"]
    assert 2 <= int(headers["Retry-After"]) <= 9


async def test_over_time_the_rate_holds_whatever_the_clients_do(gateway: Gateway) -> None:
    """Twenty sources that do not wait at all get what the quota gives, and not more."""
    taken = 0
    started = time.monotonic()

    async def push(number: int) -> None:
        nonlocal taken
        seqno = 0
        while time.monotonic() < started + 4:
            path = f"/v1/topics/quota-a/sources/t{number}-{started}/chunks?seqno={seqno}"
            status, _, _ = await gateway.ask("POST", path, "limited", data=b"x" * 1000)
            assert status in (200, 429)
            taken += 1000 * (status == 200)
            seqno += 1

    await asyncio.gather(*(push(number) for number in range(20)))
    elapsed_s = time.monotonic() - started
    assert RATE < taken <= RATE * (elapsed_s + 1) + 1000


async def test_quotas_are_re_read(gateway: Gateway) -> None:
    path = f"/v1/topics/quota-b/sources/s{time.time_ns()}/chunks?seqno="
    assert (await gateway.ask("POST", path + "1", "limited", data=b"x" * 50 * RATE))[0] == 200
    assert (await gateway.ask("POST", path + "2", "limited", data=b"x"))[0] == 429
    await gateway.reload(TABLES.replace(str(RATE), str(100 * RATE)))
    assert (await gateway.ask("POST", path + "2", "limited", data=b"x"))[0] == 200


async def test_who_waits_for_data_holds_nothing_of_the_quota(gateway: Gateway) -> None:
    """A tail of a quiet partition reads nothing; the caller's other reads are answered meanwhile."""
    _, document, _ = await gateway.ask("POST", "/v1/topics/quota-b/sources/tail/chunks?seqno=1", "free", data=b"x")
    written, offset = document["partition"], document["offsets"][0]
    quiet = f"/v1/topics/dc1.quota-b/partitions/{1 - written}/chunks?offset=latest&wait_ms=30000"

    async def wait_for_data() -> None:
        while (await gateway.ask("GET", quiet, "tailing"))[0] == 429:  # noqa: ASYNC110  others came first
            await asyncio.sleep(0.05)

    tail = asyncio.create_task(wait_for_data())
    path = f"/v1/topics/dc1.quota-b/partitions/{written}/chunks?offset={offset}&max_bytes=1"
    found = 0
    while found < 20 and not tail.done():
        status, document, _ = await gateway.ask("GET", path, "tailing")
        # The tail looks for data once before it waits.
        assert status in (200, 429), document
        found += status == 200
        await asyncio.sleep(0.05)
    assert (found, tail.done()) == (20, False)
    tail.cancel()
    await asyncio.gather(tail, return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


# What a worker's callers do without an end: each time it is accepted, the amount is reported.
Caller = Callable[[int, int, Callable[[float], None]], Coroutine[None, None, None]]


async def divided(quota: float, caller: Caller) -> None:
    """One of two workers gets all of the quota while the other has nothing to do, then half."""
    taken: list[tuple[float, int, float]] = []

    def rate(seconds: float, worker: int | None = None) -> float:
        """Of the last seconds, as a part of the quota."""
        now_s = time.monotonic()
        found = [amount for at_s, who, amount in taken if at_s > now_s - seconds and worker in (None, who)]
        return sum(found) / seconds / quota

    async with asyncio.TaskGroup() as group:

        def begin(worker: int) -> list[asyncio.Task[None]]:
            def tell(amount: float) -> None:
                taken.append((time.monotonic(), worker, amount))

            return [group.create_task(caller(worker, number, tell)) for number in range(3)]

        first = begin(0)
        await until(lambda: rate(4) >= 0.9)
        assert rate(4) <= 1.1
        second = begin(1)
        await until(lambda: 0.4 <= rate(5, 0) <= 0.6 and 0.4 <= rate(5, 1) <= 0.6)
        await asyncio.sleep(5)
        assert rate(5) <= 1.1
        for task in (*first, *second):
            task.cancel()


async def source_of(gateway: Gateway, worker: int, number: int) -> str:
    """A source of a lane that this worker owns."""
    for candidate in range(1000):
        source = f"w{worker}-{number}-{candidate}"
        _, document, _ = await gateway.ask("GET", f"/v1/topics/shared/sources/{source}", "free")
        if document["url"] == gateway.urls[worker]:
            return source
    raise AssertionError(f"worker {worker} owns no lane")


async def test_the_workers_divide_each_quota_by_demand(kafka: KafkaCluster, tmp_path: Path) -> None:
    async with Gateway(tmp_path, kafka.bootstrap, 2, TABLES, settings=with_key(tmp_path)) as gateway:

        async def again(asked: Awaitable[tuple[int, Any, Any]]) -> bytes | None:
            """What was answered; None: it was refused, and some time has passed."""
            status, document, _ = await asked
            assert status in (200, 429, 503), document
            if status == 200:
                return document if isinstance(document, bytes) else b""
            await asyncio.sleep(0.05)
            return None

        async def push(worker: int, number: int, tell: Callable[[float], None]) -> None:
            source, seqno = await source_of(gateway, worker, number), 1
            while True:
                path = f"/v1/topics/shared/sources/{source}/chunks?seqno={seqno}"
                if await again(gateway.ask("POST", path, "limited", worker, data=b"x" * 400)) is not None:
                    tell(400)
                    seqno += 1

        async def ask(worker: int, number: int, tell: Callable[[float], None]) -> None:
            """All of it for the other worker, which does not count what it is handed on."""
            path = f"/v1/topics/shared/sources/{await source_of(gateway, 1 - worker, number)}"
            while True:
                if await again(gateway.ask("GET", path, "asking", worker)) is not None:
                    tell(1)

        async def read(worker: int, number: int, tell: Callable[[float], None]) -> None:
            path = f"{partition}/chunks?offset=earliest&max_bytes=10000"
            while True:
                asked = gateway.ask("GET", path, "reading", worker, headers={"Accept": "text/plain"})
                if (found := await again(asked)) is not None:
                    assert found
                    tell(len(found))

        status, document, _ = await gateway.ask("PUT", "/v1/topics/shared", "free", data='{"partitions": 4}')
        assert status in (200, 201), document
        body = b"".join(pack_chunk(Chunk(seqno, None, None, {}, b"x" * 500)) for seqno in range(1, 101))
        path = "/v1/topics/shared/sources/read/chunks"
        status, document, _ = await gateway.ask("POST", path, "free", data=body, headers={"Content-Type": MSGPACK})
        assert status == 200, document
        partition = f"/v1/topics/dc1.shared/partitions/{document['partition']}"
        await asyncio.gather(divided(RATE, push), divided(REQUESTS, ask), divided(READ, read))
        await stream_of(gateway)
        await connections_of(gateway)
        assert "quota_usage_failed" not in gateway.said()


async def stream_of(gateway: Gateway) -> None:
    """A read session waits for its quota, with signs of life, and loses nothing."""
    path = "/v1/topics/streamed/sources/s/chunks"
    assert (await gateway.ask("PUT", "/v1/topics/streamed", "free", data='{"partitions": 1}'))[0] in (200, 201)
    for first in (1, 101, 201):
        chunks = (Chunk(seqno, None, None, {}, b"y" * 10_000) for seqno in range(first, first + 100))
        body = b"".join(map(pack_chunk, chunks))
        assert (await gateway.ask("POST", path, "free", data=body, headers={"Content-Type": MSGPACK}))[0] == 200
    headers = {"Authorization": "Bearer reading", "Accept": "application/x-ndjson"}
    url = f"{gateway.urls[0]}/v1/consumers/quotas/stream?topic=dc1.streamed"
    seqnos, began_s = [], time.monotonic()
    async with asyncio.timeout(120), gateway.session.get(url, headers=headers) as answer:
        async for line in answer.content:
            frame = json.loads(line)
            if frame["frame"] == "chunk":
                seqnos.append(frame["seqno"])
                if len(seqnos) == 300:
                    break
    assert seqnos == list(range(1, 301))
    # 3 MB, of which a second's worth and the last write, of up to 1 MB, may come at once.
    assert time.monotonic() - began_s >= (3_000_000 - READ - 1_500_000) / READ


async def connections_of(gateway: Gateway) -> None:
    """One worker takes all of them, also after the other one, which had them, was killed."""
    ports = [URL(url).port or 0 for url in gateway.urls]
    lines: list[Line] = []

    async def open_more(worker: int) -> str:
        """One more, until it is refused; the refusal."""
        while True:
            line = await Line(ports[worker], "opening").open()
            status, said = await line.ask("/v1/caller")
            if status != 200:
                assert (status, await line.reader.read()) == (429, b"")
                await line.close()
                return said
            lines.append(line)
            assert len(lines) <= CONNECTIONS

    async def fill(worker: int) -> None:
        async with asyncio.timeout(120):
            while len(lines) < CONNECTIONS:
                said = await open_more(worker)
                assert said == f"the token opening is over its quota of {CONNECTIONS} connections"
                await asyncio.sleep(0.1)

    await open_more(0)
    assert len(lines) == CONNECTIONS // 2, "an equal part is there at once"
    await fill(0)
    await asyncio.sleep(3)
    for worker in (0, 1):
        await open_more(worker)
    assert [(await line.ask("/v1/caller"))[0] for line in lines] == [200] * CONNECTIONS
    gateway.workers[0].send(signal.SIGKILL)
    await asyncio.to_thread(gateway.workers[0].wait_for_end, 60)
    for line in lines:
        assert (await line.ask("/v1/caller"))[0] == 0
        await line.close()
    lines.clear()
    await fill(1)
    await asyncio.gather(*(line.close() for line in lines))
    lines.clear()
    await fill(1)
    await asyncio.gather(*(line.close() for line in lines))
