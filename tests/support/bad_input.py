"""The table of bad input: what is sent, and the problem that it must get. Sizes fit the limits that stand here."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from typing import Any

import cramjam
import msgpack
from logferry.gateway.contract.chunk import MSGPACK

CHUNK, REQUEST, COUNT = 8192, 32768, 20
TOPIC = "bad-input"
WRITE = f"/v1/topics/{TOPIC}/sources/a/chunks"
SESSION = f"/v1/topics/{TOPIC}/sources/a/session"
SOURCE = f"/v1/topics/{TOPIC}/sources/a"
BEAT = f"/v1/topics/{TOPIC}/sources/a/heartbeat"
SOURCES = f"/v1/topics/{TOPIC}/sources"
READ = f"/v1/topics/dc1.{TOPIC}/partitions/0/chunks"
PUT = f"/v1/topics/{TOPIC}"


@dataclass
class Case:
    method: str
    path: str
    status: int
    problem: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    says: str = ""


def bad(path: str, says: str = "", method: str = "POST", **rest: Any) -> Case:
    return Case(method, path, 400, "bad-request", says=says, **rest)


def packed(*items: object) -> bytes:
    return b"".join(msgpack.packb(item) for item in items)


def many(body: bytes, says: str = "", status: int = 400, problem: str = "bad-request", query: str = "") -> Case:
    return Case("POST", WRITE + query, status, problem, body, {"Content-Type": MSGPACK}, says)


def encoded(body: bytes, encoding: str, status: int, problem: str) -> Case:
    return Case("POST", f"{WRITE}?seqno=11", status, problem, body, {"Content-Encoding": encoding})


SOURCE_IDS = (
    "",
    ".",
    "..",
    "%2E%2e",
    "%00",
    "a%0Ab",
    "%1b",
    "%7F",
    "%C2%85",
    "%ff",
    "%ed%a0%80",
    "%",
    "a%2",
    "x" * 513,
)
NAMES = [
    bad(f"/v1/topics/{topic}/{rest}", "topic", method)
    for topic in ("%20", "a%20b", "a%2Fb", "%2E", "..", ".", "x" * 201, "%C3%A9", "%ff", "%", "%zz", "")
    for method, rest in [("POST", "sources/a/chunks?seqno=11"), ("POST", "sources/a/session"), ("GET", "sources/a")]
] + [
    bad(f"/v1/topics/{TOPIC}/sources/{source}/{rest}", "sourceId", method)
    for source in SOURCE_IDS
    for method, rest in [("POST", "chunks?seqno=11"), ("POST", "session"), ("POST", "heartbeat")]
]  # fmt: skip

QUERIES = [
    *(
        bad(f"{WRITE}?seqno={seqno}", "seqno")
        for seqno in ("", "-1", "+1", "%2B1", "1.0", "1e3", "0x1", "x", "1_0", "%D9%A3", "1%00", "9223372036854775808")
    ),
    bad(f"{WRITE}?seqno={'9' * 5000}", "seqno"),
    bad(WRITE, "seqno"),
    bad(f"{WRITE}?prev=5", "seqno"),
    bad(f"{WRITE}?seqno=11&prev=11", "prev"),
    bad(f"{WRITE}?seqno=11&prev=12", "prev"),
    bad(f"{WRITE}?seqno=0&prev=0", "prev"),
    bad(f"{WRITE}?seqno=11&prev=-1", "prev"),
    bad(f"{WRITE}?seqno=11&prev=", "prev"),
    bad(f"{WRITE}?seqno=11&session=x", "session"),
    bad(f"{WRITE}?seqno=11&session=9223372036854775808", "session"),
    bad(f"{WRITE}?seqno=11&created_ms=-1", "created_ms"),
    bad(f"{WRITE}?seqno=11&created_ms=now", "created_ms"),
    bad(f"{WRITE}?seqno=11&seqno=12", "seqno is given more than once"),
    bad(f"{WRITE}?seqno=11&%73eqno=12", "seqno is given more than once"),
    bad(f"{WRITE}?seqno=11&Prev=10", "Prev"),
    bad(f"{WRITE}?seqno=11&offset=1", "offset"),
    bad(f"{WRITE}?seqno=11&=1", "query"),
    bad(f"{WRITE}?seqno=11&partition_key=", "partition_key"),
    bad(f"{WRITE}?seqno=11&partition_key=%2E", "partition_key"),
    bad(f"{WRITE}?seqno=11&partition_key=%00", "partition_key"),
    bad(f"{WRITE}?seqno=11&partition_key=%ff", "partition_key"),
    bad(f"{WRITE}?seqno=11&partition_key={'x' * 513}", "partition_key"),
    bad(f"{WRITE}?seqno=11&%ff=1", "query"),
    bad(f"{SESSION}?session=1", "session"),
    bad(f"{SESSION}?seqno=1", "seqno"),
    bad(f"{SESSION}?partition_key=a&partition_key=b", "partition_key is given more than once"),
    bad(f"{SOURCE}?x=1", "x", "GET"),
    bad(f"{SOURCE}?partition_key=", "partition_key", "GET"),
    bad(f"{SOURCES}?prefiks=a", "prefiks", "GET"),
    bad(f"{SOURCES}?idle_for_ms=-1", "idle_for_ms", "GET"),
    bad(f"{PUT}?partitions=5", "partitions", "PUT", body=b'{"partitions": 5}'),
    bad(f"{PUT}?x=1", "x", "GET"),
    bad("/v1/topics?x=1", "x", "GET"),
]

BODIES = [
    bad(SESSION, "body", body=b"x"),
    bad(SESSION, "body", body=b"{}"),
    *(
        bad(BEAT, says, body=body)
        for says, body in [
            ("body", b""),
            ("body", b"{"),
            ("body", b"[]"),
            ("body", b"\xff"),
            ("x", b'{"x": 1}'),
            ("position", b'{"position": -1}'),
            ("position", b'{"position": "5"}'),
            ("size", b'{"size": 9223372036854775808}'),
            ("watermark_ms", b'{"watermark_ms": 1.5}'),
            ("finished", b'{"finished": 1}'),
        ]
    ),
    *(
        bad(PUT, says, "PUT", body=body)
        for says, body in [
            ("body", b""),
            ("body", b"partitions=5"),
            ("body", b"null"),
            ("body", b"[5]"),
            ("body", b'{"partitions": 5} x'),
            ("body", b"\xff\xfe"),
            ("body", b'{"partitions": 5, "partitions"'),
            ("body", b"[" * 4000),
            ("partitions", b"{}"),
            ("partitions", b'{"partitions": null}'),
            ("partitions", b'{"partitions": "5"}'),
            ("partitions", b'{"partitions": 5.0}'),
            ("partitions", b'{"partitions": true}'),
            ("partitions", b'{"partitions": 0}'),
            ("partitions", b'{"partitions": -1}'),
            ("partitions", b'{"partitions": 10001}'),
            ("partitions", b'{"partitions": 1e400}'),
            ("retention_ms", b'{"partitions": 5, "retention_ms": -2}'),
            ("retention_ms", b'{"partitions": 5, "retention_ms": "1d"}'),
            ("retention_ms", b'{"partitions": 5, "retention_ms": 1e30}'),
            ("replication", b'{"partitions": 5, "replication": 1}'),
        ]
    ),
    # Too large, by the head and by what comes.
    Case("POST", f"{WRITE}?seqno=11", 413, "too-large", b"x" * (CHUNK + 1)),
    Case("POST", f"{WRITE}?seqno=11", 413, "too-large", b"x" * (REQUEST + 1)),
    Case("POST", f"{WRITE}?seqno=11", 413, "too-large", b"", {"Content-Length": str(1 << 40)}),
    Case("PUT", PUT, 413, "too-large", b" " * (REQUEST + 1)),
    Case("POST", BEAT, 413, "too-large", b" " * (REQUEST + 1)),
    Case("POST", SESSION, 413, "too-large", b" " * (REQUEST + 1)),
    *(
        Case("POST", f"{WRITE}?seqno=11", 413, "too-large", chunked, {"Transfer-Encoding": "chunked"})
        for chunked in (
            b"%x\r\n%b\r\n0\r\n\r\n" % (CHUNK + 1, b"x" * (CHUNK + 1)),
            b"%x\r\n%b\r\n0\r\n\r\n" % (REQUEST + 1, b"x" * (REQUEST + 1)),
            b"8000\r\n%b\r\n" % (b"x" * 0x8000) * 40 + b"0\r\n\r\n",
        )
    ),
]  # fmt: skip

ENCODINGS = [
    encoded(b"x" * 100, "gzip", 400, "bad-request"),
    encoded(b"", "gzip", 400, "bad-request"),
    encoded(gzip.compress(b"x" * 100)[:-3], "gzip", 400, "bad-request"),
    encoded(gzip.compress(b"x" * 100) + b"rest", "gzip", 400, "bad-request"),
    encoded(gzip.compress(b"\0" * 30_000_000), "gzip", 413, "too-large"),
    encoded(gzip.compress(b"x" * (CHUNK + 1)), "gzip", 413, "too-large"),
    encoded(gzip.compress(b"x" * 100), "zstd", 400, "bad-request"),
    encoded(bytes(cramjam.zstd.compress(b"\0" * 30_000_000)), "zstd", 413, "too-large"),
    encoded(bytes(cramjam.zstd.compress(b"x" * 100))[:-3], "zstd", 400, "bad-request"),
    encoded(b"x", "br", 415, "unsupported-media-type"),
    encoded(b"x", "deflate", 415, "unsupported-media-type"),
    encoded(b"x", "gzip, gzip", 415, "unsupported-media-type"),
    encoded(b"x", "x" * 2000, 415, "unsupported-media-type"),
]

ATTRIBUTES = [
    bad(f"{WRITE}?seqno=11", says, headers=headers)
    for says, headers in [
        ("X-Attr-a", {"X-Attr-a": "%ff"}),
        ("X-Attr-a", {"X-Attr-a": "%"}),
        ("X-Attr-a", {"X-Attr-a": "\udcff"}),
        ("attributes", {"X-Attr-": "x"}),
        ("attributes", {"X-Attr-a~b": "x"}),
        ("attributes", {"X-Attr-" + "a" * 65: "x"}),
        ("attributes", {"X-Attr-a": "x" * 4097}),
        ("attributes", {f"X-Attr-a{n}": "x" for n in range(65)}),
        ("X-ATTR-A", {"X-Attr-a": "x", "X-ATTR-A": "y"}),
    ]
]

CHUNKS = [
    many(b"", "no chunk"),
    many(b"\xc1", "chunk 0"),
    many(b"text", "chunk 0"),
    many(packed(7), "chunk 0"),
    many(packed([11, None, None, None, b"x"])[:-1], "chunk 0"),
    many(packed([11, None, None, None, b"x"], [12, None]), "chunk 1"),
    many(packed([-1, None, None, None, b"x"]), "seqno"),
    many(packed([2**63, None, None, None, b"x"]), "seqno"),
    many(packed(["11", None, None, None, b"x"]), "seqno"),
    many(packed([11, 11, None, None, b"x"]), "prev"),
    many(packed([11, None, -1, None, b"x"]), "created_ms"),
    many(packed([11, None, None, {"A": "x"}, b"x"]), "attributes"),
    many(packed([11, None, None, {"a": 1}, b"x"]), "attributes"),
    many(packed([11, None, None, None, "text"]), "data"),
    many(packed([11, None, None, None, None]), "data"),
    many(packed([[[]]]), "chunk 0"),
    many(b"\x91" * 30_000, "chunk 0"),
    many(b"\xdd\xff\xff\xff\xff", "chunk 0"),
    many(packed([11, None, None, None, b"x"]), "seqno", query="?seqno=11"),
    many(packed([11, None, None, None, b"x"]), "session", query="?session=-1"),
    many(packed([11, None, None, None, b"x" * (CHUNK + 1)]), "chunk 0", 413, "too-large"),
    many(packed(*([n, None, None, None, b"x"] for n in range(11, 12 + COUNT))), str(COUNT), 413, "too-large"),
    many(packed([12, None, None, None, b"x"], [11, None, None, None, b"x"]), "", 409, "out-of-order"),
    many(packed([11, None, None, None, b"x"], [11, None, None, None, b"x"]), "", 409, "out-of-order"),
]

RULES = [
    Case("POST", f"{WRITE}?seqno=20&prev=15", 409, "gap"),
    Case("POST", f"{WRITE}?seqno=5", 409, "gap"),
    Case("POST", f"{WRITE}?seqno=20&prev=7", 409, "overlap"),
    Case("POST", f"{WRITE}?seqno=11&session=1", 409, "superseded"),
    Case("POST", f"{WRITE}?seqno=10&session=1", 409, "superseded"),
    Case("POST", f"{BEAT}?session=1", 409, "superseded", b"{}"),
    Case("PUT", PUT, 409, "conflict", b'{"partitions": 1}'),
    Case("PUT", "/v1/topics/dc1.x", 409, "conflict", b'{"partitions": 1}'),
    Case("PUT", "/v1/topics/dc2.x", 409, "conflict", b'{"partitions": 1}'),
    bad(f"{PUT}-2", "", "PUT", body=b'{"partitions": 1, "retention_ms": 1000000000000000000000}'),
    *(
        Case(method, f"/v1/topics/no-such{rest}", 404, "unknown-topic", body, says="logferry topics create no-such")
        for method, rest, body in [
            ("POST", "/sources/a/chunks?seqno=1", b"x"),
            ("POST", "/sources/a/session", b""),
            ("GET", "/sources/a", b""),
            ("POST", "/sources/a/heartbeat", b"{}"),
            ("DELETE", "/sources/a", b""),
            ("GET", "/sources", b""),
            ("GET", "", b""),
        ]
    ),
]  # fmt: skip

READS = [
    *(
        bad(f"{READ}?{query}", says, "GET")
        for says, query in [
            ("offset", "offset="),
            ("offset", "offset=-1"),
            ("offset", "offset=first"),
            ("offset", "offset=9223372036854775808"),
            ("time_ms", "time_ms=yesterday"),
            ("time_ms", "time_ms=-1"),
            ("cursor", "cursor="),
            ("cursor", f"cursor=dc1.{TOPIC}:0"),
            ("cursor", f"cursor=dc1.{TOPIC}:1:0"),
            ("cursor", f"cursor=dc2.{TOPIC}:0:0"),
            ("cursor", f"cursor=dc1.{TOPIC}:0:-1"),
            ("cursor", f"cursor=dc1.{TOPIC}:0:9223372036854775808"),
            ("only one", "offset=0&time_ms=0"),
            ("only one", f"offset=0&cursor=dc1.{TOPIC}:0:0"),
            ("max_bytes", "max_bytes=-1"),
            ("max_bytes", "max_bytes=2147483648"),
            ("wait_ms", "wait_ms=x"),
            ("wait_ms", "wait_ms=1.5"),
            ("given more than once", "offset=0&offset=1"),
            ("given more than once", "attr.a=0&attr.a=1"),
            ("from", "from=0"),
            ("query", "source_prefix=%ff"),
        ]
    ),
    *(
        bad(f"/v1/topics/dc1.{TOPIC}/partitions/{partition}/chunks", "partition", "GET")
        for partition in ("", "-1", "x", "2147483648", "%ff")
    ),
    *(
        bad(f"/v1/topics/{topic}/partitions/0/chunks", "topic", "GET")
        for topic in ("", TOPIC, "DC.x", "dc1.", ".x", "dc1.%ff")
    ),
    *(bad(READ, "Accept", "GET", headers={"Accept": accept}) for accept in ("text/html", "image/*", ";;;", "x" * 3000)),
    Case("GET", f"/v1/topics/dc1.{TOPIC}/partitions/7/chunks", 404, "not-found"),
    Case("GET", "/v1/topics/dc1.no-such/partitions/0/chunks", 404, "unknown-topic"),
    Case("GET", f"{READ}?offset=9223372036854775807", 416, "out-of-range"),
    Case("GET", f"{READ}?cursor=dc1.{TOPIC}:0:1000", 416, "out-of-range"),
]  # fmt: skip

UNKNOWN = (
    *("/", "//", "/v1", "/v2/topics", "/v1/", "/v1/topicz", "/healthz/", "/HEALTHZ", "/metrics/x", "/%00"),
    *(f"{PUT}/", f"{PUT}/x", f"{SOURCE}/x", f"{WRITE}/x", "/v1/topics/t/sources/a/b/chunks"),
    *("/v1/topics/a/b/c/d/e/f/g/h", "http://x/healthz", "/x?" + "y" * 4000),
)
ROUTES = [
    *(
        Case("GET", path, 404, "not-found")
        for path in UNKNOWN
    ),
    *(
        Case(method, path, 405, "method-not-allowed")
        for path, methods in [
            (WRITE, ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")),
            (SESSION, ("GET", "DELETE")),
            (SOURCE, ("POST", "PUT")),
            (READ, ("POST", "PUT", "DELETE", "TRACE")),
            (PUT, ("POST", "DELETE")),
            ("/v1/topics", ("POST", "PUT")),
            ("/healthz", ("POST",)),
            ("/metrics", ("DELETE",)),
        ]
        for method in methods
    ),
]  # fmt: skip

TABLE = [*NAMES, *QUERIES, *BODIES, *ENCODINGS, *ATTRIBUTES, *CHUNKS, *RULES, *READS, *ROUTES]

LINE = b"POST %b?seqno=11 HTTP/1.1\r\n" % WRITE.encode()
MALFORMED = [
    b"hello\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /healthz HTTP/x\r\nHost: x\r\n\r\n",
    b"G\0T /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /heal\0thz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    LINE + b"Host: x\r\n" + b"".join(b"X-%d: x\r\n" % n for n in range(500)) + b"\r\n",
    LINE + b"Host: x\r\nno colon\r\n\r\n",
    LINE + b"Host: x\r\n: no name\r\n\r\n",
    LINE + b"Host: x\r\nbad name : x\r\n\r\n",
    LINE + b"Host: x\r\nX-A: a\0b\r\n\r\n",
    LINE + b"Host: x\r\nContent-Length: x\r\n\r\n",
    LINE + b"Host: x\r\nContent-Length: -5\r\n\r\n",
    LINE + b"Host: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    LINE + b"Host: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    LINE + b"Host: x\r\nTransfer-Encoding: gzip\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    LINE + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nhello\r\n0\r\n\r\n",
    LINE + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    LINE + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloworld\r\n0\r\n\r\n",
    LINE + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
]
LONG_HEADS = [
    b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    LINE + b"Host: x\r\nX-Attr-a: " + b"x" * 20_000 + b"\r\n\r\n",
]
