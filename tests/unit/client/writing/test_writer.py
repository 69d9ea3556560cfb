"""Both faces of the writer over real sockets, against a reference of the gateway."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from logferry.client import AsyncWriter, Closed, Full, Rejected, Superseded, Unknown, Writer

from tests.support.fake_gateway import FakeGateway, Served

PATIENCE_S = 30


class Plain:
    """The plain writer, called from threads: so one test serves both faces."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.writer = Writer(*args, **options)

    async def __aenter__(self) -> Plain:
        await asyncio.to_thread(self.writer.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self.writer.__exit__, *error)

    async def open(self, *args: Any) -> None:
        await asyncio.to_thread(self.writer.open, *args)

    async def write(self, *args: Any, **options: Any) -> int:
        return await asyncio.to_thread(lambda: self.writer.write(*args, **options))

    async def flush(self, *args: Any) -> None:
        await asyncio.to_thread(self.writer.flush, *args)

    async def close(self, *args: Any) -> None:
        await asyncio.to_thread(self.writer.close, *args)

    @property
    def recorded_seqno(self) -> int | None:
        return self.writer.recorded_seqno


@pytest.fixture(params=[Plain, AsyncWriter], ids=["plain", "asyncio"])
def face(request: pytest.FixtureRequest) -> Callable[..., Any]:
    chosen: Callable[..., Any] = request.param
    return chosen


async def test_all_that_is_written_is_recorded_once_in_order(face: Any, gateway: FakeGateway, served: Any) -> None:
    gateway.faults.extend(["", "cut after", "", "", "", "500 after", "", "cut before", "redirect"])
    async with face(served.url, "t", "s", batch_bytes=2000, attributes={"a": "1"}) as writer:
        assert writer.recorded_seqno is None
        for number in range(300):
            assert await writer.write(b"%d\n" % number, attributes={"n": str(number)}) == number + 1
    stored = gateway.sources["s"]
    assert stored.content() == b"".join(b"%d\n" % number for number in range(300))
    assert stored.chunks[7].attributes == {"a": "1", "n": "7"}
    assert writer.recorded_seqno == 300
    assert len(gateway.requests) < 300


async def test_it_continues_at_the_position_of_the_source(face: Any, gateway: FakeGateway, served: Any) -> None:
    async with face(served.url, "t", "s", gzip=True) as writer:
        await writer.write(b"a\n", 10)
    async with face(served.url, "t", "s") as again:
        assert again.recorded_seqno == 10
        assert await again.write(b"b\n") == 11
        await again.flush()
        assert again.recorded_seqno == 11
    assert [(c.seqno, c.prev, c.data) for c in gateway.sources["s"].chunks] == [(10, None, b"a\n"), (11, 10, b"b\n")]


async def test_many_write_at_once(face: Any, gateway: FakeGateway, served: Any) -> None:
    async with face(served.url, "t", "s", batch_bytes=500, buffer_bytes=3000) as writer:
        seqnos = await asyncio.gather(*(writer.write(b"%d\n" % number) for number in range(200)))
    assert sorted(seqnos) == list(range(1, 201))
    by_seqno = {chunk.seqno: chunk.data for chunk in gateway.sources["s"].chunks}
    assert by_seqno == {seqno: b"%d\n" % number for number, seqno in enumerate(seqnos)}


async def test_a_deadline_ends_the_waiting_and_not_the_trying(face: Any, gateway: FakeGateway, served: Any) -> None:
    async with face(served.url, "t", "s") as writer:
        await writer.write(b"a\n")
        await writer.flush()
        gateway.faults.extend(["cut after"] * 1000)
        await writer.write(b"b\n")
        with pytest.raises(Unknown) as unknown:
            await writer.flush(0.3)
        assert (unknown.value.recorded_seqno, unknown.value.unknown_to) == (1, 2)
        gateway.faults.clear()
        await asyncio.wait_for(writer.flush(), PATIENCE_S)
        assert writer.recorded_seqno == 2


async def wait_faults(gateway: FakeGateway, more: int) -> None:
    """Returns when so many more requests have met a fault."""
    left = len(gateway.faults) - more

    async def wait() -> None:
        while len(gateway.faults) > left:  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), PATIENCE_S)


async def test_a_full_buffer_is_waited_for_or_raised(face: Any, gateway: FakeGateway, served: Any) -> None:
    async with face(served.url, "t", "s", buffer_bytes=2000) as writer:
        await writer.write(b"first\n")
        await writer.flush()
        gateway.faults.extend(["cut before"] * 1000)
        await writer.write(b"x" * 1500)
        with pytest.raises(Full):
            await writer.write(b"y" * 1000, timeout_s=0.1)
        waiting = asyncio.create_task(writer.write(b"z" * 1000))
        await wait_faults(gateway, 2)
        assert not waiting.done()
        gateway.faults.clear()
        assert await asyncio.wait_for(waiting, PATIENCE_S) == 3
    assert [chunk.data[:1] for chunk in gateway.sources["s"].chunks] == [b"f", b"x", b"z"]


async def test_no_gateway_within_the_time(face: Any) -> None:
    writer = face("http://127.0.0.1:9", "t", "s")
    with pytest.raises(Unknown, match=r"127\.0\.0\.1:9"):
        await writer.open(0.2)
    with pytest.raises(Full):
        await writer.write(b"x", timeout_s=0.1)
    await writer.close(0.1)
    with pytest.raises(Closed):
        await writer.write(b"x")


async def test_the_next_url_is_taken(face: Any, gateway: FakeGateway, served: Any) -> None:
    async with face(["http://127.0.0.1:9", served.url], "t", "s") as writer:
        await writer.write(b"x")
    assert gateway.sources["s"].recorded == 1


async def test_another_writer_supersedes(face: Any, gateway: FakeGateway, served: Any) -> None:
    older, newer = face(served.url, "t", "s"), face(served.url, "t", "s")
    await older.write(b"a\n")
    await older.flush()
    await newer.open()
    await older.write(b"b\n")
    with pytest.raises(Superseded) as superseded:
        await older.flush()
    assert (superseded.value.recorded_seqno, superseded.value.unknown_to) == (1, None)
    with pytest.raises(Superseded):
        await older.write(b"c\n")
    with pytest.raises(Superseded):
        await older.close()
    assert await newer.write(b"d\n") == 2
    await newer.close()
    assert gateway.sources["s"].content() == b"a\nd\n"


async def test_a_rejection_has_the_recorded_seqno(face: Any, gateway: FakeGateway, served: Any) -> None:
    gateway.largest_chunk_bytes = 1000
    with pytest.raises(Rejected) as rejected:  # noqa: PT012  it may come with any of them
        async with face(served.url, "t", "s", batch_bytes=2000) as writer:
            for size in (100, 200, 5000, 300):
                await writer.write(b"x" * size)
    error = rejected.value
    assert (error.kind, error.status, error.recorded_seqno, error.unknown_to) == ("too-large", 413, 2, None)
    assert [len(chunk.data) for chunk in gateway.sources["s"].chunks] == [100, 200]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nowhere", "t", "s"), "urls: 'nowhere'"),
        (([], "t", "s"), "urls: at least one"),
        (("http://h", "t/u", "s"), "topic: 't/u'"),
        (("http://h", "t", ""), "source_id: 0 bytes"),
        (("http://h", "t", "a\nb"), "source_id: holds control"),
    ],
)
async def test_arguments_that_cannot_be(face: Any, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        face(*arguments)


async def test_data_that_cannot_be(face: Any, served: Any) -> None:
    async with face(served.url, "t", "s") as writer:
        with pytest.raises(TypeError, match="encode"):
            await writer.write("text")
        with pytest.raises(ValueError, match="attributes: the name 'A'"):
            await writer.write(b"x", attributes={"A": "1"})
        await writer.write(b"good")
        await writer.flush()
        assert writer.recorded_seqno == 1


async def test_a_token_goes_to_the_cluster_s_own_urls_only(face: Any, gateway: FakeGateway, served: Any) -> None:
    gateway.token = "secret"
    with Served(FakeGateway()) as stranger:
        async with face(served.url, "t", "s", token="secret") as writer:
            gateway.other_url = stranger.url
            gateway.faults.append("redirect")
            await writer.write(b"x")
        assert stranger.gateway.requests == []
    assert gateway.sources["s"].recorded == 1
    with pytest.raises(Rejected, match="unauthenticated"):
        async with face(served.url, "t", "s", token="wrong"):
            pass


async def test_the_owner_that_a_session_names_is_written_to(face: Any, gateway: FakeGateway, served: Any) -> None:
    gateway.token = "secret"
    with Served(gateway) as owner:
        gateway.other_url = owner.url
        async with face(served.url, "t", "s", token="secret") as writer:
            await writer.write(b"x")
    assert [url.startswith(owner.url) for url, _ in gateway.requests] == [False, True]


async def test_an_error_in_the_block_is_not_hidden(face: Any, gateway: FakeGateway, served: Any) -> None:
    with pytest.raises(KeyError):  # noqa: PT012
        async with face(served.url, "t", "s") as writer:
            await writer.write(b"x")
            raise KeyError
    assert gateway.sources["s"].recorded == 1


def test_a_forked_process_cannot_use_it(served: Served) -> None:
    with Writer(served.url, "t", "s") as writer:
        writer.write(b"parent\n")
        reader, pipe = os.pipe()
        child = os.fork()
        if child == 0:  # no lock may be waited for here
            try:
                writer.write(b"child\n")
            except Closed:
                os.write(pipe, b"told")
            finally:
                os._exit(0)
        os.close(pipe)
        with os.fdopen(reader, "rb") as told:
            assert told.read() == b"told"
        os.waitpid(child, 0)
        writer.write(b"parent again\n")
    assert served.gateway.sources["s"].content() == b"parent\nparent again\n"


def test_its_threads_end(served: Served) -> None:
    with Writer(served.url, "t", "s") as writer:
        writer.write(b"x")
        assert [thread for thread in threading.enumerate() if thread.name.startswith("logferry-writer")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("logferry-writer")]
