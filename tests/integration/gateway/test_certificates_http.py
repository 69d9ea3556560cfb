"""Callers by client certificate at real workers: what one worker forwards keeps its caller, and nobody forges that."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme
from logferry.gateway.access.certificates import CALLER_HEADER, Identity, signed
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.client_certificates import client, write_revocations
from tests.support.served_gateway import Gateway

TOKEN, SHA256 = new_token()
ENTRIES = f"""
[[tokens]]
name = "operators"
certificates = ["cn:operator *"]
admin = ["*"]

[[tokens]]
name = "hosts"
certificates = ["dns:web*.example"]
write = ["nginx"]
sources = "web1/*"

[[tokens]]
name = "plain"
sha256 = "{SHA256}"
write = ["nginx"]
"""


def tables(folder: Path, authority: trustme.CA, callers: trustme.CA, mode: str) -> str:
    """The TLS of a gateway, with its files, and who may do what."""
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "worker.pem")
    issued.private_key_pem.write_to_path(folder / "worker.key")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    callers.cert_pem.write_to_path(folder / "callers.pem")
    write_revocations(callers, folder / "revoked.pem")
    files = {"certificate": "worker.pem", "key": "worker.key", "ca": "ca.pem"}
    files |= {"client_ca": "callers.pem", "client_crl": "revoked.pem"}
    lines = "".join(f'{setting} = "{folder / file}"\n' for setting, file in files.items())
    return f'[tls]\n{lines}client_certificates = "{mode}"\n{ENTRIES}'


@pytest.mark.parametrize("mode", ["optional", "required"])
async def test_the_caller_of_a_certificate_goes_along(kafka: KafkaCluster, tmp_path: Path, mode: str) -> None:
    authority = trustme.CA()
    # Where certificates are required, the workers need one for each other.
    callers = authority if mode == "required" else trustme.CA()
    (tmp_path / "key").write_bytes(b"k" * 32)
    operator, host, revoked = (
        callers.issue_cert("ops1.example", common_name="operator anna"),
        callers.issue_cert("web1.example"),
        callers.issue_cert("web2.example"),
    )
    trusted: ssl.SSLContext = client(authority, operator)
    text = tables(tmp_path, authority, callers, mode)
    settings = {"worker_key_file": str(tmp_path / "key")}
    async with (
        Gateway(tmp_path, kafka.bootstrap, 2, text, "https", trusted, settings) as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client(authority, host))) as session,
    ):

        async def write(source: str, **headers: str) -> tuple[int, str]:
            url = f"{gateway.urls[0]}/v1/topics/nginx/sources/{source}/chunks?seqno=1"
            async with session.post(url, data=b"x\n", headers=headers) as answer:
                return answer.status, json.loads(await answer.read()).get("type", "").rpartition("/")[2]

        status, document, _ = await gateway.ask("PUT", "/v1/topics/nginx", data='{"partitions": 4}')
        assert status in (200, 201), document
        assert (await gateway.ask("GET", "/v1/workers"))[0] == 200
        # Sources of all lanes, all at one worker: half of them are forwarded.
        assert {await write(f"web1%2F{number}") for number in range(24)} == {(200, "")}
        _, metrics, _ = await gateway.ask("GET", "/metrics")
        assert b'logferry_forwards_total{how="forward"}' in metrics
        assert {await write(f"web2%2F{number}") for number in range(8)} == {(403, "forbidden")}
        # A token is handed on as before, and counts before a certificate.
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert {await write(f"web3%2F{number}", **bearer) for number in range(8)} == {(200, "")}
        # A header of the caller's own is no word of a worker, and what it says of itself is not handed on.
        forged = signed(b"x" * 32, "POST", "/v1/topics/nginx", Identity(("cn:operator eve",), 2e9), 1e9)
        for headers in ({CALLER_HEADER: forged}, {CALLER_HEADER: ""}, {"X-Logferry-Forwarded": "1"}):
            assert {await write(f"web1%2F{number}", **headers) for number in range(8)} == {(401, "unauthenticated")}
        # The log of acts has the name of the certificate.
        async with asyncio.timeout(60):
            while "operators:operator%20anna" not in json.dumps(document):
                status, document, _ = await gateway.ask("GET", "/v1/admin-log?kind=acts")
                assert status == 200
        # A certificate that is revoked: the next connection is refused, without a word to the other ones.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client(authority, revoked))) as other:
            url = gateway.urls[1] + "/v1/caller"
            async with other.get(url) as answer:
                assert (answer.status, (await answer.json())["name"]) == (200, "hosts:web2.example")
            write_revocations(callers, tmp_path / "revoked.pem", revoked)
            assert {said["event"] for said in await gateway.reload(text)} == {"configuration_reloaded"}
            with pytest.raises(aiohttp.ClientOSError, match="certificate revoked"):
                await other.get(url)
        assert await write("web1%2Fafter") == (200, "")
