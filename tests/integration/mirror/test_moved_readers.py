"""What moves to another data centre: read sessions by cursors, and sources, of which the next one can tell."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
import pytest_asyncio
from logferry.client import AsyncReader, Reader
from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk
from logferry.ops.stack.stack import Stack

from tests.support.event_source import Event, EventSource
from tests.support.kafka import alter_topic
from tests.support.mirror import make_topic
from tests.support.read_sessions import PATIENCE_S, Stream, has

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2"), mirrors=1) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class World:
    """Requests to the gateways of both data centres."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self.stack, self.http = stack, http

    def url(self, dc: str) -> str:
        return self.stack.urls(dc)[0]

    async def ask(self, dc: str, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url(dc) + path, **more) as answer:
            return answer.status, await answer.json()

    async def write(self, dc: str, topic: str, source: str, seqnos: list[int], data: bytes = b"x\n") -> None:
        """One request and so one transaction each: a control record lies between them."""
        for seqno in seqnos:
            body = pack_chunk(Chunk(seqno, seqno - 1, 1000, {}, data))
            path = f"/v1/topics/{topic}/sources/{source}/chunks"
            status, document = await self.ask(dc, "POST", path, data=body, headers={"Content-Type": MSGPACK})
            assert (status, document["recorded_seqno"]) == (200, seqno)

    async def becomes(self, path: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Asks in dc2 until the answer has this in it."""
        found: Any = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    status, found = await self.ask("dc2", "GET", path)
                    if status == 200 and wanted.items() <= found.items():
                        return dict(found)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not in time, at last: {found}") from None


@pytest.fixture
def world(stack: Stack, http: aiohttp.ClientSession) -> World:
    return World(stack, http)


def seqnos(stream: Stream) -> list[int]:
    return [frame["seqno"] for frame in stream.chunks]


# ---- read sessions --------------------------------------------------------------------------------------------


async def test_a_session_continues_in_the_other_data_centre_at_the_very_next_chunk(world: World) -> None:
    topic = await make_topic(world.stack, "sessions", 1)
    await world.write("dc1", "sessions", "web", list(range(1, 11)))
    await world.becomes("/v1/topics/sessions/sources/web?dc=dc1", {"mirrored_seqno": 10})
    read: list[int] = []
    query = f"topic={topic}"
    for number, dc in enumerate(("dc1", "dc2", "dc1", "dc2")):
        async with Stream(world.http, world.url(dc), f"mover-{number}", query) as stream:
            await stream.until(has(2))
            read += seqnos(stream)[:2]
            position = stream.chunks[1]["offset"] + 1
            status, document = await stream.commit({(topic, 0): position})
        assert status == 200
        query = f"topic={topic}&" + urlencode({"cursor": document["cursors"][0]})
    assert read == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_an_event_stream_continues_in_the_other_data_centre(world: World) -> None:
    """The id of each event is the cursor behind the original, also where the copy has other offsets."""
    topic = await make_topic(world.stack, "events", 1)
    await world.write("dc1", "events", "web", list(range(1, 11)))
    await world.becomes("/v1/topics/events/sources/web?dc=dc1", {"mirrored_seqno": 10})

    async def events(dc: str, last_id: str, count: int) -> list[Event]:
        source = EventSource(f"{world.url(dc)}/v1/topics/{topic}/partitions/0/chunks")
        source.last_id = last_id
        async with asyncio.timeout(PATIENCE_S):
            return await source.take(count)

    original, copied = await events("dc1", "", 10), await events("dc2", "", 10)
    assert [event.last_id for event in copied] == [event.last_id for event in original]
    read, last_id = list[int](), ""
    for dc in ("dc1", "dc2", "dc1", "dc2"):
        found = await events(dc, last_id, 2)
        read, last_id = read + [event.row["seqno"] for event in found], found[-1].last_id
    assert read == [1, 2, 3, 4, 5, 6, 7, 8]
    # What comes later, to a stream that waits at the end of the copy.
    waiting = asyncio.ensure_future(events("dc2", original[-1].last_id, 1))
    await world.write("dc1", "events", "web", [11])
    assert [event.row["seqno"] for event in await waiting] == [11]


async def test_positions_are_set_to_cursors(world: World) -> None:
    topic = await make_topic(world.stack, "set", 1)
    await world.write("dc1", "set", "web", [1, 2, 3])
    await world.becomes("/v1/topics/set/sources/web?dc=dc1", {"mirrored_seqno": 3})
    async with Stream(world.http, world.url("dc1"), "setter", f"topic={topic}") as stream:
        await stream.until(has(3))
        third = stream.chunks[2]["offset"]
    body = {"positions": [{"cursor": f"{topic}:0:{third}"}]}
    status, document = await world.ask("dc2", "PUT", "/v1/consumers/setter/offsets", json=body)
    assert status == 200, document
    async with Stream(world.http, world.url("dc2"), "setter", f"topic={topic}") as stream:
        await stream.until(has(1))
        assert seqnos(stream)[0] == 3
        # It lives, and would not hear of it.
        status, document = await world.ask("dc2", "PUT", "/v1/consumers/setter/offsets", json=body)
        assert (status, document["members"]) == (409, 1)
        path = f"/v1/consumers/setter/stream?topic={topic}&cursor={topic}:0:{third}"
        assert (await world.ask("dc2", "GET", path))[0] == 409


async def test_a_cursor_that_cannot_be_gone_to_is_refused(world: World) -> None:
    topic = await make_topic(world.stack, "refused", 1)
    await world.write("dc1", "refused", "web", [1])
    await world.becomes("/v1/topics/refused/sources/web?dc=dc1", {"mirrored_seqno": 1})

    async def refusal(dc: str, cursor: str) -> tuple[int, str]:
        path = f"/v1/consumers/nobody/stream?topic={topic}&cursor={cursor}"
        status, document = await world.ask(dc, "GET", path)
        return status, document["type"].rpartition("/")[2]

    assert await refusal("dc2", f"{topic}:0:5000") == (503, "behind")
    assert await refusal("dc1", f"{topic}:0:5000") == (416, "out-of-range")
    assert await refusal("dc2", "dc1.other:0:0") == (400, "bad-request")
    assert await refusal("dc2", f"{topic}:0") == (400, "bad-request")
    assert await refusal("dc2", f"{topic}:0:1&cursor={topic}:0:2") == (400, "bad-request")
    for position in ({"cursor": f"{topic}:0:1", "offset": 1}, {"cursor": f"{topic}:0:1", "topic": topic}, {}):
        body = {"positions": [position]}
        assert (await world.ask("dc2", "PUT", "/v1/consumers/nobody/offsets", json=body))[0] == 400


# ---- readers of the library -----------------------------------------------------------------------------------


async def test_a_reader_continues_in_the_other_data_centre(world: World) -> None:
    topic = await make_topic(world.stack, "library", 2)
    for source in ("web", "db", "app"):
        await world.write("dc1", "library", source, [1, 2, 3, 4], data=b"one\ntwo\n")
        await world.becomes(f"/v1/topics/library/sources/{source}?dc=dc1", {"mirrored_seqno": 4})

    def read(dc: str, start: str, count: int) -> tuple[list[tuple[str, int]], str]:
        with Reader(world.url(dc), topic, start=start, max_chunks=count) as reader:
            found = [(chunk.source_id, chunk.seqno) for chunk in reader]
            for (name, number), at in reader.position.items():
                there = reader.translate(name, number, at.offset, dc, "dc1")
                assert reader.cursors()[name, number].offset == there
            return found, str(reader.cursors())

    async def read_async(dc: str, start: str, count: int) -> tuple[list[tuple[str, int]], str]:
        async with AsyncReader(world.url(dc), topic, start=start, max_chunks=count) as reader:
            return [(chunk.source_id, chunk.seqno) async for chunk in reader], str(await reader.cursors())

    first, at = await asyncio.to_thread(read, "dc1", "earliest", 5)
    second, at = await asyncio.to_thread(read, "dc2", at, 3)
    third, at = await read_async("dc1", at, 2)
    fourth, at = await read_async("dc2", at, 2)
    assert at.startswith("cursors:dc1.library:")
    assert sorted(first + second + third + fourth) == [(s, n) for s in ("app", "db", "web") for n in (1, 2, 3, 4)]


async def test_a_reader_of_lines_continues_with_the_next_line(world: World) -> None:
    topic = await make_topic(world.stack, "lines", 1)
    await world.write("dc1", "lines", "web", [1, 2], data=b"one\ntwo\n")
    await world.becomes("/v1/topics/lines/sources/web?dc=dc1", {"mirrored_seqno": 2})

    def lines(dc: str, start: str, count: int) -> tuple[list[bytes], str]:
        with Reader(world.url(dc), topic, start=start) as reader:
            found = [line.data for _, line in zip(range(count), reader.lines(), strict=False)]
            return found, str(reader.cursors())

    odd, at = await asyncio.to_thread(lines, "dc1", "earliest", 1)
    rest, _ = await asyncio.to_thread(lines, "dc2", at, 3)
    assert (odd, rest) == ([b"one"], [b"two", b"one", b"two"])


async def test_a_chunk_that_came_in_two_data_centres_is_handed_out_once(world: World) -> None:
    topic = await make_topic(world.stack, "copied", 1)
    assert (await world.ask("dc2", "PUT", "/v1/topics/copied", json={"partitions": 1}))[0] == 201
    await world.write("dc1", "copied", "web", [1, 2, 3])
    # It heard nothing about its last two, and sent them again where it continued.
    await world.write("dc2", "copied", "web", [2, 3, 4])
    await world.becomes("/v1/topics/copied/sources/web?dc=dc1", {"mirrored_seqno": 3})

    def read(drop_copies: bool) -> list[int]:
        topics = [topic, "dc2.copied"]
        with Reader(world.url("dc2"), topics, follow=False, drop_copies=drop_copies) as reader:
            return sorted(chunk.seqno for chunk in reader)

    assert await asyncio.to_thread(read, True) == [1, 2, 3, 4]
    assert await asyncio.to_thread(read, False) == [1, 2, 2, 3, 3, 4]


# ---- sources --------------------------------------------------------------------------------------------------


async def test_the_next_data_centre_returns_the_mirrored_seqno(world: World) -> None:
    topic = await make_topic(world.stack, "moved", 4)
    await world.write("dc1", "moved", "web", [1, 2, 3])
    await world.write("dc1", "moved", "other", [1])
    path = "/v1/topics/moved/sources/web?dc=dc1"
    found = await world.becomes(path, {"recorded_seqno": 3, "mirrored_seqno": 3})
    assert (found["topic"], found["source_id"]) == (topic, "web")
    # The data stops on its way, the word of it does not.
    await alter_topic(world.stack.cluster("dc2").bootstrap, topic, max_message_bytes="2000")
    await world.write("dc1", "moved", "web", [4], data=random.Random(1).randbytes(4000))
    # The mirror raises the limit as soon as it is refused.
    assert (await world.becomes(path, {"recorded_seqno": 4}))["mirrored_seqno"] in (3, 4)
    # It continues in dc2 with its own numbers; what dc1 holds stays what it is.
    assert (await world.ask("dc2", "PUT", "/v1/topics/moved", json={"partitions": 1}))[0] == 201
    await world.write("dc2", "moved", "web", [5, 6])
    assert (await world.ask("dc2", "GET", "/v1/topics/moved/sources/web"))[1]["recorded_seqno"] == 6
    assert (await world.ask("dc2", "GET", path))[1]["recorded_seqno"] == 4


async def test_an_unknown_source_has_no_seqnos(world: World) -> None:
    await make_topic(world.stack, "silent", 1)
    await world.write("dc1", "silent", "web", [1])
    await world.becomes("/v1/topics/silent/sources/web?dc=dc1", {"mirrored_seqno": 1})
    status, document = await world.ask("dc2", "GET", "/v1/topics/silent/sources/db?dc=dc1")
    assert (status, document["recorded_seqno"], document["mirrored_seqno"]) == (200, None, None)
    assert (await world.ask("dc2", "GET", "/v1/topics/silent/sources/web?dc=dc9"))[0] == 400
