"""JSON Web Tokens at real workers: rights, forwarding between workers, and a stream that ends with its token."""

from __future__ import annotations

import json
import time
from pathlib import Path

import aiohttp
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Setting

from tests.support.issuer import AUDIENCE, TestIssuer
from tests.support.served_gateway import Gateway

ADMIN = new_token()
PATIENT = aiohttp.ClientTimeout(60)


def tables(issuer: TestIssuer) -> str:
    return (
        f'[[tokens]]\nname = "admin"\nsha256 = "{ADMIN[1]}"\nadmin = ["*"]\n'
        '[[tokens]]\nname = "hosts"\nclaims = [{ issuer = "sso", claim = "groups", value = "hosts" }]\n'
        'write = ["nginx"]\nsources = "web*"\n'
        '[[tokens]]\nname = "people"\nclaims = [{ issuer = "sso", claim = "groups", value = "people" }]\n'
        'read = ["*"]\n'
        f'[[issuers]]\nname = "sso"\nissuer = "{issuer.url}"\naudience = "{AUDIENCE}"\nclock_skew_s = 0\n'
    )


async def test_tokens_of_an_issuer(kafka: KafkaCluster, tmp_path: Path) -> None:
    # Of a data centre of its own: other tests have topics of the same names.
    settings: dict[str, Setting] = {"dc": "sso", "data_centres": ["sso"]}
    async with (
        TestIssuer() as issuer,
        Gateway(tmp_path, kafka.bootstrap, 2, tables(issuer), settings=settings) as gateway,
    ):
        status, document, _ = await gateway.ask(
            "PUT", "/v1/topics/nginx", ADMIN[0], data='{"partitions": 2}', timeout=PATIENT
        )
        assert status in (200, 201), document
        hosts = issuer.token("ec", sub="web1", groups=["hosts"])
        people = issuer.token(sub="alice", groups=["others", "people"], exp=int(time.time()) + 15)
        stranger = issuer.token(sub="eve", groups=["others"])
        forged = issuer.token(header={"kid": "ec"}, groups=["people"])
        # Some of the sources are of lanes of the other worker, which verifies the token itself.
        for number in range(12):
            path = f"/v1/topics/nginx/sources/web{number}"
            status, document, _ = await gateway.ask("POST", path + "/chunks?seqno=1", hosts, data=b"x\n")
            assert status == 200, document
        for token, path, method, expected in (
            (hosts, "/v1/topics/nginx/sources/db1/chunks?seqno=1", "POST", 403),
            (people, "/v1/topics/nginx/sources/web1/chunks?seqno=2", "POST", 403),
            (people, "/v1/topics/sso.nginx/partitions/0/chunks", "GET", 200),
            (stranger, "/v1/topics", "GET", 403),
            (forged, "/v1/topics", "GET", 401),
        ):
            for worker in range(2):
                status, document, _ = await gateway.ask(method, path, token, worker, data=b"x", timeout=PATIENT)
                assert status == expected, document
        _, document, _ = await gateway.ask("GET", "/v1/caller", people)
        assert (document["name"], document["read"], document["everything"]) == ("people:alice", True, False)
        headers = {"Authorization": f"Bearer {people}", "Accept": "application/x-ndjson"}
        url = f"{gateway.urls[0]}/v1/consumers/oidc-{time.time_ns()}/stream?topic=sso.nginx"
        async with gateway.session.get(url, headers=headers) as stream:
            frames = [json.loads(line) async for line in stream.content]
        assert {"session", "assigned"} < {frame["frame"] for frame in frames}
        assert frames[-1]["problem"]["type"].endswith("/forbidden")
        assert (await gateway.ask("GET", "/v1/topics", people))[0] == 401
        _, metrics, _ = await gateway.ask("GET", "/metrics", ADMIN[0])
        assert b'logferry_issuer_fetches_total{issuer="sso",result="done"} 1' in metrics
        said = gateway.said()
        assert not [token for token in (hosts, people, stranger, forged) if token in said]
