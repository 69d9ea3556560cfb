"""What a monitoring system sees of a worker: names, labels of bounded number, and the same in Graphite."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
from logferry.gateway.config import Graphite
from logferry.gateway.service.worker import graphite_prefix
from logferry.ops.stack.kafka_cluster import KafkaCluster
from prometheus_client.parser import text_string_to_metric_families

from tests.support.faults import wait_unread
from tests.support.served_gateway import Gateway

# name → its labels, all of which have few values whatever callers send.
WANTED = {
    "logferry_requests_total": {"route", "status"},
    "logferry_request_seconds_count": {"route"},
    "logferry_chunks_total": {"topic", "result"},
    "logferry_chunk_bytes_total": {"topic", "result"},
    "logferry_read_bytes_total": {"topic"},
    "logferry_read_sessions": set(),
    "logferry_in_flight_bytes": set(),
    "logferry_connections": set(),
    "logferry_lane_open": {"lane"},
    "logferry_lane_state": {"lane", "state"},
    "logferry_lane_queued_bytes": {"lane"},
    "logferry_lane_sources": {"lane"},
    "logferry_lane_receipts": {"lane"},
    "logferry_lane_uploads": {"lane"},
    "logferry_lane_staged_bytes": {"lane"},
    "logferry_received_total": {"receiver", "result"},
    "logferry_lane_owner": {"lane", "owner"},
    "logferry_lane_openings_total": {"lane", "reason"},
    "logferry_replay_seconds_count": set(),
    "logferry_transaction_seconds_count": set(),
    "logferry_transactions_total": {"result"},
    "logferry_event_loop_lag_seconds_count": set(),
}


async def samples(gateway: Gateway, worker: int = 0) -> dict[str, dict[tuple[str, ...], float]]:
    """Name → label values in the order of their names → value."""
    _, body, headers = await gateway.ask("GET", "/metrics", worker=worker)
    assert headers["Content-Type"].startswith("text/plain; version=")
    found: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(body.decode()):
        assert family.name.startswith("logferry_")
        assert family.documentation
        for sample in family.samples:
            found[sample.name][tuple(sample.labels[name] for name in sorted(sample.labels))] = sample.value
            if sample.name in WANTED:
                assert set(sample.labels) == WANTED[sample.name]
    return found


async def test_everything_is_counted_by_bounded_labels(kafka: KafkaCluster, tmp_path: Path) -> None:
    topic = f"metrics-{time.time_ns()}"
    full, chunks = f"dc1.{topic}", f"/v1/topics/{topic}/sources/{{}}/chunks?seqno={{}}"
    archive = f'[receivers.archive]\ntopics = [{{ name = "a", topic = "{topic}-files" }}]\n'
    async with Gateway(tmp_path, kafka.bootstrap, 1, archive) as gateway:
        assert (await gateway.ask("PUT", f"/v1/topics/{topic}", data='{"partitions": 2}'))[0] == 201
        assert (await gateway.ask("PUT", f"/v1/topics/{topic}-files", data='{"partitions": 1}'))[0] == 201
        await archived(gateway, "open", "store?piece=1&host=h&file=f&log_type=a")
        await archived(gateway, "done", "store?piece=1&host=h&file=f&log_type=a", "commit_request?", "commit?")
        for number in range(30):
            assert (await gateway.ask("POST", chunks.format(f"s{number}", 5), data=b"12345"))[0] == 200
        assert (await gateway.ask("POST", chunks.format("s0", 5), data=b"12345"))[0] == 200
        assert (await gateway.ask("POST", chunks.format("s0", 20) + "&prev=9", data=b"123"))[0] == 409
        assert (await gateway.ask("POST", chunks.format("s0", 20) + "&prev=2", data=b"12"))[0] == 409
        assert (await gateway.ask("POST", chunks.format("s0", 20) + "&session=7", data=b"1"))[0] == 409
        # Kafka shows a transaction a moment after its answer.
        read, offsets = 0, ["0", "0"]
        while read < 150:
            for partition, offset in enumerate(offsets):
                path = f"/v1/topics/{full}/partitions/{partition}/chunks?offset={offset}"
                status, data, headers = await gateway.ask("GET", path, headers={"Accept": "text/plain"})
                assert status == 200
                read, offsets[partition] = read + len(data), headers["X-Next-Offset"]
        before = sum(map(len, (await samples(gateway)).values()))
        for number in range(50):
            # Names that are not there must not become labels, in whatever place they stand.
            await gateway.ask("POST", chunks.format(f"x{number}", 1).replace(topic, f"none-{number}"), data=b"x")
            await gateway.ask("GET", f"/v1/topics/dc1.none-{number}/partitions/0/chunks")
            await gateway.ask("GET", f"/v1/nothing/{number}")
            await gateway.ask("GET", f"/v1/archive/none-{number}")
            await gateway.ask(f"VERB{number}", "/healthz")
            await gateway.ask("GET", f"/v1/consumers/c{number}/offsets")
        found = await samples(gateway)
        assert sum(map(len, found.values())) - before < 150, "labels grow with what callers send"
        assert set(WANTED) <= set(found)
        counts = {result: count for (result, of), count in found["logferry_chunks_total"].items() if of == full}
        assert counts == {"written": 30, "duplicate": 1, "gap": 1, "overlap": 1, "superseded": 1}
        sizes = {result: size for (result, _), size in found["logferry_chunk_bytes_total"].items()}
        assert sizes == {"written": 150, "duplicate": 5, "gap": 3, "overlap": 2, "superseded": 1}
        assert found["logferry_read_bytes_total"][full,] == 150
        assert {state for (_, state), value in found["logferry_lane_state"].items() if value} == {"serving"}
        assert sum(found["logferry_lane_sources"].values()) == 31  # and that of the archive
        assert set(found["logferry_lane_owner"]) == {(str(lane), gateway.urls[0]) for lane in range(4)}
        assert found["logferry_transactions_total"]["committed",] >= 1
        assert found["logferry_in_flight_bytes"][()] == 0
        # Of the archive: a transaction that is open, and one that is committed.
        assert found["logferry_received_total"]["archive", "recorded"] == 1
        assert sum(found["logferry_lane_uploads"].values()) == 1
        assert sum(found["logferry_lane_staged_bytes"].values()) == len(b"piece\n")


async def archived(gateway: Gateway, transaction: str, *calls: str) -> None:
    """Calls of the archive, one after the other, with the digest of the answer before."""
    digest = ""
    for call in calls:
        path, data = f"/v1/archive/{transaction}/{call}{digest}", b"piece\n" if "store" in call else b""
        status, body, _ = await gateway.ask("POST", path, data=data)
        assert status == 200, body
        digest = f"digest={body['digest']}"


async def test_fences_and_forwards_are_counted(kafka: KafkaCluster, tmp_path: Path) -> None:
    """A worker that is frozen past its session is shut out of its lanes by the other, and says so when it wakes."""
    topic = f"fences-{time.time_ns()}"
    chunks = f"/v1/topics/{topic}/sources/{{}}/chunks?seqno={{}}"
    async with Gateway(tmp_path, kafka.bootstrap, 2, settings={"session_timeout_ms": 6000}) as gateway:
        assert (await gateway.ask("PUT", f"/v1/topics/{topic}", data='{"partitions": 2}'))[0] == 201
        for number in range(16):
            assert (await gateway.ask("POST", chunks.format(number, 1), data=b"x"))[0] == 200
        assert (await samples(gateway))["logferry_forwards_total"]["forward",] > 0
        frozen = gateway.workers[1]
        frozen.send(signal.SIGSTOP)
        try:
            # The other one has all lanes once the group has missed the frozen one.
            await asyncio.gather(*(taken(gateway, chunks.format(number, 2)) for number in range(16)))
            late = [gateway.ask("POST", chunks.format(number, 3), worker=1, data=b"x") for number in range(16)]
            waiting = [asyncio.create_task(request) for request in late]
            # On waking it finds these before it hears of what happened.
            await wait_unread(gateway.urls[1], len(waiting))
        finally:
            frozen.send(signal.SIGCONT)
        await asyncio.gather(*waiting)
        assert sum((await samples(gateway, 1))["logferry_lane_fences_total"].values()) >= 1


async def taken(gateway: Gateway, path: str) -> None:
    for _ in range(900):
        if (await gateway.ask("POST", path, data=b"x"))[0] == 200:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{path} is not taken")


@pytest.mark.parametrize(
    ("prefix", "host", "expected"),
    [
        ("logferry", "gw1", "logferry.dc1.gw1.worker-3"),
        ("a.b", "gw1.example.com", "a.b.dc1.gw1_example_com.worker-3"),
        ("logferry", "gw 1/é", "logferry.dc1.gw_1__.worker-3"),
    ],
)
def test_a_place_for_each_worker(prefix: str, host: str, expected: str) -> None:
    assert graphite_prefix(Graphite(host="x", prefix=prefix), "dc1", 3, host) == expected


async def test_graphite_gets_the_same_and_may_go_away(kafka: KafkaCluster, tmp_path: Path) -> None:
    received: asyncio.Queue[str] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.put_nowait((await reader.read(-1)).decode())
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    tables = f'[graphite]\nhost = "127.0.0.1"\nport = {port}\nprefix = "tests"\ninterval_s = 1\n'
    async with Gateway(tmp_path, kafka.bootstrap, 1, tables) as gateway:
        found: dict[str, float] = {}
        async with server:
            while found.get("logferry_lane_state.lane.0.state.serving") != 1:  # it may push before it serves
                for line in (await received.get()).splitlines():
                    name, value, at_s = line.split(" ")
                    assert name.startswith("tests.dc1.")
                    assert abs(int(at_s) - time.time()) < 60
                    found[name.partition(".worker-0.")[2]] = float(value)
        assert found["logferry_connections"] >= 0
        await server.wait_closed()
        for _ in range(600):
            if "graphite_unreachable" in gateway.said():
                break
            await asyncio.sleep(0.1)
        assert gateway.said().count("graphite_unreachable") == 1
        assert (await gateway.ask("GET", "/readyz"))[0] == 200
