"""Connections to brokers for what is large: record batches are copied by the kernel alone.

aiokafka makes a connection and says who we are (TLS, SASL). Its way of reading and writing is then replaced, because it
copies each byte a dozen times: an answer is read into one buffer of its size here, and decoded where it lies; a request
is written as the pieces that it consists of.

What this module keeps:

* Requests to one broker are sent in the order in which they were asked, also those that wait for the connection.
* An answer is that of its request, by its number; a broker that answers anything else is hung up on.
* A connection that breaks fails all that is under way on it. The next request makes a new one.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar, Final, Protocol, TypeVar

from aiokafka import errors
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, create_conn

Piece = bytes | bytearray | memoryview

_SIZE: Final = struct.Struct(">i")
# Api, its version, the request's number, the length of the client's id.
_HEAD: Final = struct.Struct(">hhih")
_NO_TAGS: Final = b"\0"
# Nothing that is asked here may be answered by more; a fetch brings one batch over its limit at most.
_ANSWER_BYTES: Final = 1 << 30

_Answer_co = TypeVar("_Answer_co", covariant=True)


class Question(Protocol[_Answer_co]):
    """A request of a flexible version (KIP-482), and how its answer is read."""

    API_KEY: ClassVar[int]
    API_VERSION: ClassVar[int]

    def pieces(self) -> Iterable[Piece]:
        """What follows the header."""

    def read(self, answer: memoryview) -> _Answer_co:
        """``answer``: what follows the header."""


class Channels:
    """A connection to each broker that something is asked of. ``client`` knows where the brokers are."""

    def __init__(self, client: AIOKafkaClient, options: dict[str, Any], client_id: str, timeout_s: float) -> None:
        self._client, self._client_id, self._timeout_s = client, client_id, timeout_s
        self._options = {name: value for name, value in options.items() if name != "bootstrap_servers"}
        self._open: dict[tuple[int, str], _Channel] = {}
        self._locks: dict[tuple[int, str], asyncio.Lock] = {}

    async def ask(self, node: int, question: Question[_Answer_co], line: str = "") -> _Answer_co:
        """Asks once. Raises KafkaError: the broker does not answer, and may or may not have heard.

        ``line``: a connection of its own for each, since Kafka answers what is asked on one in order.
        """
        async with self._locks.setdefault((node, line), asyncio.Lock()):
            channel = self._open.get((node, line))
            if channel is None or channel.is_broken:
                channel = self._open[node, line] = await self._connect(node)
            answer = channel.ask(question)
        try:
            async with asyncio.timeout(self._timeout_s):
                return question.read(await answer)
        except TimeoutError:
            channel.hang_up()
            raise errors.RequestTimedOutError(f"broker {node} did not answer within {self._timeout_s:g} s") from None

    async def _connect(self, node: int) -> _Channel:
        broker = self._client.cluster.broker_metadata(node)
        try:
            if broker is None:
                raise errors.StaleMetadata(f"broker {node} is not known")
            connection = await create_conn(
                broker.host,
                broker.port,
                client_id=self._client_id,
                request_timeout_ms=int(self._timeout_s * 1000),
                **self._options,
            )
        except (OSError, TimeoutError, errors.KafkaError) as error:
            self._client.force_metadata_update()
            raise errors.NodeNotReadyError(f"broker {node} cannot be reached: {error!r}") from error
        return _Channel(connection, self._client_id, self._client.force_metadata_update)

    def hang_up(self) -> None:
        """What is under way is given up."""
        for channel in self._open.values():
            channel.hang_up()


class _Channel(asyncio.BufferedProtocol):
    """One connection, from when aiokafka has made it. ``on_lost`` is called when it breaks by itself."""

    def __init__(self, connection: AIOKafkaConnection, client_id: str, on_lost: Any) -> None:
        name = client_id.encode()
        self._name, self._name_size = name + _NO_TAGS, len(name)
        self._on_lost = on_lost
        self._asked: deque[tuple[int, asyncio.Future[memoryview]]] = deque()
        self._number = 0
        self.is_broken = False
        self._size = bytearray(_SIZE.size)
        self._answer: bytearray | None = None
        self._room = memoryview(self._size)
        # It is kept: it would close the transport when it is not needed any more.
        self._made_by = connection
        self._versions: dict[int, tuple[int, int]] = connection._versions
        self._transport: Any = connection._writer.transport
        connection._read_task.cancel()
        self._transport.set_protocol(self)

    def ask(self, question: Question[Any]) -> asyncio.Future[memoryview]:
        """Sends it, and returns where its answer will be."""
        least, most = self._versions.get(question.API_KEY, (0, -1))
        if not least <= question.API_VERSION <= most:
            needed = f"version {question.API_VERSION} of request {question.API_KEY}"
            raise errors.IncompatibleBrokerVersion(f"the broker does not know {needed}; it is too old")
        if self.is_broken:
            raise errors.KafkaConnectionError("the connection is broken")
        self._number = (self._number + 1) & 0x7FFFFFFF
        head = _HEAD.pack(question.API_KEY, question.API_VERSION, self._number, self._name_size) + self._name
        pieces = list(question.pieces())
        size = len(head) + sum(map(len, pieces))
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._asked.append((self._number, answer))
        self._transport.writelines([_SIZE.pack(size) + head, *pieces])
        return answer

    def hang_up(self) -> None:
        self._broken("it was hung up on")

    # ---- what the event loop calls ----------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._room = self._room[nbytes:]
        if len(self._room):
            return
        if self._answer is None:
            self._begins(*_SIZE.unpack(self._size))
        else:
            answer, self._answer = memoryview(self._answer), None
            self._room = memoryview(self._size)
            self._answered(answer)

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_broken:
            self._broken(repr(exc) if exc else "the broker closed it")
            self._on_lost()

    # -----------------------------------------------------------------------------------------------------------

    def _begins(self, size_bytes: int) -> None:
        if _SIZE.size < size_bytes <= _ANSWER_BYTES:
            self._answer = bytearray(size_bytes)
            self._room = memoryview(self._answer)
        else:
            self._broken(f"an answer of {size_bytes} bytes")

    def _answered(self, answer: memoryview) -> None:
        (number,) = _SIZE.unpack_from(answer)
        if self._asked and self._asked[0][0] == number:
            _, waiting = self._asked.popleft()
            if not waiting.done():
                waiting.set_result(answer[_past_tags(answer, _SIZE.size) :])
        else:
            self._broken(f"an answer to request {number}, which is not the next one")

    def _broken(self, why: str) -> None:
        self.is_broken = True
        self._transport.abort()
        self._made_by.close()
        asked, self._asked = self._asked, deque()
        for _, answer in asked:
            if not answer.done():
                answer.set_exception(errors.KafkaConnectionError(f"the connection broke: {why}"))


def _past_tags(raw: memoryview, at: int) -> int:
    count, at = _varint(raw, at)
    for _ in range(count):
        _, at = _varint(raw, at)
        size, at = _varint(raw, at)
        at += size
    return at


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
