"""`FakeGateway` answers as the gateway does: each scenario is sent to both, and each answer is held against the other.

The real one is two workers with a real Kafka. What differs by nature is replaced before: times, URLs, and numbers of
sessions, which are times. Some requests that are wrong (`FREE`) get the same problem with other words.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgpack
import pytest
from logferry.client import (
    AsyncReader,
    AsyncWriter,
    LogferryHandler,
    OutOfRange,
    Reader,
    Rejected,
    Superseded,
    Writer,
)
from logferry.client.testing import FakeGateway
from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import Gateway, gateway

PATIENCE_S = 120.0
SOURCE = "/v1/topics/{topic}/sources/web1%2Flog"
CHUNKS = SOURCE + "/chunks"
PAGE = "/v1/topics/dc1.{topic}/partitions/{partition}/chunks"
CONSUMER = "/v1/consumers/c-{topic}"
COMPARED = (
    *("content-type", "retry-after", "allow", "www-authenticate", "x-next-offset", "x-next-cursor", "vary"),
    *("content-encoding", "location"),
)
VARYING = ("created_ms", "recorded_ms", "written_ms", "heartbeat_ms", "url", "id", "lag_seconds", "lanes")
FREE = "free"  # a detail in other words


class Step(NamedTuple):
    """One request. ``path`` and ``body`` may name the topic, and facts of the answers before."""

    method: str
    path: str
    body: Any = b""
    headers: dict[str, str] | None = None
    detail: str = ""


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    content: Any


def post(path: str, body: Any = b"line\n", detail: str = "", **headers: str) -> Step:
    return Step("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()}, detail)


def get(path: str, detail: str = "", **headers: str) -> Step:
    return Step("GET", path, b"", {name.replace("_", "-"): value for name, value in headers.items()}, detail)


def many(*rows: tuple[Any, ...]) -> bytes:
    return b"".join(pack_chunk(Chunk(*row)) for row in rows)


def packed(body: bytes, detail: str = "", query: str = "", **headers: str) -> Step:
    return post(CHUNKS + ("?" + query if query else ""), body, detail, Content_Type=MSGPACK, **headers)


def line(seqno: int, prev: int | None = None, data: bytes = b"x\n", created_ms: int | None = 5) -> tuple[Any, ...]:
    return seqno, prev, created_ms, {}, data


SCENARIOS: dict[str, list[Step]] = {
    "the rule of a chunk": [
        get(SOURCE),
        post(f"{CHUNKS}?seqno=4096&prev=100"),
        post(f"{CHUNKS}?seqno=4096&prev=100"),
        post(f"{CHUNKS}?seqno=200", b"another one\n"),
        post(f"{CHUNKS}?seqno=100"),
        post(f"{CHUNKS}?seqno=50&prev=49"),
        post(f"{CHUNKS}?seqno=5000&prev=4999"),
        post(f"{CHUNKS}?seqno=5000&prev=4000"),
        post(f"{CHUNKS}?seqno=5000&prev=4096"),
        post(f"{CHUNKS}?seqno=6000"),
        post(f"{CHUNKS}?seqno=9223372036854775807", b""),
        post(f"{CHUNKS}?seqno=9223372036854775807", b""),
        get(SOURCE),
        post("/v1/topics/{topic}/sources/zero/chunks?seqno=0"),
        get("/v1/topics/{topic}/sources/never"),
        post(f"{CHUNKS}?seqno=1&partition_key=web1"),
        post("/v1/topics/{topic}/sources/other/chunks?seqno=1&partition_key=web1"),
        post("/v1/topics/{topic}/sources/web1/chunks?seqno=1"),
        get(SOURCE + "?partition_key=web1"),
        get(SOURCE + "?dc=dc1"),
        get(SOURCE + "?dc=dc7", FREE),
        get("/v1/topics/{topic}"),
    ],
    "malformed writes": [
        post(CHUNKS),
        post(f"{CHUNKS}?seqno="),
        post(f"{CHUNKS}?seqno=-1"),
        post(f"{CHUNKS}?seqno=1.0"),
        post(f"{CHUNKS}?seqno=9223372036854775808"),
        post(f"{CHUNKS}?seqno=5&prev=5"),
        post(f"{CHUNKS}?seqno=5&prev=x"),
        post(f"{CHUNKS}?seqno=5&seqno=6"),
        post(f"{CHUNKS}?seqno=5&session=a"),
        post(f"{CHUNKS}?seqno=5&sesion=1"),
        post(f"{CHUNKS}?seqno=5&partition_key="),
        post(f"{CHUNKS}?seqno=5&partition_key=%2"),
        post(f"{CHUNKS}?seqno=5", b"", FREE, **{"X-Attr-A": "1", "x-attr-a": "2"}),
        post(f"{CHUNKS}?seqno=5", x_attr_a="%zz"),
        post(f"{CHUNKS}?seqno=5", x_attr_a="%ff"),
        post(f"{CHUNKS}?seqno=5", **{f"X-Attr-{'n' * 65}": "1"}),
        post(f"{CHUNKS}?seqno=5", X_Attr_Long="v" * 4097),
        post(f"{CHUNKS}?seqno=5", **{f"X-Attr-{n}": "1" for n in range(65)}),
        post("/v1/topics/{topic}/sources/%00/chunks?seqno=1"),
        post("/v1/topics/{topic}/sources/%ff/chunks?seqno=1"),
        post("/v1/topics/{topic}/sources/%2/chunks?seqno=1"),
        post("/v1/topics/{topic}/sources/../chunks?seqno=1"),
        post("/v1/topics/{topic}/sources//chunks?seqno=1"),
        post("/v1/topics/{topic}/sources/" + "s" * 513 + "/chunks?seqno=1"),
        post("/v1/topics/a%20b/sources/s/chunks?seqno=1"),
        post("/v1/topics//sources/s/chunks?seqno=1"),
        get(SOURCE),
    ],
    "one chunk with all": [
        post(f"{CHUNKS}?seqno=7&created_ms=5", b"\xff\x00", X_Attr_Host="web1", X_Attr_Path="%C3%A9%2Fa"),
        post(f"{CHUNKS}?seqno=8&created_ms=0", "é\n".encode(), Content_Type="text/plain; charset=utf-8"),
        post(f"{CHUNKS}?seqno=9", gzip.compress(b"small\n"), Content_Encoding="gzip"),
        post(f"{CHUNKS}?seqno=10", gzip.compress(b"two\n") + gzip.compress(b"members\n"), Content_Encoding="x-gzip"),
        post(f"{CHUNKS}?seqno=11", b"plain\n", Content_Encoding="identity"),
        post(f"{CHUNKS}?seqno=12", b"not gzip", FREE, Content_Encoding="gzip"),
        post(f"{CHUNKS}?seqno=12", gzip.compress(b"cut\n")[:-3], FREE, Content_Encoding="gzip"),
        post(f"{CHUNKS}?seqno=12", b"", Content_Encoding="gzip"),
        post(f"{CHUNKS}?seqno=12", b"br", Content_Encoding="br"),
        post(f"{CHUNKS}?seqno=12", gzip.compress(b"\0" * (17 << 20)), Content_Encoding="gzip"),
        get(PAGE, Accept="application/x-ndjson"),
        get(PAGE, Accept=MSGPACK),
        get(PAGE),
    ],
    "too large": [
        post(f"{CHUNKS}?seqno=1", b"\0" * ((4 << 20) + 1)),
        post(f"{CHUNKS}?seqno=1", b"\0" * ((16 << 20) + 1)),
        packed(many(line(1), line(2, data=b"\0" * ((4 << 20) + 1)))),
        packed(many(*(line(n) for n in range(10_001)))),
        post(SOURCE + "/heartbeat", b" " * 4097),
        get(SOURCE),
    ],
    "many chunks": [
        packed(many(line(1, 0), line(2, 1, created_ms=None), line(5, 2))),
        packed(many(line(1, 0), line(2, 1), line(5, 2), line(6, 5))),
        packed(many(line(7, 6), line(9, 8))),
        packed(many(line(6, 5), line(7, 5))),
        packed(many(line(8), line(7))),
        packed(many(line(7), line(7))),
        packed(many(line(7, 7))),
        packed(b""),
        packed(b"\xc0"),
        packed(msgpack.packb([7, None, None, None])),
        packed(msgpack.packb([7, None, None, None, "text"]), FREE),
        packed(msgpack.packb([-7, None, None, None, b""]), FREE),
        packed(msgpack.packb([True, None, None, None, b""]), FREE),
        packed(msgpack.packb([7, 1.5, None, None, b""]), FREE),
        packed(msgpack.packb([7, None, "now", None, b""]), FREE),
        packed(msgpack.packb([7, None, None, [], b""]), FREE),
        packed(msgpack.packb([7, None, None, {"A": "b"}, b""])),
        packed(msgpack.packb([7, None, None, {"a": 1}, b""])),
        packed(msgpack.packb([7, None, None, {"a": {}}, b""]), FREE),
        packed(msgpack.packb([[[[]]]]), FREE),
        packed(b"\xc1", FREE),
        packed(many(line(7))[:-1], FREE),
        packed(many(line(7)) + b"\x95\x01", FREE),
        packed(many(line(7)), query="seqno=7"),
        packed(msgpack.packb([7, None, 10**12, {"a": "é"}, b"\xff"]) + msgpack.packb([2**40, 7, None, {}, b""])),
        packed(gzip.compress(many(line(2**40 + 1))), Content_Encoding="gzip"),
        packed(many(line(2**63 - 1, 2**40 + 1))),
        get(PAGE),
        get(PAGE, Accept="application/x-ndjson"),
    ],
    "sessions": [
        post(f"{CHUNKS}?seqno=1"),
        post(f"{SOURCE}/session", b""),
        post(f"{CHUNKS}?seqno=2"),
        post(f"{CHUNKS}?seqno=3&session={{session}}"),
        post(f"{CHUNKS}?seqno=3"),
        post(f"{CHUNKS}?seqno=4"),
        packed(many(line(3), line(4))),
        post(f"{CHUNKS}?seqno=4&session=17"),
        get(SOURCE),
        post(f"{SOURCE}/session", b""),
        post(f"{CHUNKS}?seqno=4"),
        packed(many(line(5, 4), line(6, 5)), query="session={session}"),
        post(f"{SOURCE}/session", b"body"),
        post(f"{SOURCE}/session?session=1", b""),
        post("/v1/topics/{topic}/sources/new/session?partition_key=web1", b""),
        post("/v1/topics/{topic}/sources/never/chunks?seqno=4&session=17"),
        post("/v1/topics/{topic}/sources/zero/chunks?seqno=4&session=0"),
    ],
    "heartbeats": [
        post(f"{SOURCE}/heartbeat", {"watermark_ms": 5, "position": 10, "size": 20}),
        post(f"{SOURCE}/heartbeat", {"finished": True}),
        post(f"{CHUNKS}?seqno=1"),
        post(f"{SOURCE}/heartbeat", {"position": None, "finished": True}),
        post(f"{SOURCE}/heartbeat?session=3", {}),
        post(f"{SOURCE}/heartbeat", b"", FREE),
        post(f"{SOURCE}/heartbeat", b"[]", FREE),
        post(f"{SOURCE}/heartbeat", {"place": 1}, FREE),
        post(f"{SOURCE}/heartbeat", {"position": -1}, FREE),
        post(f"{SOURCE}/heartbeat", {"position": "1"}, FREE),
        post(f"{SOURCE}/heartbeat", {"finished": 1}, FREE),
        post("/v1/topics/{topic}/sources/web2/session", b""),
        post("/v1/topics/{topic}/sources/a%20b/chunks?seqno=3&partition_key=k"),
        get(SOURCE),
        post(f"{CHUNKS}?seqno=1&prev=0"),
    ],
    "topics": [
        get("/v1/topics/{topic}"),
        get("/v1/topics/dc1.{topic}"),
        get("/v1/topics/{topic}?size=true", FREE),
        get("/v1/topics/no-{topic}"),
        get("/v1/topics/dc1.no-{topic}"),
    ],
    "no such topic, route or method": [
        post("/v1/topics/no-{topic}/sources/s/chunks?seqno=1"),
        post("/v1/topics/no-{topic}/sources/s/chunks"),
        post("/v1/topics/no-{topic}/sources/s/session", b""),
        post("/v1/topics/no-{topic}/sources/s/heartbeat", {}),
        post("/v1/topics/dc1.{topic}/sources/s/chunks?seqno=1"),
        get("/v1/topics/no-{topic}/sources/s"),
        get("/v1/topics/dc1.no-{topic}/partitions/0/chunks", FREE),
        get("/v1/topics/{topic}/partitions/0/chunks"),
        get("/v1/topics/dc1.{topic}/partitions/4/chunks"),
        get("/v1/topics/dc1.{topic}/partitions/x/chunks"),
        get("/"),
        get("/v1"),
        get("/v1/nothing?a=b"),
        get("/v2/topics"),
        get("/v1/topics/{topic}/sources/s/chunks/"),
        get(CHUNKS),
        Step("PATCH", CHUNKS),
        post("/v1/topics"),
        post("/healthz"),
        get("/healthz"),
        get("/readyz"),
    ],
    "pages": [
        get(PAGE),
        *(post(f"{CHUNKS}?seqno={n}&created_ms={n}", b"%d\n" % n, X_Attr_Odd=str(n % 2)) for n in range(1, 4)),
        packed(many(line(4), line(5), line(6))),
        post("/v1/topics/{topic}/sources/web2/chunks?seqno=1&partition_key=web1%2Flog&created_ms=1"),
        get(PAGE),
        get(PAGE + "?offset=earliest"),
        get(PAGE + "?offset=latest"),
        get(PAGE + "?offset=2"),
        get(PAGE + "?offset=3"),
        get(PAGE + "?offset=12"),
        get(PAGE + "?offset=13"),
        get(PAGE + "?offset=-1"),
        get(PAGE + "?time_ms=0"),
        get(PAGE + "?time_ms=9999999999999"),
        get(PAGE + "?cursor=dc1.{topic}:{partition}:4"),
        get(PAGE + "?cursor=dc1.{topic}:9:4"),
        get(PAGE + "?cursor=4"),
        get(PAGE + "?offset=1&time_ms=5"),
        get(PAGE + "?source_prefix=web2"),
        get(PAGE + "?source_prefix=no"),
        get(PAGE + "?attr.odd=1"),
        get(PAGE + "?attr.odd=1&attr.odd=0"),
        get(PAGE + "?ofset=1"),
        get(PAGE + "?wait_ms=x"),
        get(PAGE + "?max_bytes=9223372036854775807"),
        get(PAGE + "?wait_ms=50&offset=latest"),
        get(PAGE, FREE, Accept="image/png"),
        post(f"{CHUNKS}?seqno=7&created_ms=7", b"long " * 200),
        get(PAGE + "?offset=12", Accept="application/x-ndjson", Accept_Encoding="gzip"),
        get("/v1/topics/dc1.{topic}/partitions/{partition}/translate?offset=3"),
        get("/v1/topics/dc1.{topic}/partitions/{partition}/translate?offset=3&from=dc1&to=dc1"),
        get("/v1/topics/dc1.{topic}/partitions/{partition}/translate?offset=3&to=dc2", FREE),
        get("/v1/topics/dc1.{topic}/partitions/{partition}/translate"),
    ],
    "positions of a consumer": [
        get(CONSUMER + "/offsets"),
        post(f"{CHUNKS}?seqno=1"),
        packed(many(line(2), line(3))),
        get(CONSUMER + "/offsets"),
        get(CONSUMER + "/offsets?offset=a", FREE),
        get("/v1/consumers/a%20b/offsets"),
        get("/v1/consumers/logferry.gateway/offsets"),
        get(CONSUMER + "/stream"),
        get(CONSUMER + "/stream?topic=dc1.no-{topic}", FREE),
        get(CONSUMER + "/stream?topic={topic}"),
        get(CONSUMER + "/stream?topic=dc1.{topic}&from=now"),
        get(CONSUMER + "/stream?topic=dc1.{topic}", Accept="text/plain"),
        post(CONSUMER + "/sessions/none/commit", {"generation": 1, "positions": []}, FREE),
        post(
            CONSUMER + "/sessions/none/commit",
            {"generation": 1, "positions": [{"topic": "dc1.{topic}", "partition": 0, "offset": 0}]},
        ),
    ],
}


class Side:
    """One of the two gateways, as a test sees it. ``facts``: what paths and bodies may name."""

    def __init__(self, url: str, topic: str, token: str | None = None) -> None:
        self._at, self._token = urlsplit(url).netloc, token
        self._sessions: list[int] = []
        self.facts: dict[str, Any] = {"topic": topic, "partition": 1}

    def filled(self, text: str) -> str:
        for name, value in self.facts.items():
            text = text.replace("{" + name + "}", str(value))
        return text

    def request(self, step: Step) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._at, timeout=PATIENCE_S)
        connection.putrequest(step.method, self.filled(step.path), skip_accept_encoding=True)
        body = step.body if isinstance(step.body, bytes) else self.filled(json.dumps(step.body)).encode()
        for name, value in {"Content-Length": str(len(body)), **(step.headers or {})}.items():
            connection.putheader(name, value)
        if self._token is not None:
            connection.putheader("Authorization", f"Bearer {self._token}")
        connection.endheaders(body)
        return connection.getresponse()

    def ask(self, step: Step) -> Reply:
        with self.request(step) as response:
            raw, kind = response.read(), response.headers.get("Content-Type", "")
            headers = {name: value for name in COMPARED if (value := response.headers.get(name)) is not None}
        raw = gzip.decompress(raw) if headers.get("content-encoding") == "gzip" else raw
        if kind.startswith(MSGPACK):
            unpacker = msgpack.Unpacker()
            unpacker.feed(raw)
            return Reply(response.status, headers, [self._row(row) for row in unpacker])
        if "ndjson" in kind:
            return Reply(response.status, headers, [self.plain(json.loads(one)) for one in raw.splitlines()])
        if "json" not in kind:
            return Reply(response.status, headers, raw)
        document = json.loads(raw)
        if isinstance(document.get("session"), int):
            self.facts["session"] = document["session"]
            if document["session"] not in self._sessions:
                self._sessions.append(document["session"])
        return Reply(response.status, headers, self.plain(document, step.detail))

    def _row(self, row: list[Any]) -> list[Any]:
        assert abs(row[8] - time.time() * 1000) < 1000 * PATIENCE_S
        return [*row[:7], "now" if row[7] == row[8] else row[7], *row[9:]]

    def plain(self, value: Any, detail: str = "") -> Any:
        """Without what differs by nature."""
        if isinstance(value, dict):
            return {
                name: one is not None if name in VARYING else "" if name == "detail" and detail else self.plain(one)
                for name, one in value.items()
            }
        if isinstance(value, list):
            return [self.plain(one) for one in value]
        if isinstance(value, int) and value in self._sessions:
            return f"session {self._sessions.index(value)}"
        if isinstance(value, str):
            for number, session in enumerate(self._sessions):
                value = value.replace(str(session), f"session {number}")
            return re.sub(r"another \d+ s", "another 900 s", value)
        return value


def agree(step: Step, fake: Side, real: Side) -> Reply:
    """The answer of both. What Kafka shows a moment later may be read again."""
    wanted, deadline = fake.ask(step), time.monotonic() + PATIENCE_S
    while (found := real.ask(step)) != wanted and step.method == "GET" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert wanted == found, f"{step.method} {step.path}: the fake one is on the left"
    return wanted


def with_topic(real: Side) -> Side:
    assert real.ask(Step("PUT", "/v1/topics/{topic}", {"partitions": 4})).status == 201
    return real


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


@pytest.fixture
def sides(fake: FakeGateway, workers: Gateway, topic_name: str) -> tuple[Side, Side]:
    """A topic of four partitions at both."""
    fake.create_topic(topic_name, 4)
    return Side(fake.url, topic_name), with_topic(Side(workers.urls[0], topic_name))


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_answer_alike(name: str, sides: tuple[Side, Side]) -> None:
    for step in SCENARIOS[name]:
        reply = agree(step, *sides)
        if isinstance(reply.content, dict) and isinstance(reply.content.get("partition"), int):
            for side in sides:
                side.facts["partition"] = reply.content["partition"]


# ---- read sessions ---------------------------------------------------------------------------------------------------


class Stream:
    """A read session of one side."""

    def __init__(self, side: Side, **headers: str) -> None:
        step = get(CONSUMER + "/stream?topic=dc1.{topic}", Accept="application/x-ndjson", **headers)
        self.side, self._response = side, side.request(step)
        assert self._response.status == 200
        self.session: str = self.frame("session")["session"]

    def frame(self, *kinds: str) -> dict[str, Any]:
        """The next one of these kinds."""
        while (found := json.loads(self._response.readline()))["frame"] not in kinds:
            assert found["frame"] in ("keep_alive", "caught_up"), found
        return dict(found)

    def all_of(self, partitions: int) -> list[Any]:
        """The chunks, in the order of their places, and the positions that were reached at the end."""
        chunks, reached = list[Any](), dict[int, int]()
        while len(reached) < partitions:
            frame = self.frame("chunk", "caught_up")
            if frame["frame"] == "chunk":
                chunks.append(self.side.plain(frame))
            else:
                reached |= {one["partition"]: one["offset"] for one in frame["partitions"]}
        return [*sorted(chunks, key=lambda one: (one["partition"], one["offset"])), sorted(reached.items())]

    def commit(self, generation: int, *places: tuple[int, int]) -> Reply:
        positions = [{"topic": "dc1.{topic}", "partition": p, "offset": offset} for p, offset in places]
        path = f"{CONSUMER}/sessions/{self.session}/commit"
        reply = self.side.ask(post(path, {"generation": generation, "positions": positions}, FREE))
        if isinstance(reply.content.get("instance"), str):
            reply.content["instance"] = reply.content["instance"].replace(self.session, "s")
        return reply

    def close(self) -> None:
        self._response.close()


def until_idle(*sides: Side) -> None:
    """Until the consumer has no session at all sides."""
    deadline = time.monotonic() + PATIENCE_S
    for side in sides:
        while side.ask(get(CONSUMER + "/offsets")).content["members"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_read_session_alike(sides: tuple[Side, Side]) -> None:
    for number in range(8):
        agree(post(f"/v1/topics/{{topic}}/sources/web{number}/chunks?seqno=1&created_ms=3", b"\xff\n"), *sides)
    agree(get("/v1/topics/{topic}"), *sides)
    streams = [Stream(side) for side in sides]
    assigned, other = (stream.frame("assigned") for stream in streams)
    assert assigned == other
    assert [one["offset"] for one in assigned["partitions"]] == [0] * 4
    found, others = (stream.all_of(4) for stream in streams)
    assert found == others
    assert len(found) == 9
    generation, (*_, ends) = assigned["generation"], found
    for places in ([(0, 1)], [(1, 99)], [(9, 0)], [(0, 1), (0, 2)], ends):
        commits = [stream.commit(generation, *places) for stream in streams]
        assert commits[0] == commits[1]
    commits = [stream.commit(generation + 1, (0, 0)) for stream in streams]
    assert commits[0] == commits[1]
    for stream in streams:
        stream.close()
    until_idle(*sides)
    agree(get(CONSUMER + "/offsets"), *sides)
    commits = [stream.commit(generation, *ends) for stream in streams]
    assert commits[0].status == commits[1].status == 409
    again = [Stream(side, **{"Accept-Encoding": "identity"}) for side in sides]
    starts = [stream.frame("assigned")["partitions"] for stream in again]
    assert starts[0] == starts[1]
    assert [one["offset"] for one in starts[0]] == [end for _, end in ends]
    for stream in again:
        stream.close()
    until_idle(*sides)


def test_two_sessions_share_alike(sides: tuple[Side, Side]) -> None:
    seen = []
    for side in sides:
        first = Stream(side)
        alone = first.frame("assigned")
        agreeing = side.ask(post(f"{CHUNKS}?seqno=1&created_ms=3"))
        chunk = first.frame("chunk")
        second = Stream(side)
        revoked = first.frame("revoked")
        late = first.commit(alone["generation"], (chunk["partition"], chunk["offset"] + 1))
        parts = [stream.frame("assigned") for stream in (first, second)]
        held = [{one["partition"] for one in frame["partitions"]} for frame in parts]
        later = first.commit(alone["generation"], (chunk["partition"], 0))
        second.close()
        back = [first.frame("revoked"), first.frame("assigned")]
        first.close()
        until_idle(side)
        facts = [len(alone["partitions"]), len(revoked["partitions"]), len(back[1]["partitions"]), late.status]
        rising = alone["generation"] == revoked["generation"] < parts[0]["generation"] < back[1]["generation"]
        offsets = {one["partition"]: one["offset"] for one in back[1]["partitions"]}
        kinds = later.status, later.content["type"].rpartition("/")[2]
        shares = sorted(map(len, held)), held[0] & held[1]
        seen.append([agreeing, side.plain(chunk), facts, *shares, rising, offsets, kinds])
    assert seen[0] == seen[1]
    offset_of = {one: int(one == seen[0][1]["partition"]) for one in range(4)}
    assert seen[0][2:] == [[4, 4, 4, 200], [2, 2], set(), True, offset_of, (409, "superseded")]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_a_wrong_token_alike(kafka: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    secret, sha256 = new_token()
    rights = {"name": "all", "sha256": sha256, "write": ["*"], "read": ["*"], "admin": ["*"]}
    with FakeGateway(token=secret) as fake, gateway(kafka, tmp_path, topic_name, 1, tokens=[rights]) as real:
        urls = fake.url, real.urls[0]
        right, wrong, none = ([Side(url, topic_name, one) for url in urls] for one in (secret, "lf_wrong", None))
        fake.create_topic(topic_name, 4)
        with_topic(right[1])
        agree(post(f"{SOURCE}/session", b""), *right)
        steps = [post(f"{CHUNKS}?seqno=1"), post(CHUNKS), get(PAGE), get("/healthz"), get("/no"), get(CHUNKS)]
        for step in [*steps, get(CONSUMER + "/offsets"), get("/v1/topics/no")]:
            for pair in (right, wrong, none):
                agree(step._replace(detail=FREE), *pair)
        for scheme in ("Basic YTpi", "Bearer", "Bearer  ", f"bearer {secret}", secret):
            agree(post(f"{CHUNKS}?seqno=2&prev=1", detail=FREE, Authorization=scheme), *none)


# ---- the clients -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fake", "real"])
def url(request: pytest.FixtureRequest, fake: FakeGateway, workers: Gateway, topic_name: str) -> str:
    """Of one of the two, where the topic has four partitions."""
    if request.param == "fake":
        fake.create_topic(topic_name, 4)
        return fake.url
    with_topic(Side(workers.urls[0], topic_name))
    return workers.urls[0]


def lines_of(url: str, topic: str, number: int) -> list[tuple[str, int, bytes]]:
    """So many lines, sorted: source, seqno, data."""
    with Reader(url, topic) as reader:
        return sorted((line.source_id, line.seqno, line.data) for line in islice(reader.lines(), number))


def test_a_writer_and_a_reader(url: str, topic_name: str) -> None:
    writer = Writer(url, topic_name, "web1/log", batch_bytes=100, gzip=True, attributes={"host": "web1"})
    assert writer.recorded_seqno is None
    numbers = [writer.write(b"%d\n" % number) for number in range(50)]
    writer.flush(PATIENCE_S)
    assert writer.recorded_seqno == numbers[-1] == 50
    with Writer(url, topic_name, "web1/log") as newer:
        assert newer.recorded_seqno == 50
        writer.write(b"late\n")
        with pytest.raises(Superseded):
            writer.close(PATIENCE_S)
        newer.write(b"50\n", 60)
        with pytest.raises(ValueError, match="60"):
            newer.write(b"61\n", 60)
    with pytest.raises(Rejected) as refused, Writer(url, topic_name, "large") as large:
        large.write(b"\0" * ((4 << 20) + 1))
    assert refused.value.kind == "too-large"
    with pytest.raises(Rejected) as unknown, Writer(url, f"no-{topic_name}", "web1/log") as lost:
        lost.open(PATIENCE_S)
    assert unknown.value.kind == "unknown-topic"
    assert lines_of(url, topic_name, 51) == [
        ("web1/log", seqno, b"%d" % number) for number, seqno in enumerate([*range(1, 51), 60])
    ]
    with Reader(url, topic_name, follow=False, attributes={"host": "web1"}, gzip=True) as reader:
        chunks = [reader.read(PATIENCE_S) for _ in range(20)]
        position, cursors = reader.position, reader.cursors(PATIENCE_S)
    with Reader(url, topic_name, follow=False, start=str(position), attributes={"host": "web1"}) as rest:
        chunks += list(rest)
    with Reader(url, topic_name, follow=False, start=cursors, attributes={"host": "web1"}) as rest:
        assert list(rest) == chunks[20:]
    assert [chunk.seqno for chunk in chunks if chunk] == [*range(1, 51)]
    beyond = f"dc1.{topic_name}:0:999999"
    with pytest.raises(OutOfRange), Reader(url, topic_name, start=beyond, partitions=[0]) as reader:
        reader.read(PATIENCE_S)


def test_readers_of_a_consumer(url: str, topic_name: str) -> None:
    for source in "abcdefgh":
        with Writer(url, topic_name, source) as writer:
            writer.write(b"one\n")
    every = lines_of(url, topic_name, 8)
    with Reader(url, topic_name, consumer=f"c-{topic_name}") as reader:
        assert sorted(chunk.source_id for chunk in islice(reader, 8)) == [source for source, _, _ in every]
        reader.commit(PATIENCE_S)
        with Reader([url], f"*.{topic_name}", consumer=f"c-{topic_name}") as other:
            with Writer(url, topic_name, "a") as writer:
                writer.write(b"two\n")
                writer.flush()
            found: list[Any] = []
            while not found:
                found += [one for one in (reader.read(0.1), other.read(0.1)) if one is not None]
            assert [(chunk.source_id, chunk.seqno) for chunk in found] == [("a", 2)]


async def test_the_asyncio_faces(url: str, topic_name: str) -> None:
    async with AsyncWriter(url, topic_name, "web1", batch_bytes=100) as writer:
        for number in range(30):
            await writer.write(b"%d\n" % number)
    every = await asyncio.to_thread(lines_of, url, topic_name, 30)
    for consumer in (None, f"c-{topic_name}"):
        async with AsyncReader(url, topic_name, follow=False, consumer=consumer) as reader:
            assert [(line.source_id, line.seqno, line.data) async for line in reader.lines()] == every
            if consumer:
                await reader.commit(PATIENCE_S)


def test_the_handler_of_logging(url: str, topic_name: str) -> None:
    handler = LogferryHandler(url, topic_name, "program", close_timeout_s=PATIENCE_S)
    handler.emit(logging.LogRecord("x", logging.INFO, __file__, 1, "started", (), None))
    handler.close()
    assert lines_of(url, topic_name, 1) == [("program", 1, b"started")]


def test_the_push_client(url: str, topic_name: str, tmp_path: Path) -> None:
    file = tmp_path / "app.log"
    command = [sys.executable, "-m", "logferry.client", "--once", "--url", url, "--topic", topic_name, "--host", "h"]
    command += ["--state-dir", str(tmp_path / "state"), str(file)]
    for text in ("one\ntwo\n", "three\n"):
        with file.open("a", encoding="utf-8") as log:
            log.write(text)
        subprocess.run(command, check=True, timeout=PATIENCE_S)
    found = lines_of(url, topic_name, 3)
    assert [data for _, _, data in found] == [b"one", b"two", b"three"]
    source = Side(url, topic_name).ask(get("/v1/topics/{topic}/sources/" + quote(found[0][0], safe="")))
    assert source.content["recorded_seqno"] == 14
