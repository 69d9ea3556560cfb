"""The library's readers against real workers and Kafka: both faces, with and without a consumer, and cut off."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from logferry.client import (
    AsyncReader,
    Chunk,
    Closed,
    Line,
    OutOfRange,
    Position,
    Reader,
    Rejected,
    Superseded,
    Unknown,
    Writer,
)
from logferry.client.reading import requests
from logferry.client.reading.decode import NdjsonDecoder

from tests.support.checker import committed_records
from tests.support.gateway import Gateway
from tests.support.relay import Relay

PATIENCE_S = 60
SOURCES = 6


class Plain:
    """The plain reader, called from a thread: so one test serves both faces."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.reader = Reader(*args, **options)

    async def __aenter__(self) -> Plain:
        await asyncio.to_thread(self.reader.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self.reader.__exit__, *error)

    def __aiter__(self) -> Plain:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self.read()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def read(self, timeout_s: float | None = None) -> Chunk | None:
        return await asyncio.to_thread(self.reader.read, timeout_s)

    async def lines(self) -> Any:
        lines = self.reader.lines()
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            yield line

    async def commit(self) -> None:
        await asyncio.to_thread(self.reader.commit)

    async def lag(self) -> dict[Any, int | None]:
        return await asyncio.to_thread(self.reader.lag)

    async def seek(self, to: Any) -> None:
        await asyncio.to_thread(self.reader.seek, to)

    async def pause(self, partitions: Any = None) -> None:
        await asyncio.to_thread(self.reader.pause, partitions)

    async def resume(self, partitions: Any = None) -> None:
        await asyncio.to_thread(self.reader.resume, partitions)

    async def close(self) -> None:
        await asyncio.to_thread(self.reader.close)

    @property
    def position(self) -> Position:
        return self.reader.position

    @property
    def is_over(self) -> bool:
        return self.reader.is_over


@pytest.fixture(params=[Plain, AsyncReader], ids=["plain", "asyncio"])
def face(request: pytest.FixtureRequest) -> Callable[..., Any]:
    chosen: Callable[..., Any] = request.param
    return chosen


def fill(workers: Gateway, topic: str, chunks: int = 20, start: int = 1) -> list[tuple[str, int, bytes]]:
    """So many chunks of each source, from seqno ``start`` on; (source, seqno, data) of each, sorted."""
    rng, made = random.Random(start), []
    for number in range(SOURCES):
        source = f"web{number}"
        with Writer(workers.urls, topic, source, attributes={"host": source}, batch_bytes=2000) as writer:
            for seqno in range(start, start + chunks):
                data = b"".join(b"%d %d\n" % (seqno, rng.getrandbits(60)) for _ in range(rng.randint(1, 4)))
                made.append((source, writer.write(data, seqno), data))
    asyncio.run(committed_records(workers.kafka.bootstrap, f"dc1.{topic}"))  # Kafka shows it a moment later
    return sorted(made)


def of(chunk: Chunk) -> tuple[str, int, bytes]:
    return chunk.source_id, chunk.seqno, chunk.data


async def until(reader: Any, wanted: int) -> list[Chunk]:
    """So many chunks."""
    async with asyncio.timeout(PATIENCE_S):
        return [await anext(reader) for _ in range(wanted)]


@pytest.mark.parametrize("consumer", [None, "c"])
async def test_all_of_a_topic_once(face, workers: Gateway, topic_name: str, consumer: str | None) -> None:
    await workers.make_topic(topic_name, 4)
    written = await asyncio.to_thread(fill, workers, topic_name)
    consumer = consumer and f"{consumer}-{topic_name}"
    async with face(workers.urls, topic_name, follow=False, consumer=consumer) as reader:
        found = [chunk async for chunk in reader]
        assert reader.is_over
    assert sorted(map(of, found)) == written
    assert {chunk.topic for chunk in found} == {f"dc1.{topic_name}"}
    assert found[0].attributes["host"] == found[0].source_id


async def test_a_reader_is_set_back_pauses_and_knows_its_lag(face, workers: Gateway, topic_name: str) -> None:
    await workers.make_topic(topic_name, 2)
    written = await asyncio.to_thread(fill, workers, topic_name)
    async with face(workers.urls, topic_name) as reader:
        begin, behind = str(reader.position), await reader.lag()
        assert behind.keys() == reader.position.keys()
        assert sum(behind.values()) >= len(written)
        first = await until(reader, len(written))
        assert set((await reader.lag()).values()) <= {0, 1, 2}  # markers of transactions
        await reader.seek(begin)
        assert str(reader.position) == begin
        again = await until(reader, len(written))
        assert sorted(map(of, again)) == sorted(map(of, first)) == written
        one = min(reader.position)
        await reader.pause([one])
        more = await asyncio.to_thread(fill, workers, topic_name, 5, 21)
        others = [chunk for chunk in more if chunk[0] in {c.source_id for c in first if (c.topic, c.partition) != one}]
        assert sorted(map(of, await until(reader, len(others)))) == sorted(others)
        assert await reader.read(0.3) is None
        await reader.resume()
        assert len(await until(reader, len(more) - len(others))) == len(more) - len(others)
        with pytest.raises(ValueError, match="not read by this reader"):
            await reader.seek(f"dc1.{topic_name}:99:0")
    async with face(workers.urls, topic_name, consumer=f"c-{topic_name}") as reader:
        with pytest.raises(ValueError, match="consumer"):
            await reader.seek(begin)


async def test_without_msgpack_it_is_the_same(
    face, workers: Gateway, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logferry.client.aio import reader as aio_reader
    from logferry.client.reading import reader as plain_reader

    for module in (requests, plain_reader, aio_reader):
        monkeypatch.setattr(module, "best_decoder", NdjsonDecoder)
    await workers.make_topic(topic_name, 2)
    written = await asyncio.to_thread(fill, workers, topic_name)
    async with face(workers.urls, topic_name, follow=False, gzip=True) as reader:
        assert sorted([of(chunk) async for chunk in reader]) == written


@pytest.mark.parametrize("by_line", [False, True], ids=["chunks", "lines"])
async def test_started_again_from_a_stored_position_nothing_is_lost_or_doubled(
    face, workers: Gateway, topic_name: str, by_line: bool
) -> None:
    await workers.make_topic(topic_name, 4)
    written = await asyncio.to_thread(fill, workers, topic_name)
    stored, found, rng = "", [], random.Random(1)
    for _ in range(40):
        async with face(workers.urls, topic_name, follow=False, start=stored or "earliest") as reader:
            left = rng.randint(0, 60)
            async for item in reader.lines() if by_line else reader:
                found.append(item)
                stored = str(reader.position)
                left -= 1
                if left <= 0:
                    break
            if reader.is_over:
                break
    if by_line:
        lines = [(source, seqno, number, line) for source, seqno, data in written
                 for number, line in enumerate(data.splitlines())]  # fmt: skip
        assert sorted((x.source_id, x.seqno, x.number, x.data) for x in found if isinstance(x, Line)) == sorted(lines)
        assert "+" not in stored
    else:
        assert sorted(map(of, found)) == written


async def test_it_follows_and_continues_when_its_connections_are_cut(face, workers: Gateway, topic_name: str) -> None:
    await workers.make_topic(topic_name, 4)
    written = await asyncio.to_thread(fill, workers, topic_name)
    with Relay(workers.urls[0]) as relay:
        async with face(relay.url, topic_name) as reader:
            found = await until(reader, len(written) // 2)
            assert await asyncio.to_thread(relay.cut) > 0
            found += await until(reader, len(written) - len(found))
            assert await asyncio.to_thread(relay.cut) > 0
            more = await asyncio.to_thread(fill, workers, topic_name, 5, 21)
            found += await until(reader, len(more))
            assert await reader.read(0.3) is None
            assert not reader.is_over
    assert sorted(map(of, found)) == sorted(written + more)


async def test_a_consumer_continues_where_it_has_committed(face, workers: Gateway, topic_name: str) -> None:
    await workers.make_topic(topic_name, 4)
    written = await asyncio.to_thread(fill, workers, topic_name)
    options = {"consumer": f"c-{topic_name}"}
    async with face(workers.urls, topic_name, **options) as first:
        done = await until(first, 50)
        await first.commit()
        await until(first, 20)  # never committed
    async with face(workers.urls, topic_name, **options) as second:
        done += await until(second, len(written) - 50)
    assert sorted(map(of, done)) == written


async def test_a_consumer_whose_session_is_cut_sees_nothing_twice(face, workers: Gateway, topic_name: str) -> None:
    await workers.make_topic(topic_name, 4)
    written = await asyncio.to_thread(fill, workers, topic_name)
    with Relay(workers.urls[0]) as relay:
        async with face(relay.url, topic_name, consumer=f"c-{topic_name}") as reader:
            found = await until(reader, 30)
            await reader.commit()
            found += await until(reader, 30)
            assert await asyncio.to_thread(relay.cut) > 0
            found += await until(reader, len(written) - len(found))
            with suppress(Superseded):
                await reader.commit()
            assert await reader.read(0.3) is None
            await reader.commit()
    assert sorted(map(of, found)) == written
    async with face(workers.urls, topic_name, consumer=f"c-{topic_name}", follow=False) as again:
        assert [chunk async for chunk in again] == []


@pytest.mark.parametrize("face", [Plain, pytest.param(AsyncReader, marks=pytest.mark.long)])
async def test_two_readers_of_a_consumer_share(face, workers: Gateway, topic_name: str) -> None:
    """The first reader loses partitions and learns it at its commit. The other one gets the uncommitted chunks."""
    await workers.make_topic(topic_name, 4)
    written = await asyncio.to_thread(fill, workers, topic_name)
    first = face(workers.urls, topic_name, consumer=f"c-{topic_name}")
    second = face(workers.urls, topic_name, consumer=f"c-{topic_name}")
    async with first:
        seen = [of(chunk) for chunk in await until(first, len(written))]
        async with second:
            shared = [of(chunk) for chunk in await until(second, 1)]
            with pytest.raises(Superseded):  # noqa: PT012  raised by one of the commits
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        assert await first.read(0.1) is None, "twice in one process"
                        await first.commit()
            while (chunk := await second.read(1)) is not None:
                shared.append(of(chunk))
    assert sorted(seen) == written
    assert set(shared) < set(seen), "some of it, and not all"


async def test_who_has_to_give_partitions_up_hears_of_it(face, workers: Gateway, topic_name: str) -> None:
    """With everything before it handed out."""
    await workers.make_topic(topic_name, 4)
    written = await asyncio.to_thread(fill, workers, topic_name, 2)
    heard: list[Position] = []

    def plain() -> None:
        heard.append(first.position)

    async def awaited() -> None:
        plain()

    options = {"consumer": f"c-{topic_name}"}
    first = face(workers.urls, topic_name, **options, on_revoked=plain if face is Plain else awaited)
    async with first:
        await until(first, len(written))
        async with face(workers.urls, topic_name, **options), asyncio.timeout(PATIENCE_S):
            while not heard:
                assert await first.read(0.1) is None
    assert {partition for _, partition in heard[0]} == set(range(4))


async def test_from_a_time_the_end_and_a_partition(face, workers: Gateway, topic_name: str) -> None:
    full = await workers.make_topic(topic_name, 4)
    before = await asyncio.to_thread(fill, workers, topic_name)
    async with face(workers.urls, topic_name, follow=False) as reader:
        offsets = [chunk async for chunk in reader]
    # Kafka's clock counts in ms: the time between differs from the times of the chunks before and after it.
    await asyncio.sleep(0.01)
    between = datetime.now(UTC)
    await asyncio.sleep(0.01)
    async with face(workers.urls, topic_name, start="latest") as latest:
        after = await asyncio.to_thread(fill, workers, topic_name, 3, 21)
        assert sorted(map(of, await until(latest, len(after)))) == after
    async with face(workers.urls, topic_name, start=between, follow=False) as reader:
        assert sorted([of(chunk) async for chunk in reader]) == after
    async with face(workers.urls, topic_name, follow=False, max_chunks=7) as reader:
        assert len([chunk async for chunk in reader]) == 7
    one = offsets[0].partition
    async with face(workers.urls, topic_name, follow=False, partitions=[one]) as reader:
        assert {chunk.partition async for chunk in reader} == {one}
    async with face(workers.urls, [full], follow=False, source_prefix="web1") as reader:
        assert sorted([of(c) async for c in reader]) == [c for c in sorted(before + after) if c[0] == "web1"]
    async with face(workers.urls, full, follow=False, attributes={"host": "web2"}) as reader:
        assert sorted([of(c) async for c in reader]) == [c for c in sorted(before + after) if c[0] == "web2"]


async def test_partitions_that_are_added_are_read(
    face, workers: Gateway, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logferry.client.reading.reader_core.LOOK_INTERVAL_S", 0.2)
    await workers.make_topic(topic_name, 1)
    async with face(workers.urls, topic_name, start="latest") as reader:
        await workers.make_topic(topic_name, 8)
        written = await asyncio.to_thread(fill, workers, topic_name, 2)
        found = await until(reader, len(written))
    assert sorted(map(of, found)) == written
    assert len({chunk.partition for chunk in found}) > 1


async def test_topics_and_positions_that_cannot_be_read_raise(face, workers: Gateway, topic_name: str) -> None:
    full = await workers.make_topic(topic_name, 1)
    with pytest.raises(Rejected, match="unknown-topic"):
        async with face(workers.urls, f"{topic_name}-not"):
            pass
    async with face(workers.urls, topic_name, start=f"{full}:0:99") as reader:
        with pytest.raises(OutOfRange) as out:
            await reader.read()
        with pytest.raises(OutOfRange):
            await reader.read()
    assert (out.value.topic, out.value.partition, out.value.first, out.value.next) == (full, 0, 0, 0)
    with pytest.raises(Rejected, match="not what is read"):
        async with face(workers.urls, topic_name, start="dc1.other:0:1"):
            pass
    nowhere = face("http://127.0.0.1:9", topic_name)
    with pytest.raises(Unknown, match="no answer in time"):
        await nowhere.read(0.2)
    await nowhere.close()
    with pytest.raises(Closed):
        await nowhere.read(0.2)
    consumer = face(workers.urls, f"{topic_name}-not", consumer=f"c-{topic_name}")
    with pytest.raises(Rejected, match="unknown-topic"):
        await consumer.read()
    await consumer.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": "yesterday"}, "start: 'yesterday'"),
        ({"start": datetime(2026, 1, 1)}, "start: a time needs"),  # noqa: DTZ001
        ({"start": datetime.now(UTC), "consumer": "c"}, "start: a consumer"),
        ({"topic": "*.nginx"}, "topic: a pattern needs a consumer"),
        ({"topic": []}, "topic: at least one"),
        ({"max_chunks": -1}, "max_chunks: -1"),
        ({"partitions": [1], "consumer": "c"}, "partitions:"),
        ({"urls": "ftp://h"}, "urls: 'ftp://h'"),
    ],
)
async def test_arguments_that_cannot_be(face, options: dict[str, Any], text: str) -> None:
    given = {"urls": "http://h", "topic": "t", **options}
    with pytest.raises(ValueError, match=text.replace("*", r"\*")):
        face(given.pop("urls"), given.pop("topic"), **given)


async def test_closing_ends_it_at_once(face, workers: Gateway, topic_name: str) -> None:
    """Though long polls are open: nobody waits for them."""
    await workers.make_topic(topic_name, 4)
    async with face(workers.urls, topic_name) as reader:
        assert await reader.read(0.3) is None
    async with asyncio.timeout(15):  # a long poll is longer
        while True:
            if not [thread for thread in threading.enumerate() if thread.name.startswith("logferry-reader")]:
                break
            await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == {asyncio.current_task()}
