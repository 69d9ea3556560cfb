"""Syslog on sockets → spool, a JSON line for each message.

Syslog has no acknowledgement: what was read and is not in the spool when the client is killed is lost, and so is what
is in the buffers of the system then. While the spool is full nothing is read from connections, so their senders wait.
Datagrams cannot wait: those without room are dropped and counted; the system drops further ones, and nobody counts.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from logferry.client.events import log_event
from logferry.client.inputs.counters import InputCounters
from logferry.client.inputs.listeners import Certificates, ListenAddress
from logferry.client.inputs.spool import Spool
from logferry.client.inputs.syslog_message import json_line
from logferry.gateway.contract.syslog_frames import Framer, is_blank

READ_BYTES = 1 << 16
CONNECTIONS = 1000  # each holds at most a message and a read
HANDSHAKE_S = 10.0
ACCEPT_AGAIN_S = 0.5
# A sender that was switched off is noticed after two minutes, so that it does not keep its connection.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class SyslogInput:
    """``sockets`` belong to ``addresses``. One thread serves all of them."""

    def __init__(
        self,
        spool: Spool,
        counters: InputCounters,
        addresses: Sequence[ListenAddress],
        message_bytes: int,
        certificates: Certificates | None,
    ) -> None:
        self._spool = spool
        self._counters = counters
        self._addresses = addresses
        self._limit = message_bytes
        self._certificates = certificates
        self._context = None if certificates is None else certificates.context()
        self._sockets: list[socket.socket] = []
        self._loop = asyncio.new_event_loop()
        self._room, self._end = self._loop.run_until_complete(_events())
        self._datagrams: list[asyncio.BaseTransport] = []
        self._servers: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=counters.guard(self._work), name="syslog", daemon=True)

    def start(self) -> None:
        """Raises OSError where it cannot listen."""
        for address in self._addresses:
            try:
                self._sockets.append(address.listen())
            except OSError as error:
                raise OSError(error.errno, f"{address.kind}://{address.host}: {error.strerror or error}") from None
        self._spool.on_room = self._has_room
        self._thread.start()

    def reload(self) -> None:
        """Reads the certificate again; it holds for new connections."""
        if self._certificates is None or self._context is None:
            return
        try:
            self._certificates.context()  # first into another one: this one stays usable
            self._context.load_cert_chain(self._certificates.cert, self._certificates.key)
        except OSError as error:
            log_event("credentials-unusable", file=self._certificates.cert, reason=error.strerror or error)
        else:
            log_event("credentials-read", file=self._certificates.cert)

    def close(self, timeout_s: float) -> None:
        """Nothing more is read; what was read is in the spool's memory."""
        if self._thread.ident is not None:
            self._call(lambda: self._end.set())
            self._thread.join(timeout_s)
        else:
            self._loop.close()
        for each in self._sockets:
            each.close()

    def _has_room(self) -> None:
        self._call(lambda: self._room.set())

    def _call(self, what: Callable[[], None]) -> None:
        """In the thread of the loop."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._failed)
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._loop.close()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What no task caught: a connection that fails is the sender's matter."""
        error = context.get("exception")
        if error is not None and not isinstance(error, (OSError, asyncio.CancelledError)):
            self._counters.defect = error

    async def _run(self) -> None:
        for address, each in zip(self._addresses, self._sockets):
            if each.type == socket.SOCK_DGRAM:
                datagrams = _Datagrams(self, address.kind == "unix")
                made = self._loop.create_datagram_endpoint(lambda datagrams=datagrams: datagrams, sock=each)  # type: ignore[misc]
                self._datagrams.append((await made)[0])
            else:
                self._begin(self._accept(each, self._context if address.kind == "tls" else None), self._servers)
        await self._end.wait()
        for transport in self._datagrams:
            transport.close()
        while tasks := (*self._servers, *self._connections):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # what was closed is closed now

    def _begin(self, work: Coroutine[Any, Any, None], kind: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        kind.add(task)
        task.add_done_callback(kind.discard)

    async def _accept(self, listener: socket.socket, secured: ssl.SSLContext | None) -> None:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(listener)
            except OSError:  # the sender is gone, or there are too many open files
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._connections) >= CONNECTIONS:  # those in their handshake, too
                self._counters.refused += 1
                connection.close()
            else:
                self._begin(self._connected(connection, str(peer[0]), secured), self._connections)

    async def _connected(self, connection: socket.socket, peer: str, secured: ssl.SSLContext | None) -> None:
        reader = asyncio.StreamReader(limit=READ_BYTES, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        handshake_s = HANDSHAKE_S if secured is not None else None
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=secured, ssl_handshake_timeout=handshake_s
            )
        except (OSError, EOFError, asyncio.CancelledError):  # garbage in place of a handshake is an OSError, too
            self._counters.refused += not self._end.is_set()
            connection.close()
            return
        try:
            await self._serve(reader, peer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the sender is gone, or the client ends; what was read is in the spool
        finally:
            transport.abort() if self._end.is_set() else transport.close()

    async def _serve(self, reader: asyncio.StreamReader, peer: str) -> None:
        framer, too_long = Framer(self._limit), 0
        while data := await reader.read(READ_BYTES):
            messages = framer.feed(data)
            self._counters.refused += framer.too_long - too_long
            too_long = framer.too_long
            if messages:
                await self._put(messages, peer)
        if last := framer.end():
            await self._put(last, peer)

    async def _put(self, messages: list[bytes], peer: str) -> None:
        received = _now()
        for message in messages:
            line = json_line(message, received, peer)
            while not self._spool.put(line):
                self._room.clear()
                if self._spool.put(line):
                    break
                await self._room.wait()
            self._counters.took(1, len(message))

    def take_datagram(self, message: bytes, peer: str, has_host: bool) -> None:
        """Takes it, or counts it."""
        if is_blank(message):
            return
        if len(message) > self._limit:
            self._counters.refused += 1
        elif self._spool.put(json_line(message, _now(), peer, has_host)):
            self._counters.took(1, len(message))
        else:
            self._counters.dropped += 1


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, to: SyslogInput, is_unix: bool) -> None:
        self._to = to
        self._is_unix = is_unix

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._to.take_datagram(data, "" if self._is_unix else str(addr[0]), not self._is_unix)


async def _events() -> tuple[asyncio.Event, asyncio.Event]:
    """Of the loop that runs this: Python 3.9 binds them to it when they are made."""
    return asyncio.Event(), asyncio.Event()


def _now() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
