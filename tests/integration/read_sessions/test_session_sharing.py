"""How live sessions share the partitions, and what one that is cut off or does not read does to the others."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.read_sessions import (
    PATIENCE_S,
    Stream,
    has,
    identities,
    is_caught_up,
    make,
    offsets,
    until_members,
    write,
)
from tests.support.served_gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


# ---- sharing ----------------------------------------------------------------------------------------------


async def test_partitions_are_shared_and_move(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 4)
    every = {(topic, number) for number in range(4)}
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        await one.until(lambda s: set(s.held) == every)
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await asyncio.gather(one.until(lambda s: len(s.held) == 2), two.until(lambda s: len(s.held) == 2))
            assert set(one.held) | set(two.held) == every
            count = await write(gateway, topic_name, sources=32)
            told = await offsets(gateway, topic_name, f"?topic={topic}")
            need = {p["partition"]: p["next"] for p in told["positions"]}

            def has_all(stream: Stream) -> bool:
                return all(position >= need[number] for (_, number), position in stream.held.items())

            await asyncio.gather(one.until(has_all), two.until(has_all))
            assert len(set(identities(one, two))) == len(identities(one, two)) == count
            old = dict(one.held), one.generation
            assert (await one.commit(one.held))[0] == 200
            assert (await two.commit(two.held))[0] == 200
            # Neither may commit what the other one holds, nor in a generation that is not its own.
            assert (await one.commit(two.held))[0] == 409
            status, problem = await one.commit(one.held, generation=one.generation - 1)
            assert (status, problem["type"].rpartition("/")[2]) == (409, "superseded")
        await one.until(lambda s: set(s.held) == every)
        assert (await one.commit(*old))[0] == 409
        await one.until(is_caught_up)
    assert one.kinds().count("assigned") == 3
    assert len(set(identities(one, two))) == len(identities(one, two)), "what was committed came again"


async def test_a_commit_on_being_revoked_is_in_time(gateway: Gateway, topic_name: str) -> None:
    """A reader that answers ``revoked`` with a commit sees nothing twice, nor does the one that comes."""
    topic = await make(gateway, topic_name, 4)
    count = await write(gateway, topic_name, sources=32)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        await one.until(has(count))
        delivered = dict(one.held)
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await one.until(lambda s: "revoked" in s.kinds())
            assert (await one.commit(delivered))[0] == 200
            await asyncio.gather(one.until(lambda s: len(s.held) == 2), two.until(lambda s: len(s.held) == 2))
            await asyncio.gather(one.until(is_caught_up), two.until(is_caught_up))
    assert two.chunks == []
    assert len(one.chunks) == count


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_cut_connection_gives_its_partitions_up(gateway: Gateway, topic_name: str, how: str) -> None:
    topic = await make(gateway, topic_name, 4)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        await one.until(lambda s: len(s.held) == 4)
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await two.until(lambda s: len(s.held) == 2)
            assert two.response.connection is not None
            transport = two.response.connection.transport
            assert transport is not None
            if how == "reset":
                transport.abort()
            else:
                transport.close()
            await one.until(lambda s: s.kinds().count("assigned") >= 2 and len(s.held) == 4)
            assert (await two.commit({(topic, 0): 0}))[0] == 409


async def test_a_worker_that_stops_ends_its_sessions_and_one_that_dies_loses_them(
    gateway: Gateway, topic_name: str
) -> None:
    topic = await make(gateway, topic_name, 4)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as one:
        for number in (signal.SIGTERM, signal.SIGKILL):
            async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
                await two.until(lambda s: len(s.held) == 2)
                gateway.workers[1].send(number)
                with pytest.raises((StopAsyncIteration, aiohttp.ClientPayloadError)):
                    await two.until(lambda s: False)
                seen = one.kinds().count("assigned")

                def has_all_again(stream: Stream, seen: int = seen) -> bool:
                    return stream.kinds().count("assigned") > seen and len(stream.held) == 4

                await one.until(has_all_again)
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        # 503 while it is not known whether the other worker is gone.
                        status, problem = await two.commit({(topic, 0): 0}, url=gateway.urls[0])
                        if status != 503:
                            break
                        await asyncio.sleep(0.2)
                assert (status, problem["type"].rpartition("/")[2]) == (409, "superseded")
            await asyncio.to_thread(gateway.workers[1].wait_for_end)
            gateway.workers[1].start()
            await gateway._ready()


# ---- slow readers and limits ------------------------------------------------------------------------------


def rss_bytes(gateway: Gateway, worker: int) -> int:
    status = Path(f"/proc/{gateway.workers[worker].pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


async def test_a_reader_that_does_not_read_holds_little_and_blocks_nobody(gateway: Gateway, topic_name: str) -> None:
    topic = await make(gateway, topic_name, 4)
    count = 0
    for turn in range(12):
        count += await write(gateway, topic_name, sources=16, start=100 * turn, chunks=8, size=64 << 10)
    before = rss_bytes(gateway, 0)
    async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as slow:
        await slow.until(has(1))
        # It reads no more; the other one gets its share all the same, and reads it.
        async with Stream(gateway.session, gateway.urls[1], topic_name, f"topic={topic}") as two:
            await two.until(lambda s: len(s.held) == 2)
            await two.until(is_caught_up)
            assert rss_bytes(gateway, 0) - before < 40 << 20
            assert (await two.commit(two.held))[0] == 200
            await slow.until(lambda s: s.kinds().count("assigned") == 2 and is_caught_up(s))
    assert set(identities(slow, two)) == {
        (topic, f"web{source}", 100 * turn + n + 1) for source in range(16) for turn in range(12) for n in range(8)
    }
    assert count == len(set(identities(slow, two)))


async def test_a_reader_that_takes_nothing_for_too_long_is_cut_off(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    async with Gateway(tmp_path, kafka.bootstrap, 1, "[limits]\nsession_stall_s = 10\nsessions = 1\n") as gateway:
        topic = await make(gateway, topic_name, 1)
        for turn in range(8):
            await write(gateway, topic_name, sources=8, start=100 * turn, chunks=8, size=64 << 10)
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as slow:
            await slow.until(has(1))
            status, problem, headers = await gateway.ask("GET", f"/v1/consumers/{topic_name}/stream?topic={topic}")
            assert (status, problem["limit_sessions"]) == (503, 1)
            assert int(headers["Retry-After"]) >= 1
            status, metrics, _ = await gateway.ask("GET", "/metrics")
            assert b"\nlogferry_read_sessions 1.0\n" in metrics
            await until_members(gateway, topic_name, 0)
            assert "it took nothing for 10" in gateway.said()
        async with Stream(gateway.session, gateway.urls[0], topic_name, f"topic={topic}") as stream:
            await stream.until(has(1))
