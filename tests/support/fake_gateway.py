"""A reference of the gateway for tests of the client: the rule of a chunk over a dictionary, with faults.

It keeps what the interface promises and nothing else; a broker, lanes and workers have no place here. It can be
called as the client's exchange (no sockets) or be served over HTTP by `Served`.
"""

from __future__ import annotations

import gzip
import http.server
import io
import json
import ssl
import threading
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

import msgpack
from logferry.client.transport.connections import Body, NoResponse, Reply
from logferry.gateway.contract.chunk import MSGPACK, Chunk
from logferry.gateway.contract.names import check_attributes, check_source_id, check_topic

LARGEST_CHUNK_BYTES = 1 << 20

# What can happen to a request; each is used up by one request.
FAULTS = (
    "cut before",  # the connection is cut, nothing is recorded
    "cut after",  # recorded, and the answer is lost
    "500 before",
    "500 after",
    "503",
    "429",
    "redirect",
)


class Killed(BaseException):
    """Stands for a SIGKILL of the client at the moment of a request."""


@dataclass
class Stored:
    """What is known of one source."""

    topic: str = "t"
    session: int = 0
    base: int | None = None
    recorded: int | None = None
    chunks: list[Chunk] = field(default_factory=list)
    beats: list[dict[str, object]] = field(default_factory=list)

    def content(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)


class Problem(Exception):
    def __init__(self, status: int, kind: str, **fields: object) -> None:
        super().__init__(kind)
        self.status = status
        self.body = {"type": f"https://logferry.example/problems/{kind}", "title": kind, "detail": kind, **fields}


class FakeGateway:
    """One topic's sources. ``faults`` are used up, one a request; ``after`` is where redirects lead."""

    def __init__(self, topics: tuple[str, ...] = ("t",)) -> None:
        self.topics = set(topics)
        self.sources: dict[str, Stored] = {}
        self.faults: deque[str] = deque()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.other_url: str | None = None  # the owner, as sessions name it and redirects point to
        self.token: str | None = None
        self.refuses_beats = False
        self.is_away = False
        self.is_one_of_many = False  # other data centres may hold what is not recorded here
        self.prev_always = True
        self.source_retention_ms: int | None = None  # as sessions name it; None: an older gateway, which does not
        self.largest_chunk_bytes = LARGEST_CHUNK_BYTES
        self.largest_request_chunks: int | None = None  # a limit of requests
        self._lock = threading.Lock()

    def __call__(self, url: str, headers: dict[str, str], body: Body | None, method: str = "POST") -> Reply:
        """The client's exchange. Raises `NoResponse`, or `Killed` where the fault says so."""
        if self.is_away:
            raise NoResponse("away")
        if method == "GET":
            assert url.endswith("/readyz"), url
            return Reply(200, {}, b"{}")
        assert body is not None
        body = body if isinstance(body, bytes) else b"".join(body)
        with self._lock:
            return self._exchange(url, {name.lower(): value for name, value in headers.items()}, body)

    def _exchange(self, url: str, headers: dict[str, str], body: bytes) -> Reply:
        self.requests.append((url, headers))
        fault = self.faults.popleft() if self.faults else ""
        if fault == "cut before":
            raise NoResponse("cut before")
        if fault == "kill before":
            raise Killed
        if fault in ("503", "429"):
            return Reply(int(fault), {"retry-after": "1"}, b'{"type": "overloaded"}')
        if fault == "source-in-use":
            return Reply(503, {"retry-after": "1"}, b'{"type": "source-in-use", "detail": "of another token"}')
        if fault == "500 before":
            return Reply(500, {}, b'{"type": "outcome-unknown"}')
        if fault == "redirect" and "x-logferry-redirect" in headers and self.other_url:
            parts = urlsplit(url)
            return Reply(307, {"location": f"{self.other_url}{parts.path}?{parts.query}"}, b"")
        reply = self._answer(url, headers, body)
        if fault == "cut after":
            raise NoResponse("cut after")
        if fault == "kill after":
            raise Killed
        return Reply(500, {}, b'{"type": "outcome-unknown"}') if fault == "500 after" else reply

    def _answer(self, url: str, headers: dict[str, str], body: bytes) -> Reply:
        parts = urlsplit(url)
        try:
            if self.token and headers.get("authorization") != f"Bearer {self.token}":
                raise Problem(401, "unauthenticated")
            _, v1, topics, topic, sources, source, call = parts.path.split("/")
            assert (v1, topics, sources) == ("v1", "topics", "sources"), parts.path
            if check_topic(topic) not in self.topics:
                raise Problem(404, "unknown-topic")
            stored = self.sources.setdefault(check_source_id(unquote(source, errors="strict")), Stored(topic))
            assert stored.topic == topic, f"{source} was in {stored.topic}"
            if call == "session":
                answer = self._open(stored)
            elif call == "heartbeat":
                answer = self._beat(stored, parse_qs(parts.query), body)
            else:
                assert call == "chunks", call
                answer = self._write(stored, parse_qs(parts.query), headers, body)
        except Problem as problem:
            return Reply(problem.status, {}, json.dumps(problem.body).encode())
        return Reply(200, {}, json.dumps(answer).encode())

    def _open(self, stored: Stored) -> dict[str, object]:
        stored.session += 1
        more = {} if self.source_retention_ms is None else {"source_retention_ms": self.source_retention_ms}
        return {
            "session": stored.session,
            "partition": 0,
            "recorded_seqno": stored.recorded,
            "url": self.other_url,
            **more,
        }

    def _beat(self, stored: Stored, query: dict[str, list[str]], body: bytes) -> dict[str, object]:
        if int(query["session"][0]) != stored.session:
            raise Problem(409, "superseded")
        if self.refuses_beats:
            raise Problem(403, "forbidden")
        said = json.loads(body)
        assert said.keys() <= {"watermark_ms", "position", "size", "finished"}, said
        assert self.is_one_of_many or said["position"] <= (stored.recorded or 0), f"{said} of {stored.recorded}"
        assert "watermark_ms" not in said or said["position"] == said["size"], said
        stored.beats.append(said)
        return {"session": stored.session, "recorded_seqno": stored.recorded, "url": self.other_url}

    def _write(
        self, stored: Stored, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> dict[str, object]:
        if ("session" in query or stored.session) and int(query["session"][0]) != stored.session:
            raise Problem(409, "superseded")
        assert headers["content-type"] == MSGPACK, headers
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        recorded, written, duplicates = stored.recorded, [], 0
        rows = list(msgpack.Unpacker(io.BytesIO(body)))
        if self.largest_request_chunks is not None and len(rows) > self.largest_request_chunks:
            raise Problem(413, "too-large", limit=self.largest_request_chunks)
        for row in rows:
            chunk = Chunk(row[0], row[1], row[2], row[3] or {}, row[4])
            check_attributes(chunk.attributes)
            if len(chunk.data) > self.largest_chunk_bytes:
                raise Problem(413, "too-large", limit=self.largest_chunk_bytes)
            if recorded is not None and chunk.seqno <= recorded:
                if stored.base is not None and chunk.seqno <= stored.base:
                    raise Problem(409, "gap", recorded_seqno=recorded)
                duplicates += 1
                continue
            if "resumed_at" in chunk.attributes:
                assert self.is_one_of_many
                assert chunk.prev is None
                assert recorded is not None
                assert int(chunk.attributes["resumed_at"]) > recorded, f"{chunk.attributes} after {recorded}"
            else:
                assert chunk.prev is not None or not self.prev_always, "the push-client always says prev"
            if recorded is not None and chunk.prev is not None and chunk.prev != recorded:
                raise Problem(409, "gap" if chunk.prev > recorded else "overlap", recorded_seqno=recorded)
            recorded = chunk.seqno
            written.append(chunk)
        if stored.recorded is None and written:
            stored.base = written[0].prev
        first = len(stored.chunks)
        stored.chunks += written
        stored.recorded = recorded
        return {
            "recorded_seqno": recorded,
            "written": len(written),
            "duplicates": duplicates,
            "topic": f"dc1.{stored.topic}",
            "partition": 0,
            "offsets": [first, first + len(written) - 1] if written else None,
        }


class Served:
    """A `FakeGateway` over HTTP, or HTTPS with a ``context``, on a free port of 127.0.0.1, in a ``with`` block."""

    def __init__(self, gateway: FakeGateway, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        self.gateway = gateway
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        gateway = self.gateway
        served = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    reply = gateway(served.url + self.path, dict(self.headers.items()), body)
                except NoResponse:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
