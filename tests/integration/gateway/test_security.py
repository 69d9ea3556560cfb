"""Tokens and TLS, from outside: real workers, real Kafka, and what is in their logs afterwards."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiokafka import AIOKafkaConsumer
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from logferry.gateway.contract.chunk import lane_of
from logferry.gateway.http.auth import new_token
from logferry.ops.stack.kafka_cluster import Cluster
from logferry.ops.stack.ports import free_ports

from tests.support.served_gateway import Gateway

NAMES = ("admin", "writer", "own", "reader", "stranger")
TOKENS = {name: new_token() for name in NAMES}
SECRET = {name: made[0] for name, made in TOKENS.items()}
GRANTS = {
    "admin": 'admin = ["*"]',
    "writer": 'write = ["nginx"]',
    "own": 'write = ["nginx"]\nsources = "web1/*"',
    "reader": 'read = ["dc1.nginx"]',
    "stranger": 'write = ["squid"]\nread = ["squid"]\nadmin = ["squid"]',
}


def entries(*names: str) -> str:
    return "".join(f'[[tokens]]\nname = "{n}"\nsha256 = "{TOKENS[n][1]}"\n{GRANTS[n]}\n' for n in names)


@pytest.fixture
async def gateway(kafka: Cluster, tmp_path: Path) -> AsyncIterator[Gateway]:
    """Two workers with all the tokens; the topic nginx exists, squid does not."""
    async with Gateway(tmp_path, kafka.bootstrap, 2, entries(*NAMES)) as gateway:
        status, document, _ = await gateway.ask(
            "PUT", "/v1/topics/nginx", SECRET["admin"], data='{"partitions": 4}', timeout=aiohttp.ClientTimeout(60)
        )
        assert status in (200, 201), document
        yield gateway
        for secret, sha256 in TOKENS.values():
            assert secret not in gateway.said()
            assert sha256 not in gateway.said()


def chunk(source: str, seqno: int = 10, topic: str = "nginx") -> str:
    return f"/v1/topics/{topic}/sources/{source}/chunks?seqno={seqno}"


async def test_each_may_do_what_was_granted_and_nothing_else(gateway: Gateway) -> None:
    source, read = "/v1/topics/nginx/sources/web1%2Fa", "/v1/topics/dc1.nginx/partitions/0/chunks"
    beat = {"method": "POST", "path": source + "/heartbeat", "data": "{}"}
    table = [
        # what, who gets it (200 or 201); all the others get 403
        ({"method": "POST", "path": chunk("web1%2Fa"), "data": b"x\n"}, {"writer", "own"}),
        ({"method": "POST", "path": chunk("web2%2Fa"), "data": b"x\n"}, {"writer"}),
        ({"method": "POST", "path": source + "/session"}, {"writer", "own"}),
        (beat, {"writer", "own"}),
        ({"method": "GET", "path": source}, {"writer", "own", "reader", "admin"}),
        ({"method": "GET", "path": "/v1/topics/nginx/sources"}, {"writer", "own", "reader", "admin"}),
        ({"method": "GET", "path": read}, {"reader"}),
        ({"method": "GET", "path": "/v1/topics"}, set(NAMES)),
        ({"method": "GET", "path": "/v1/status"}, {"admin"}),
        ({"method": "GET", "path": "/v1/topics/nginx"}, {"writer", "own", "reader", "admin"}),
        ({"method": "GET", "path": "/v1/topics/dc1.nginx"}, {"writer", "own", "reader", "admin"}),
        ({"method": "PUT", "path": "/v1/topics/nginx", "data": '{"partitions": 4}'}, {"admin"}),
        ({"method": "DELETE", "path": source}, {"admin"}),
    ]
    for request, allowed in table:
        for worker in range(2):
            for name in NAMES:
                status, document, _ = await gateway.ask(**request, token=SECRET[name], worker=worker)
                assert (status == 403) == (name not in allowed), (request, name, document)
                assert status in (200, 403), (request, name, document)
                if status == 403:
                    assert document["type"].endswith("/forbidden")
            for token in (None, "lf_nobody-has-this", TOKENS["admin"][1]):
                status, document, headers = await gateway.ask(**request, token=token, worker=worker)
                assert (status, document["type"].rpartition("/")[2]) == (401, "unauthenticated")
                assert headers["WWW-Authenticate"].startswith("Bearer")


async def test_a_token_learns_nothing_of_another_topic(gateway: Gateway) -> None:
    """There or not, the answer is the same to the last byte, but for the name that was asked for."""
    shapes = [
        ("GET", "/v1/topics/{}"),
        ("PUT", "/v1/topics/{}"),
        ("GET", "/v1/topics/dc1.{}"),
        ("GET", "/v1/topics/{}/sources"),
        ("GET", "/v1/topics/{}/sources/web1"),
        ("DELETE", "/v1/topics/{}/sources/web1"),
        ("POST", "/v1/topics/{}/sources/web1/session"),
        ("POST", "/v1/topics/{}/sources/web1/heartbeat"),
        ("POST", "/v1/topics/{}/sources/web1/chunks?seqno=1"),
        ("GET", "/v1/topics/dc1.{}/partitions/0/chunks"),
        ("GET", "/v1/topics/dc1.{}/partitions/99/chunks?offset=7"),
    ]
    for method, shape in shapes:
        answers = []
        for topic in ("nginx", "nosuch"):
            status, document, headers = await gateway.ask(method, shape.format(topic), SECRET["stranger"])
            assert document.pop("instance") == shape.format(topic)
            kept = {name: headers[name] for name in headers if name not in ("Date", "Content-Length")}
            answers.append((status, document, kept))
        assert answers[0] == answers[1]
        assert answers[0][0] == 403
    for name, seen in (("stranger", []), ("writer", ["dc1.nginx"]), ("reader", ["dc1.nginx"])):
        _, document, _ = await gateway.ask("GET", "/v1/topics", SECRET[name])
        assert [topic["topic"] for topic in document["topics"]] == seen
    for path in ("/healthz", "/readyz"):
        status, document, _ = await gateway.ask("GET", path)
        assert status == 200
        assert "nginx" not in str(document)


async def test_a_writer_of_some_sources_is_shown_those_alone(gateway: Gateway) -> None:
    for source in ("web1%2Fa", "web1%2Fb", "web2%2Fa"):
        status, document, _ = await gateway.ask("POST", chunk(source), SECRET["writer"], data=b"x\n")
        assert status == 200, document
    for name, expected in (("own", ["web1/a", "web1/b"]), ("writer", ["web1/a", "web1/b", "web2/a"])):
        for worker in range(2):
            _, document, _ = await gateway.ask("GET", "/v1/topics/nginx/sources", SECRET[name], worker)
            assert [row["source_id"] for row in document["sources"]] == expected


async def test_the_token_goes_along_when_a_request_is_handed_on(gateway: Gateway) -> None:
    """Sources of all lanes, all through one worker: some of them are answered by the other."""
    sources = [f"web1%2F{number}" for number in range(24)]
    assert {lane_of(source.replace("%2F", "/"), 4) for source in sources} == {0, 1, 2, 3}
    for source in sources:
        status, document, _ = await gateway.ask("POST", chunk(source), SECRET["own"], data=b"x\n")
        assert status == 200, document
    redirect = {"X-Logferry-Redirect": "1"}
    answers = [await gateway.ask("POST", chunk(s, 20), SECRET["own"], data=b"x\n", headers=redirect) for s in sources]
    assert {status for status, _, _ in answers} == {200, 307}
    # Whoever says of itself that it was handed on gets nothing by it.
    status, _, _ = await gateway.ask("POST", chunk("web1%2Fa"), data=b"x\n", headers={"X-Logferry-Forwarded": "1"})
    assert status == 401


async def test_tokens_are_re_read_while_requests_go_on(gateway: Gateway) -> None:
    connector = aiohttp.TCPConnector(limit=1, force_close=False)
    async with aiohttp.ClientSession(connector=connector) as session:
        headers = {"Authorization": f"Bearer {SECRET['writer']}"}

        async def write(seqno: int) -> int:
            url = gateway.urls[0] + chunk("web3", seqno)
            async with session.post(url, data=b"x\n", headers=headers) as answer:
                await answer.read()
                return answer.status

        trace: list[object] = []
        assert await write(1) == 200
        (connection,) = (held[0].transport for held in connector._conns[next(iter(connector._conns))])
        assert connection is not None
        for said in await gateway.reload(entries("writer", "reader")):
            assert (said["event"], said["tokens"]) == ("configuration_reloaded", ["writer", "reader"])
        assert await write(2) == 200
        assert not connection.is_closing()
        assert (await gateway.ask("GET", "/v1/topics", SECRET["admin"]))[0] == 401
        trace += await gateway.reload(entries("admin"))
        assert await write(3) == 401
        assert not connection.is_closing()
        for bad in (entries("writer", "writer"), entries("writer").replace("write", "wrlte"), "[[tokens", 'x = "y"'):
            for said in await gateway.reload(bad):
                assert (said["event"], said["level"]) == ("configuration_not_reloaded", "error")
            assert await write(3) == 401
            assert (await gateway.ask("GET", "/v1/topics", SECRET["admin"]))[0] == 200
        await gateway.reload(entries("writer"))
        assert await write(3) == 200


@pytest.mark.parametrize("topics", ["topic=dc1.nginx", "topic=*.nginx"])
async def test_who_loses_its_right_is_not_read_to_any_longer(gateway: Gateway, topics: str) -> None:
    headers = {"Authorization": f"Bearer {SECRET['reader']}", "Accept": "application/x-ndjson"}
    url = f"{gateway.urls[0]}/v1/consumers/reload-{time.time_ns()}/stream?{topics}"
    async with gateway.session.get(url, headers=headers) as stream:
        seen = [json.loads(await stream.content.readline())["frame"] for _ in range(2)]
        assert seen == ["session", "assigned"]
        await gateway.reload(entries("writer"))
        frames = [json.loads(line) async for line in stream.content]
    assert frames[-1]["frame"] == "error"
    assert frames[-1]["problem"]["type"].endswith("/forbidden")
    assert (await gateway.ask("GET", "/v1/topics", SECRET["reader"]))[0] == 401


async def test_metrics_name_no_source_and_no_token(gateway: Gateway) -> None:
    await gateway.ask("POST", chunk("web1%2Fvery-special"), SECRET["writer"], data=b"x\n")
    status, body, _ = await gateway.ask("GET", "/metrics")
    assert status == 200
    for word in ("very-special", *SECRET.values()):
        assert word not in body.decode()


# ---- TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def certificate(authority: trustme.CA, folder: Path, name: str = "worker") -> str:
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    issued.private_key_pem.write_to_path(folder / f"{name}.key")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    files = {"certificate": f"{name}.pem", "key": f"{name}.key", "ca": "ca.pem"}
    return "[tls]\n" + "".join(f'{setting} = "{folder / file}"\n' for setting, file in files.items())


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_tls_to_and_between_workers(kafka: Cluster, tmp_path: Path, authority: trustme.CA) -> None:
    tls = certificate(authority, tmp_path)
    tables = tls + entries("admin", "writer")
    async with Gateway(tmp_path, kafka.bootstrap, 2, tables, "https", trusting(authority)) as gateway:
        await gateway.ask("PUT", "/v1/topics/nginx", SECRET["admin"], data='{"partitions": 4}')
        for number in range(16):
            status, document, _ = await gateway.ask("POST", chunk(f"tls-{number}"), SECRET["writer"], data=b"x\n")
            assert status == 200, document
        _, metrics, _ = await gateway.ask("GET", "/metrics")
        assert b'logferry_forwards_total{how="forward"}' in metrics
        status, session, _ = await gateway.ask("POST", "/v1/topics/nginx/sources/tls-1/session", SECRET["writer"])
        assert (status, session["url"] in gateway.urls) == (200, True)
        with pytest.raises(aiohttp.ClientConnectionError):
            await gateway.session.get(gateway.urls[0].replace("https", "http") + "/healthz")
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await stranger.get(gateway.urls[0] + "/healthz")
        # A renewed certificate is shown to the next who connects.
        before = await shown(gateway.urls[0], authority)
        certificate(authority, tmp_path)
        assert await shown(gateway.urls[0], authority) == before
        await gateway.reload(tables)
        after = await shown(gateway.urls[0], authority)
        assert after != before
        (tmp_path / "worker.key").write_text("not a key")
        assert {said["event"] for said in await gateway.reload(tables)} == {"configuration_not_reloaded"}
        assert await shown(gateway.urls[0], authority) == after


async def shown(url: str, authority: trustme.CA) -> bytes:
    """The certificate that a new connection is shown."""
    port = int(url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
    try:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert isinstance(found, bytes)
        return found
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_worker_does_not_hand_on_to_one_whose_certificate_it_cannot_verify(
    kafka: Cluster, tmp_path: Path, authority: trustme.CA
) -> None:
    tls = certificate(authority, tmp_path)
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    async with Gateway(tmp_path, kafka.bootstrap, 2, tls, "https", trusting(authority)) as gateway:
        await gateway.ask("PUT", "/v1/topics/nginx", data='{"partitions": 4}')
        statuses = {(await gateway.ask("POST", chunk(f"cut-{number}"), data=b"x\n"))[0] for number in range(16)}
        assert statuses == {200, 503}


# ---- Kafka's own security -------------------------------------------------------------------------------------

PASSWORD = "the password of the broker"


def pkcs8(key: bytes) -> bytes:
    """Java knows no other form."""
    return load_pem_private_key(key, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.fixture
def secured(tmp_path: Path, authority: trustme.CA) -> Iterator[tuple[Cluster, str]]:
    """A broker with a listener that wants TLS, a client's certificate and a password; and that listener's address."""
    data = tmp_path / "kafka"
    with Cluster("secured", data) as plain:
        broker = plain.bootstrap
    (port,) = free_ports(1)
    properties = dict(
        line.split("=", 1)
        for line in next(data.rglob("server.properties")).read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    issued = authority.issue_cert("127.0.0.1")
    one_line = {
        "ssl.keystore.certificate.chain": issued.cert_chain_pems[0].bytes() + authority.cert_pem.bytes(),
        "ssl.keystore.key": pkcs8(issued.private_key_pem.bytes()),
        "ssl.truststore.certificates": authority.cert_pem.bytes(),
    }
    login = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_gateway="{PASSWORD}";'
    own = {
        **{name: value.decode().replace("\n", "\\n") for name, value in one_line.items()},
        "ssl.keystore.type": "PEM",
        "ssl.truststore.type": "PEM",
        "ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "PLAIN",
        "plain.sasl.jaas.config": login,
    }
    settings = {
        "listeners": f"{properties['listeners']},SECURED://127.0.0.1:{port}",
        "advertised.listeners": f"{properties['advertised.listeners']},SECURED://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        **{f"listener.name.secured.{name}": value for name, value in own.items()},
    }
    with Cluster("secured", data, settings=settings) as cluster:
        assert cluster.bootstrap == broker, "the ports changed between the two starts"
        yield cluster, f"127.0.0.1:{port}"


async def test_kafka_over_tls_with_a_password_and_a_certificate(
    secured: tuple[Cluster, str], tmp_path: Path, authority: trustme.CA
) -> None:
    cluster, address = secured
    certificate(authority, tmp_path, "client")
    (tmp_path / "password").write_text(PASSWORD + "\n")
    settings = {
        "bootstrap_servers": address,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_username": "gateway",
        "sasl_password_file": tmp_path / "password",
        "ca_file": tmp_path / "ca.pem",
        "cert_file": tmp_path / "client.pem",
        "key_file": tmp_path / "client.key",
    }
    tables = "[kafka]\n" + "".join(f'{name} = "{value}"\n' for name, value in settings.items())
    async with Gateway(tmp_path, address, 2, tables) as gateway:
        status, document, _ = await gateway.ask("PUT", "/v1/topics/nginx", data='{"partitions": 2}')
        assert status == 201, document
        for number in range(8):
            status, document, _ = await gateway.ask("POST", chunk(f"s{number}"), data=b"x\n")
            assert status == 200, document
    assert PASSWORD not in gateway.said()
    consumer = AIOKafkaConsumer("dc1.nginx", bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        found = [(await consumer.getone()).key for _ in range(8)]
    finally:
        await consumer.stop()
    assert sorted(found) == [b"s%d" % number for number in range(8)]


async def test_a_wrong_password_ends_the_start_with_a_word_and_without_the_password(
    secured: tuple[Cluster, str], tmp_path: Path, authority: trustme.CA
) -> None:
    _, address = secured
    certificate(authority, tmp_path, "client")
    (tmp_path / "password").write_text("a wrong one")
    tables = f"""[kafka]
bootstrap_servers = "{address}"
security_protocol = "SASL_SSL"
sasl_mechanism = "PLAIN"
sasl_username = "gateway"
sasl_password_file = "{tmp_path / "password"}"
ca_file = "{tmp_path / "ca.pem"}"
cert_file = "{tmp_path / "client.pem"}"
key_file = "{tmp_path / "client.key"}"
"""
    gateway = Gateway(tmp_path, "", 1, tables)
    (worker,) = gateway.workers
    worker.start()
    try:
        assert await asyncio.to_thread(worker.ends_by_itself, 60)
    finally:
        worker.stop(5)
    assert worker.exit_status == 3
    assert "kafka_away" in gateway.said()
    assert "Authentication failed" in gateway.said()
    assert "a wrong one" not in gateway.said()
