"""`AsyncWriter`: `Writer` for asyncio, on aiohttp. The same words, the same decisions (`Window`); tasks for threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType

import aiohttp
from logferry.client.aio import requests
from logferry.client.errors import Closed, Full, Unknown
from logferry.client.gateways import cluster_of
from logferry.client.writing.requests import target
from logferry.client.writing.send_window import Job, Limits, Window
from logferry.client.writing.writer import LEFT_BY_ERROR_S


class AsyncWriter:
    """See `Writer`, which says what is guaranteed and what each argument means. For the tasks of one event loop.

    A call that is cancelled has done nothing, or all of it: a chunk that `write` took is sent.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        topic: str,
        source_id: str,
        *,
        partition_key: str | None = None,
        token: str | None = None,
        attributes: Mapping[str, str] | None = None,
        gzip: bool = False,
        ca_file: str | None = None,
        batch_bytes: int = 1 << 20,
        buffer_bytes: int = 16 << 20,
        in_flight: int = 4,
    ) -> None:
        """Raises ValueError."""
        self._attributes = dict(attributes or {})
        self._target = target(cluster_of(urls, token), topic, source_id, partition_key, gzip, self._attributes)
        self._ca_file = ca_file
        self._window = Window(Limits(batch_bytes, buffer_bytes=buffer_bytes, in_flight=in_flight))
        self._http: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._work: asyncio.Future[None] | None = None
        self._progress: asyncio.Future[None] | None = None
        self._is_closed = False

    async def __aenter__(self) -> AsyncWriter:
        try:
            await self.open()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close(LEFT_BY_ERROR_S)
        except Exception:  # noqa: BLE001  the error that is on its way already says more
            return

    async def open(self, timeout_s: float | None = None) -> None:
        """Opens the session; does nothing where it is open. Raises `Rejected`, and `Unknown` after ``timeout_s``."""
        await self._open(_deadline(timeout_s))

    @property
    def recorded_seqno(self) -> int | None:
        """As `Writer.recorded_seqno`, but it does not open: None before `open`, too."""
        return self._window.recorded

    async def write(
        self,
        data: bytes,
        seqno: int | None = None,
        *,
        created_ms: int | None = None,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As `Writer.write`. Tasks that wait for room may get it in any order: give seqnos from one task only."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"data: bytes are needed, not {type(data).__name__}; text wants .encode()")
        deadline = _deadline(timeout_s)
        data = bytes(data)
        more = self._attributes if not attributes else {**self._attributes, **attributes}
        try:
            await self._open(deadline)
        except Unknown as unknown:
            raise Full(str(unknown)) from None
        while not self._window.has_room(len(data)):
            if not await self._wait(deadline):
                raise Full(f"no room for {len(data)} bytes within {timeout_s} s; {self._window.told()}")
        self._check()
        seqno = self._window.put(data, seqno, int(time.time() * 1000) if created_ms is None else created_ms, more)
        if self._window.is_wanting:
            self._tell_work()
        return seqno

    async def flush(self, timeout_s: float | None = None) -> None:
        """Returns when everything that was written before is recorded. Raises `Unknown` after ``timeout_s``."""
        await self._flush(_deadline(timeout_s))

    async def close(self, timeout_s: float | None = None) -> None:
        """`flush`, and the end. Raises what `flush` does: then what is not recorded is given up. Calling it again is
        safe."""
        try:
            if not self._is_closed:
                await self._flush(_deadline(timeout_s))
        finally:
            await self._end()

    async def _end(self) -> None:
        self._is_closed = True
        self._tell_progress()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"the writer of {self._target.source_id} is closed")
        error = self._window.error()
        if error is not None:
            raise error

    async def _wait(self, deadline: float | None) -> bool:
        """False: the time is over. Raises what has ended the writer meanwhile."""
        self._check()
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        if self._progress is None:
            self._progress = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._progress], timeout=left)
        self._check()
        return True

    async def _open(self, deadline: float | None) -> None:
        self._check()
        if not self._tasks:
            self._http = requests.session(self._ca_file)
            self._tasks = [asyncio.create_task(self._carry(self._http)) for _ in range(self._window.limits.in_flight)]
        while self._window.session is None:
            if not await self._wait(deadline):
                raise self._window.unknown("the session could not be opened in time")

    async def _flush(self, deadline: float | None) -> None:
        self._check()
        wanted = self._window.put_count
        while self._window.settled_count < wanted:
            if not await self._wait(deadline):
                raise self._window.unknown("not everything was recorded in time")

    # ---- in the tasks ----------------------------------------------------------------------------------------

    async def _carry(self, http: aiohttp.ClientSession) -> None:
        try:
            while not self._is_closed:
                now = time.monotonic()
                job = self._window.next_job(now)
                if job is None:
                    await self._rest(now)
                    continue
                trip, headers, body = self._target.request(job)
                sent = partial(self._sent, job)
                outcome = self._target.learned(job, await requests.travel(http, trip, headers, body, sent))
                self._window.take(job, outcome, time.monotonic())
                self._tell_progress()
                self._tell_work()
        except Exception as error:  # noqa: BLE001  a defect: whoever waits must hear of it
            self._window.break_off(repr(error))
            self._tell_progress()

    def _sent(self, job: Job) -> None:
        self._window.sent(job)
        self._tell_work()

    async def _rest(self, now: float) -> None:
        """Until there is something to do, perhaps."""
        due = self._window.due()
        if self._work is None:
            self._work = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._work], timeout=None if due is None else max(due - now, 0.0))

    def _tell_work(self) -> None:
        work, self._work = self._work, None
        if work is not None and not work.done():
            work.set_result(None)

    def _tell_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None and not progress.done():
            progress.set_result(None)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
