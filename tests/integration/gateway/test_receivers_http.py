"""Receivers against real workers: any worker takes any request, keys make repetitions duplicates, rights count."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from logferry.gateway.contract.chunk import MSGPACK, Chunk, chunk_of_record, pack_chunk
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from tests.support.agents import agent, block, needs
from tests.support.checker import committed_records
from tests.support.gateway import Answer, Gateway, gateway

TOKENS: Final = {name: new_token() for name in ("agent", "other")}
TOKEN: Final = TOKENS["agent"][0]
BEARER: Final = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS: Final[dict[str, Any]] = {
    "tokens": [
        {"name": "agent", "sha256": TOKENS["agent"][1], "write": ["in-*"], "admin": ["in-*"]},
        {"name": "other", "sha256": TOKENS["other"][1], "write": ["in-*"], "sources": "elsewhere/*"},
    ],
    "receivers": {
        "lines": True,
        "elasticsearch": [
            {"name": "app", "topic": "in-agents"},
            {"name": "es-*", "topic": "in-es"},
            {"name": "nowhere", "topic": "in-no-such-topic"},
            {"name": "secret", "topic": "out"},
        ],
        "splunk": [{"name": "main", "topic": "in-hec"}, {"name": "second", "topic": "in-hec-2"}],
        "otlp": [{"name": "web*", "topic": "in-otlp"}, {"name": "shop", "topic": "in-agents"}],
    },
}


@pytest.fixture(scope="module")
def syslog_port() -> int:
    [port] = free_ports(1)
    return port


@pytest.fixture(scope="module")
def receivers(kafka: KafkaCluster, syslog_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("receivers")
    (folder / "token").write_text(TOKEN + "\n", encoding="utf-8")
    listen = {"listen": f"127.0.0.1:{syslog_port}", "topic": "in-syslog", "udp": True, "message_bytes": 1024}
    on = {**SETTINGS["receivers"], "syslog": {**listen, "token_file": str(folder / "token")}}
    with gateway(kafka, folder, "receivers", **{**SETTINGS, "receivers": on}) as running:

        async def make_topics() -> None:
            for topic in ("in-agents", "in-es", "in-hec", "in-hec-2", "in-otlp", "in-syslog"):
                await post(running, f"/v1/topics/{topic}", b'{"partitions": 2}', method="PUT", expect=201)

        asyncio.run(make_topics())
        yield running


async def post(
    at: Gateway, path: str, data: bytes, worker: int = 0, expect: int = 200, method: str = "POST", **headers: str
) -> Answer:
    """``headers``: with _ for -."""
    sent = {**BEARER, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await at.ask(method, path, worker, data=data, headers=sent, expect=expect)


async def make_topic(at: Gateway) -> str:
    name = f"in-{time.time_ns()}"
    await post(at, f"/v1/topics/{name}", b'{"partitions": 2}', method="PUT", expect=201)
    return name


async def stored(at: Gateway, topic: str) -> list[tuple[str, bytes]]:
    """(source, data), each source's in its order; the chain of each is whole."""
    last: dict[str, int] = {}
    found = []
    records = await committed_records(at.kafka.bootstrap, f"dc1.{topic}")
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        source, chunk = (record.key or b"").decode(), chunk_of_record(record.value or b"", record.headers)
        assert chunk.prev == last.get(source, chunk.prev)
        assert chunk.seqno == (chunk.prev or 0) + 1
        last[source] = chunk.seqno
        found.append((source, chunk.data))
    return found


# ---- lines ------------------------------------------------------------------------------------------------------


async def test_the_same_lines_in_another_trace_are_a_duplicate(receivers: Gateway) -> None:
    topic = await make_topic(receivers)
    traces = [f"00-{number:032x}-00f067aa0ba902b7-01" for number in (1, 2)]
    written = []
    for worker, trace in enumerate(traces):
        path = f"/v1/topics/{topic}/lines?source=web"
        answer = await post(receivers, path, b"a\n", worker, Idempotency_Key="k", traceparent=trace)
        written.append(answer.document["written"])
    assert written == [1, 0]
    (record,) = await committed_records(receivers.kafka.bootstrap, f"dc1.{topic}")
    assert chunk_of_record(record.value or b"", record.headers).attributes == {"traceparent": traces[0]}


async def test_lines_by_any_worker(receivers: Gateway) -> None:
    """The key is known to the owner of the lane, whichever worker is asked; the source is the token's."""
    topic = await make_topic(receivers)
    path = f"/v1/topics/{topic}/lines?source=web"
    seen: list[Any] = []
    for number in range(6):
        for worker in (0, 1, 0):
            said = (await post(receivers, f"{path}{number}", b"a\nb", worker, Idempotency_Key="k")).document
            assert (said["lines"], said["topic"]) == (2, f"dc1.{topic}")
            seen.append((said["source_id"], said["first_seqno"], said["last_seqno"], said["partition"]))
            assert (said["written"], said["duplicates"]) == ((1, 0) if len(seen) % 3 == 1 else (0, 1))
    assert len(set(seen)) == 6
    assert sorted(await stored(receivers, topic)) == [(f"lines/agent/web{n}", b"a\nb\n") for n in range(6)]
    reused = await post(receivers, path + "0", b"c", expect=422, Idempotency_Key="k")
    assert reused.problem == "key-reused"


async def test_many_senders_at_once_keep_order_and_lose_nothing(receivers: Gateway) -> None:
    topic = await make_topic(receivers)

    async def send(sender: int) -> None:
        for number in range(10):
            body, path = gzip.compress(b"%d %d\n" % (sender, number)), f"/v1/topics/{topic}/lines?source={sender % 3}"
            await post(receivers, path, body, number % 2, Content_Encoding="gzip")

    await asyncio.gather(*(send(sender) for sender in range(6)))
    found = [data for _, data in await stored(receivers, topic)]
    for sender in range(6):
        mine = [data for data in found if data.startswith(b"%d " % sender)]
        assert mine == [b"%d %d\n" % (sender, number) for number in range(10)]


async def test_rights_and_ways_of_writing(receivers: Gateway) -> None:
    topic = await make_topic(receivers)
    path, source = f"/v1/topics/{topic}/lines?source=w", f"/v1/topics/{topic}/sources/lines%2Fagent%2Fw"
    own = f"/v1/topics/{topic}/sources/own"
    other = f"Bearer {TOKENS['other'][0]}"

    async def kind(path: str, status: int, data: bytes = b"x", **headers: Any) -> str | None:
        return (await post(receivers, path, data, expect=status, **headers)).problem

    assert await kind(path, 401, Authorization="Bearer wrong") == "unauthenticated"
    assert await kind("/v1/topics/out/lines", 403) == "forbidden"
    assert await kind(path, 403, Authorization=other) == "forbidden"
    assert await kind(path, 400, b"") == "bad-request"
    assert await kind(path, 413, b"x" * (5 << 20)) == "too-large"
    assert await kind(path, 200) is None
    # The gateway's seqnos, and a writer's, are never mixed; of a source with a session least of all.
    assert await kind(source + "/chunks?seqno=9", 409) == "conflict"
    assert await kind(source + "/session", 409, b"") == "conflict"
    assert await kind(own + "/session", 200, b"") is None
    assert await kind(own + "/append", 409) == "conflict"
    packed: dict[str, Any] = {"Content_Type": MSGPACK}
    assert await kind(source + "/append", 200, pack_chunk(Chunk(0, None, 7, {"a": "b"}, b"y\n")), **packed) is None
    assert await kind(source + "/append", 400, pack_chunk(Chunk(5, None, 7, {}, b"y\n")), **packed) == "bad-request"
    # What an agent may present elsewhere is no token here.
    assert await kind(own + "/chunks?seqno=1", 401, Authorization=f"Splunk {TOKEN}") == "unauthenticated"


async def test_receivers_are_off_by_default(workers: Gateway) -> None:
    for path in ("/v1/topics/x/lines", "/v1/topics/x/sources/y/append", "/elasticsearch/_bulk", "/otlp/v1/logs"):
        await workers.ask("POST", path, data=b"x", expect=404)


# ---- Elasticsearch ----------------------------------------------------------------------------------------------


async def test_bulk_by_its_items(receivers: Gateway) -> None:
    hello = await receivers.ask("GET", "/elasticsearch/", headers=BEARER)
    assert (hello.headers["X-Elastic-Product"], hello.document["version"]["number"][0]) == ("Elasticsearch", "8")
    basic = base64.b64encode(f"agent:{TOKEN}".encode()).decode()
    lines = [
        b'{"index":{"_index":"es-1"}}', b'{"n":1}', b'{"delete":{"_index":"es-1","_id":"1"}}',
        b'{"create":{"_index":"none"}}', b'{"n":2}', b'{"create":{"_index":"nowhere"}}', b'{"n":3}',
        b'{"create":{"_index":"secret"}}', b'{"n":4}', b'{"create":{}}', b'{"n":5}',
    ]  # fmt: skip
    for scheme in (f"Basic {basic}", f"ApiKey {basic}"):
        said = await post(
            receivers, "/elasticsearch/es-2/_bulk?filter_path=items.*.error", b"\n".join(lines) + b"\n",
            Authorization=scheme, X_Logferry_Source="bulk", Idempotency_Key="b",
        )  # fmt: skip
        statuses = [(action, item["status"]) for one in said.document["items"] for action, item in one.items()]
        assert statuses == [("index", 201), ("delete", 400), ("create", 404), ("create", 404), ("create", 403),
                            ("create", 201)]  # fmt: skip
        assert said.document["errors"] is True
    assert [row for row in await stored(receivers, "in-es") if row[0].endswith("/bulk")] == [
        ("elasticsearch/agent/bulk", b'{"n":1}\n{"n":5}\n')
    ]
    refused = await post(receivers, "/elasticsearch/_bulk", b'{"index":{}}\n', expect=400)
    assert refused.document["error"]["type"] == "bad_request_exception"
    unknown = await post(receivers, "/elasticsearch/_bulk", b"{}", expect=401, Authorization="Bearer wrong")
    assert (unknown.document["status"], unknown.headers["X-Elastic-Product"]) == (401, "Elasticsearch")


# ---- Splunk -----------------------------------------------------------------------------------------------------


async def test_hec_and_its_acknowledgements(receivers: Gateway) -> None:
    path = "/services/collector"
    splunk: dict[str, Any] = {"Authorization": f"Splunk {TOKEN}"}
    assert (await receivers.ask("GET", path + "/health")).document["code"] == 17
    events = b'{"event":"a","host":"h1"}{"event":{"b":1},"host":"h1"}\n{"event":"c","index":"second"}'
    said = await post(receivers, path + "/event", events, **splunk, X_Splunk_Request_Channel="c1")
    assert (said.document["code"], said.document["text"]) == (0, "Success")
    ack = said.document["ackId"]
    asked = json.dumps({"acks": [ack, ack + 1]}).encode()
    # By any worker; another channel has other ids.
    for worker, channel, is_acked in ((0, "c1", True), (1, "c1", True), (1, "c2", False)):
        acks = await post(receivers, f"{path}/ack?channel={channel}", asked, worker, **splunk)
        assert acks.document == {"acks": {str(ack): is_acked, str(ack + 1): False}}
    await post(receivers, path + "/raw?host=h2&channel=c1", b"x\ny", **splunk)
    assert dict(await stored(receivers, "in-hec")) == {
        "splunk/agent/h1": b'{"event":"a","host":"h1"}\n{"event":{"b":1},"host":"h1"}\n',
        "splunk/agent/h2": b"x\ny\n",
    }
    assert [data for _, data in await stored(receivers, "in-hec-2")] == [b'{"event":"c","index":"second"}\n']
    for body, status, code in (
        (b"", 400, 5), (b'{"event":"d"}{"a":1}', 400, 12), (b'{"event":"e","index":"none"}', 400, 7),
    ):  # fmt: skip
        assert (await post(receivers, path, body, expect=status, **splunk)).document["code"] == code
    assert (await post(receivers, path, b"{}", expect=401, Authorization="Splunk wrong")).document["code"] == 2
    assert (await post(receivers, path + "/ack", asked, expect=400, **splunk)).document["code"] == 10
    assert len(await stored(receivers, "in-hec")) == 2


# ---- OpenTelemetry ----------------------------------------------------------------------------------------------


def request_of(*services: tuple[str, str, int]) -> ExportLogsServiceRequest:
    """(service, host, number of records) each."""
    found = ExportLogsServiceRequest()
    for service, host, count in services:
        attributes = [KeyValue(key=key, value=AnyValue(string_value=value))
                      for key, value in (("service.name", service), ("host.name", host))]  # fmt: skip
        records = [LogRecord(body=AnyValue(string_value=f"{service} {n}")) for n in range(count)]
        found.resource_logs.append(
            ResourceLogs(resource=Resource(attributes=attributes), scope_logs=[ScopeLogs(log_records=records)])
        )
    return found


async def test_otlp_with_partial_success(receivers: Gateway) -> None:
    protobuf: dict[str, Any] = {"Content_Type": "application/x-protobuf"}
    body = request_of(("web", "a", 2), ("web2", "b", 1), ("none", "a", 3)).SerializeToString()
    said = await post(receivers, "/otlp/v1/logs", gzip.compress(body), Content_Encoding="gzip", **protobuf)
    partial = ExportLogsServiceResponse.FromString(said.body).partial_success
    assert (partial.rejected_log_records, "'none'" in partial.error_message) == (3, True)
    whole = await post(receivers, "/otlp/v1/logs", request_of(("web", "a", 1)).SerializeToString(), 1, **protobuf)
    assert (whole.body, whole.headers["Content-Type"]) == (b"", "application/x-protobuf")
    empty = await post(receivers, "/otlp/v1/logs", b"{}", Content_Type="application/json")
    assert empty.document == {}
    found = [(source, [json.loads(line)["body"] for line in data.splitlines()])
             for source, data in await stored(receivers, "in-otlp")]  # fmt: skip
    assert sorted(found) == [
        ("otlp/agent/a", ["web 0"]), ("otlp/agent/a", ["web 0", "web 1"]), ("otlp/agent/b", ["web2 0"]),
    ]  # fmt: skip
    refused = request_of(("none", "a", 3)).SerializeToString()
    await post(receivers, "/otlp/v1/logs", refused, expect=404, **protobuf)
    await post(receivers, "/otlp/v1/logs", b"\x0b", expect=400, **protobuf)
    await post(receivers, "/otlp/v1/traces", b"", expect=404, **protobuf)
    await post(receivers, "/otlp/v1/logs", b"", expect=415, Content_Type="text/plain")


# ---- syslog -----------------------------------------------------------------------------------------------------


async def wait_lines(at: Gateway, topic: str, source: str, count: int) -> list[bytes]:
    """The lines of a source once there are so many."""
    async with asyncio.timeout(120):
        while True:
            found = await lines_of(at, topic, source)
            if len(found) >= count:
                return found
            await asyncio.sleep(0.1)


async def test_syslog_over_tcp_and_udp(receivers: Gateway, syslog_port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", syslog_port)
    lines = [b"<34>1 2026-01-01T00:00:00Z tcp1 app - - - %d" % number for number in range(2000)]
    for number, line in enumerate(lines):
        writer.write(b"%d %b" % (len(line), line) if number % 2 else line + b"\n")
    # A message that is too long is dropped alone, and one of two lines is one line.
    two_lines = b"<34>1 2026-01-01T00:00:00Z tcp1 app - - - a\nb"
    writer.write(b"<34>1 - tcp1 " + b"x" * 5000 + b"\n" + b"%d %b" % (len(two_lines), two_lines))
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    found = await wait_lines(receivers, "in-syslog", "syslog/agent/tcp1", 2001)
    assert found == [*lines, b"<34>1 2026-01-01T00:00:00Z tcp1 app - - - a#012b"]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        asyncio.DatagramProtocol, remote_addr=("127.0.0.1", syslog_port)
    )
    for number in range(20):
        transport.sendto(b"<34>Oct 11 22:14:15 udp1 su: %d" % number)
    assert await wait_lines(receivers, "in-syslog", "syslog/agent/udp1", 20) == [
        b"<34>Oct 11 22:14:15 udp1 su: %d" % number for number in range(20)
    ]
    transport.close()


# ---- agents as they are -----------------------------------------------------------------------------------------


def program(name: str, at: Gateway, syslog_port: int, log: Path, **more: str) -> str:
    """A block of the guide, with this gateway's address, token and topic. ``more``: further replacements."""
    port = at.urls[0].rpartition(":")[2]
    known = {"http://127.0.0.1:8080": at.urls[0], '"8080"': f'"{port}"', "TOKEN": TOKEN, "/var/log/app.log": str(log),
             "/topics/app/": "/topics/in-agents/", "5514": str(syslog_port)}  # fmt: skip
    return block(name, known | more, must=more)


async def lines_of(at: Gateway, topic: str, source: str) -> list[bytes]:
    found = [data for name, data in await stored(at, topic) if name == source]
    return b"".join(found).splitlines()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("lines.sh", "lines/agent/web1"),
        ("hec.sh", "splunk/agent/web1"),
        ("Elasticsearch bulk", "elasticsearch/agent/127.0.0.1"),
        ("OpenTelemetry logs", "otlp/agent/web1"),
    ],
)
async def test_an_agent_as_the_guide_has_it(
    receivers: Gateway, syslog_port: int, tmp_path: Path, name: str, source: str
) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    (tmp_path / name).write_text(program(name, receivers, syslog_port, log), encoding="utf-8")
    topic = "in-hec" if name == "hec.sh" else "in-agents"
    before = len(await lines_of(receivers, topic, source))
    for _ in range(2):
        command = ["sh", "-e", name] if name.endswith(".sh") else [sys.executable, "-W", "ignore", name]
        run = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
    found = (await lines_of(receivers, topic, source))[before:]
    # With a key, or with ids, the second run is a duplicate; without, it is another request.
    expected = {"lines.sh": 1000, "hec.sh": 2, "Elasticsearch bulk": 1000, "OpenTelemetry logs": 2000}
    assert len(found) == expected[name]
    if name == "lines.sh":
        assert found == log.read_bytes().splitlines()
    if name == "OpenTelemetry logs":
        assert [json.loads(line)["attributes"]["order"] for line in found] == [*range(1000), *range(1000)]


@pytest.mark.parametrize(
    ("name", "program_name", "topic", "source"),
    [
        pytest.param("rsyslog.conf", "rsyslogd", "in-agents", "elasticsearch/agent/127.0.0.1",
                     marks=needs("rsyslogd", "omelasticsearch")),
        pytest.param("rsyslog-tcp.conf", "rsyslogd", "in-syslog", "syslog/agent/HOST", marks=needs("rsyslogd")),
        pytest.param("syslog-ng.conf", "syslog-ng", "in-agents", "lines/agent/web1", marks=needs("syslog-ng")),
        pytest.param("syslog-ng-tcp.conf", "syslog-ng", "in-syslog", "syslog/agent/HOST", marks=needs("syslog-ng")),
        pytest.param("collector.yaml", "otelcol", "in-agents", "otlp/agent/web1", marks=needs("otelcol")),
    ],
)  # fmt: skip
async def test_a_running_agent_as_the_guide_has_it(
    receivers: Gateway, syslog_port: int, tmp_path: Path, name: str, program_name: str, topic: str, source: str
) -> None:
    """It follows a file. Its lines arrive in order, beside those of other agents."""
    log = tmp_path / "app.log"
    log.write_bytes(b"".join(b"%b line %d\n" % (name.encode(), number) for number in range(2000)))
    folders = {"collector.yaml": "/var/lib/otelcol", "syslog-ng.conf": "/var/lib/syslog-ng"}
    more = {folders[name]: str(tmp_path)} if name in folders else {}
    child = await asyncio.to_thread(agent, program_name, tmp_path, program(name, receivers, syslog_port, log, **more))
    pattern = re.compile(rb"\b" + re.escape(name.encode()) + rb" line (\d+)")
    found: list[int] = []
    try:
        async with asyncio.timeout(120):
            while len(found) < 2000:
                assert child.running, child.log_tail()
                lines = await lines_of(receivers, topic, source.replace("HOST", socket.gethostname()))
                found = [int(number) for number in pattern.findall(b"\n".join(lines))]
                await asyncio.sleep(0.1)
    finally:
        await asyncio.to_thread(child.stop, 20)
    assert found == list(range(2000))
