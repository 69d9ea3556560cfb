"""No request of the permitted size holds the event loop of a worker, well-formed or hostile, packed or not.

The worker measures the CPU time of each callback of its loop (`tests/support/measured_worker.py`), so neither other
processes nor other threads change the result. The limit is relative to a fixed piece of work, which the same thread
does after each callback that took long.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import cramjam
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logferry.gateway.contract.chunk import MSGPACK, NDJSON, Chunk, pack_chunk
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.held_loop import Measured, least_held, measured_gateway

MIB: Final = 1 << 20
TOPIC: Final = "held"
WIDE: Final = "held-wide"
LIMIT: Final = 16 * MIB
RANDOM: Final = random.Random(1).randbytes(LIMIT)
# As large as the permitted bodies, in a few bytes.
ZEROS: Final = bytes(LIMIT)


def zstd(plain: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(plain, 1))


def fast_gzip(plain: bytes) -> bytes:
    return gzip.compress(plain, 1)


def encoded(encoding: str, made: Callable[[], bytes]) -> bytes:
    return zstd(made()) if encoding == "zstd" else made()


@dataclass(frozen=True)
class Sent:
    """A request. ``body`` is made when it is sent."""

    name: str
    path: str
    body: Callable[[], bytes] = bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def source(name: str, rest: str = "/chunks?seqno=1", topic: str = TOPIC) -> str:
    return f"/v1/topics/{topic}/sources/{name}{rest}"


def many_chunks(count: int, attributes: int, value: str = "", data: bytes = b"x", first: int = 1) -> bytes:
    attrs = {f"{number:02d}": value for number in range(attributes)}
    return b"".join(pack_chunk(Chunk(number, None, None, attrs, data)) for number in range(first, first + count))


def packed(name: str, body: Callable[[], bytes], source_name: str = "") -> list[Sent]:
    """A MessagePack body as it is, by gzip and by zstd, each to a source of its own."""
    kinds: dict[str, Callable[[bytes], bytes]] = {"": lambda plain: plain, "gzip": fast_gzip, "zstd": zstd}
    return [
        Sent(
            f"{name} {encoding or 'plain'}",
            source(source_name or f"{name.replace(' ', '-')}-{encoding}", "/chunks"),
            lambda pack=pack: pack(body()),  # type: ignore[misc]
            headers={"Content-Type": MSGPACK, **({"Content-Encoding": encoding} if encoding else {})},
        )
        for encoding, pack in kinds.items()
    ]


def one(name: str, body: Callable[[], bytes], encoding: str = "", **headers: str) -> Sent:
    if encoding:
        headers["Content-Encoding"] = encoding
    return Sent(name, source(name.replace(" ", "-")), body, headers=headers)


def positions(count: int, topic: str = f"dc1.{WIDE}", **more: Any) -> bytes:
    listed = [{"topic": topic, "partition": number, **more} for number in range(count)]
    return json.dumps({"positions": listed}).encode()


def lengths(field: bytes, inner: bytes) -> bytes:
    size = bytes([len(inner) & 0x7F | 0x80, len(inner) >> 7 & 0x7F | 0x80, len(inner) >> 14 & 0x7F | 0x80,
                  len(inner) >> 21])  # fmt: skip
    return field + size + inner


def otlp_records(records: bytes) -> bytes:
    return lengths(b"\x0a", lengths(b"\x12", records))


def many_hosts() -> bytes:
    """Ten thousand resources of as many hosts, each with a record."""
    record = lengths(b"\x12", lengths(b"\x12", b""))

    def resource(number: int) -> bytes:
        value = lengths(b"\x12", lengths(b"\x0a", b"%d" % number))
        return lengths(b"\x0a", lengths(b"\x0a", lengths(b"\x0a", lengths(b"\x0a", b"host.name") + value)) + record)

    return b"".join(map(resource, range(10_000)))


BULK: Final = "/elasticsearch/held/_bulk"
HEC: Final = "/services/collector/"
OTLP: Final = "/otlp/v1/logs"
PIECE: Final = "/v1/archive/held/store?piece="
FIRST: Final = "&host=h&file=f&log_type=l"
# Name, path, type and body of the worst for each receiver.
RECEIVED: Final[list[tuple[str, str, str, Callable[[], bytes]]]] = [
    ("lines", f"/v1/topics/{TOPIC}/lines", "text/plain", lambda: b"\n" * LIMIT),
    ("long lines", f"/v1/topics/{TOPIC}/lines", "text/plain", lambda: (b"x" * (MIB // 2) + b"\n") * 31),
    ("bulk", BULK, NDJSON, lambda: b'{"index":{}}\n{}\n' * 100_000),
    ("bulk with ids", BULK, NDJSON, lambda: b'{"index":{"_id":"x"}}\n{}\n' * 100_000),
    ("too many actions", BULK, NDJSON, lambda: b'{"index":{}}\n{}\n' * (LIMIT // 16)),
    ("empty lines of bulk", BULK, NDJSON, lambda: b"\n" * LIMIT),
    ("deep actions", BULK, NDJSON, lambda: (b"[" * 4000 + b"\n") * 4000),
    ("events", HEC + "event", "application/json", lambda: b'{"event":1}' * 100_000),
    ("too many events", HEC + "event", "application/json", lambda: b'{"event":1}' * 300_000),
    ("deep events", HEC + "event", "application/json", lambda: b'{"event":' * 900_000),
    ("tiny values", HEC + "event", "application/json", lambda: b'{"event":[' + b"1," * (LIMIT // 2 - 10) + b"1]}"),
    ("raw", HEC + "raw", "text/plain", lambda: b"\n" * (LIMIT - 1) + b"x"),
    ("acks", HEC + "ack?channel=c", "application/json", lambda: b'{"acks":[' + b"1," * 9_999 + b"1]}"),
    ("otlp records", OTLP, "application/x-protobuf", lambda: otlp_records(b"\x12\x00" * 100_000)),
    ("too many otlp records", OTLP, "application/x-protobuf", lambda: otlp_records(b"\x12\x00" * (LIMIT // 2 - 20))),
    ("otlp resources", OTLP, "application/x-protobuf", lambda: b"\x0a\x00" * (LIMIT // 2)),
    ("many otlp hosts", OTLP, "application/x-protobuf", many_hosts),
    ("otlp unknown fields", OTLP, "application/x-protobuf", lambda: b"\x78\x01" * (LIMIT // 2)),
    (
        "too many otlp values",
        OTLP,
        "application/x-protobuf",
        lambda: otlp_records(lengths(b"\x12", b"\x32\x00" * 500_001)),
    ),
    ("otlp json", OTLP, "application/json", lambda: b'{"resourceLogs":[' + b"{}," * 300_000 + b"{}]}"),
    ("deep otlp json", OTLP, "application/json", lambda: b'{"resourceLogs":' + b"[" * 900_000),
    ("a piece", PIECE + "1" + FIRST, "text/plain", lambda: RANDOM[: 4 * MIB - 10_000]),
    ("a piece of lines", PIECE + "1" + FIRST, "text/plain", lambda: b"\n" * (4 * MIB - 10_000)),
    ("too large a piece", PIECE + "1" + FIRST, "text/plain", lambda: ZEROS),
    ("a later piece", PIECE + "2&digest=" + "0" * 32, "text/plain", lambda: RANDOM[: 4 * MIB - 10_000]),
]
STREAM: Final = "/v1/consumers/held/stream?"
PREFIX: Final = f"/v1/topics/dc1.{TOPIC}/partitions/0"
CASES: Final = [
    *packed("many attributes", lambda: many_chunks(10_000, 64)),
    # The same again: all are duplicates.
    *packed("many attributes", lambda: many_chunks(10_000, 64)),
    *packed("long attributes", lambda: many_chunks(60, 64, "é" * 2000)),
    *packed("many chunks", lambda: many_chunks(10_000, 0)),
    *packed("too many chunks", lambda: many_chunks(100_000, 0)),
    *packed("large chunks", lambda: many_chunks(15, 0, data=RANDOM[:MIB])),
    *packed("a gap at the end", lambda: many_chunks(9_999, 1) + pack_chunk(Chunk(20_000, 15_000, None, {}, b""))),
    *packed("nils", lambda: b"\xc0" * LIMIT),
    *packed("nested arrays", lambda: b"\x91" * LIMIT),
    *packed("nested maps", lambda: b"\x95\x01\xc0\xc0" + b"\x81\xa1a" * (5 * MIB)),
    *packed("empty arrays", lambda: b"\x90" * LIMIT),
    *packed("one long bin", lambda: msgpack.packb(bytes(LIMIT - 5))),
    *packed("one long string", lambda: msgpack.packb("x" * (LIMIT - 5))),
    *packed("announced and missing", lambda: b"\x95\x01\xc0\xc0\xc0\xc6\x00\xff\xff\xf0" + RANDOM[: LIMIT - 100]),
    *packed("zeros", lambda: ZEROS),
    *packed("noise", lambda: RANDOM[: LIMIT - 10_000]),
    one("one chunk", lambda: RANDOM[: 4 * MIB - 1000]),
    one("one packed chunk", lambda: fast_gzip(RANDOM[: 4 * MIB - 1000]), "gzip"),
    one("one chunk by zstd", lambda: zstd(RANDOM[: 4 * MIB - 1000]), "zstd"),
    one("small zstd of much", lambda: zstd(ZEROS), "zstd"),
    one("small gzip of much", lambda: fast_gzip(ZEROS), "gzip"),
    one("gzip members", lambda: fast_gzip(b"") * 1024, "gzip"),
    one("too many gzip members", lambda: fast_gzip(b"") * (LIMIT // 21), "gzip"),
    one("gzip members of zeros", lambda: fast_gzip(bytes(1 << 14)) * 1024, "gzip"),
    one("zstd frames", lambda: zstd(b"") * 1024, "zstd"),
    one("small zstd frames", lambda: zstd(bytes(1 << 17))[:2000] * 20, "zstd"),
    one("too many zstd frames", lambda: zstd(b"") * (LIMIT // 20), "zstd"),
    one("almost the magic", lambda: b"\x28\xb5\x2f" * (LIMIT // 3), "zstd"),
    one("gzip that is none", lambda: RANDOM, "gzip"),
    one("header of gzip with a long name", lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * (LIMIT - 10), "gzip"),
    one("too large", lambda: bytes(LIMIT + 1)),
    Sent(
        "long header attributes",
        source("headers"),
        lambda: b"x",
        headers={f"X-Attr-{number:02d}": "%20" * 4096 for number in range(64)},
    ),
    Sent("long header values", source("headers"), bytes, headers={f"X-{n}": "x" * 16_000 for n in range(100)}),
    Sent("a query of separators", source("query", "/chunks?" + "&" * 16_000)),
    Sent("a query of names", source("query", "/chunks?" + "&".join(f"{n:x}" for n in range(3200)))),
    Sent("a query of escapes", source("query", "/chunks?" + "&".join(f"%61{n:x}" for n in range(2000)))),
    Sent("a path of slashes", "/" * 16_000, method="GET"),
    Sent("a path of escapes", source("%41" * 5000)),
    Sent("many cursors", STREAM + "topic=dc1.x&" + "&".join(f"cursor=dc1.x:{n}:0" for n in range(700)), method="GET"),
    Sent("patterns of stars", STREAM + "&".join(["topic=dc9.*a*b*c*d*e*f*g"] * 100) + "&cursor=x:0:0", method="GET"),
    Sent("a heartbeat of keys", source("beat", "/heartbeat"), lambda: b'{"a":' * 800),
    Sent("a heartbeat of numbers", source("beat", "/heartbeat"), lambda: b'{"position":' + b"9" * 4000 + b"}"),
    Sent("positions", "/v1/consumers/held/offsets", lambda: positions(10_000, offset=0), "PUT"),
    Sent("positions by time", "/v1/consumers/held/offsets", lambda: positions(10_000, time_ms=1), "PUT"),
    Sent("positions that are there", "/v1/consumers/held/offsets", lambda: positions(200, offset=0), "PUT"),
    Sent("commits", "/v1/consumers/held/sessions/x/commit", lambda: positions(10_000, offset=0)),
    Sent(
        "wrong positions", "/v1/consumers/held/offsets", lambda: b'{"positions": [' + b"{}," * 30_000 + b"{}]}", "PUT"
    ),
    Sent("deep JSON", "/v1/consumers/held/offsets", lambda: b"[" * 90_000, "PUT"),
    Sent("a long number", "/v1/consumers/held/offsets", lambda: b"9" * (MIB - 1), "PUT"),
    Sent("escapes in JSON", "/v1/consumers/held/offsets", lambda: b'"' + b"\\u0041" * 170_000 + b'"', "PUT"),
    Sent("a topic", "/v1/topics/x", lambda: b'{"partitions":' + b"1" * 4000 + b"}", "PUT"),
    *(
        Sent(f"read {kind} {coding}", f"{PREFIX}/chunks?max_bytes=8388608", method="GET", headers={
            "Accept": kind, "Accept-Encoding": coding,
        })
        for kind in (MSGPACK, NDJSON, "text/plain")
        for coding in ("identity", "gzip", "zstd")
    ),
    Sent("read without a match", f"{PREFIX}/chunks?max_bytes=8388608&attr.x=y", method="GET"),
    *(
        Sent(f"{name} {encoding}", path, partial(encoded, encoding, made), headers={
            "Content-Type": kind, "Content-Encoding": encoding, "Idempotency-Key": name,
        })
        for encoding in ("identity", "zstd")
        for name, path, kind, made in RECEIVED
    ),
    Sent("sources", f"/v1/topics/{TOPIC}/sources", method="GET"),
    Sent("topics", "/v1/topics", method="GET"),
    Sent("one topic", f"/v1/topics/dc1.{WIDE}", method="GET"),
    Sent("metrics", "/metrics", method="GET"),
    Sent("status", "/v1/status", method="GET"),
    Sent("interface", "/v1/openapi.json", method="GET"),
    Sent("offsets", "/v1/consumers/held/offsets", method="GET"),
]  # fmt: skip


async def held(measured: Measured, sent: Sent) -> list[dict[str, Any]]:
    """Sends the request; the reports of callbacks until it is answered and the loop is free again."""

    async def send() -> None:
        options: dict[str, Any] = {"data": sent.body(), "headers": sent.headers, "expect": None}
        answer = await measured.gateway.ask(sent.method, sent.path, **options)
        assert answer.status != 500, f"{sent.name}: {answer.body[:300]!r}"

    return await measured.during(send)


@pytest.fixture(scope="module")
def measured(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    rules = [{"name": "*", "topic": TOPIC}]
    on: dict[str, Any] = {"lines": True, "elasticsearch": rules, "splunk": rules, "otlp": rules}
    on["archive"] = {"topics": rules}
    with measured_gateway(kafka, tmp_path_factory.mktemp("held"), receivers=on) as running:
        asyncio.run(running.gateway.make_topic(TOPIC))
        asyncio.run(running.gateway.make_topic(WIDE, 200))
        yield running


@pytest.mark.parametrize("sent", CASES, ids=lambda sent: sent.name.replace(" ", "-"))
async def test_the_worst_of_each_format_does_not_hold_the_loop(measured: Measured, sent: Sent) -> None:
    assert await least_held(lambda: held(measured, sent)) == []


@pytest.mark.parametrize(("count", "size"), [(300, 100), (30, MIB)])
async def test_the_end_of_a_file_does_not_hold_the_loop(measured: Measured, count: int, size: int) -> None:
    """Its commit reads all pieces and writes them as chunks; repeated, it is a duplicate."""
    number = 0

    async def send() -> None:
        nonlocal number
        number += 1
        path, query = f"/v1/archive/file-{count}-{number}", FIRST
        for piece in range(1, count + 1):
            answer = await measured.gateway.ask("POST", f"{path}/store?piece={piece}{query}", data=RANDOM[:size])
            query = f"&digest={answer.document['digest']}"
        for end in ("commit_request", "commit", "commit"):
            await measured.gateway.ask("POST", f"{path}/{end}?{query[1:]}")
        await measured.gateway.ask("GET", path)

    assert await least_held(lambda: measured.during(send)) == []


@pytest.mark.parametrize("accept", [MSGPACK, NDJSON])
async def test_a_read_session_over_small_chunks_does_not_hold_the_loop(measured: Measured, accept: str) -> None:
    body, kind = many_chunks(10_000, 64), {"Content-Type": MSGPACK}
    await measured.gateway.ask("POST", source(f"read-{len(accept)}", "/chunks"), data=body, headers=kind)
    url = f"{measured.gateway.urls[0]}/v1/consumers/held-{len(accept)}/stream?topic=dc1.{TOPIC}"

    async def read() -> None:
        async with aiohttp.ClientSession() as session, session.get(url, headers={"Accept": accept}) as answer:
            assert answer.status == 200
            seen = b""
            async with asyncio.timeout(120):
                while b"caught_up" not in seen:
                    seen = seen[-100:] + await answer.content.readany()

    assert await least_held(lambda: measured.during(read)) == []


# ---- whatever else: pieces of all formats, put together at random ---------------------------------------------

pieces = st.sampled_from(
    [
        *(b"\x90", b"\x91", b"\x95", b"\x81\xa1a", b"\xc0", b"\xc4\x00", b"\xc6\x00\x10\x00\x00", b"\xdc\xff\xff"),
        *(b"[", b"]", b"{", b'{"a":', b"1,", b'"', b"\\u0041", b"9", b"null,", b'{"topic":"dc1.x","partition":0},'),
        *(b"&", b"%41", b"=", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", b"line\n", b"\0", b"\xff"),
        *(pack_chunk(Chunk(1, None, None, {"a": "b"}, b"x")), fast_gzip(b""), zstd(b""), zstd(bytes(1 << 16))),
    ]
)
runs = st.tuples(pieces | st.binary(max_size=40), st.integers(1, 60_000))
bodies = st.lists(runs, max_size=4).map(lambda found: b"".join(piece * count for piece, count in found)[:LIMIT])
texts = st.sampled_from(
    ["&", "a=", "%41", "+", "/", ".", "*", "seqno=1&", "prev=0&", "topic=*.a&", "x", "é", "attr.a=b&"]
)
queries = st.lists(st.tuples(texts, st.integers(1, 3000)), max_size=3).map(
    lambda found: quote("".join(piece * count for piece, count in found)[:8000], safe="&=%+/.*")
)
paths = st.sampled_from(
    [
        *(("POST", source("fuzz", f"/{what}")) for what in ("chunks", "session", "heartbeat")),
        *(("GET", source("fuzz", "")), ("DELETE", source("fuzz", "")), ("GET", f"/v1/topics/{TOPIC}/sources")),
        *(("PUT", "/v1/consumers/fuzz/offsets"), ("GET", "/v1/consumers/fuzz/offsets"), ("PUT", "/v1/topics/dc1.x")),
        *(("POST", "/v1/consumers/fuzz/sessions/x/commit"), ("GET", f"{PREFIX}/translate"), ("GET", "/v1/nothing")),
    ]
)
encodings: dict[str, Callable[[bytes], bytes]] = {"gzip": fast_gzip, "zstd": zstd, "identity": bytes}
kinds = st.sampled_from([MSGPACK, "text/plain"])


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(paths, queries, bodies, st.sampled_from(sorted(encodings)), st.booleans(), kinds)
async def test_no_request_holds_the_loop(
    measured: Measured, path: tuple[str, str], query: str, body: bytes, encoding: str, is_packed: bool, kind: str
) -> None:
    headers = {"Content-Type": kind, "Content-Encoding": encoding}
    packed_body = encodings[encoding](body) if is_packed else body
    sent = Sent("any", f"{path[1]}?{query}" if query else path[1], lambda: packed_body, path[0], headers)
    assert await least_held(lambda: held(measured, sent)) == []
