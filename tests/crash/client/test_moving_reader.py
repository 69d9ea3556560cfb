"""A reader that moves between the data centres by its cursor: the very next record, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from logferry.ops.stack.stack import Stack

from tests.support.clients import Load, MovingReader, chunks_of, have_moved
from tests.support.mirror import differences_in_the_end, make_topic, read_log, true_pairs

_PARTITIONS = 2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2"), mirrors=1) as stack:
        yield stack


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
        assert reader.seen == chunks_of(log, number)


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
            assert answer.status == 503  # the mirror is behind, perhaps
        async with session.get(path, params={"offset": 1, "from": "dc9"}) as answer:
            assert answer.status == 400
        async with session.get(f"{url}/v1/topics/dc2.none/partitions/0/translate?offset=1&from=dc2") as answer:
            assert (answer.status, (await answer.json())["translated"]) == (200, 1)
