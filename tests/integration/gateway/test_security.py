"""Tokens and TLS, from outside: real workers, real Kafka, and what is in their logs afterwards."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from logferry.gateway.contract.names import lane_of
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster

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
async def gateway(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[Gateway]:
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
    # Each token opens a session of a source of its own: another one's is in use.
    source, read = "/v1/topics/nginx/sources/web1%2F{name}", "/v1/topics/dc1.nginx/partitions/0/chunks"
    beat = {"method": "POST", "path": source + "/heartbeat", "data": "{}"}
    table: list[tuple[dict[str, Any], set[str]]] = [
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
        ({"method": "GET", "path": "/v1/workers"}, {"admin"}),
        ({"method": "GET", "path": "/v1/mirror"}, {"admin"}),
        ({"method": "GET", "path": "/v1/deliver"}, {"admin"}),
        ({"method": "GET", "path": "/v1/caller"}, set(NAMES)),
        ({"method": "GET", "path": "/v1/topics/nginx"}, {"writer", "own", "reader", "admin"}),
        ({"method": "GET", "path": "/v1/topics/dc1.nginx"}, {"writer", "own", "reader", "admin"}),
        ({"method": "PUT", "path": "/v1/topics/nginx", "data": '{"partitions": 4}'}, {"admin"}),
        ({"method": "DELETE", "path": source}, {"admin"}),
    ]
    for request, allowed in table:
        for worker in range(2):
            for name in NAMES:
                path = request["path"].format(name=name)
                asked = {**request, "path": path}
                status, document, _ = await gateway.ask(**asked, token=SECRET[name], worker=worker)
                assert (status == 403) == (name not in allowed), (request, name, document)
                assert status in (200, 403), (request, name, document)
                if status == 403:
                    assert document["type"].endswith("/forbidden")
            for token in (None, "lf_nobody-has-this", TOKENS["admin"][1]):
                status, document, headers = await gateway.ask(**request, token=token, worker=worker)
                assert (status, document["type"].rpartition("/")[2]) == (401, "unauthenticated")
                assert headers["WWW-Authenticate"].startswith("Bearer")


async def test_a_session_is_authority_over_its_source(gateway: Gateway) -> None:
    """Another writer of the topic can neither silence the source nor take it; its own writer notices nothing."""
    source = "/v1/topics/nginx/sources/web1%2Fowned"
    status, opened, _ = await gateway.ask("POST", source + "/session", SECRET["own"])
    assert status == 200
    session, writes = opened["session"], source + "/chunks?seqno="
    highest = 2**63 - 1
    for worker in range(2):
        for query in (str(highest), f"{highest}&session={session}", f"{highest}&prev=0", "5"):
            status, document, _ = await gateway.ask("POST", writes + query, SECRET["writer"], worker, data=b"theft")
            assert (status, document["type"].rpartition("/")[2]) == (409, "superseded")
        status, document, headers = await gateway.ask("POST", source + "/session", SECRET["writer"], worker)
        assert (status, document["type"].rpartition("/")[2]) == (503, "source-in-use")
        assert 800 < int(headers["Retry-After"]) <= 900
        status, _, _ = await gateway.ask(
            "POST", source + "/heartbeat", SECRET["writer"], worker, data='{"finished": true}'
        )
        assert status == 409
        # Of the session's own token, but outside of the session: a mistake.
        status, document, _ = await gateway.ask("POST", writes + str(highest), SECRET["own"], worker, data=b"mistake")
        assert (status, document["type"].rpartition("/")[2]) == (400, "bad-request")
    status, document, _ = await gateway.ask("POST", f"{writes}10&prev=0&session={session}", SECRET["own"], data=b"mine")
    assert (status, document["written"], document["recorded_seqno"]) == (200, 1, 10)
    # Now the session is used by its number: its own token needs it, too.
    for query in ("20", "20&prev=10", f"{highest}&prev=10"):
        status, document, _ = await gateway.ask("POST", writes + query, SECRET["own"], data=b"mistake")
        assert (status, document["type"].rpartition("/")[2]) == (409, "superseded")
    query = f"20&prev=10&session={session}"
    status, document, _ = await gateway.ask("POST", writes + query, SECRET["own"], data=b"also mine")
    assert (status, document["written"]) == (200, 1)
    status, _, _ = await gateway.ask("DELETE", source, SECRET["admin"])
    assert status == 200
    status, document, _ = await gateway.ask("POST", writes + "1", SECRET["writer"], data=b"free again")
    assert (status, document["written"]) == (200, 1)


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


async def test_tokens_are_re_read_while_requests_continue(gateway: Gateway) -> None:
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


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", 0), ("127.0.0.2", 1)])
async def test_a_worker_whose_tokens_are_not_encrypted_says_so_at_its_start(
    kafka: KafkaCluster, tmp_path: Path, host: str, warns: int
) -> None:
    """Any address but the three names of loopback counts as one that others reach."""
    async with Gateway(tmp_path, kafka.bootstrap, 1, entries("admin"), host=host) as gateway:
        said = [json.loads(line) for line in gateway.said().splitlines() if "tokens_unencrypted" in line]
        assert [(one["event"], one["level"]) for one in said] == [("tokens_unencrypted", "warning")] * warns
        assert all(one["listen"].startswith(host) for one in said)


async def test_metrics_name_no_source_and_no_token(gateway: Gateway) -> None:
    await gateway.ask("POST", chunk("web1%2Fvery-special"), SECRET["writer"], data=b"x\n")
    assert (await gateway.ask("GET", "/metrics"))[0] == 401
    status, body, _ = await gateway.ask("GET", "/metrics", SECRET["admin"])
    assert status == 200
    for word in ("very-special", *SECRET.values()):
        assert word not in body.decode()


# ---- TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def certificate(authority: trustme.CA, folder: Path) -> str:
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "worker.pem")
    issued.private_key_pem.write_to_path(folder / "worker.key")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    files = {"certificate": "worker.pem", "key": "worker.key", "ca": "ca.pem"}
    return "[tls]\n" + "".join(f'{setting} = "{folder / file}"\n' for setting, file in files.items())


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_tls_to_and_between_workers(kafka: KafkaCluster, tmp_path: Path, authority: trustme.CA) -> None:
    tls = certificate(authority, tmp_path)
    tables = tls + entries("admin", "writer")
    async with Gateway(tmp_path, kafka.bootstrap, 2, tables, "https", trusting(authority)) as gateway:
        await gateway.ask("PUT", "/v1/topics/nginx", SECRET["admin"], data='{"partitions": 4}')
        for number in range(16):
            status, document, _ = await gateway.ask("POST", chunk(f"tls-{number}"), SECRET["writer"], data=b"x\n")
            assert status == 200, document
        _, metrics, _ = await gateway.ask("GET", "/metrics", SECRET["admin"])
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
    kafka: KafkaCluster, tmp_path: Path, authority: trustme.CA
) -> None:
    tls = certificate(authority, tmp_path)
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    async with Gateway(tmp_path, kafka.bootstrap, 2, tls, "https", trusting(authority)) as gateway:
        await gateway.ask("PUT", "/v1/topics/nginx", data='{"partitions": 4}')
        statuses = {(await gateway.ask("POST", chunk(f"cut-{number}"), data=b"x\n"))[0] for number in range(16)}
        assert statuses == {200, 503}
