"""The port that region servers ship to: one thread a connection reads calls, a pool of threads carries them out.

Memory is bounded: a call is read when there is room for all of it within ``memory_bytes``, and until then its
connection waits, which slows HBase down. A call of more than ``call_bytes`` is read past and refused with the setting
that makes it smaller. A connection that does not send the whole of a call in time is cut.

Every call is answered, as done or with the reason why it is not, unless its bytes are not HBase's: then the connection
is closed. HBase ships again what was not answered as done.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import NamedTuple

from logferry.client.events import log_event
from logferry.client.hbase import frames
from logferry.client.hbase.frames import RemoteCall
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.metrics import Figures

# So long for the opening of a connection, and for a call, which has more the larger it is.
_STALLED_S = 60.0
_SLOWEST_BYTES_S = 1 << 20
_MOST_CONNECTIONS = 1000
_PIECE_BYTES = 256 << 10
_STOPS = "the connector stops"
# A host that vanished is noticed after some minutes, so that its connections do not remain.
_KEEPALIVE = tuple(
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6))
    if hasattr(socket, name)
)


class ServerLimits(NamedTuple):
    """``threads``: calls that are carried out at a time."""

    call_bytes: int = 128 << 20
    memory_bytes: int = 256 << 20
    threads: int = 16


class CallRefused(Exception):
    """The call is answered with this text, and HBase ships it again."""


class _Room:
    """``left``: how many more bytes of calls can be held."""

    def __init__(self, bytes_: int) -> None:
        self.left, self._changed = bytes_, threading.Condition()

    def take(self, size: int) -> None:
        """Waits until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self.left >= size)
            self.left -= size

    def give(self, size: int) -> None:
        with self._changed:
            self.left += size
            self._changed.notify_all()


class _CutOff(Exception):
    """The other side is gone, or was silent for too long."""


class PeerServer:
    """``carry_out`` is called in a thread with a call; when it returns, the call is done. It may raise CallRefused and
    ForeignBytes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        carry_out: Callable[[RemoteCall], None],
        limits: ServerLimits,
        figures: Figures | None = None,
    ) -> None:
        """Listens. Raises OSError."""
        self._listener = socket.create_server((host, port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._carry_out, self._limits = carry_out, limits
        self._figures = figures or Figures()
        self._room = _Room(limits.memory_bytes)
        self._pool = ThreadPoolExecutor(limits.threads, "hbase-call")
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        return self._limits.memory_bytes - self._room.left

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="hbase-accept", daemon=True).start()

    def close(self) -> None:
        """Takes no more calls, waits for those that are carried out, and cuts the connections."""
        with self._lock:
            self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._pool.shutdown(wait=True)
        with self._lock:
            for link in self._connections:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                link, (host, port, *_) = self._listener.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(0.1)  # no file descriptor is free
                continue
            with self._lock:
                is_welcome = len(self._connections) < _MOST_CONNECTIONS and not self._is_closed
                if is_welcome:
                    self._connections.add(link)
            if not is_welcome:
                log_event("hbase-refused", who=f"{host}:{port}", reason=f"more than {_MOST_CONNECTIONS} connections")
                link.close()
                continue
            name = f"hbase-{host}:{port}"
            try:
                threading.Thread(target=self._serve, args=(link, f"{host}:{port}"), name=name, daemon=True).start()
            except RuntimeError as error:  # no thread can be had; the next connection may have one
                log_event("hbase-refused", who=f"{host}:{port}", reason=error)
                with self._lock:
                    self._connections.discard(link)
                link.close()

    def _serve(self, link: socket.socket, who: str) -> None:
        with closing(link):
            try:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    link.setsockopt(socket.IPPROTO_TCP, option, value)
                _Connection(link, who, self._room, self._limits, self._figures, self._submit).run()
            except _CutOff:
                pass
            except (ForeignBytes, OSError) as error:
                if not self._is_closed:
                    log_event("hbase-refused", who=who, reason=error)
            finally:
                with self._lock:
                    self._connections.discard(link)

    def _submit(self, connection: _Connection, call: RemoteCall, size: int, number: int) -> None:
        try:
            self._pool.submit(self._run, connection, call, size, number)
        except RuntimeError:  # the pool is shut down
            self._room.give(size)
            self._figures.call_ended(number, connection.who, _STOPS)
            connection.send(frames.failure(call.call_id, _STOPS))

    def _run(self, connection: _Connection, call: RemoteCall, size: int, number: int) -> None:
        why = ""
        try:
            if call.method != "ReplicateWALEntry":
                raise CallRefused(f"{call.method} is not served here: this is a replication peer")
            self._carry_out(call)
        except (CallRefused, ForeignBytes) as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  a defect: HBase must not wait for an answer that never comes
            why = repr(error)
        finally:
            self._room.give(size)
        self._figures.call_ended(number, connection.who, why)
        if why:
            log_event("hbase-call-failed", who=connection.who, reason=why)
        connection.send(frames.failure(call.call_id, why) if why else frames.answer(call.call_id))


class _Connection:
    """One region server's."""

    def __init__(
        self,
        link: socket.socket,
        who: str,
        room: _Room,
        limits: ServerLimits,
        figures: Figures,
        submit: Callable[[_Connection, RemoteCall, int, int], None],
    ) -> None:
        self.who = who
        self._link, self._room, self._limits, self._figures, self._submit = link, room, limits, figures, submit
        self._refusal: str | None = None
        self._deadline: float | None = None  # for what is read, monotonic; None: the other side may be silent
        self._sending = threading.Lock()

    def run(self) -> None:
        """Until the other side closes. Raises ForeignBytes, _CutOff, OSError."""
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_STALLED_S), 0))
        self._deadline = time.monotonic() + _STALLED_S
        frames.check_preamble(bytes(self._read(frames.PREAMBLE_BYTES)))
        size = self._length()
        if not 0 < size <= frames.MOST_HEADER_BYTES:
            raise ForeignBytes(f"a connection header of {size} bytes")
        self._refusal = frames.refusal_of(bytes(self._read(size)))
        if self._refusal:
            log_event("hbase-refused", who=self.who, reason=self._refusal)
        while True:
            self._deadline = None
            size = self._length()
            if size <= 0:
                raise ForeignBytes(f"a call of {size} bytes")
            if self._refusal or size > self._limits.call_bytes:
                self._refuse(size)
            else:
                self._take(size)

    def send(self, frame: bytes) -> None:
        """A connection that is gone is no error: HBase ships the call again. One that takes no answer is cut."""
        try:
            with self._sending:
                self._link.sendall(frame)
        except OSError:
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)

    def _take(self, size: int) -> None:
        came = time.monotonic()
        number = self._figures.call_came(came)
        self._room.take(size)
        try:
            self._deadline = time.monotonic() + _STALLED_S + size / _SLOWEST_BYTES_S
            call = frames.call_of(memoryview(self._read(size)), came)
        except BaseException as error:
            self._room.give(size)
            self._figures.call_ended(number, self.who, str(error) or "it was cut off")
            raise
        self._submit(self, call, size, number)

    def _refuse(self, size: int) -> None:
        """Reads past a call, and answers it."""
        self._deadline = time.monotonic() + _STALLED_S + size / _SLOWEST_BYTES_S
        start = self._read(min(size, frames.MOST_CALL_HEADER_BYTES))
        left = size - len(start)
        while left:
            left -= len(self._read(min(left, _PIECE_BYTES)))
        why = self._refusal or (
            f"a call of {size} bytes, and at most {self._limits.call_bytes} are taken: lower "
            "replication.source.size.capacity of the region servers, or raise --call-mb"
        )
        if not self._refusal:
            log_event("hbase-refused", who=self.who, reason=why)
        call_id = frames.call_id_of(memoryview(start))
        if call_id is None:
            raise ForeignBytes(f"a call of {size} bytes without a header")
        self._figures.call_ended(self._figures.call_came(time.monotonic()), self.who, why)
        self.send(frames.failure(call_id, why))

    def _length(self) -> int:
        found: int = frames.LENGTH.unpack(self._read(frames.LENGTH.size))[0]
        return found

    def _read(self, size: int) -> bytearray:
        """So many bytes. Their memory is taken as they come, not as they are announced."""
        data = bytearray()
        while len(data) < size:
            try:
                if self._deadline is not None and self._deadline <= time.monotonic():
                    raise TimeoutError
                self._link.settimeout(None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001))
                piece = self._link.recv(min(size - len(data), _PIECE_BYTES))
            except TimeoutError:
                raise ForeignBytes(f"{len(data)} of {size} bytes in the time for them: too slow, or silent") from None
            except ConnectionError:
                raise _CutOff from None
            if not piece:
                raise _CutOff
            data += piece
        return data
