"""A reader that moves between the data centres by its cursor: the very next record, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from logferry.ops.stack import Stack

from tests.load import Load
from tests.mirrored import differences_in_the_end, read_log, true_pairs
from tests.mirroring import make_topic

_PARTITIONS = 2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2"), mirrors=1) as stack:
        yield stack


class MovingReader:
    """Reads one partition, a page in each data centre in turn; ``seen``: (source, seqno), in order."""

    def __init__(self, stack: Stack, topic: str, partition: int, session: aiohttp.ClientSession) -> None:
        self._stack, self._session = stack, session
        self._path = f"/v1/topics/{topic}/partitions/{partition}/chunks"
        self.cursor = f"{topic}:{partition}:0"
        self.seen: list[tuple[str, int]] = []
        self.pages = {"dc1": 0, "dc2": 0}

    async def page(self, dc: str) -> int:
        """How many chunks it held; -1: the data centre could not answer."""
        # Small steps where everything is there at once, so that something is left for the other.
        max_bytes = 2_000 if dc == "dc1" else 60_000
        parameters: dict[str, Any] = {"cursor": self.cursor, "max_bytes": max_bytes, "wait_ms": 300}
        headers = {"Accept": "application/x-ndjson"}
        url = self._stack.urls(dc)[0] + self._path
        try:
            async with self._session.get(url, params=parameters, headers=headers) as answer:
                body = await answer.read()
                if answer.status in (404, 503):
                    return -1  # it is not mirrored yet, or Kafka is away
                assert answer.status == 200, body
                self.cursor = answer.headers["X-Next-Cursor"]
        except aiohttp.ClientError:
            return -1
        rows = [json.loads(line) for line in body.splitlines()]
        self.seen += [(row["source_id"], row["seqno"]) for row in rows]
        self.pages[dc] += bool(rows)
        return len(rows)

    async def to_and_fro(self, is_over: asyncio.Event) -> None:
        """Until it is over and both data centres have nothing more."""
        while True:
            was_over = is_over.is_set()
            found = [await self.page(dc) for dc in ("dc1", "dc2")]
            if was_over and found == [0, 0]:
                return


async def have_moved(readers: list[MovingReader], more: int = 2) -> None:
    """Returns when each has got so many more pages in either data centre: the faults meet readers that move."""
    wanted = [{dc: pages + more for dc, pages in reader.pages.items()} for reader in readers]
    async with asyncio.timeout(90):
        while any(  # noqa: ASYNC110
            r.pages[dc] < least[dc] for r, least in zip(readers, wanted, strict=True) for dc in least
        ):
            await asyncio.sleep(0.05)


async def test_reads_each_chunk_once_while_it_moves(stack: Stack) -> None:
    topic = await make_topic(stack, "moving", _PARTITIONS)
    is_over = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        readers = [MovingReader(stack, topic, number, session) for number in range(_PARTITIONS)]
        reading = [asyncio.create_task(reader.to_and_fro(is_over)) for reader in readers]
        async with Load("moving", stack.urls("dc1"), seed=31, sources=32) as load:
            await have_moved(readers)
            stack.kill("dc2/mirror-0")
            await have_moved(readers)
            stack.kill("dc2/gateway-0")
            await have_moved(readers)
            await load.acknowledged(300)
        is_over.set()
        await asyncio.gather(*reading)
    log = await read_log(stack.cluster("dc1").bootstrap, topic)
    for number, reader in enumerate(readers):
        wanted = [
            ((record.key or b"").decode(), int.from_bytes(dict(record.headers)["seqno"])) for _, record in log[number]
        ]
        assert reader.seen == wanted


async def test_every_offset_is_translated_to_the_same_record_and_back(stack: Stack) -> None:
    topic = await make_topic(stack, "translated", _PARTITIONS)
    async with Load("translated", stack.urls("dc1"), seed=32, sources=8) as load:
        await load.acknowledged(400)
    there, here = stack.cluster("dc1").bootstrap, stack.cluster("dc2").bootstrap
    assert await differences_in_the_end((there, topic), (here, topic)) == []
    original, copy = await read_log(there, topic), await read_log(here, topic)
    url = stack.urls("dc2")[0]
    async with aiohttp.ClientSession() as session:

        async def translated(number: int, offset: int, start: str) -> int:
            path = f"{url}/v1/topics/{topic}/partitions/{number}/translate"
            async with session.get(path, params={"offset": offset, "from": start}) as answer:
                assert answer.status == 200, await answer.text()
                return int((await answer.json())["translated"])

        for number, pairs in true_pairs(original, copy).items():
            end = max(pairs)
            for offset in range(end + 1):
                # Control records take offsets, too: their position is that of the next record.
                following = next(known for known in range(offset, end + 1) if known in pairs)
                assert await translated(number, offset, "dc1") == pairs[following]
                assert await translated(number, pairs[following], "dc2") == following
        path = f"{url}/v1/topics/{topic}/partitions/0/translate"
        async with session.get(path, params={"offset": 10**9, "from": "dc1"}) as answer:
            assert answer.status == 416
        async with session.get(path, params={"offset": 1, "from": "dc9"}) as answer:
            assert answer.status == 400
        async with session.get(f"{url}/v1/topics/dc2.none/partitions/0/translate?offset=1&from=dc2") as answer:
            assert (answer.status, (await answer.json())["translated"]) == (200, 1)
