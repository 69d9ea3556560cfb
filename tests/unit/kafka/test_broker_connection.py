"""Connections for what is large, against a broker that is played here: order, answers by number, and how they break."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trustme
import uvloop
from aiokafka import errors
from logferry.gateway.kafka.broker_connection import BrokerConnections
from logferry.gateway.kafka.types import Piece

_API, _VERSION = 1, 13
_MIB = 1 << 20
Answering = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Echo:
    """Asks for itself."""

    API_KEY: ClassVar[int] = _API
    API_VERSION: ClassVar[int] = _VERSION

    def __init__(self, *pieces: Piece, throttle_ms: int = 0) -> None:
        self._pieces, self.throttle_ms = pieces, throttle_ms

    def pieces(self) -> tuple[Piece, ...]:
        return self._pieces

    def read(self, answer: memoryview) -> bytes:
        return bytes(answer)


class TooNew(Echo):
    API_VERSION = _VERSION + 1


def answer(number: int, body: bytes) -> bytes:
    # One tag in the header, which is nothing that is known.
    framed = struct.pack(">i", number) + b"\x01\x05\x02ab" + body
    return struct.pack(">i", len(framed)) + framed


def number_of(request: bytes) -> int:
    return int(struct.unpack_from(">i", request, 4)[0])


def body_of(request: bytes) -> bytes:
    (length,) = struct.unpack_from(">h", request, 8)
    return request[10 + length + 1 :]


async def echo(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(number_of(request), body_of(request)))


@asynccontextmanager
async def channels(answering: Answering, tls: bool = False, timeout_s: float = 20) -> AsyncIterator[BrokerConnections]:
    server_context = client_context = None
    if tls:
        authority = trustme.CA()
        server_context, client_context = (
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
            ssl.create_default_context(),
        )
        authority.issue_cert("127.0.0.1").configure_cert(server_context)
        authority.configure_trust(client_context)

    served: list[tuple[asyncio.Task[Any] | None, asyncio.StreamWriter]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append((asyncio.current_task(), writer))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                request = await reader.readexactly(size)
                if request.startswith(b"\0\x12"):  # which versions there are
                    body = struct.pack(">ihihhh", number_of(request), 0, 1, _API, 0, _VERSION)
                    writer.write(struct.pack(">i", len(body)) + body)
                else:
                    await answering(request, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
    port = server.sockets[0].getsockname()[1]
    looked: list[None] = []
    client: Any = SimpleNamespace(
        cluster=SimpleNamespace(broker_metadata={1: SimpleNamespace(host="127.0.0.1", port=port)}.get),
        force_metadata_update=lambda: looked.append(None),
    )
    options = {
        "bootstrap_servers": "…",
        "security_protocol": "SSL" if tls else "PLAINTEXT",
        "ssl_context": client_context,
    }
    made = BrokerConnections(client, options, "test", timeout_s)
    made.looked = looked  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        made.abort()
        for _, writer in served:
            writer.transport.abort()
        await asyncio.gather(*(task for task, _ in served if task), return_exceptions=True)
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("tls", [False, True])
def test_large_requests_and_answers_pass_whole(run: Callable[[Any], bool], tls: bool) -> None:
    assert run(pass_whole(tls))


async def pass_whole(tls: bool) -> bool:
    async with channels(echo, tls) as made:
        large = bytes(range(256)) * (5 * _MIB // 256)
        pieces = (b"head", memoryview(large)[7:], bytearray(b"between"), large[:70_000], b"")
        assert await made.ask(1, Echo(*pieces)) == b"".join(pieces)
        return await made.ask(1, Echo(b"small")) == b"small"


async def test_what_is_asked_at_once_is_sent_in_order_and_each_has_its_answer() -> None:
    seen: list[bytes] = []

    async def note(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(body_of(request))
        await echo(request, writer)

    async with channels(note) as made:
        wanted = [b"%d" % number for number in range(50)]
        # The first ones wait for the connection.
        first = [asyncio.create_task(made.ask(1, Echo(body))) for body in wanted[:20]]
        await first[0]
        rest = [asyncio.create_task(made.ask(1, Echo(body))) for body in wanted[20:]]
        assert await asyncio.gather(*first, *rest) == wanted
        assert seen == wanted


async def test_a_connection_that_breaks_fails_all_that_is_under_way_and_the_next_request_makes_a_new_one() -> None:
    count = 0

    async def cut_after_two(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count == 3:
            writer.transport.abort()
        elif count in (1, 4):
            await echo(request, writer)

    async with channels(cut_after_two) as made:
        asked = [asyncio.create_task(made.ask(1, Echo(b"%d" % number))) for number in range(3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert found[0] == b"0"
        assert [type(error) for error in found[1:]] == [errors.KafkaConnectionError] * 2
        assert made.looked, "where the broker is now was not looked up"  # type: ignore[attr-defined]
        assert await made.ask(1, Echo(b"again")) == b"again"


async def test_an_answer_to_something_else_is_not_believed() -> None:
    async def confuse(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(number_of(request) + 1, b"of another"))

    async with channels(confuse) as made:
        with pytest.raises(errors.KafkaConnectionError, match="not the next one"):
            await made.ask(1, Echo(b"mine"))


async def test_a_size_that_cannot_be_ends_the_connection() -> None:
    async def huge(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">i", 2**31 - 1))

    async with channels(huge) as made:
        with pytest.raises(errors.KafkaConnectionError, match="an answer of 2147483647 bytes"):
            await made.ask(1, Echo(b"mine"))


async def test_a_broker_that_says_nothing_is_hung_up_on() -> None:
    silent = True

    async def say_nothing(request: bytes, writer: asyncio.StreamWriter) -> None:
        if not silent:
            await echo(request, writer)

    async with channels(say_nothing, timeout_s=1.0) as made:
        with pytest.raises(errors.RequestTimedOutError):
            await made.ask(1, Echo(b"mine"))
        silent = False
        assert await made.ask(1, Echo(b"again")) == b"again", "the answer is that of the new connection"


async def test_a_request_that_is_given_up_leaves_the_others_their_answers() -> None:
    came, go = asyncio.Event(), asyncio.Event()

    async def later(request: bytes, writer: asyncio.StreamWriter) -> None:
        came.set()
        await go.wait()
        await echo(request, writer)

    async with channels(later) as made:
        given_up, kept = (asyncio.create_task(made.ask(1, Echo(body))) for body in (b"1", b"2"))
        async with asyncio.timeout(60):
            await came.wait()
        given_up.cancel()
        go.set()
        assert await kept == b"2"


async def test_what_the_broker_does_not_know_and_a_broker_that_is_not_known() -> None:
    async with channels(echo) as made:
        with pytest.raises(errors.IncompatibleBrokerVersion, match="version 14 of request 1"):
            await made.ask(1, TooNew(b"x"))
        with pytest.raises(errors.NodeNotReadyError, match="broker 2"):
            await made.ask(2, Echo(b"x"))


# ---- quotas of Kafka ------------------------------------------------------------------------------------------------


async def test_nothing_is_sent_while_a_quota_asks_for_a_pause() -> None:
    arrived: list[tuple[bytes, float]] = []
    loop = asyncio.get_running_loop()

    async def noted(request: bytes, writer: asyncio.StreamWriter) -> None:
        arrived.append((body_of(request), loop.time()))
        await echo(request, writer)

    async with channels(noted) as made:
        await made.ask(1, Echo(b"one", throttle_ms=2000))
        answered = loop.time()
        await asyncio.gather(made.ask(1, Echo(b"two")), made.ask(1, Echo(b"three")), made.ask(1, Echo(b"x"), "other"))
        at = dict(arrived)
        assert at[b"two"] - answered > 1.9
        assert at[b"three"] >= at[b"two"]
        assert at[b"x"] - answered < 1.9, "other connections of the broker do not wait"
        assert made.throttled_s == pytest.approx(2.0)
        assert made.losses == 0


async def test_a_broker_that_throttles_is_not_taken_for_silent() -> None:
    """What was in flight when the pause began is answered after it, later than the time-out."""
    waiting: list[tuple[bytes, asyncio.StreamWriter]] = []

    async def throttling(request: bytes, writer: asyncio.StreamWriter) -> None:
        if body_of(request) == b"first":
            await echo(request, writer)
            return
        waiting.append((request, writer))
        asyncio.get_running_loop().call_later(2.0, writer.write, answer(number_of(request), b"late"))

    async with channels(throttling, timeout_s=1.0) as made:
        first = asyncio.create_task(made.ask(1, Echo(b"first", throttle_ms=2500)))
        second = asyncio.create_task(made.ask(1, Echo(b"second")))
        assert await first == b"first"
        assert await second == b"late"
