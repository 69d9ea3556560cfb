"""`AsyncReader`: `Reader` for asyncio, on aiohttp. `ReaderCore` decides; tasks carry out its steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import aiohttp
from logferry.client.aio import requests
from logferry.client.errors import Closed, LogferryError
from logferry.client.reading.decode import Line, ReceivedChunk, best_decoder
from logferry.client.reading.reader import ReaderFace
from logferry.client.reading.reader_core import Ask, HoldSession, StartWorkers, Step, Steps, Wait
from logferry.client.reading.requests import ReaderRequest, RetryLater, error_of, page_of
from logferry.client.reading.subscription import SILENCE_S, Cursors, Partition, Position, ReaderOptions
from logferry.client.transport.cluster import deadline_of
from logferry.client.transport.connections import NoResponse, TlsFiles
from yarl import URL

_T = TypeVar("_T")


class AsyncReader(ReaderFace[Awaitable[None]]):
    """`Reader` for one task: the same guarantees and arguments.

    ``on_revoked`` is awaited. A `read` that is cancelled has delivered nothing.
    """

    def _prepare(self, options: ReaderOptions, files: TlsFiles) -> Callable[[], None]:
        self._files = files
        self._http: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = requests.Change()
        return self._changed.notify

    async def __aenter__(self) -> AsyncReader:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self, timeout_s: float | None = None) -> None:
        """As `Reader.open`. Raises OSError if a file cannot be used."""
        await self._run(self._core.opening(deadline_of(timeout_s)))

    def __aiter__(self) -> AsyncIterator[ReceivedChunk]:
        return self

    async def __anext__(self) -> ReceivedChunk:
        chunk = await self.read()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def read(self, timeout_s: float | None = None) -> ReceivedChunk | None:
        """As `Reader.read`."""
        chunk = await self._run(self._core.next_chunk(deadline_of(timeout_s)))
        if chunk is not None:
            self._core.deliver(chunk)
        return chunk

    async def lines(self) -> AsyncIterator[Line]:
        """As `Reader.lines`."""
        while (chunk := await self._run(self._core.next_chunk(None))) is not None:
            for line in self._core.lines_of(chunk):
                yield line

    @property
    def position(self) -> Position:
        """As `Reader.position`."""
        self._core.process.check()
        return self._core.position

    async def cursors(self, timeout_s: float | None = None) -> Cursors:
        """As `Reader.cursors`."""
        return await self._run(self._core.cursors(deadline_of(timeout_s)))

    async def translate(
        self, topic: str, partition: int, offset: int, from_dc: str, to_dc: str, timeout_s: float | None = None
    ) -> int:
        """As `Reader.translate`."""
        deadline = deadline_of(timeout_s)
        return await self._run(self._core.translate((topic, partition), offset, from_dc, to_dc, deadline))

    async def lag(self, timeout_s: float | None = None) -> dict[Partition, int | None]:
        """As `Reader.lag`."""
        return await self._run(self._core.lags(deadline_of(timeout_s)))

    async def seek(self, to: str | Position, timeout_s: float | None = None) -> None:
        """As `Reader.seek`."""
        await self._run(self._core.seeking(to, deadline_of(timeout_s)))

    async def pause(self, partitions: Iterable[Partition] | None = None, timeout_s: float | None = None) -> None:
        """As `Reader.pause`."""
        await self._run(self._core.pausing(partitions, True, deadline_of(timeout_s)))

    async def resume(self, partitions: Iterable[Partition] | None = None, timeout_s: float | None = None) -> None:
        """As `Reader.resume`."""
        await self._run(self._core.pausing(partitions, False, deadline_of(timeout_s)))

    @property
    def is_over(self) -> bool:
        """As `Reader.is_over`."""
        self._core.process.check()
        return self._core.is_over

    async def commit(self, timeout_s: float | None = None) -> None:
        """As `Reader.commit`."""
        await self._run(self._core.commit(deadline_of(timeout_s)))

    async def close(self) -> None:
        """As `Reader.close`."""
        if not self._core.process.is_here:
            return  # its connections and tasks are those of the parent
        self._core.is_closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._changed.notify()
        if self._http is not None:
            await self._http.close()

    # ---- steps -----------------------------------------------------------------------------------------------

    async def _run(self, steps: Steps[_T]) -> _T:
        """The result of the steps. Raises what they raise."""
        self._core.process.check()
        advance: Callable[[], Step] = partial(next, steps)
        try:
            while True:
                step = advance()
                try:
                    advance = partial(steps.send, await self._carry_out(step))
                except (RetryLater, LogferryError) as error:
                    advance = partial(steps.throw, error)
        except StopIteration as result:
            found: _T = result.value
            return found

    async def _carry_out(self, step: Step) -> Any:
        if isinstance(step, Wait):
            return await self._changed.wait(step.seconds)
        if isinstance(step, Ask):
            request = ReaderRequest(self._core.options, *step)
            sent = request.method, request.url, request.headers, request.body
            try:
                reply = request.answered(await requests.exchange(self._session(), *sent))
            except NoResponse as error:
                raise request.failed(error) from None
            return page_of(reply) if step.is_page else reply
        if isinstance(step, HoldSession):
            return await self._hold(step.topics)
        if isinstance(step, StartWorkers):
            self._tasks += [asyncio.create_task(self._work(worker)) for worker in step.workers]
        elif self._on_revoked is not None:
            await self._on_revoked()
        return None

    def _session(self) -> aiohttp.ClientSession:
        if self._core.is_closed:
            raise Closed("the reader is closed: open another one")
        self._http = self._http or requests.session(self._files)
        return self._http

    async def _hold(self, topics: list[str]) -> None:
        """As `Reader._hold`."""
        decoder, options = best_decoder(), self._core.options
        request = ReaderRequest(options, options.stream_path(topics), is_stream=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S, sock_connect=requests.CONNECT_TIMEOUT_S)
        url = URL(request.url, encoded=True)
        try:
            async with self._session().get(
                url, headers=request.headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise error_of(request.answered(await requests.reply_of(response)))
                async for data in response.content.iter_any():
                    if not await self._run(self._core.feeding(list(decoder.feed(data)))):
                        break
        except requests.FAULTS as error:
            raise request.failed(f"{request.base}: {error or type(error).__name__}") from None

    async def _work(self, worker: Steps[None]) -> None:
        try:
            await self._run(worker)
        except Exception as error:  # noqa: BLE001  the caller must hear of it, of a defect, too
            self._core.fail(error)
