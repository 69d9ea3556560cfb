"""Syslog over TLS, and streams that are made to hold a worker or to fill its memory while others send."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import trustme
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports

from tests.support.agents import agent, block, needs
from tests.support.checker import committed_records
from tests.support.held_loop import Measured, least_held, measured_gateway
from tests.support.served_gateway import Gateway

pytestmark = pytest.mark.long

MIB: Final = 1 << 20
PORT, TLS_PORT = free_ports(2)
# What a hostile stream may add to a worker, while all of them together send hundreds of MiB.
MEMORY: Final = 96 * MIB
DRIPS: Final = 500


def message(host: str, text: str) -> bytes:
    return f"<34>1 2026-01-01T00:00:00Z {host} app - - - {text}\n".encode()


async def lines_of(bootstrap: str, topic: str, source: str) -> list[bytes]:
    records = sorted(await committed_records(bootstrap, topic), key=lambda record: (record.partition, record.offset))
    of_source = [record for record in records if (record.key or b"").decode() == source]
    return b"".join(chunk_of_record(one.value or b"", one.headers).data for one in of_source).splitlines(keepends=True)


async def wait_lines(bootstrap: str, topic: str, source: str, count: int) -> list[bytes]:
    async with asyncio.timeout(120):
        while True:
            found = await lines_of(bootstrap, topic, source)
            if len(found) >= count:
                return found
            await asyncio.sleep(0.1)


# ---- hostile streams --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    syslog = {"listen": f"127.0.0.1:{PORT}", "topic": "streams", "udp": True}
    with measured_gateway(kafka, tmp_path_factory.mktemp("streams"), "streams", receivers={"syslog": syslog}) as at:
        asyncio.run(at.gateway.make_topic("streams"))
        yield at


def memory_of(pid: int | None, name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of a process, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


async def sent_whole(make: Callable[[], Iterator[bytes]]) -> None:
    """Until the worker has read all of it, which it says by closing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    for piece in make():
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


def repeated(head: bytes, piece: bytes, size: int) -> Callable[[], Iterator[bytes]]:
    def make() -> Iterator[bytes]:
        yield head
        block_of = piece * (MIB // len(piece))
        for _ in range(size // MIB):
            yield block_of

    return make


STREAMS: Final = {
    "a frame of a gigabyte": repeated(b"999999999 ", b"x", 100 * MIB),
    "a length without an end": repeated(b"", b"9", 100 * MIB),
    "no newline": repeated(b"<1>", b"x", 100 * MIB),
    "newlines": repeated(b"", b"\n", 16 * MIB),
    "empty frames": repeated(b"", b"1 \n", 2 * MIB),
    "small messages": repeated(b"", b"a\n", MIB),
    "the longest messages": repeated(b"", b"<1>" + b"y" * 65_533 + b"\n", 16 * MIB),
    "line breaks in frames": repeated(b"", b"1000 " + b"\n\0" * 499 + b"ab", 8 * MIB),
    "many hosts": lambda: (message(f"h{n}", "x") for n in range(2_000)),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_hostile_stream_holds_nobody_and_no_memory(measured: Measured, name: str) -> None:
    at, good = measured.gateway, f"good-{[*STREAMS].index(name)}"
    source, topic = f"syslog/-/{good}", "dc1.streams"
    _, writer = await asyncio.open_connection("127.0.0.1", PORT)
    before, sent = memory_of(at.pids[0], "VmRSS"), 0
    Path(f"/proc/{at.pids[0]}/clear_refs").write_text("5")  # the peak counts from now on

    async def beside() -> None:
        """Another sender is served meanwhile, however long the stream lasts."""
        nonlocal sent
        hostile = asyncio.create_task(sent_whole(STREAMS[name]))
        while True:
            writer.write(message(good, str(sent)))
            sent += 1
            await wait_lines(at.kafka.bootstrap, topic, source, sent)
            if hostile.done():
                return await hostile

    assert await least_held(lambda: measured.during(beside)) == []
    writer.close()
    assert await lines_of(at.kafka.bootstrap, topic, source) == [message(good, str(number)) for number in range(sent)]
    assert memory_of(at.pids[0], "VmHWM") - before < MEMORY


async def test_connections_that_drip_hold_nobody(measured: Measured) -> None:
    """Each sends one byte at a time and never ends a message; the last byte of each arrives after another's line."""
    at = measured.gateway
    before = memory_of(at.pids[0], "VmRSS")

    async def drip() -> None:
        open_now = [await asyncio.open_connection("127.0.0.1", PORT) for _ in range(DRIPS)]
        for byte in b"<1>drip":
            for _, writer in open_now:
                writer.write(bytes([byte]))
            await asyncio.gather(*(writer.drain() for _, writer in open_now))
        count = len(await lines_of(at.kafka.bootstrap, "dc1.streams", "syslog/-/patient"))
        await sent_whole(lambda: iter([message("patient", "x")]))
        assert await wait_lines(at.kafka.bootstrap, "dc1.streams", "syslog/-/patient", count + 1)
        for _, writer in open_now:
            writer.close()

    assert await least_held(lambda: measured.during(drip)) == []
    assert memory_of(at.pids[0], "VmRSS") - before < MEMORY


async def test_datagrams_in_bounded_memory(measured: Measured) -> None:
    """Empty and short ones are the most; whatever is dropped, the worker serves the next."""
    at = measured.gateway
    before = memory_of(at.pids[0], "VmRSS")

    async def flood() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.connect(("127.0.0.1", PORT))
            for number in range(60_000):
                sender.send(b"" if number % 2 else b"x")

    assert await least_held(lambda: measured.during(flood)) == []
    assert memory_of(at.pids[0], "VmRSS") - before < MEMORY
    await sent_whole(lambda: iter([message("after", "x")]))
    assert await wait_lines(at.kafka.bootstrap, "dc1.streams", "syslog/-/after", 1)


# ---- TLS --------------------------------------------------------------------------------------------------------


def issue(authority: trustme.CA, folder: Path, name: str, *hosts: str) -> None:
    issued = authority.issue_cert(*hosts)
    issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    issued.private_key_pem.write_to_path(folder / f"{name}.key")


def sender_context(folder: Path, certificate: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if certificate is not None:
        context.load_cert_chain(folder / f"{certificate}.pem", folder / f"{certificate}.key")
    return context


def send_by_tls(context: ssl.SSLContext, data: bytes) -> bytes:
    """The worker's certificate, after it has read the data. Raises OSError where it refuses."""
    with (
        socket.create_connection(("127.0.0.1", TLS_PORT), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
        connection.sendall(data)
        connection.unwrap()
    assert shown is not None
    return shown


def tables(folder: Path, more: str) -> str:
    pair = f'[tls]\ncertificate = "{folder}/worker.pem"\nkey = "{folder}/worker.key"\nca = "{folder}/ca.pem"\n'
    listen = f'listen = "127.0.0.1:{TLS_PORT}"\ntopic = "by-tls"\ntls = true\n'
    return f"{pair}[receivers.syslog]\n{listen}{more}"


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    issue(made, tmp_path, "worker", "127.0.0.1", "logs.example.org")
    issue(made, tmp_path, "web1", "web1.example.org")
    issue(trustme.CA(), tmp_path, "stranger", "web1.example.org")
    return made


@pytest.mark.parametrize("is_mutual", [False, True])
async def test_syslog_over_tls(kafka: KafkaCluster, tmp_path: Path, authority: trustme.CA, is_mutual: bool) -> None:
    more = f'client_ca = "{tmp_path}/ca.pem"\n' if is_mutual else ""
    verify = sender_context(tmp_path, None)
    async with Gateway(tmp_path, kafka.bootstrap, 1, tables(tmp_path, more), "https", verify) as at:
        await at.ask("PUT", "/v1/topics/by-tls", data='{"partitions": 1}')
        host = f"tls-{is_mutual}"

        async def send(certificate: str | None, text: str) -> bytes | None:
            context = sender_context(tmp_path, certificate)
            try:
                return await asyncio.to_thread(send_by_tls, context, message(host, text))
            except OSError:
                return None

        shown = await send("web1", "0")
        assert shown is not None
        assert (await send(None, "1") is None) == is_mutual
        # Whoever asks for no certificate looks at none either.
        assert (await send("stranger", "2") is None) == is_mutual
        # A renewed certificate is shown to the next who connects.
        issue(authority, tmp_path, "worker", "127.0.0.1", "logs.example.org")
        assert await send("web1", "3") == shown
        await at.reload(tables(tmp_path, more))
        assert await send("web1", "4") not in (None, shown)
        texts = ["0", "3", "4"] if is_mutual else ["0", "1", "2", "3", "4"]
        found = await wait_lines(kafka.bootstrap, "dc1.by-tls", f"syslog/-/{host}", len(texts))
        assert found == [message(host, text) for text in texts]
        # A half of a handshake is no sender, and those behind it are served.
        with socket.create_connection(("127.0.0.1", TLS_PORT)) as silent:
            silent.send(b"\x16\x03\x01")
            assert await send("web1", "5") is not None


@needs("rsyslogd", "lmnsd_gtls")
async def test_rsyslog_over_tls_as_the_guide_has_it(kafka: KafkaCluster, tmp_path: Path, authority: trustme.CA) -> None:
    log = tmp_path / "app.log"
    log.write_bytes(b"".join(b"tls line %d\n" % number for number in range(1000)))
    verify = sender_context(tmp_path, None)
    mutual = tables(tmp_path, f'client_ca = "{tmp_path}/ca.pem"\n')
    async with Gateway(tmp_path, kafka.bootstrap, 1, mutual, "https", verify) as at:
        await at.ask("PUT", "/v1/topics/by-tls", data='{"partitions": 1}')
        text = block(
            "rsyslog-tls.conf",
            {"/etc/logferry": str(tmp_path), "/var/log/app.log": str(log), '"5514"': f'"{TLS_PORT}"'},
        )
        child = await asyncio.to_thread(agent, "rsyslogd", tmp_path / "agent", text)
        try:
            source = f"syslog/-/{socket.gethostname()}"
            found = await wait_lines(kafka.bootstrap, "dc1.by-tls", source, 1000)
        finally:
            await asyncio.to_thread(child.stop, 20)
    assert [line.rpartition(b" tls line ")[2] for line in found] == [b"%d\n" % number for number in range(1000)]
