"""`FakeGateway`: a gateway in the memory of a test, with faults. See *Test your program* in the guide of the library.

``tests/integration/client/test_fake_gateway.py`` holds its answers equal to those of a gateway with Kafka.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from logferry.client.reading.decode import ReceivedChunk
from logferry.client.reading.subscription import Position, ReadOffset
from logferry.client.testing import reader_calls, source_calls
from logferry.client.testing.call import Answer, FakeCall, FakeStore
from logferry.client.testing.server import FakeServer
from logferry.client.testing.stored import FakePartition, FakeTopic
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import Malformed, check_attributes, check_source_id, check_topic, full_topic
from logferry.gateway.errors import PROBLEMS, Problem

_Handle = Callable[[FakeStore, FakeCall], Answer]


def healthz(_store: FakeStore, _call: FakeCall) -> Answer:
    return Answer.of({"status": "alive"})


def readyz(_store: FakeStore, _call: FakeCall) -> Answer:
    return Answer.of({"status": "ready", "lanes": {"0": "serving"}})


_TOPIC, _SOURCE = "/v1/topics/*", "/v1/topics/*/sources/*"
_CONSUMER = "/v1/consumers/*"
_OPEN = (healthz, readyz)
# By path and method; the name of the function is that of the call.
_ROUTES: dict[str, dict[str, _Handle]] = {
    "/healthz": {"GET": healthz},
    "/readyz": {"GET": readyz},
    "/v1/topics": {"GET": source_calls.topics},
    _TOPIC: {"GET": source_calls.topic},
    _SOURCE: {"GET": source_calls.source},
    f"{_SOURCE}/session": {"POST": source_calls.session},
    f"{_SOURCE}/heartbeat": {"POST": source_calls.heartbeat},
    f"{_SOURCE}/chunks": {"POST": source_calls.write},
    f"{_TOPIC}/partitions/*/chunks": {"GET": reader_calls.read},
    f"{_TOPIC}/partitions/*/translate": {"GET": reader_calls.translate},
    f"{_CONSUMER}/stream": {"GET": reader_calls.stream},
    f"{_CONSUMER}/sessions/*/commit": {"POST": reader_calls.commit},
    f"{_CONSUMER}/offsets": {"GET": reader_calls.offsets},
}
CALLS = {handle.__name__ for methods in _ROUTES.values() for handle in methods.values()}


@dataclass
class _Fault:
    """Of so many requests of one call. ``after_bytes``: of the answer, the connection is cut; None: it is not."""

    call: str
    times: int
    problem: Problem | None = None
    is_dropped: bool = False
    after_bytes: int | None = None
    delay_s: float = 0.0


class FakeGateway:
    """A gateway on a free port of 127.0.0.1, with its state in memory. For ``with`` blocks, or `start` and `stop`.

    ``topics``: their short names, each with the number of its partitions. ``token``: what callers must present, None:
    nothing; it may be set at any time. ``chunk_bytes``: the largest chunk.

    A fault happens to the next ``times`` requests of a ``call``: ``write`` (of chunks), ``session``, ``heartbeat``,
    ``read``, ``stream``, ``commit``, ``topic`` and the others that the guide lists. Of several faults for one call, the
    first one is used up first. `heal` takes back what is left.
    """

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        *,
        dc: str = "dc1",
        token: str | None = None,
        chunk_bytes: int = 4 << 20,
    ) -> None:
        self.token = token
        self.requests: list[tuple[str, str]] = []  # method and path of each, with its query
        self._store = FakeStore(dc, chunk_bytes)
        self._faults: list[_Fault] = []
        self._port = 0
        self._stopping = threading.Event()
        self._server: FakeServer | None = None
        for topic, partitions in (topics or {}).items():
            self.create_topic(topic, partitions)

    # ---- life --------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The same after `stop` and `start`. Before the first `start`: empty."""
        return self._store.url

    def start(self) -> None:
        """Serves; what was written before is still there."""
        self._server = FakeServer(self._port, self._serve)
        self._port = self._server.server_address[1]
        self._stopping.clear()
        self._store.url, self._store.is_open = f"http://127.0.0.1:{self._port}", True
        self._server.start()

    def stop(self) -> None:
        """Cuts all connections, and refuses new ones. Returns when no thread of it is left."""
        if self._server is None:
            return
        self._stopping.set()
        with self._store.changed:
            self._store.is_open = False
            self._store.changed.notify_all()
        self._server.stop()
        self._server = None

    def __enter__(self) -> FakeGateway:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- what it holds -----------------------------------------------------------------------------------------

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Creates the topic, or gives it more partitions. Raises ValueError."""
        store, full = self._store, full_topic(self._store.dc, check_topic(name))
        if name.startswith(f"{store.dc}."):
            raise ValueError(f"the name {name} begins with the data centre {store.dc}; such names are reserved")
        with store.changed:
            found = store.topics.setdefault(full, FakeTopic(full))
            if partitions < max(len(found.partitions), 1):
                raise ValueError(f"{full} has {len(found.partitions)} partitions; their number cannot be reduced")
            found.partitions += [FakePartition() for _ in range(partitions - len(found.partitions))]
            for consumer in store.consumers.values():
                consumer.reassign()

    def chunks(self, topic: str, source_id: str | None = None) -> list[ReceivedChunk]:
        """The recorded chunks of the topic, or of one source, in the order of recording. Raises LookupError."""
        with self._store.changed:
            return [chunk for chunk in self._topic(topic).chunks if source_id in (None, chunk.source_id)]

    def write(
        self,
        topic: str,
        source_id: str,
        data: bytes,
        seqno: int | None = None,
        *,
        partition_key: str | None = None,
        created_ms: int | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> int:
        """Records a chunk, as if a program had written it before. Returns its seqno: without one the next.

        Raises ValueError for one that is recorded already, and LookupError for a topic that does not exist.
        """
        check_source_id(source_id)
        with self._store.changed:
            found, now_ms = self._topic(topic), self._store.now_ms()
            source = found.source(partition_key, source_id)
            number = (source.recorded or 0) + 1 if seqno is None else seqno
            chunk = Chunk(number, source.recorded, created_ms, check_attributes(dict(attributes or {})), bytes(data))
            fresh = source.take([chunk], source.session or None, now_ms)
            if not fresh:
                raise ValueError(f"seqno: {number} is not above {source.recorded}, which is recorded")
            found.record(source, fresh, now_ms)
            self._store.changed.notify_all()
        return number

    def positions(self, consumer: str) -> Position:
        """What the consumer has committed; empty: nothing."""
        with self._store.changed:
            known = self._store.consumers.get(consumer)
            return Position({tp: ReadOffset(offset) for tp, offset in known.committed.items()} if known else {})

    def _topic(self, name: str) -> FakeTopic:
        try:
            return self._store.topic(name)
        except Problem as problem:
            raise LookupError(problem.detail) from None

    # ---- faults ------------------------------------------------------------------------------------------------

    def refuse(
        self, kind: str, times: int = 1, *, call: str = "write", retry_after_s: float | None = None, **more: Any
    ) -> None:
        """Answers with a problem of this kind and does nothing; the kind says the status.

        ``retry_after_s``: in the header `Retry-After`, of 429 and 503 by default 1. ``more``: of the problem document.
        """
        if kind not in PROBLEMS:
            raise ValueError(f"kind: {kind!r} is none of {', '.join(PROBLEMS)}")
        problem = Problem(kind, f"the test wants {kind}", retry_after_s=retry_after_s, **more)
        if problem.status == 429 and retry_after_s is None:
            problem.retry_after_s = 1
        self._add(_Fault(call, times, problem))

    def drop_request(self, times: int = 1, *, call: str = "write") -> None:
        """Cuts the connection and does nothing."""
        self._add(_Fault(call, times, is_dropped=True))

    def drop_answer(self, times: int = 1, *, call: str = "write", after_bytes: int = 0) -> None:
        """Does what is asked for, and cuts the connection after so many bytes of the answer."""
        self._add(_Fault(call, times, after_bytes=after_bytes))

    def delay(self, seconds: float, times: int = 1, *, call: str = "write") -> None:
        """Waits before it does what is asked for."""
        self._add(_Fault(call, times, delay_s=seconds))

    def heal(self) -> None:
        """No more faults."""
        with self._store.changed:
            self._faults.clear()

    def _add(self, fault: _Fault) -> None:
        if fault.call not in CALLS:
            raise ValueError(f"call: {fault.call!r} is none of {', '.join(sorted(CALLS))}")
        with self._store.changed:
            self._faults.append(fault)

    def _next_fault(self, call: str) -> _Fault:
        with self._store.changed:
            for fault in self._faults:
                if fault.call == call and fault.times > 0:
                    fault.times -= 1
                    return fault
        return _Fault(call, 0)

    # ---- requests ----------------------------------------------------------------------------------------------

    def _serve(self, method: str, call: FakeCall) -> tuple[Answer | None, int | None]:
        """The answer, and after how many of its bytes the connection is cut. No answer: it is cut at once."""
        with self._store.changed:
            self.requests.append((method, call.target))
        methods, call.names = _found(call.target.partition("?")[0].split("/"))
        handle = methods.get(method)
        fault = self._next_fault("" if handle is None else handle.__name__)
        if self._stopping.wait(fault.delay_s) or fault.is_dropped:
            return None, None
        try:
            if handle is None:
                return _no_route(call.target, methods), None
            if fault.problem is not None:
                raise fault.problem
            if handle not in _OPEN:
                self._authenticate(call)
            call.parse_query()
            with self._store.changed:
                answer = handle(self._store, call)
                self._store.changed.notify_all()
            return answer, fault.after_bytes
        except Problem as problem:
            return Answer.refusing(problem, call.target), fault.after_bytes
        except Malformed as error:
            return Answer.refusing(Problem("bad-request", str(error)), call.target), fault.after_bytes
        except Exception:  # noqa: BLE001  the test sees it on standard error, the client as in the gateway
            traceback.print_exc()
            return Answer.refusing(Problem("internal", "the fake gateway failed"), call.target), None

    def _authenticate(self, call: FakeCall) -> None:
        scheme, _, presented = call.header("authorization").partition(" ")
        if self.token is not None and (scheme.lower(), presented.strip()) != ("bearer", self.token):
            raise Problem("unauthenticated", "a token is needed: send the header Authorization: Bearer <token>")


def _found(segments: list[str]) -> tuple[dict[str, _Handle], list[str]]:
    """The methods of the path, and the names in it."""
    for path, methods in _ROUTES.items():
        pattern = path.split("/")
        if len(pattern) == len(segments) and all(a in ("*", b) for a, b in zip(pattern, segments)):
            return methods, [b for a, b in zip(pattern, segments) if a == "*"]
    return {}, []


def _no_route(target: str, methods: dict[str, _Handle]) -> Answer:
    if not methods:
        path = target.partition("?")[0]
        return Answer.refusing(Problem("not-found", f"{path} is not part of the interface"), target)
    allowed = ", ".join(sorted(methods))
    answer = Answer.refusing(Problem("method-not-allowed", f"allowed here: {allowed}"), target)
    answer.headers["Allow"] = allowed
    return answer
