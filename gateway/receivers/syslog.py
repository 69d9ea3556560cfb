"""Syslog (RFC 5424 and 3164) over TCP, TLS and UDP, on a port that all workers of a host share (SO_REUSEPORT).

Syslog has no acknowledgements. Of a TCP connection nothing more is read until what was read is recorded, so a sender
waits when Kafka does. What was read and not recorded when a worker is killed is lost. A batch whose outcome is not
known is recorded again and may double. UDP cannot wait: what finds no room is dropped and counted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from typing import Final

from aiokafka.errors import KafkaError
from logferry.gateway.config import LOOPBACK, ConfigError
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import Malformed, check_source_id, full_topic
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.contract.syslog_frames import Framer, host_of, is_blank, line_of
from logferry.gateway.errors import CannotListen, Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import problem_of
from logferry.gateway.metrics import CONNECTIONS_REFUSED, RECEIVED
from logferry.gateway.receiver_settings import SyslogSettings
from logferry.gateway.receivers.append import CHUNK_BYTES, Appender, Part
from logferry.gateway.receivers.lines import joined

_READ_BYTES: Final = 1 << 17
_DATAGRAM_BYTES: Final = 8 << 20
# Of memory, beside the bytes of a datagram, so that small ones are bounded as well.
_DATAGRAM_OVERHEAD: Final = 256
_DATAGRAMS: Final = 2000
_CONNECTIONS: Final = 1000
# Names of senders in one batch; the lines of others count as their peer's.
_HOSTS: Final = 100
# A message is so much work, whatever its size.
_WORK_BYTES: Final = 16
_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_STOP_S: Final = 5.0
_TLS_HANDSHAKE_S: Final = 10.0
# A sender that was switched off is noticed after two minutes, so that it does not keep its connection.
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class Datagrams(asyncio.DatagramProtocol):
    """What arrived by UDP and is not taken yet: (peer, message). ``limit``: a longer message is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting: deque[tuple[str, bytes]] = deque()
        self.size_bytes = 0
        self.news = asyncio.Event()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if is_blank(data):
            return
        if len(data) > self._limit or self.size_bytes + len(data) + _DATAGRAM_OVERHEAD > _DATAGRAM_BYTES:
            RECEIVED.labels("syslog", "too-large" if len(data) > self._limit else "dropped").inc()
            return
        self.size_bytes += len(data) + _DATAGRAM_OVERHEAD
        self.waiting.append((addr[0], data))
        self.news.set()

    async def take(self) -> dict[str, list[bytes]]:
        """Some of it, by peer; waits until there is something."""
        await self.news.wait()
        found: dict[str, list[bytes]] = {}
        for _ in range(min(len(self.waiting), _DATAGRAMS)):
            peer, message = self.waiting.popleft()
            self.size_bytes -= len(message) + _DATAGRAM_OVERHEAD
            found.setdefault(peer, []).append(message)
        if not self.waiting:
            self.news.clear()
        return found


def by_sender(peer: str, messages: list[bytes]) -> dict[str, list[bytes]]:
    """The messages as lines, by the names of their senders."""
    lines: dict[str, list[bytes]] = {}
    for message in messages:
        name = host_of(message) or peer
        if name not in lines and len(lines) >= _HOSTS:
            name = peer
        lines.setdefault(name, []).append(line_of(message))
    return lines


class SyslogServer:
    """Listens and records. Raises ConfigError where it would take lines that no token allows."""

    def __init__(self, appender: Appender, gate: Gate, settings: SyslogSettings) -> None:
        config = appender.config
        self._appender, self._gate, self._settings = appender, gate, settings
        self._host, _, self._port = settings.listen.rpartition(":")
        self._authorization: str | None = None
        if settings.token_file is not None:
            try:
                self._authorization = f"Bearer {settings.token_file.read_text(encoding='utf-8').strip()}"
            except OSError as error:
                raise ConfigError(f"receivers.syslog.token_file: {settings.token_file}: {error.strerror}") from None
        if config.tokens and self._authorization is None:
            raise ConfigError("receivers.syslog: needs token_file, since [[tokens]] are configured")
        if not (config.tokens or config.anonymous or self._host in LOOPBACK):
            raise ConfigError("receivers.syslog.listen: without tokens only loopback is served, or anonymous = true")
        if settings.tls and config.tls is None:
            raise ConfigError("receivers.syslog.tls: needs the certificate of [tls]")
        if settings.client_ca is not None and not settings.tls:
            raise ConfigError("receivers.syslog.client_ca: needs tls = true")
        self._server: asyncio.Server | None = None
        self._datagrams: asyncio.DatagramTransport | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._drain: asyncio.Task[None] | None = None

    async def start(self, context: ssl.SSLContext | None) -> None:
        """``context``: of the workers' certificate. Raises CannotListen."""
        host, port, loop = self._host.strip("[]"), int(self._port), asyncio.get_running_loop()
        try:
            self._server = await asyncio.start_server(
                self._connected,
                host,
                port,
                limit=_READ_BYTES,
                ssl=context,
                ssl_handshake_timeout=None if context is None else _TLS_HANDSHAKE_S,
                reuse_port=True,
            )
            if self._settings.udp:
                transport, datagrams = await loop.create_datagram_endpoint(
                    lambda: Datagrams(self._settings.message_bytes), local_addr=(host, port), reuse_port=True
                )
                self._datagrams = transport
                self._drain = asyncio.create_task(self._record_datagrams(datagrams))
        except OSError as error:
            raise CannotListen(self._settings.listen, error) from error

    async def stop(self) -> None:
        """Nothing more is read; what was read from connections gets some seconds to be recorded."""
        if self._server is not None:
            self._server.close()
        if self._datagrams is not None:
            self._datagrams.close()
        for writer in self._connections.values():
            writer.close()
        tasks = [*self._connections, *([self._drain] if self._drain is not None else [])]
        if self._connections:
            await asyncio.wait(self._connections, timeout=_STOP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= _CONNECTIONS:
            CONNECTIONS_REFUSED.labels("syslog").inc()
            writer.close()
            return
        self._connections[task] = writer
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            await self._serve(reader, str((writer.get_extra_info("peername") or ("-",))[0]))
        except (ConnectionError, ssl.SSLError, TimeoutError):
            pass  # the sender is gone, and what was read is recorded
        finally:
            del self._connections[task]
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, peer: str) -> None:
        framer, too_long = Framer(self._settings.message_bytes), 0
        while data := await reader.read(_READ_BYTES):
            messages = await computed(len(data), framer.feed, data)
            if framer.too_long > too_long:
                RECEIVED.labels("syslog", "too-large").inc(framer.too_long - too_long)
                too_long = framer.too_long
            if messages:
                await self._record(peer, messages)
        if last := framer.end():
            await self._record(peer, last)

    async def _record_datagrams(self, datagrams: Datagrams) -> None:
        while True:
            found = await datagrams.take()
            await asyncio.gather(*(self._record(peer, messages) for peer, messages in found.items()))

    async def _record(self, peer: str, messages: list[bytes]) -> None:
        """Returns when all of them are recorded, each sender's in order."""
        lines = await computed(_WORK_BYTES * len(messages), by_sender, peer, messages)
        await asyncio.gather(*(self._record_lines(name, of_name) for name, of_name in lines.items()))

    async def _record_lines(self, name: str, lines: list[bytes]) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                await self._append(name, lines)
            except (Problem, Malformed, KafkaError, TimeoutError) as error:
                problem = problem_of(error)
                RECEIVED.labels("syslog", problem.kind).inc(len(lines))
                await asyncio.sleep(max(pause_s, problem.retry_after_s or 0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                RECEIVED.labels("syslog", "recorded").inc(len(lines))
                return

    async def _append(self, name: str, lines: list[bytes]) -> None:
        appender, authorization = self._appender, self._authorization
        caller = self._gate.admit(Right.AGENT, {"Authorization": authorization} if authorization else {}, [])
        source_id = check_source_id(f"syslog/{caller.name or '-'}/{name}")
        source = SourceIdentity(full_topic(appender.config.dc, self._settings.topic), None, source_id)
        limit = min(CHUNK_BYTES, (await appender.bounds(caller, source)).data_bytes)
        pieces = joined([line[: limit - 1] for line in lines], limit)
        part = Part(source, [Chunk(0, None, None, {}, piece) for piece in pieces], None, len(lines))
        await appender.append(caller, authorization, part)
