"""Limits from outside: a caller over one gets an answer, or is closed, and everybody else is served as before."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from logferry.gateway.contract.chunk import MSGPACK
from logferry.gateway.contract.names import lane_of
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.served_gateway import Gateway

TOPIC = "limits"
LIMITS = """[limits]
connections = 40
idle_timeout_s = 2
body_timeout_s = 2
header_bytes = 2048
heads_bytes = 1048576
request_bytes = 1048576
chunk_bytes = 65536
process_bytes = 4194304
request_chunks = 100
"""


@asynccontextmanager
async def serving(kafka: KafkaCluster, folder: Path, tables: str) -> AsyncIterator[Gateway]:
    async with Gateway(folder, kafka.bootstrap, 1, tables) as gateway:
        status, document, _ = await gateway.ask("PUT", f"/v1/topics/{TOPIC}", data='{"partitions": 4}')
        assert status in (200, 201), document
        yield gateway
        (worker,) = gateway.workers
        assert worker.running
        assert "request_failed" not in gateway.said()


@pytest.fixture
def tables() -> str:
    return LIMITS


@pytest.fixture
async def gateway(kafka: KafkaCluster, tmp_path: Path, tables: str) -> AsyncIterator[Gateway]:
    async with serving(kafka, tmp_path, tables) as gateway:
        yield gateway


def chunks(seqno: int = 1) -> str:
    return f"/v1/topics/{TOPIC}/sources/s{time.time_ns()}/chunks?seqno={seqno}"


class Raw:
    """A connection of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ends(self) -> bytes:
        """What came until the other side closed."""
        try:
            return await self.reader.read(-1)
        except ConnectionResetError:
            return b""

    async def answer(self) -> tuple[int, dict[str, object]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        (length,) = (int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
        return int(head.split(" ")[1]), json.loads(await self.reader.readexactly(length))

    def close(self) -> None:
        self.writer.close()


Dial = Callable[[Gateway], Awaitable[Raw]]


@pytest.fixture
async def connected() -> AsyncIterator[Dial]:
    """Opens connections, which end with the test."""
    made: list[Raw] = []

    async def dial(gateway: Gateway) -> Raw:
        host, _, port = gateway.urls[0].removeprefix("http://").partition(":")
        made.append(Raw(*await asyncio.open_connection(host, int(port))))
        return made[-1]

    yield dial
    for raw in made:
        raw.writer.transport.abort()
    await asyncio.gather(*(raw.writer.wait_closed() for raw in made), return_exceptions=True)


async def until(gateway: Gateway, name: str, is_so: Callable[[float], bool]) -> None:
    """Waits, but not permanently, until the metric is so."""
    for _ in range(600):
        value = await metric(gateway, name)
        if is_so(value):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} stays at {value}")


async def metric(gateway: Gateway, name: str) -> float:
    _, body, _ = await gateway.ask("GET", "/metrics")
    return sum(float(line.rsplit(" ", 1)[1]) for line in body.decode().splitlines() if line.startswith(name))


@pytest.mark.parametrize("tables", [LIMITS.replace("idle_timeout_s = 2", "idle_timeout_s = 60")])
async def test_one_connection_too_many_is_refused_and_the_others_stay(gateway: Gateway, connected: Dial) -> None:
    assert (await gateway.ask("GET", "/healthz"))[0] == 200  # this one stays open, for the session keeps it
    held = [await connected(gateway) for _ in range(39)]
    for raw in held:
        await raw.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await raw.answer())[0] == 200
    for _ in range(5):
        refused = await connected(gateway)
        answer = await refused.ends()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"].endswith("/overloaded")
    assert await metric(gateway, 'logferry_connections_refused_total{limit="limit"}') == 5
    assert await metric(gateway, "logferry_connections ") == 40
    for raw in held:
        await raw.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await raw.answer())[0] == 200
    held.pop().close()
    await until(gateway, "logferry_connections ", lambda open_ones: open_ones < 40)
    newcomer = await connected(gateway)
    await newcomer.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await newcomer.answer())[0] == 200


@pytest.mark.parametrize(
    "first",
    [b"", b"G", b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"],
)
async def test_idle_connections_and_slow_heads_are_closed(gateway: Gateway, connected: Dial, first: bytes) -> None:
    """Also when a byte comes now and then: the time of a head is bounded, not the pause between its bytes."""
    raw = await connected(gateway)
    await raw.send(first)
    if first.endswith(b"\r\n\r\n"):
        assert (await raw.answer())[0] == 200
    end = asyncio.create_task(raw.ends())
    while not end.done():
        if first.endswith(b": x\r\n"):
            await raw.send(b"X")
        await asyncio.wait([end], timeout=0.2)  # the pace of the bytes
    assert await end == b""


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz?" + b"x" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"secret" * 600 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"x" * 3000 + b": 1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 200 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost : x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not http\r\n\r\n",
        b"GET /healthz SPDY/9\r\n\r\n",
    ],
)
async def test_heads_over_the_limits_and_what_is_no_http(gateway: Gateway, connected: Dial, head: bytes) -> None:
    raw = await connected(gateway)
    await raw.send(head)
    status, document = await raw.answer()
    assert (status, str(document["type"]).rpartition("/")[2]) in ((413, "too-large"), (400, "bad-request"))
    assert status == document["status"]
    assert await raw.ends() == b""
    assert "secret" not in str(document)
    assert "secret" not in gateway.said()
    assert await metric(gateway, 'logferry_requests_total{route="none"') == 1


async def test_unfinished_heads_are_bounded_together(gateway: Gateway, connected: Dial) -> None:
    """Twelve that each begin a head of 200 KB, with 1 MB for all: some are closed, a small one in two parts is not."""
    small = await connected(gateway)
    await small.send(b"GET /healthz HTTP/1.1\r\nHost:")
    large = []
    for _ in range(12):
        raw = await connected(gateway)
        large.append(raw)
        await raw.send(b"GET /healthz HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 1900) for n in range(100)))
    await until(gateway, 'logferry_connections_refused_total{limit="head"}', bool)
    await small.send(b" x\r\n\r\n")
    assert (await small.answer())[0] == 200


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_slow_body_is_cut_off_and_an_endless_one_too(gateway: Gateway, connected: Dial, chunked: bool) -> None:
    how = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 1000"
    raw = await connected(gateway)
    await raw.send(b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (chunks().encode(), how))
    await raw.send(b"4\r\nabcd\r\n" if chunked else b"abcd")
    status, document = await raw.answer()
    assert (status, document["status"]) == (408, 408)

    endless = await connected(gateway)
    await endless.send(b"POST %s HTTP/1.1\r\nHost: x\r\n" % chunks().encode())
    if not chunked:
        await endless.send(b"Content-Length: 99999999999\r\n\r\n")
        assert (await endless.answer())[0] == 413
    else:
        await endless.send(b"Transfer-Encoding: chunked\r\n\r\n")
        answer = asyncio.create_task(endless.answer())
        while not answer.done():
            await endless.send(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        status, document = await answer
        assert (status, document["limit_bytes"]) == (413, 1 << 20)


async def test_bombs_and_many_tiny_chunks(gateway: Gateway) -> None:
    bomb = gzip.compress(bytes(64 << 20), 9)
    assert len(bomb) < 1 << 17
    twice = gzip.compress(bomb, 9)
    for body in (bomb, twice):
        status, document, _ = await gateway.ask("POST", chunks(), data=body, headers={"Content-Encoding": "gzip"})
        if body is bomb:
            assert (status, document["limit_bytes"]) == (413, 1 << 20)
        else:
            assert status in (200, 413)
    for body in (
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 500_000,
        b"\x95\x01\xc0\x00\xc0\xc6\xff\xff\xff\xff",
        b"\x01" * 1000,
    ):
        status, _, _ = await gateway.ask(
            "POST", chunks().partition("?")[0], data=body, headers={"Content-Type": MSGPACK}
        )
        assert status == 400
    many = b"".join(b"\x95\xcd%b\xc0\x00\xc0\xc4\x01x" % seqno.to_bytes(2, "big") for seqno in range(1, 102))
    status, document, _ = await gateway.ask(
        "POST", chunks().partition("?")[0], data=many, headers={"Content-Type": MSGPACK}
    )
    assert (status, document["limit_chunks"]) == (413, 100)


@pytest.mark.parametrize("tables", [LIMITS.replace("body_timeout_s = 2", "body_timeout_s = 60")])
async def test_received_bytes_are_bounded_and_the_slowest_body_goes_first(gateway: Gateway, connected: Dial) -> None:
    """Connections that only declare 1 MB take no room; of those that sent it, one makes room for the last."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n"
    for _ in range(10):
        await (await connected(gateway)).send(head % chunks().encode())
    held = []
    for _ in range(4):
        raw = await connected(gateway)
        await raw.send(head % chunks().encode() + bytes(1_000_000))
        held.append(raw)
    await until(gateway, "logferry_in_flight_bytes ", lambda used: used == 4_000_000)
    assert (await gateway.ask("POST", chunks(), data=bytes(60_000)))[0] == 200
    await asyncio.sleep(1.2)  # their pace falls below that of the next body
    fifth = asyncio.create_task(gateway.ask("POST", chunks(), data=bytes(1 << 20)))
    answers = [asyncio.create_task(raw.answer()) for raw in held]
    [first], others = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    assert first.result()[0] == 503
    assert (await fifth)[0] == 413  # it was read whole: the limit of a chunk is 64 KiB
    for other in others:
        other.cancel()
    for raw in held:
        raw.close()
    await until(gateway, "logferry_in_flight_bytes ", lambda used: used == 0)
    assert (await gateway.ask("POST", chunks(), data=b"x\n"))[0] == 200


async def test_bytes_that_wait_in_a_lane_are_bounded(tmp_path: Path) -> None:
    """Kafka stops: what is over the limit is refused, and what was taken before it is recorded."""
    limits = "[limits]\nlane_bytes = 1048576\n"
    with KafkaCluster("still", tmp_path / "kafka") as kafka:
        async with serving(kafka, tmp_path, limits) as gateway:
            first, second = chunks(), chunks()  # of one lane, and nobody else's
            while lane_of(first.split("/")[5], 4) != lane_of(second.split("/")[5], 4):
                second = chunks()
            for path in (first, second):  # the topic is known from now on, without asking Kafka
                assert (await gateway.ask("POST", path, data=b"x"))[0] == 200
            first, second = (path.replace("seqno=1", "seqno=2") for path in (first, second))
            kafka.kill(1, signal.SIGSTOP)
            try:
                taken = asyncio.create_task(gateway.ask("POST", first, data=bytes(700_000)))
                await until(gateway, "logferry_lane_queued_bytes", lambda queued: queued >= 700_000)
                status, document, headers = await gateway.ask("POST", second, data=bytes(700_000))
                assert (status, str(document["type"]).rpartition("/")[2]) == (503, "overloaded")
                assert "lane" in document["detail"]
                assert int(headers["Retry-After"]) >= 1
            finally:
                kafka.kill(1, signal.SIGCONT)
            assert (await taken)[0] == 200
            assert (await gateway.ask("POST", second, data=bytes(700_000)))[1]["written"] == 1


@pytest.fixture
def many_files() -> Iterator[int]:
    """As many connections as this machine lets one process have, up to ten thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_000 + 1000
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    yield allowed - 1000
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_ten_thousand_idle_connections_do_not_disturb(
    kafka: KafkaCluster, tmp_path: Path, connected: Dial, many_files: int
) -> None:
    async with serving(kafka, tmp_path, "") as gateway:
        held: list[Raw] = []
        while len(held) < many_files:
            held += await asyncio.gather(*(connected(gateway) for _ in range(min(250, many_files - len(held)))))
        await until(gateway, "logferry_connections ", lambda open_ones: open_ones >= many_files)
        for seqno in range(1, 50):
            status, document, _ = await gateway.ask("POST", chunks(seqno), data=b"x\n")
            assert status == 200, document
        assert await metric(gateway, "logferry_connections_refused_total") == 0
        for raw in held:
            raw.close()
        await until(gateway, "logferry_connections ", lambda open_ones: open_ones <= 1)
