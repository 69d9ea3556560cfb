"""Bad input to every endpoint: the problem document of the interface, no worker dies, no state changes.

One table of cases. Each case is sent to both workers, so that half of them take the way through the other one. The
bytes are put on the wire as they stand here, because a client library would not send most of them.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from logferry.gateway.contract.chunk import MSGPACK
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.bad_input import (
    CHUNK,
    COUNT,
    LONG_HEADS,
    MALFORMED,
    REQUEST,
    SESSION,
    SOURCE,
    TABLE,
    TOPIC,
    WRITE,
    Case,
)
from tests.support.gateway import Gateway, gateway


@pytest.fixture(scope="module")
def small(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers with small limits."""
    limits = {
        "chunk_bytes": CHUNK,
        "request_bytes": REQUEST,
        "request_chunks": COUNT,
        "body_timeout_s": 1.0,
    }
    with gateway(kafka, tmp_path_factory.mktemp("small"), "small", limits=limits) as running:
        asyncio.run(running.make_topic(TOPIC, 2))
        asyncio.run(seed(running))
        asyncio.run(has_admin_log(running))
        yield running


async def seed(small: Gateway) -> None:
    """The source ``a`` has 10 recorded, in the session that is its newest."""
    await small.ask("POST", SESSION)
    await small.ask("POST", f"{WRITE}?seqno=10&prev=5", data=b"line\n")


async def has_admin_log(small: Gateway) -> None:
    """Waits until what was done is logged: the first record makes the topic."""
    async with asyncio.timeout(60):
        while not (await small.ask("GET", "/v1/admin-log")).document["records"]:  # noqa: ASYNC110  an answer of HTTP
            await asyncio.sleep(0.1)


# ---- the wire ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> Any:
        assert self.headers.get("content-type") == "application/problem+json", (self.headers, self.body)
        return json.loads(self.body)


async def exchange(url: str, sent: bytes) -> Reply:
    """One connection: everything is sent, one answer is read."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        async with asyncio.timeout(60):
            writer.write(sent)
            return await reply(reader, has_body=not sent.startswith(b"HEAD "))
    finally:
        writer.close()


async def reply(reader: asyncio.StreamReader, has_body: bool = True) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", "0"))) if has_body else b""
    return Reply(int(head[0].split(" ")[1]), headers, body)


def request(case: Case) -> bytes:
    headers = {"Host": "x", **case.headers}
    if "Transfer-Encoding" not in headers:
        headers.setdefault("Content-Length", str(len(case.body)))
    lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + case.body


# ---- state -------------------------------------------------------------------------------------------------


async def state(small: Gateway) -> dict[str, object]:
    """Everything that a request could have changed: the end of every log, aborted data included; topics; processes."""
    admin = AIOKafkaAdminClient(bootstrap_servers=small.kafka.bootstrap)
    consumer = AIOKafkaConsumer(bootstrap_servers=small.kafka.bootstrap, isolation_level="read_uncommitted")
    await admin.start()
    await consumer.start()
    try:
        names = sorted(await admin.list_topics())
        [described] = await admin.describe_topics([f"dc1.{TOPIC}"])
        partitions = [TopicPartition(f"dc1.{TOPIC}", n) for n in range(len(described["partitions"]))]
        partitions += [TopicPartition(small.state_topic, n) for n in range(4)]
        ends = await consumer.end_offsets(partitions)
    finally:
        await consumer.stop()
        await admin.close()
    look = (await small.ask("GET", SOURCE)).document
    return {"topics": names, "ends": ends, "source": look, "pids": small.pids}


@pytest.fixture
async def unchanged(small: Gateway) -> AsyncIterator[None]:
    before = await state(small)
    yield
    small.wait_ready()
    after = await state(small)
    assert {name: (before[name], after[name]) for name in after if after[name] != before[name]} == {}


# ---- the tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [0, 1])
async def test_every_case_gets_its_problem_and_changes_nothing(small: Gateway, unchanged: None, worker: int) -> None:
    wrong = []
    for case in TABLE:
        try:
            texts = complaints(case, await exchange(small.urls[worker], request(case)))
        except (OSError, EOFError, TimeoutError) as error:
            texts = [repr(error)]
        wrong += [f"{case.method} {case.path[:80]} {case.headers} {case.body[:40]!r}: {text}" for text in texts]
    assert not wrong, "\n".join(wrong)


def complaints(case: Case, answer: Reply) -> list[str]:
    """What is not as the case wants it."""
    if answer.headers.get("content-type") != "application/problem+json":
        return [f"{answer.status} is no problem document: {answer.headers}"]
    if case.method == "HEAD":
        return [] if answer.status == case.status else [f"{answer.status}"]
    document = answer.problem
    found = (answer.status, document["type"].rpartition("/")[2])
    texts = [f"{found}, not {(case.status, case.problem)}"] if found != (case.status, case.problem) else []
    if case.says.lower() not in document["detail"].lower():
        texts.append(f"does not say {case.says!r}: {document['detail']}")
    missing = {"type", "title", "status", "detail", "instance"} - document.keys()
    if missing or document["status"] != answer.status:
        texts.append(f"lacks {missing}, or its status: {document}")
    wanted = {"gap": "recorded_seqno", "overlap": "recorded_seqno", "out-of-range": "next"}.get(case.problem)
    if wanted is not None and wanted not in document:
        texts.append(f"lacks {wanted}")
    if case.problem == "too-large" and not {"limit_bytes", "limit_chunks"} & document.keys():
        texts.append("lacks the limit")
    if case.status == 405 and "allow" not in answer.headers:
        texts.append("lacks Allow")
    return texts


@pytest.mark.parametrize("sent", [*MALFORMED, *LONG_HEADS], ids=lambda sent: sent[:12].hex())
async def test_what_is_not_http_gets_a_problem_document_too(small: Gateway, unchanged: None, sent: bytes) -> None:
    expected = (413, "too-large") if sent in LONG_HEADS else (400, "bad-request")
    for url in small.urls:
        answer = await exchange(url, sent)
        assert (answer.status, answer.problem["type"].rpartition("/")[2]) == expected


# ---- bodies that come slowly, in part, or not at all ---------------------------------------------------------


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines]).encode() + b"\r\n\r\n"


@pytest.mark.parametrize("worker", [0, 1])
async def test_a_slow_body_is_timed_out_while_others_are_served(small: Gateway, unchanged: None, worker: int) -> None:
    parts = urlsplit(small.urls[worker])
    slow = []
    for framing, begun in [("Content-Length: 100", b"x" * 50), ("Transfer-Encoding: chunked", b"32\r\n" + b"x" * 50)]:
        for path in (f"{WRITE}?seqno=11", SESSION):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(head(path, framing) + begun)
            slow.append((reader, writer))
    waiting = asyncio.gather(*(reply(reader) for reader, _ in slow))
    served = await small.ask("GET", SOURCE, worker)
    assert served.document["recorded_seqno"] == 10
    async with asyncio.timeout(60):
        answers = await waiting
    for _, writer in slow:
        writer.close()
    assert [(answer.status, answer.problem["type"].rpartition("/")[2]) for answer in answers] == [(408, "timeout")] * 4


CUT = [
    head(f"{WRITE}?seqno=11", "Content-Length: 100"),
    head(f"{WRITE}?seqno=11", "Content-Length: 100") + b"x" * 99,
    head(f"{WRITE}?seqno=11", "Transfer-Encoding: chunked"),
    head(f"{WRITE}?seqno=11", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n",
    head(f"{WRITE}?seqno=11", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n",
    head(f"{WRITE}?seqno=11", "Content-Length: 100", "Content-Encoding: gzip") + gzip.compress(b"x" * 100)[:20],
    head(WRITE, "Content-Length: 100", f"Content-Type: {MSGPACK}") + msgpack.packb([11, None, None, None, b"x"]),
    b"POST " + WRITE.encode(),
    b"",
]


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("abort", [False, True])
async def test_a_connection_cut_inside_a_request_records_nothing(
    small: Gateway, unchanged: None, worker: int, abort: bool
) -> None:
    before = await state(small)
    parts = urlsplit(small.urls[worker])
    for sent in CUT:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(sent)
        await writer.drain()
        if abort:
            writer.transport.abort()
        else:
            writer.write_eof()
            writer.close()
            await writer.wait_closed()
    assert await state(small) == before


@pytest.mark.parametrize("worker", [0, 1])
async def test_the_next_request_of_a_connection_is_read_where_it_begins(
    small: Gateway, unchanged: None, worker: int
) -> None:
    """The body of a refused request is not taken for a request of its own, even if it looks like one."""
    inner = head(f"{WRITE}?seqno=11", "Content-Length: 5") + b"inner"
    parts = urlsplit(small.urls[worker])
    for path, status in [("/nowhere", 404), (f"{WRITE}?seqno=x", 400), (f"{WRITE}?seqno=20&prev=15", 409)]:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        async with asyncio.timeout(60):
            refused = head(path, f"Content-Length: {len(inner)}") + inner
            writer.write(refused + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reply(reader)).status == status
            assert (await reply(reader)).body == b'{"status": "alive"}'
        writer.close()


async def test_the_largest_that_is_allowed_is_allowed(small: Gateway) -> None:
    """The limits are limits, not walls in the wrong place."""
    for worker in (0, 1):
        path = f"/v1/topics/{TOPIC}/sources/large{worker}/chunks"
        await small.ask("POST", f"{path}?seqno=1", worker, data=b"x" * CHUNK)
        chunks = [msgpack.packb([n, None, None, None, b"x" * 1600]) for n in range(2, 2 + COUNT)]
        body = b"".join(chunks)
        assert len(body) <= REQUEST
        answer = await small.ask("POST", path, worker, data=body, headers={"Content-Type": MSGPACK})
        assert answer.document["written"] == COUNT
    assert (await small.ask("GET", SOURCE)).document["recorded_seqno"] == 10, "and all that was refused stayed out"
