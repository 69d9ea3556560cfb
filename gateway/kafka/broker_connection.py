"""Connections to brokers for large requests and answers: only the kernel copies record batches.

aiokafka opens a connection and authenticates (TLS, SASL). Its reading and writing are then replaced, because it copies
each byte a dozen times: here an answer is read into one buffer of its size and decoded in place; a request is written
as the pieces that it consists of.

Invariants:

* Requests to one broker are sent in the order of the calls, also those that wait for the connection.
* An answer is matched to its request by its number; a broker that sends any other number is disconnected.
* A connection that breaks fails all requests in flight on it. The next request opens a new one.
* Where a quota of Kafka is exceeded, an answer says for how long the broker reads no more from its connection. Nothing
  is sent to it meanwhile, and the time-outs of requests in flight start after it: the broker is not silent.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Protocol, TypeVar

from aiokafka import errors
from logferry.gateway.contract.varint import read_tags
from logferry.gateway.kafka.aiokafka_internals import AIOKafkaClient, AIOKafkaConnection, create_conn, take_over
from logferry.gateway.kafka.types import Piece

_SIZE: Final = struct.Struct(">i")
# Api, its version, the request's number, the length of the client's id.
_HEAD: Final = struct.Struct(">hhih")
_NO_TAGS: Final = b"\0"
# The limit of an answer; a fetch exceeds its own limit by one batch at most.
_ANSWER_BYTES: Final = 1 << 30

_Answer_co = TypeVar("_Answer_co", covariant=True)


class Question(Protocol[_Answer_co]):
    """A request of a flexible version (KIP-482), and the decoder of its answer.

    ``throttle_ms``: the pause that the answer asks for (KIP-219), once it was read.
    """

    API_KEY: ClassVar[int]
    API_VERSION: ClassVar[int]
    throttle_ms: int

    def pieces(self) -> Iterable[Piece]:
        """What follows the header."""

    def read(self, answer: memoryview) -> _Answer_co:
        """``answer``: what follows the header."""


class BrokerConnections:
    """One connection to each broker that is used. ``client`` knows the addresses of the brokers.

    ``losses``: the connections that broke by themselves; a broker may have been away, and another the leader.
    ``throttled_s``: the pauses that answers asked for.
    """

    def __init__(self, client: AIOKafkaClient, options: dict[str, Any], client_id: str, timeout_s: float) -> None:
        self._client, self._client_id, self._timeout_s = client, client_id, timeout_s
        self._options = {name: value for name, value in options.items() if name != "bootstrap_servers"}
        self._open: dict[tuple[int, str], _BrokerConnection] = {}
        self._locks: dict[tuple[int, str], asyncio.Lock] = {}
        self.losses = 0
        self.throttled_s = 0.0

    async def ask(self, node: int, question: Question[_Answer_co], line: str = "") -> _Answer_co:
        """Sends the request once. Raises KafkaError without an answer; the broker may have executed it.

        ``line``: each has a connection of its own, since Kafka answers the requests of one connection in order.
        """
        async with self._locks.setdefault((node, line), asyncio.Lock()):
            channel = self._open.get((node, line))
            if channel is None or channel.is_broken:
                channel = self._open[node, line] = await self._connect(node)
            await channel.rested()
            answer = channel.ask(question)
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                channel.clocks.add(clock)
                try:
                    found = question.read(await answer)
                finally:
                    channel.clocks.discard(clock)
            if question.throttle_ms > 0:
                self.throttled_s += question.throttle_ms / 1000
                channel.rest(question.throttle_ms / 1000, self._timeout_s)
            return found
        except TimeoutError:
            channel.abort()
            raise errors.RequestTimedOutError(f"broker {node} did not answer within {self._timeout_s:g} s") from None

    async def _connect(self, node: int) -> _BrokerConnection:
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
        return _BrokerConnection(connection, self._client_id, self._lost)

    def _lost(self) -> None:
        self.losses += 1
        self._client.force_metadata_update()

    def abort(self) -> None:
        for channel in self._open.values():
            channel.abort()


class _BrokerConnection(asyncio.BufferedProtocol):
    """One connection that aiokafka has opened. ``on_lost`` is called when it breaks by itself.

    ``clocks``: of the requests in flight.
    """

    def __init__(self, connection: AIOKafkaConnection, client_id: str, on_lost: Callable[[], None]) -> None:
        name = client_id.encode()
        self._name, self._name_size = name + _NO_TAGS, len(name)
        self._on_lost = on_lost
        self._asked: deque[tuple[int, asyncio.Future[memoryview]]] = deque()
        self._number = 0
        self.clocks: set[asyncio.Timeout] = set()
        self._rests_until_s = 0.0
        self.is_broken = False
        self._size = bytearray(_SIZE.size)
        self._answer: bytearray | None = None
        self._room = memoryview(self._size)
        # A reference is kept: without one aiokafka closes the transport.
        self._made_by = connection
        self._versions, self._transport = take_over(connection)
        self._transport.set_protocol(self)

    def ask(self, question: Question[Any]) -> asyncio.Future[memoryview]:
        """Sends the request and returns the future of its answer."""
        least, most = self._versions.get(question.API_KEY, (0, -1))
        if not least <= question.API_VERSION <= most:
            needed = f"version {question.API_VERSION} of request {question.API_KEY}"
            raise errors.IncompatibleBrokerVersion(f"the broker is too old: it does not know {needed}")
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

    def abort(self) -> None:
        self._broken("it was aborted")

    def rest(self, seconds: float, timeout_s: float) -> None:
        """The broker reads nothing for so long; it answers what is in flight within the time-out after that."""
        self._rests_until_s = max(self._rests_until_s, asyncio.get_running_loop().time() + seconds)
        for clock in self.clocks:
            clock.reschedule(self._rests_until_s + timeout_s)

    async def rested(self) -> None:
        """Returns when the broker reads again."""
        pause_s = self._rests_until_s - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
            await self.rested()

    # ---- what the event loop calls ----------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._room = self._room[nbytes:]
        if len(self._room):
            return
        if self._answer is None:
            (size_bytes,) = _SIZE.unpack(self._size)
            if not _SIZE.size < size_bytes <= _ANSWER_BYTES:
                self._broken(f"an answer of {size_bytes} bytes")
                return
            self._answer = bytearray(size_bytes)
            self._room = memoryview(self._answer)
        else:
            answer, self._answer = memoryview(self._answer), None
            self._room = memoryview(self._size)
            self._answered(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_broken:
            self._broken(repr(exc) if exc else "the broker closed it")
            self._on_lost()

    def _answered(self, answer: memoryview) -> None:
        (number,) = _SIZE.unpack_from(answer)
        if self._asked and self._asked[0][0] == number:
            _, waiting = self._asked.popleft()
            if not waiting.done():
                waiting.set_result(answer[read_tags(answer, _SIZE.size)[1] :])
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
