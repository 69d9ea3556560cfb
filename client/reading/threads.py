"""The threads of a `Reader`: they carry out the steps of `ReaderCore` under one lock, and requests outside of it."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from logferry.client.errors import LogferryError
from logferry.client.reading.decode import best_decoder
from logferry.client.reading.group_membership import has_news
from logferry.client.reading.reader_core import Ask, FetchPage, HoldSession, ReaderCore, Step, Steps, Wait
from logferry.client.reading.requests import ReaderRequests, RetryLater, reader_request
from logferry.client.reading.start_positions import page_of, page_path
from logferry.client.reading.subscription import SILENCE_S, ReaderOptions
from logferry.client.transport.connections import Reply, cut
from logferry.client.transport.dialer import Dialer

_JOIN_S = 1.0
_READ_BYTES = 256 << 10
_T = TypeVar("_T")


class SessionStream:
    """The stream of one session, over a connection of its own. Another thread may `cut` it."""

    def __init__(self, options: ReaderOptions, dialer: Dialer) -> None:
        self._options, self._dialer = options, dialer
        self._connection: http.client.HTTPConnection | None = None
        self._is_cut = False

    def cut(self) -> None:
        self._is_cut = True
        cut(self._connection)

    def hold(self, topics: list[str], feed: Callable[[list[Any]], bool]) -> bool:
        """Hands the frames to ``feed`` until that returns False, or to the session's end.

        Returns whether there was more than an opening. Raises `RetryLater`, and errors for the caller.
        """
        decoder = best_decoder()
        request = reader_request(self._options, self._options.stream_path(topics), None, decoder.media_type)
        parts = urlsplit(request.url)
        has_begun = False
        self._connection = connection = self._dialer.connection(parts)
        try:
            target, more = self._dialer.request_to(parts)
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
            connection.request("GET", target, headers={**request.headers, **more})
            response = connection.getresponse()
            if response.status != 200:
                headers = {name.lower(): value for name, value in response.getheaders()}
                raise request.refused(Reply(response.status, headers, response.read(_READ_BYTES), time.time()))
            while not self._is_cut and (data := response.read1(_READ_BYTES)):
                frames = list(decoder.feed(data))
                has_begun = has_begun or has_news(frames)
                if not feed(frames):
                    break
        except (OSError, http.client.HTTPException, ValueError) as error:
            again = request.failed(f"{request.base}: {error or type(error).__name__}")
            if not has_begun:
                raise again from None
        finally:
            connection.close()
        return has_begun


class ReaderThreads:
    """``changed``: the one lock, notified whenever something has changed."""

    def __init__(self, dialer: Dialer, on_revoked: Callable[[], None]) -> None:
        self.changed = threading.Condition(threading.Lock())
        self._dialer = dialer
        self._on_revoked = on_revoked
        self._cuts: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []

    def run(self, core: ReaderCore, steps: Steps[_T], requests: ReaderRequests) -> _T:
        """The result of the steps. Raises what they raise."""
        advance: Callable[[], Step] = partial(next, steps)
        try:
            while True:
                with self.changed:
                    step = advance()
                    while isinstance(step, Wait):
                        self.changed.wait(step.seconds)
                        step = next(steps)
                try:
                    advance = partial(steps.send, self._carry_out(step, core, requests))
                except (RetryLater, LogferryError) as error:
                    advance = partial(steps.throw, error)
        except StopIteration as result:
            found: _T = result.value
            return found

    def _carry_out(self, step: Step, core: ReaderCore, requests: ReaderRequests) -> Any:
        if isinstance(step, Ask):
            return requests.ask(*step)
        if isinstance(step, FetchPage):
            return page_of(requests.ask(page_path(core.options, step.request), accept=True))
        if isinstance(step, HoldSession):
            stream = SessionStream(core.options, self._dialer)
            with self.cutting(stream.cut):
                return stream.hold(step.topics, lambda frames: self.run(core, core.feeding(frames), requests))
        return self._on_revoked()

    def start(self, core: ReaderCore, workers: Sequence[Steps[None]]) -> None:
        """A thread for each. What a worker raises is the reader's failure."""
        for number, worker in enumerate(workers):
            name = f"logferry-reader-{number}"
            thread = threading.Thread(target=self._work, args=(core, worker), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, core: ReaderCore, worker: Steps[None]) -> None:
        requests = ReaderRequests(core.options, self._dialer)
        try:
            with self.cutting(requests.cut):
                self.run(core, worker, requests)
        except Exception as error:  # noqa: BLE001  the caller must hear of it, of a defect, too
            with self.changed:
                core.fail(error)
        finally:
            requests.close()

    @contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `close` calls ``cut``, and waits for the network end."""
        with self.changed:
            self._cuts.append(cut)
        try:
            yield
        finally:
            with self.changed:
                self._cuts.remove(cut)

    def close(self, core: ReaderCore) -> None:
        with self.changed:
            core.is_closed = True
            self.changed.notify_all()
            cuts = list(self._cuts)
        for end in cuts:
            end()
        for thread in self._threads:
            thread.join(_JOIN_S)
