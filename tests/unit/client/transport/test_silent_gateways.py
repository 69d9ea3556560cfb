"""A gateway that does not answer is named by writers and readers, in each of their waits; one that works is not."""

from __future__ import annotations

import http.server
import inspect
import json
import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from typing import Any

import msgpack
import pytest
from logferry.client import AsyncReader, AsyncWriter, Reader, Unknown, Writer
from logferry.client.transport import cluster

from tests.support.fake_gateway import FakeGateway, Served

_PATIENCE_S = 30.0
READERS = pytest.mark.parametrize("face", [Reader, AsyncReader])
WRITERS = pytest.mark.parametrize("face", [Writer, AsyncWriter])


class Reads:
    """A gateway with an empty partition: its topic is there, and what is read of it answers while ``works``."""

    def __init__(self) -> None:
        self.works = True
        self.answered = threading.Semaphore(0)  # released by each good answer to what is read
        reads = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/v1/topics/t":
                    offsets = [{"partition": 0, "first": 0, "next": 0}]
                    self._answer(200, json.dumps({"topic": "dc1.t", "offsets": offsets}).encode())
                elif not reads.works:
                    self._answer(503, b"{}")
                elif path.endswith("/stream"):
                    frame = {"frame": "assigned", "generation": 1, "partitions": []}
                    packed = "msgpack" in self.headers["Accept"]
                    reads.answered.release()
                    self._answer(200, msgpack.packb(frame) if packed else json.dumps(frame).encode() + b"\n")
                else:
                    reads.answered.release()
                    self._answer(200, b"")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("X-Next-Offset", "0")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def reads() -> Iterator[Reads]:
    reads = Reads()
    thread = threading.Thread(target=reads.server.serve_forever, args=(0.02,))
    thread.start()
    yield reads
    reads.server.shutdown()
    thread.join()
    reads.server.server_close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure is named at once; a later one within a minute only if something worked in between."""
    monkeypatch.setattr(cluster, "TROUBLE_AFTER_S", 0.0)


@pytest.fixture
def closed_port() -> Iterator[str]:
    """Bound, and nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


async def awaited(found: Awaitable[Any] | Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def named(caplog: pytest.LogCaptureFixture, who: str) -> int:
    texts = [record.getMessage() for record in caplog.records]
    return sum(text.startswith(f"gateway-silent who={who}") for text in texts)


async def until_named(reader: Any, caplog: pytest.LogCaptureFixture, times: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while named(caplog, "reader") < times:
        assert await awaited(reader.read(0.02)) is None
        assert time.monotonic() < deadline, caplog.text


@READERS
async def test_a_reader_that_cannot_open(face: Any, closed_port: str, caplog: pytest.LogCaptureFixture) -> None:
    reader = face(closed_port, "t")
    with pytest.raises(Unknown):
        await awaited(reader.open(0.5))
    assert named(caplog, "reader") == 1
    await awaited(reader.close())


@pytest.mark.parametrize("consumer", [None, "c"])
@READERS
async def test_a_reader_that_gets_nothing(
    face: Any, consumer: str | None, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    reader = face(reads.url, "t", consumer=consumer)
    for times in (1, 2):
        reads.works = True
        while not reads.answered.acquire(blocking=False):
            assert await awaited(reader.read(0.02)) is None
        assert named(caplog, "reader") == times - 1, caplog.text
        reads.works = False
        await until_named(reader, caplog, times)
        while reads.answered.acquire(blocking=False):
            pass  # earlier ones
    await awaited(reader.close())


@WRITERS
async def test_a_writer_that_cannot_open(face: Any, closed_port: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = face(closed_port, "t", "s")
    with pytest.raises(Unknown):
        await awaited(writer.open(0.5))
    assert named(caplog, '"writer of s"') == 1
    await awaited(writer.close())  # it has no chunks


@WRITERS
async def test_a_writer_whose_chunks_are_not_taken(face: Any, caplog: pytest.LogCaptureFixture) -> None:
    gateway = FakeGateway()
    gateway.prev_always = False
    gateway.faults.extend(["500 before", "500 before", "", "500 before", "500 before"])
    with Served(gateway) as served:
        writer = face(served.url, "t", "s")
        await awaited(writer.open(_PATIENCE_S))
        assert named(caplog, '"writer of s"') == 1
        await awaited(writer.write(b"x"))
        await awaited(writer.close(_PATIENCE_S))
    assert named(caplog, '"writer of s"') == 2
    assert gateway.sources["s"].recorded == 1
