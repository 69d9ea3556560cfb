"""`AsyncWriter`: `Writer` for asyncio, on aiohttp. `SendWindow` and `WriterCore` decide; here are the tasks."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import aiohttp
from logferry.client.aio import requests
from logferry.client.errors import LogferryError
from logferry.client.transport.cluster import deadline_of
from logferry.client.transport.connections import TlsFiles
from logferry.client.writing.send_window import ChunkReceipt, SendJob
from logferry.client.writing.writer import LEFT_BY_ERROR_S, WriterFace
from logferry.client.writing.writer_core import ChunkOptions, Promise, Waits, chunk_bytes


class AsyncWriter(WriterFace):
    """`Writer` for the tasks of one event loop: the same guarantees and arguments.

    But it must be closed: nothing is sent when the event loop has ended. A `ResourceWarning` names one that was not.

    A call that is cancelled has done nothing, or all of it: a chunk that `write` took is sent.
    """

    def _prepare(self, files: TlsFiles) -> None:
        self._files = files
        self._http: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._work = requests.Change()
        self._progress = requests.Change()

    def __del__(self) -> None:
        if getattr(self, "_http", None) is not None and not self._core.is_closed and self._core.process.is_here:
            name, lost = self._core.address.source_id, self._core.unrecorded
            text = f"the writer of {name} was not closed: {lost} chunks are lost"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)

    async def __aenter__(self) -> AsyncWriter:
        try:
            await self.open()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            await self.close()
        else:
            with suppress(Exception):  # the error that is on its way already says more
                await self.close(LEFT_BY_ERROR_S)

    async def open(self, timeout_s: float | None = None) -> None:
        """As `Writer.open`. Raises OSError if a file cannot be used."""
        self._start()
        await self._wait(self._core.opening(deadline_of(timeout_s)))

    @property
    def recorded_seqno(self) -> int | None:
        """As `Writer.recorded_seqno`, but it does not open: None before `open`, too."""
        self._core.process.check()
        return self._core.window.recorded

    async def write(
        self,
        data: bytes,
        seqno: int | None = None,
        *,
        created_ms: int | None = None,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As `Writer.write`. Tasks that wait for room get it in any order: give seqnos from one task only."""
        return await self._put(data, ChunkOptions(seqno, created_ms, attributes), timeout_s, None)

    async def submit(
        self,
        data: bytes,
        seqno: int | None = None,
        *,
        created_ms: int | None = None,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> asyncio.Future[ChunkReceipt]:
        """As `Writer.submit`: returns when the chunk was taken, with the future of its receipt."""
        promise = asyncio.get_running_loop().create_future()
        await self._put(data, ChunkOptions(seqno, created_ms, attributes), timeout_s, promise)
        return promise

    async def _put(self, data: bytes, options: ChunkOptions, timeout_s: float | None, promise: Promise | None) -> int:
        data = chunk_bytes(data)
        deadline = deadline_of(timeout_s)
        self._start()
        await self._wait(self._core.making_room(data, deadline, timeout_s))
        seqno = self._core.put(data, options, promise)
        if self._core.window.has_work:
            self._work.notify()
        return seqno

    def _keep_promises(self) -> None:
        for promise, result in self._core.kept_promises():
            if promise.done():
                continue  # it was cancelled
            if isinstance(result, LogferryError):
                promise.set_exception(result)
                promise.exception()  # a program that does not ask is not warned: `flush` and `close` raise it, too
            else:
                promise.set_result(result)

    async def flush(self, timeout_s: float | None = None) -> None:
        """As `Writer.flush`."""
        await self._wait(self._core.flushing(deadline_of(timeout_s)))

    async def close(self, timeout_s: float | None = None) -> None:
        """As `Writer.close`."""
        self._core.process.check()
        try:
            if not self._core.is_closed:
                await self.flush(timeout_s)
        finally:
            await self._end()

    async def _end(self) -> None:
        if not self._core.process.is_here:
            return  # its connections and tasks are those of the parent
        self._core.is_closed = True
        self._progress.notify()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keep_promises()
        if self._http is not None:
            await self._http.close()

    async def _wait(self, waits: Waits) -> None:
        self._core.process.check()
        for seconds in waits:
            await self._progress.wait(seconds)

    def _start(self) -> None:
        self._core.process.check()
        self._core.check()
        if not self._tasks:
            self._http = requests.session(self._files)
            in_flight = self._core.window.limits.in_flight
            self._tasks = [asyncio.create_task(self._carry(self._http)) for _ in range(in_flight)]

    async def _carry(self, http: aiohttp.ClientSession) -> None:
        try:
            while not self._core.is_closed:
                now = time.monotonic()
                job = self._core.window.next_job(now)
                if job is None:
                    due = self._core.window.due()
                    await self._work.wait(None if due is None else max(due - now, 0.0))
                    continue
                began = time.monotonic()
                outcome = await requests.follow(http, self._core.request(job), partial(self._sent, job))
                self._core.note(outcome, began)
                self._core.window.take(job, outcome, time.monotonic())
                self._keep_promises()
                self._progress.notify()
                self._work.notify()
        except Exception as error:  # noqa: BLE001  a defect: the caller that waits must hear of it
            self._core.window.break_off(repr(error))
            self._keep_promises()
            self._progress.notify()

    def _sent(self, job: SendJob) -> None:
        self._core.window.sent(job)
        self._work.notify()
