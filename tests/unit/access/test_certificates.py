"""Callers by client certificate: over real TLS at the server of a worker, without Kafka; and signed by a worker."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from logferry.gateway.access.certificates import (
    CALLER_HEADER,
    Identity,
    PeerRequest,
    identity_of,
    matching_name,
    signed,
    verified,
)
from logferry.gateway.access.rights import NOBODY, Caller
from logferry.gateway.config import Config, ConfigError
from logferry.gateway.errors import Problem
from logferry.gateway.http import auth
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import FORWARDED, Call, Routes, json_response
from logferry.gateway.http.server import Server
from logferry.gateway.metrics import CERTIFICATES_REFUSED
from logferry.gateway.service import processes
from logferry.gateway.service.processes import CallerTls
from logferry.gateway.tls import caller_context
from logferry.ops.stack.processes import free_ports

from tests.support.client_certificates import client, write_revocations

KEY = b"k" * 32
PATH = "/v1/topics"


class Worker:
    """The server of a worker; ``authority`` signs its certificate, and ``callers`` those of callers."""

    def __init__(self, folder: Path, **tls: Any) -> None:
        self.folder, self.authority, self.callers = folder, trustme.CA(), trustme.CA()
        # Where certificates are required, the workers need one for each other.
        signs = self.callers if "client_certificates" in tls else self.authority
        issued = signs.issue_cert("127.0.0.1")
        self.trusted = signs
        issued.cert_chain_pems[0].write_to_path(folder / "worker.pem")
        issued.private_key_pem.write_to_path(folder / "worker.key")
        self.callers.cert_pem.write_to_path(folder / "callers.pem")
        write_revocations(self.callers, folder / "revoked.pem")
        (folder / "key").write_bytes(KEY)
        files = {"certificate": folder / "worker.pem", "key": folder / "worker.key"}
        files |= {"client_ca": folder / "callers.pem", "client_crl": folder / "revoked.pem"}
        self.port = free_ports(1)[0]
        entry = {"name": "hosts", "certificates": ["dns:web*.example", "cn:web*"], "write": ["nginx"]}
        raw = {
            "dc": "dc1",
            "kafka": {"bootstrap_servers": "x:1"},
            "listen": f"127.0.0.1:{self.port}",
            "tls": {**files, **tls},
            "worker_key_file": folder / "key",
            "tokens": [{"name": "plain", "sha256": sha256(b"plain").hexdigest(), "read": ["nginx"]}, entry],
        }
        self.config = Config.model_validate(raw)
        assert self.config.tls is not None
        self.tls = self.config.tls
        self.gate = Gate(self.config)
        self.routes = Routes(self.gate)
        self.seen: list[Caller] = []
        self.waits: asyncio.Event | None = None
        self.ends = asyncio.Event()

        async def handler(call: Call) -> web.StreamResponse:
            self.seen.append(call.caller)
            if "X-Stream" in call.request.headers:
                await self.ends.wait()
            elif self.waits is not None:
                await self.waits.wait()
            return json_response({"name": call.caller.name})

        self.routes.add("GET", PATH, "topics", handler, Right.KNOWN)

    async def ask(self, certificate: trustme.LeafCert | None, **headers: str) -> tuple[int, str]:
        """The status, and the name of the caller or what is wrong; 0: no connection."""
        context = client(self.trusted, certificate)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            return await self.ask_by(session, **headers)

    async def ask_by(self, session: aiohttp.ClientSession, **headers: str) -> tuple[int, str]:
        try:
            async with session.get(f"https://127.0.0.1:{self.port}{PATH}", headers=headers) as answer:
                document = await answer.json(content_type=None)
                return answer.status, document["name" if answer.status == 200 else "detail"]
        except aiohttp.ClientOSError as error:
            reason = str(getattr(error, "strerror", "")).partition("] ")[2]
            return 0, reason.partition(" (_ssl")[0]
        except (aiohttp.ClientConnectionError, ConnectionError):
            return 0, ""


@pytest.fixture
async def made(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Worker, Server]]:
    worker = Worker(tmp_path, **getattr(request, "param", {}))
    server = Server(worker.routes, worker.config.limits)
    await server.listen("127.0.0.1", worker.port, caller_context(worker.tls))
    yield worker, server
    await server.close()


async def test_a_certificate_names_its_caller(made: tuple[Worker, Server]) -> None:
    worker, _ = made
    issue, stranger = worker.callers.issue_cert, trustme.CA()
    refused = "no entry of the configuration has a name of the certificate"
    needed = "a token or a certificate is needed: send Authorization: Bearer <token>"
    assert await worker.ask(issue("web1.example")) == (200, "hosts:web1.example")
    assert worker.seen[-1].write.match("dc1.nginx")
    assert await worker.ask(issue("db1.example", "web2.example")) == (200, "hosts:web2.example")
    assert await worker.ask(issue("db1.example", common_name="web/3")) == (200, "hosts:web%2F3")
    assert await worker.ask(issue("db1.example")) == (401, refused)
    assert await worker.ask(issue("xweb1.example")) == (401, refused)
    # An address or a mail is no name of a host.
    assert await worker.ask(issue("web1.example@mail.example")) == (401, refused)
    assert await worker.ask(None) == (401, needed)
    for bad in (stranger.issue_cert("web1.example"), worker.authority.issue_cert("web1.example")):
        assert await worker.ask(bad) == (0, "tlsv1 alert unknown ca")
    now = datetime.now(UTC)
    past = issue("web1.example", not_before=now - timedelta(days=2), not_after=now - timedelta(days=1))
    assert await worker.ask(past) == (0, "sslv3 alert certificate expired")
    # Upper case in the name of a host means nothing.
    assert await worker.ask(issue("WEB1.example")) == (200, "hosts:web1.example")
    # A token counts before a certificate, also a wrong one.
    assert (await worker.ask(issue("web1.example"), Authorization="Bearer x"))[0] == 401


def test_workers_that_would_refuse_each_other_do_not_start(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    with pytest.raises(ConfigError, match=r"client_certificates: required.*worker\.pem is refused: unable to get"):
        caller_context(worker.tls.model_copy(update={"client_certificates": "required"}))


@pytest.mark.parametrize("made", [{"client_certificates": "required"}], indirect=True)
async def test_no_connection_without_a_certificate(made: tuple[Worker, Server]) -> None:
    worker, _ = made
    assert await worker.ask(None) == (0, "tlsv13 alert certificate required")
    assert (await worker.ask(worker.callers.issue_cert("web1.example")))[0] == 200
    assert (await worker.ask(worker.callers.issue_cert("db1.example")))[0] == 401


async def test_a_revoked_certificate_counts_no_more(made: tuple[Worker, Server]) -> None:
    worker, server = made
    callers = CallerTls(worker.tls, worker.gate)
    callers.server = server

    async def renew() -> None:
        renewing = callers.read(worker.tls)()
        assert renewing is not None
        await renewing

    stays, goes = worker.callers.issue_cert("web1.example"), worker.callers.issue_cert("web2.example")
    sessions = [
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client(worker.authority, one)))
        for one in (stays, goes)
    ]
    try:
        assert [await worker.ask_by(one) for one in sessions] == [(200, f"hosts:web{n}.example") for n in (1, 2)]
        streaming = worker.seen[-1]
        # Another reload, with the same files: nothing ends.
        await renew()
        assert worker.gate.present(streaming).write.match("dc1.nginx")
        worker.waits = asyncio.Event()
        under_way = asyncio.create_task(worker.ask_by(sessions[1]))
        while len(worker.seen) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        write_revocations(worker.callers, worker.folder / "revoked.pem", goes)
        await renew()
        # What was admitted is answered; a stream has no right any more, and the connection takes nothing further.
        worker.waits.set()
        assert await under_way == (200, "hosts:web2.example")
        assert worker.gate.present(streaming) is NOBODY
        revoked = (0, "sslv3 alert certificate revoked")
        assert [await worker.ask_by(one) for one in sessions] == [(200, "hosts:web1.example"), revoked]
        assert await worker.ask(goes) == revoked
        assert (await worker.ask(stays))[0] == 200
    finally:
        for session in sessions:
            await session.close()


async def test_connections_without_a_certificate_end_where_one_is_required_now(made: tuple[Worker, Server]) -> None:
    """Idle ones, those with a request under way, a stream, and those whose handshake has begun."""
    worker, server = made
    server._limits = server._limits.model_copy(update={"request_timeout_s": 0.5})
    signed_by_callers = worker.callers.issue_cert("127.0.0.1")
    signed_by_callers.cert_chain_pems[0].write_to_path(worker.folder / "worker.pem")
    signed_by_callers.private_key_pem.write_to_path(worker.folder / "worker.key")
    callers = CallerTls(worker.tls, worker.gate)
    callers.server = server
    certificate = worker.callers.issue_cert("web1.example")
    sessions = [
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client(worker.authority, one)))
        for one in (None, None, None, certificate)
    ]
    idle, writing, streaming, known = sessions
    token = {"Authorization": "Bearer plain"}
    # The first half of a handshake.
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    late = client(worker.authority, None).wrap_bio(theirs, ours, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    with suppress(ssl.SSLWantReadError):
        late.do_handshake()
    writer.write(ours.read())
    while True:
        theirs.write(await reader.read(1 << 16))
        with suppress(ssl.SSLWantReadError):
            late.do_handshake()
            break
    try:
        for one in sessions:
            assert (await worker.ask_by(one, **({} if one is known else token)))[0] == 200
        worker.waits = asyncio.Event()
        under_way = asyncio.create_task(worker.ask_by(writing, **token))
        stream = asyncio.create_task(worker.ask_by(streaming, **token, **{"X-Stream": "1"}))
        while len(worker.seen) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        renewing = callers.read(worker.tls.model_copy(update={"client_certificates": "required"}))()
        assert renewing is not None
        await renewing
        worker.waits.set()
        assert (await under_way)[0] == 200, "what was admitted is answered"
        async with asyncio.timeout(60):
            assert (await stream)[0] == 0
        for one in (idle, writing, streaming):
            one._connector._ssl = client(worker.callers, None)  # type: ignore[union-attr]
            assert await worker.ask_by(one, **token) == (0, "tlsv13 alert certificate required")
        assert await worker.ask_by(known) == (200, "hosts:web1.example"), "its connection is still open"
        writer.write(ours.read())
        late.write(f"GET {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer plain\r\n\r\n".encode())
        writer.write(ours.read())
        seen = len(worker.seen)
        async with asyncio.timeout(20):
            with suppress(ConnectionError):
                await reader.read()
        assert len(worker.seen) == seen
    finally:
        worker.ends.set()
        writer.close()
        for session in sessions:
            await session.close()


async def test_a_caller_that_ignores_its_refusal_is_dropped(made: tuple[Worker, Server]) -> None:
    """The handshake ends with whatever it sends next, and at the latest by its time-out."""
    worker, _ = made
    refused = CERTIFICATES_REFUSED._value.get()
    context = client(worker.authority, trustme.CA().issue_cert("web1.example"))
    # Such a caller sends its request along with its certificate, and the alert is among what it does not read.
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(theirs, ours, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    writer.write(ours.read())
    while True:
        theirs.write(await reader.read(1 << 16))
        with suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            break
    writer.write(ours.read())
    alert = await reader.read(1 << 16)
    assert alert
    tls.write(b"GET / HTTP/1.1\r\n\r\n")
    writer.write(ours.read())
    assert await reader.read() == b""
    writer.close()
    assert CERTIFICATES_REFUSED._value.get() == refused + 1
    assert not worker.seen


async def test_a_certificate_ends_while_its_connection_is_open(made: tuple[Worker, Server]) -> None:
    worker, _ = made
    certificate = worker.callers.issue_cert("web1.example")
    connector = aiohttp.TCPConnector(ssl=client(worker.authority, certificate))
    async with aiohttp.ClientSession(connector=connector) as session:
        assert (await worker.ask_by(session))[0] == 200
        held = worker.seen[-1]
        worker.gate._clock_s = lambda: held.ends_s
        assert await worker.ask_by(session) == (401, "the certificate has ended")
        assert worker.gate.present(held) is NOBODY


async def test_a_worker_is_not_the_caller_that_it_forwards_for(made: tuple[Worker, Server]) -> None:
    worker, _ = made
    certificate = worker.callers.issue_cert("web1.example")
    assert (await worker.ask(certificate))[0] == 200
    assert (await worker.ask(certificate, **{FORWARDED: "1"}))[0] == 401


async def test_changed_files_are_noticed(
    made: tuple[Worker, Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker, server = made
    monkeypatch.setattr(processes, "_FILES_S", 0.01)
    callers = CallerTls(worker.tls, worker.gate)
    callers.server = server
    authority = worker.folder / "callers.pem"
    before, other = authority.read_bytes(), trustme.CA()
    watching = asyncio.create_task(callers.watch())

    async def logged(event: str, times: int) -> None:
        seen = ""
        async with asyncio.timeout(60):
            while seen.count(f'"{event}"') < times:
                await asyncio.sleep(0.01)
                seen += capsys.readouterr().err
                assert seen.count('ed"') <= times, seen

    try:
        authority.write_bytes(b"nonsense")
        await logged("configuration_not_reloaded", 1)
        assert (await worker.ask(worker.callers.issue_cert("web1.example")))[0] == 200
        authority.write_bytes(other.cert_pem.bytes())
        write_revocations(other, worker.folder / "revoked.pem")
        async with asyncio.timeout(60):
            while (await worker.ask(other.issue_cert("web1.example")))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await worker.ask(worker.callers.issue_cert("web1.example")) == (0, "tlsv1 alert unknown ca")
        assert before != authority.read_bytes()
    finally:
        watching.cancel()


async def test_the_word_of_another_worker(made: tuple[Worker, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = made
    now_s = time.time()
    identity = Identity(("dns:db1.example", "dns:web7.example"), now_s + 600)
    good = signed(KEY, "GET", PATH, identity, now_s)
    assert await worker.ask(None, **{CALLER_HEADER: good}) == (200, "hosts:web7.example")
    assert worker.seen[-1].ends_s == int(identity.ends_s)
    certificate = worker.callers.issue_cert("web1.example")
    said = good.partition(";")[2]
    for bad in (
        *("", ";;;", said, "0" * 64 + ";" + said, good.replace("web7", "web8"), good.replace("db1", "db2")),
        signed(b"x" * 32, "GET", PATH, identity, now_s),
        signed(KEY, "POST", PATH, identity, now_s),
        signed(KEY, "GET", PATH + "?x=1", identity, now_s),
        signed(KEY, "GET", PATH, identity, now_s - 300),
        signed(KEY, "GET", PATH, identity, now_s + 300),
        signed(KEY, "GET", PATH, identity._replace(ends_s=now_s - 1), now_s),
        signed(KEY, "GET", PATH, Identity((), now_s + 600), now_s),
        good + "é",
    ):
        # Nor does a certificate of its own help whoever tries it.
        for own in (None, certificate):
            assert (await worker.ask(own, **{CALLER_HEADER: bad}))[0] == 401, bad
    with pytest.raises(Problem, match="not signed by a worker"):
        verified(None, "GET", PATH, good, now_s)


def test_the_entry_of_a_certificate_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many entries and names that takes milliseconds, in which the worker serves nobody. Its end is its own."""
    searches = 0

    def counted(names: Iterable[str], patterns: Iterable[str]) -> str | None:
        nonlocal searches
        searches += 1
        return matching_name(names, patterns)

    monkeypatch.setattr(auth, "matching_name", counted)
    worker = Worker(tmp_path)
    names, now_s = ("dns:db1.example", "dns:web1.example"), time.time()

    def asked(names: tuple[str, ...], ends_s: float) -> Caller:
        header = signed(KEY, "GET", PATH, Identity(names, ends_s), now_s)
        return worker.gate.identify(Right.KNOWN, {CALLER_HEADER: header}, PeerRequest("GET", PATH, None))

    for ends_s in (2_000_000_000.0, 2_100_000_000.0):
        caller = asked(names, ends_s)
        assert (caller.name, caller.ends_s) == ("hosts:web1.example", ends_s)
        assert worker.gate.present(caller).name == caller.name
    for _ in range(2):
        with pytest.raises(Problem, match="no entry"):
            asked(names[:1], ends_s)
    assert searches == 4, "two entries, two certificates"
    first, second = worker.gate.settings
    worker.gate.replace([first, second.model_copy(update={"name": "others"})])
    assert asked(names, ends_s).name == "others:web1.example"
    for number in range(5000):
        asked((f"dns:web{number}.example",), ends_s)
    assert len(worker.gate._matched) <= 4096


def test_names_with_any_sign_are_signed_as_they_are() -> None:
    identity = Identity(("cn:a,b;c\u00e9 %2C", "uri:spiffe://x/y"), 2_000_000_000.0)
    header = signed(KEY, "GET", PATH, identity, 1000.0)
    assert header.isascii()
    assert verified(KEY, "GET", PATH, header, 1000.0) == identity


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"tokens": [{"name": "a", "certificates": ["web1"], "write": ["x"]}]}, "certificates"),
        ({"tls": None}, "tls.client_ca"),
        ({"worker_key_file": None}, "worker_key_file"),
    ],
)
def test_a_wrong_configuration(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    (tmp_path / "key").write_bytes(KEY)
    raw = {
        "dc": "dc1",
        "kafka": {"bootstrap_servers": "x:1"},
        "worker_key_file": tmp_path / "key",
        "tls": {"certificate": "a", "key": "b", "client_ca": "c"},
        "tokens": [{"name": "a", "certificates": ["dns:web1"], "write": ["x"]}],
    }
    assert Config.model_validate(raw).worker_key == KEY
    with pytest.raises(ValueError, match=text):
        Config.model_validate({**raw, **changed})
    with pytest.raises(ValueError, match="without client_ca"):
        Config.model_validate({**raw, "tls": {"certificate": "a", "key": "b", "client_crl": "c"}})


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_key_of_workers_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    config = Config(dc="dc1", kafka={"bootstrap_servers": "x:1"}, worker_key_file=tmp_path / "key")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="worker_key_file") as caught:
        _ = config.worker_key
    assert "short" not in str(caught.value).partition("key:")[2]


def test_a_certificate_of_many_names_fits_into_a_head() -> None:
    names = tuple(("DNS", f"h{number}." + "x" * 200) for number in range(1000))
    certificate = {"notAfter": "Jan  5 09:34:43 2030 GMT", "subjectAltName": (("DNS", "y" * 300), *names)}
    identity = identity_of(certificate)
    assert 5 < len(identity.names) < 20
    assert len(signed(KEY, "GET", PATH, identity, 1000.0)) < 8000
