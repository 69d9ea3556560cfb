"""`Reader`: the chunks of topics, for programs. `ReaderCore` decides; here are the threads, which fetch a little ahead.

They carry out the steps of the core under one lock, and requests outside of it.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from logferry.client.errors import LogferryError
from logferry.client.reading.decode import Line, ReceivedChunk, best_decoder
from logferry.client.reading.reader_core import Ask, HoldSession, ReaderCore, StartWorkers, Step, Steps, Wait
from logferry.client.reading.requests import ReaderRequest, ReaderRequests, RetryLater, error_of, page_of
from logferry.client.reading.subscription import SILENCE_S, Cursors, Partition, Position, ReaderOptions, topics_of
from logferry.client.transport.cluster import Token, cluster_of, deadline_of
from logferry.client.transport.connections import Dialer, Reply, TlsFiles, cut, proxies_of

_JOIN_S = 1.0
_READ_BYTES = 256 << 10
_T = TypeVar("_T")
_Revoked = TypeVar("_Revoked")


class ReaderFace(ABC, Generic[_Revoked]):
    """The arguments of `Reader` and `AsyncReader`. ``_Revoked``: what ``on_revoked`` returns."""

    def __init__(
        self,
        urls: str | Iterable[str],
        topic: str | Iterable[str],
        *,
        consumer: str | None = None,
        start: str | datetime | Position = "earliest",
        partitions: Iterable[int] | None = None,
        source_prefix: str = "",
        attributes: Mapping[str, str] | None = None,
        follow: bool = True,
        max_chunks: int | None = None,
        token: Token = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        gzip: bool = False,
        page_bytes: int = 1 << 20,
        connections: int = 8,
        drop_copies: bool = True,
        on_revoked: Callable[[], _Revoked] | None = None,
    ) -> None:
        """Raises ValueError, and what `_prepare` does."""
        options = ReaderOptions(
            cluster_of(urls, token), topics_of(topic), consumer, start,
            None if partitions is None else frozenset(partitions), source_prefix, dict(attributes or {}),
            follow=follow, max_chunks=max_chunks, gzip=gzip, page_bytes=page_bytes, connections=connections,
        )  # fmt: skip
        self._on_revoked = on_revoked
        self._core = ReaderCore(options, drop_copies, self._prepare(options, TlsFiles(ca_file, cert_file, key_file)))

    @abstractmethod
    def _prepare(self, options: ReaderOptions, files: TlsFiles) -> Callable[[], None]:
        """The face's own parts. Returns what wakes all that wait."""


class Reader(ReaderFace[None]):
    """Iterates over the chunks of topics, each partition in order. For one thread.

    * Without a ``consumer`` it reads all partitions from ``start`` on, and the program stores `position` beside its
      output.
    * With a ``consumer`` it shares the partitions with that consumer's other readers. It resumes where the consumer has
      committed (where nothing is committed, at ``start``), and `commit` marks all delivered chunks as done.
    * After lost connections and while a gateway is away it retries, and resumes behind the last delivered chunk:
      nothing is left out, nothing comes twice. It raises what it cannot repair: `OutOfRange`, `Rejected`.
    * A forked process must open readers of its own: those of its parent raise `Closed`.

    ``urls``: workers of one data centre, the preferred one first. ``topic``: one or several, in full (``dc1.nginx``) or
    without the data centre; with a consumer also patterns (``*.nginx``). ``start``: ``earliest``, ``latest``, a time
    with its zone, a `Position` or `Cursors`, or the text of one; partitions that a position does not name are read from
    their beginning. ``partitions``: only these. ``source_prefix``, ``attributes``: only chunks of such sources, with
    such attributes. ``follow``: wait for more chunks; else reading ends where each topic ended when it began.
    ``max_chunks``: end after so many. ``token``: one that may read the topics, or a function that returns it.
    ``ca_file``: a PEM file with the authority of the gateways' certificates; None: the system's. ``cert_file``,
    ``key_file``: PEM files with the certificate that the reader shows, and its key. ``gzip``: compress responses, for
    slow links. The reader holds at most ``connections`` pages of about ``page_bytes`` each. ``drop_copies``: if a
    source has moved to another data centre, a chunk that is in two topics of the same name comes once. It is identified
    by source id and seqno, so switch this off where one source id is used with several partition keys. ``on_revoked``:
    called before partitions move to another reader; what it commits within a second does not come again.
    """

    def _prepare(self, options: ReaderOptions, files: TlsFiles) -> Callable[[], None]:
        """Raises OSError if a file cannot be used."""
        self._dialer = Dialer(files.ca_file, (), proxies_of(os.environ), files.cert_file, files.key_file)
        self._requests = ReaderRequests(options, self._dialer)
        # Taken by itself: a Condition that is interrupted in its own `__enter__` stays locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._cuts: list[Callable[[], None]] = [self._requests.cut]
        self._threads: list[threading.Thread] = []
        return self._changed.notify_all

    def __enter__(self) -> Reader:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, timeout_s: float | None = None) -> None:
        """Finds the topics and where to begin; the first `read` calls it. Calling it again is safe.

        Raises `Rejected`, and `Unknown` after ``timeout_s`` (None: waits without limit).
        """
        self._run(self._core.opening(deadline_of(timeout_s)))

    def __iter__(self) -> Iterator[ReceivedChunk]:
        return self

    def __next__(self) -> ReceivedChunk:
        chunk = self.read()
        if chunk is None:
            raise StopIteration
        return chunk

    def read(self, timeout_s: float | None = None) -> ReceivedChunk | None:
        """The next chunk. None at the end (``follow=False``, ``max_chunks``), or if none comes within ``timeout_s``.

        Raises `OutOfRange` if retention has deleted the position, `Rejected`, and `Closed`.
        """
        chunk = self._run(self._core.next_chunk(deadline_of(timeout_s)))
        if chunk is not None:
            self._core.deliver(chunk)
        return chunk

    def lines(self) -> Iterator[Line]:
        """The lines of the chunks, one by one. `position` counts them: a restart resumes with the next line."""
        while (chunk := self._run(self._core.next_chunk(None))) is not None:
            yield from self._core.lines_of(chunk)

    @property
    def position(self) -> Position:
        """Where to resume after what was delivered. Store its `str`; the offsets are valid in this data centre.

        Empty before `open`.
        """
        self._core.process.check()
        with self._lock:
            return self._core.position

    def cursors(self, timeout_s: float | None = None) -> Cursors:
        """`position` for all data centres: a reader elsewhere that has it as ``start`` resumes with the next chunk.

        Asks the gateway. Raises `Rejected` for a topic that no mirror brought here, and `Unknown` after ``timeout_s``.
        """
        return self._run(self._core.cursors(deadline_of(timeout_s)))

    def translate(
        self, topic: str, partition: int, offset: int, from_dc: str, to_dc: str, timeout_s: float | None = None
    ) -> int:
        """The offset of the same record in another data centre.

        ``topic``: in full. One of the data centres is where the topic is written, the other is where this reader reads.
        Waits for a record that is not mirrored yet. Raises `Rejected` for a topic that no mirror brought here, and
        `Unknown` after ``timeout_s``.
        """
        return self._run(self._core.translate((topic, partition), offset, from_dc, to_dc, deadline_of(timeout_s)))

    def lag(self, timeout_s: float | None = None) -> dict[Partition, int | None]:
        """For each partition in `position`, how many offsets lie between it and the end; None: it has no leader.

        Asks the gateway. Transactions leave offsets without chunks, so it may count a few too many. Raises `Rejected`,
        and `Unknown` after ``timeout_s``.
        """
        return self._run(self._core.lags(deadline_of(timeout_s)))

    def seek(self, to: str | Position, timeout_s: float | None = None) -> None:
        """Reads each partition that the position names from there on, forwards or backwards; the others stay.

        Between two chunks, or lines: a loop over `lines` continues with those of the new position. Opens if need be.
        Raises ValueError for a reader with a consumer, and for a partition that is not read.
        """
        self._run(self._core.seeking(to, deadline_of(timeout_s)))

    def pause(self, partitions: Iterable[Partition] | None = None, timeout_s: float | None = None) -> None:
        """Nothing of the partitions (None: of all) is delivered before `resume`. What was fetched ahead is dropped.

        Opens if need be. Raises as `seek` does.
        """
        self._run(self._core.pausing(partitions, True, deadline_of(timeout_s)))

    def resume(self, partitions: Iterable[Partition] | None = None, timeout_s: float | None = None) -> None:
        """Ends the pause of the partitions; None: of all. Calling it again is safe."""
        self._run(self._core.pausing(partitions, False, deadline_of(timeout_s)))

    @property
    def is_over(self) -> bool:
        """No more chunks will come: the end, or ``max_chunks``, is reached."""
        self._core.process.check()
        with self._lock:
            return self._core.is_over

    def commit(self, timeout_s: float | None = None) -> None:
        """Commits `position` for the consumer: all delivered chunks count as done. Calling it again is safe.

        Raises `Superseded` if partitions belong to another reader by now (the others are committed, and the chunks of
        those come again there), `Unknown` after ``timeout_s``, and ValueError for a reader without a consumer.
        """
        self._run(self._core.commit(deadline_of(timeout_s)))

    def close(self) -> None:
        """Ends the requests under way and commits nothing. Calling it again is safe."""
        if not self._core.process.is_here:
            return  # its connections are those of the parent
        with self._lock:
            self._core.is_closed = True
            self._core.notify()
            cuts = list(self._cuts)
        for end in cuts:
            end()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._requests.close()

    # ---- steps -----------------------------------------------------------------------------------------------

    def _run(self, steps: Steps[_T], requests: ReaderRequests | None = None) -> _T:
        """The result of the steps, each carried out outside of the lock. Raises what they raise.

        ``requests``: those of a thread; None: of the caller.
        """
        self._core.process.check()
        advance: Callable[[], Step] = partial(next, steps)
        try:
            while True:
                with self._lock:
                    step = advance()
                    while isinstance(step, Wait):
                        self._changed.wait(step.seconds)
                        step = next(steps)
                try:
                    advance = partial(steps.send, self._carry_out(step, requests or self._requests))
                except (RetryLater, LogferryError) as error:
                    advance = partial(steps.throw, error)
        except StopIteration as result:
            found: _T = result.value
            return found

    def _carry_out(self, step: Step, requests: ReaderRequests) -> Any:
        if isinstance(step, Ask):
            reply = requests.ask(*step)
            return page_of(reply) if step.is_page else reply
        if isinstance(step, HoldSession):
            return self._hold(step.topics, requests)
        if isinstance(step, StartWorkers):
            return self._start(step.workers)
        return self._on_revoked and self._on_revoked()

    def _start(self, workers: Sequence[Steps[None]]) -> None:
        for number, worker in enumerate(workers):
            name = f"logferry-reader-{number}"
            thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _hold(self, topics: list[str], requests: ReaderRequests) -> None:
        """Feeds the core with a session, over a connection of its own, to its end, or until the core has enough.

        Raises `RetryLater`, and errors for the caller.
        """
        decoder, options = best_decoder(), self._core.options
        request = ReaderRequest(options, options.stream_path(topics), is_stream=True)
        parts = urlsplit(request.url)
        connection = self._dialer.connection(parts)
        try:
            with self._cutting(partial(cut, connection)):
                target, more = self._dialer.request_to(parts)
                connection.connect()
                connection.sock.settimeout(SILENCE_S)
                connection.request("GET", target, headers={**request.headers, **more})
                response = connection.getresponse()
                if response.status != 200:
                    headers = {name.lower(): value for name, value in response.getheaders()}
                    reply = Reply(response.status, headers, response.read(_READ_BYTES), time.time())
                    raise error_of(request.answered(reply))
                while data := response.read1(_READ_BYTES):
                    if not self._run(self._core.feeding(list(decoder.feed(data))), requests):
                        break
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise request.failed(f"{request.base}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _work(self, worker: Steps[None]) -> None:
        """In a thread. What it raises is the reader's failure."""
        requests = ReaderRequests(self._core.options, self._dialer)
        try:
            with self._cutting(requests.cut):
                self._run(worker, requests)
        except Exception as error:  # noqa: BLE001  the caller must hear of it, of a defect, too
            with self._lock:
                self._core.fail(error)
        finally:
            requests.close()

    @contextmanager
    def _cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `close` calls ``cut``, and waits for the network end."""
        with self._lock:
            self._cuts.append(cut)
        try:
            yield
        finally:
            with self._lock:
                self._cuts.remove(cut)
