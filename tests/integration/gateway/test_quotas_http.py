"""Quotas from outside: a caller over its rate gets the time to wait, the others do not notice, and workers share it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.served_gateway import Gateway

RATE = 20_000
TABLES = "".join(
    f'[[tokens]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
    f'write = ["*"]\nread = ["*"]\nadmin = ["*"]\n{quota}\n'
    for name, quota in (("limited", f"bytes_per_s = {RATE}"), ("free", ""))
)
TABLES += '[[quotas]]\ntopic = "few-*"\nchunks_per_s = 50\n'


@pytest.fixture
async def gateway(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, kafka.bootstrap, 1, TABLES) as gateway:
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


async def test_the_workers_divide_a_quota_by_demand(kafka: KafkaCluster, tmp_path: Path) -> None:
    """One of two workers gets all of it while the other has nothing to do, then half."""
    taken: list[tuple[float, str, int]] = []

    async with Gateway(tmp_path, kafka.bootstrap, 2, TABLES) as gateway:

        async def source_of(worker: int, number: int) -> str:
            """A source of a lane that this worker owns."""
            for candidate in range(1000):
                source = f"w{worker}-{number}-{candidate}"
                _, document, _ = await gateway.ask("GET", f"/v1/topics/shared/sources/{source}", "free")
                if document["url"] == gateway.urls[worker]:
                    return source
            raise AssertionError(f"worker {worker} owns no lane")

        async def push(worker: int, number: int) -> None:
            """More than the quota, until it is cancelled."""
            source, seqno = await source_of(worker, number), 1
            while True:
                path = f"/v1/topics/shared/sources/{source}/chunks?seqno={seqno}"
                status, document, _ = await gateway.ask("POST", path, "limited", worker, data=b"x" * 400)
                assert status in (200, 429, 503), document
                if status == 200:
                    taken.append((time.monotonic(), gateway.urls[worker], 400))
                    seqno += 1
                else:
                    await asyncio.sleep(0.05)

        def rate(seconds: float, worker: int | None = None) -> float:
            """Of the last seconds, as a part of the quota."""
            now_s, url = time.monotonic(), None if worker is None else gateway.urls[worker]
            found = [size for at_s, who, size in taken if at_s > now_s - seconds and url in (None, who)]
            return sum(found) / seconds / RATE

        async def until(is_so: Callable[[], bool]) -> None:
            async with asyncio.timeout(90):
                while not is_so():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        status, document, _ = await gateway.ask("PUT", "/v1/topics/shared", "free", data='{"partitions": 4}')
        assert status in (200, 201), document
        async with asyncio.TaskGroup() as group:
            first = [group.create_task(push(0, number)) for number in range(3)]
            await until(lambda: rate(4) >= 0.9)
            assert rate(4) <= 1.1
            second = [group.create_task(push(1, number)) for number in range(3)]
            await until(lambda: 0.4 <= rate(5, 0) <= 0.6 and 0.4 <= rate(5, 1) <= 0.6)
            await asyncio.sleep(5)
            assert rate(5) <= 1.1
            for task in (*first, *second):
                task.cancel()
        assert "quota_usage_failed" not in gateway.said()
