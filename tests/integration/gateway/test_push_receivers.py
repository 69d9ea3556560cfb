"""Push delivery to real receivers, over HTTP: each format and compression, filters, patterns, client certificates,
receivers that hang, hang up and redirect, and the bounds of what is sent to one of them."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import cramjam
import msgpack
import pytest
import trustme
from aiohttp import web
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.delivery import Deliver, PushReceiver, Received, deliver, receiver, send, subscribe
from tests.support.gateway import Gateway

Row = tuple[str, int]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem``, certificates of clients with their keys: ``client.pem``, ``stranger.pem``, and the server's."""
    folder = tmp_path_factory.mktemp("secrets")
    ours, other = trustme.CA(), trustme.CA()
    for name, authority in (("ca", ours), ("other-ca", other)):
        authority.cert_pem.write_to_path(folder / f"{name}.pem")
    for name, authority in (("server", ours), ("client", ours), ("stranger", other)):
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def pushing(
    kafka: KafkaCluster, workers: Gateway, secrets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deliver]:
    with deliver(kafka, tmp_path_factory.mktemp("receivers"), "shared", secrets_dir=str(secrets)) as running:
        yield running


async def units_until(pushing: Deliver, name: str, holds: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
    await pushing.until(lambda units: holds([unit for unit in units if unit["subscription"] == name]), what)


# ---- what is sent ------------------------------------------------------------------------------------------------


def _of_msgpack(body: bytes) -> list[Row]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(body)
    return [(row[4], row[5]) for row in unpacker]  # as the page of the HTTP interface lists the values


def _of_cloudevents(body: bytes) -> list[Row]:
    return [(event["source"].rpartition("/")[2], int(event["id"])) for event in json.loads(body)]


def _of_ndjson(body: bytes) -> list[Row]:
    return [(row["source_id"], row["seqno"]) for row in map(json.loads, body.splitlines())]


def _of_text(body: bytes) -> list[Row]:
    return [(line.split()[0].decode(), int(line.split()[1])) for line in body.splitlines()]


_ROWS: Final = {"msgpack": _of_msgpack, "cloudevents": _of_cloudevents, "ndjson": _of_ndjson, "text": _of_text}
_UNPACKED: Final[dict[str, Callable[[bytes], bytes]]] = {
    "none": lambda body: body,
    "gzip": gzip.decompress,
    "zstd": lambda body: bytes(cramjam.zstd.decompress(body)),
}


@pytest.mark.parametrize(
    ("kind", "compression", "content_type"),
    [
        ("msgpack", "zstd", "application/vnd.msgpack"),
        ("cloudevents", "gzip", "application/cloudevents-batch+json"),
        ("ndjson", "zstd", "application/x-ndjson"),
        ("text", "none", "text/plain"),
    ],
)
async def test_a_batch_in_each_format_and_compression(
    workers: Gateway, pushing: Deliver, topic_name: str, kind: str, compression: str, content_type: str
) -> None:
    """Decoded without the gateway's code, it has each chunk once and in order."""
    topic = await workers.make_topic(topic_name)
    written = await send(workers, topic_name, "a", range(1, 21))
    async with receiver(is_packed=True) as got:
        await subscribe(workers, topic_name, topic, got.url, format=kind, compression=compression, max_bytes=1024)

        def rows() -> list[Row]:
            bodies = [_UNPACKED[compression](one.body) for one in got.taken.values()]
            return [row for body in bodies for row in _ROWS[kind](body)]

        await got.until(lambda: len(rows()) >= len(written), "all chunks")
        assert rows() == written
        assert len(got.taken) > 1
        assert {one.headers["Content-Type"] for one in got.seen} == {content_type}
        assert {one.headers.get("Content-Encoding", "none") for one in got.seen} == {compression}


async def test_chunks_that_no_filter_leaves_out(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    topic = await workers.make_topic(topic_name)
    level = {"X-Attr-level": "error"}
    wanted = await send(workers, topic_name, "web1", range(1, 4), headers=level)
    await send(workers, topic_name, "web1", range(4, 6))
    await send(workers, topic_name, "db1", range(1, 4), headers=level)
    await send(workers, topic_name, "web2", range(5, 7), headers=level)
    filters = {"source_prefix": "web", "attributes": {"level": "error"}, "pattern": " [1-3] "}
    async with receiver() as got:
        await subscribe(workers, topic_name, topic, got.url, filters=filters)
        wanted += await send(workers, topic_name, "web3", range(1, 3), headers=level)
        await got.until(lambda: len(got.rows) >= len(wanted), "those that are wanted")
        assert got.problems(wanted) == []
        # The position is behind those that were left out, too.
        await units_until(pushing, topic_name, lambda units: [u["lag_records"] for u in units] == [0], "lag 0")


async def test_a_pattern_takes_the_topics_of_both_data_centres_and_those_that_come_later(
    kafka: KafkaCluster, workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    async with receiver() as got:
        await subscribe(workers, topic_name, f"*.{topic_name}*", got.url)
        await workers.make_topic(topic_name)
        written = await send(workers, topic_name, "here", range(1, 3))
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(f"dc2.{topic_name}", 1, 1)])
        finally:
            await admin.close()
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            # As a mirror copies it.
            headers = [("seqno", (7).to_bytes(8, "big")), ("created", (5).to_bytes(8, "big"))]
            await producer.send_and_wait(f"dc2.{topic_name}", b"copied", key=b"there", partition=0, headers=headers)
        written.append(("there", 7))
        await workers.make_topic(f"{topic_name}-later")
        written += await send(workers, f"{topic_name}-later", "later", range(1, 3))
        await got.until(lambda: len(got.rows) >= len(written), "all three topics")
        assert got.problems(written) == []
        assert {row["dc"] for row in got.rows} == {"dc1", "dc2"}


# ---- TLS -----------------------------------------------------------------------------------------------------------


async def test_a_receiver_that_asks_for_a_client_certificate(
    workers: Gateway, pushing: Deliver, secrets: Path, topic_name: str
) -> None:
    """Without one, with a stranger's, and where the receiver's is of another authority, nothing is sent. A certificate
    that is renewed in its file is used by the next attempt."""
    topic = await workers.make_topic(topic_name)
    written = await send(workers, topic_name, "a", range(1, 4))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=secrets / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(secrets / "server.pem")
    own = secrets / f"{topic_name[-60:]}.pem"
    own.write_bytes((secrets / "stranger.pem").read_bytes())

    def failed(why: str) -> Callable[[list[dict[str, Any]]], bool]:
        return lambda units: any(unit["error"] and why in unit["error"]["detail"] for unit in units)

    # The certificate of a client is judged after its handshake (TLS 1.3): then the receiver hangs up.
    refused = "Server disconnected"
    async with receiver(tls=context) as got:
        for number, (files, why) in enumerate(
            (
                ({}, "certificate verify failed"),
                ({"ca_file": "other-ca.pem", "cert_file": "client.pem"}, "certificate verify failed"),
                ({"ca_file": "ca.pem"}, refused),
            )
        ):
            name = f"{topic_name}-{number}"
            await subscribe(workers, name, topic, got.url, **files)
            await units_until(pushing, name, failed(why), f"error with {files}")
            await workers.ask("DELETE", f"/v1/subscriptions/{name}")
        await subscribe(workers, topic_name, topic, got.url, ca_file="ca.pem", cert_file=own.name)
        await units_until(pushing, topic_name, failed(refused), "error with a stranger's certificate")
        assert got.seen == []
        own.write_bytes((secrets / "client.pem").read_bytes())
        await got.until(lambda: len(got.rows) >= len(written), "all with the renewed certificate")
        assert got.problems(written) == []


# ---- receivers that misbehave --------------------------------------------------------------------------------------


async def test_a_receiver_that_hangs_and_hangs_up(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    """Before it took the batch, and after it: what was taken comes again, with the same token and bytes."""
    topic = await workers.make_topic(topic_name)
    forever, count = asyncio.Event(), 0

    async def behave(got: Received) -> int | None:
        nonlocal count
        count += 1
        if count == 1:
            await forever.wait()
        if count == 3:
            got.hang_up()
            return 200
        return None

    async def after(got: Received) -> int | None:
        if count == 2:
            await forever.wait()
        if count == 4:
            got.hang_up()
        return None

    async with receiver(PushReceiver(behave, after)) as got:
        await subscribe(workers, topic_name, topic, got.url, max_bytes=1024, timeout_s=1)
        written = await send(workers, topic_name, "a", range(1, 21), size=100)
        await units_until(
            pushing,
            topic_name,
            lambda units: any(unit["error"] and "no answer within 1 s" in unit["error"]["detail"] for unit in units),
            "time-out is named",
        )
        await got.until(lambda: len(got.rows) >= len(written), "all chunks")
        assert got.problems(written) == []
        # Each of the four attempts was for nothing, by what the worker knows.
        assert len({one.token for one in got.seen[:5]}) == 1
        forever.set()


async def test_a_redirect_is_not_followed(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    """Wherever it leads: the partition stops by name, and the other address hears nothing."""
    topic = await workers.make_topic(topic_name)

    async with receiver() as elsewhere:

        async def behave(got: Received) -> Any:
            return web.Response(status=307, headers={"Location": elsewhere.url})

        async with receiver(PushReceiver(behave)) as got:
            await subscribe(workers, topic_name, topic, got.url)
            await send(workers, topic_name, "a", range(1, 2))

            def stopped(units: list[dict[str, Any]]) -> bool:
                return any(u["stop"] and "redirects are not followed" in u["stop"]["detail"] for u in units)

            await units_until(pushing, topic_name, stopped, "stop")
            assert len(got.seen) == 1
        assert elsewhere.seen == []


async def test_a_receiver_says_when_to_try_again(workers: Gateway, pushing: Deliver, topic_name: str) -> None:
    """Its first wait would be half a second at most."""
    topic = await workers.make_topic(topic_name)
    times: list[float] = []

    async def behave(got: Received) -> Any:
        times.append(time.monotonic())
        return web.Response(status=503, headers={"Retry-After": "2"}) if len(times) == 1 else None

    async with receiver(PushReceiver(behave)) as got:
        await subscribe(workers, topic_name, topic, got.url)
        await send(workers, topic_name, "a", range(1, 2))
        await got.until(lambda: len(got.rows) == 1, "the chunk")
        assert 1.9 <= times[1] - times[0] < 30


async def test_no_more_batches_are_under_way_than_the_subscription_says(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    """Of six partitions that all have something, two are sent at a time, and the others say what they wait for."""
    topic = await workers.make_topic(topic_name, 6)
    names = [f"s{number}" for number in range(40)]
    written = [
        one
        for some in await asyncio.gather(*(send(workers, topic_name, n, range(1, 3)) for n in names))
        for one in some
    ]
    may_answer, under_way, most = asyncio.Event(), 0, 0

    async def behave(got: Received) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await may_answer.wait()
        under_way -= 1

    async with receiver(PushReceiver(behave)) as got:
        await subscribe(workers, topic_name, topic, got.url, max_in_flight=2)

        def full(units: list[dict[str, Any]]) -> bool:
            said = [unit["waits_for"] for unit in units]
            return said.count("the receiver") == 2 and said.count("one of 2 batches under way") == len(said) - 2 == 4

        await units_until(pushing, topic_name, full, "partitions that wait")
        await got.until(lambda: under_way == 2, "two under way")
        may_answer.set()
        await got.until(lambda: len(got.rows) >= len(written), "all chunks")
        assert got.problems(written) == []
        assert most == 2


async def test_a_rejected_batch_is_set_aside_whole_and_once(
    workers: Gateway, pushing: Deliver, topic_name: str
) -> None:
    topic = await workers.make_topic(topic_name)
    dead = await workers.make_topic(topic_name + "-dead")

    async def behave(got: Received) -> int | None:
        return 422 if b"bad 1 " in got.body else None

    async with receiver(PushReceiver(behave)) as got:
        rejected = await send(workers, topic_name, "bad", range(1, 4))
        offsets = [row["offset"] for row in await _rows_at(workers, f"/v1/topics/{topic}/partitions/0/chunks")]
        letters = {"on_rejection": "dead-letter", "dead_letter_topic": topic_name + "-dead"}
        await subscribe(workers, topic_name, topic, got.url, **letters)
        await units_until(
            pushing, topic_name, lambda units: [u["lag_records"] for u in units] == [0], "position behind it"
        )
        written = await send(workers, topic_name, "good", range(1, 4))
        await got.until(lambda: len(got.rows) >= len(written), "what came later")
        assert got.problems(written) == []
    path = f"/v1/topics/{dead}/partitions/0/chunks?wait_ms=5000"
    found = await _rows_at(workers, path)
    assert [(row["source_id"], row["seqno"]) for row in found] == rejected
    assert [int(row["attributes"]["dead.offset"]) for row in found] == offsets
    assert {row["attributes"]["dead.topic"] for row in found} == {topic}
    assert all("422" in row["attributes"]["dead.reason"] for row in found)


async def _rows_at(workers: Gateway, path: str) -> list[dict[str, Any]]:
    answer = await workers.ask("GET", path, headers={"Accept": "application/x-ndjson"})
    return [json.loads(line) for line in answer.body.splitlines()]
