"""`AsyncReader`: `Reader` for asyncio, on aiohttp. The same words and decisions; tasks for threads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from logferry.client.aio import requests
from logferry.client.errors import Closed, LogferryError, OutOfRange, Superseded, Unknown
from logferry.client.reading.attending import SILENCE_S
from logferry.client.reading.decode import Chunk, Line, decoder
from logferry.client.reading.duplicates import Copies, of_several_centres
from logferry.client.reading.group_membership import Membership, Revoked, has_news
from logferry.client.reading.partition_scheduler import Ask, Rotation
from logferry.client.reading.position import At, Cursors, Position
from logferry.client.reading.reader import after_line, lost_partitions
from logferry.client.reading.requests import Again, content_of, trouble
from logferry.client.reading.start_positions import (
    LOOK_INTERVAL_S,
    cursors_of,
    grown,
    names,
    page_of,
    page_path,
    placed,
    starts,
    translated,
)
from logferry.client.reading.subscription import wanted
from logferry.client.transport.connections import NoAnswer, Reply
from yarl import URL

_T = TypeVar("_T")


class AsyncReader:
    """See `Reader`, which says what is guaranteed and what each argument means. For one task.

    ``on_revoked`` is awaited. A `read` that is cancelled has handed out nothing.
    """

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
        token: str | None = None,
        ca_file: str | None = None,
        gzip: bool = False,
        page_bytes: int = 1 << 20,
        connections: int = 8,
        drop_copies: bool = True,
        on_revoked: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Raises ValueError."""
        self._wanted = wanted(
            urls, topic, token, consumer=consumer, start=start, partitions=partitions, source_prefix=source_prefix,
            attributes=attributes, follow=follow, max_chunks=max_chunks, gzip=gzip, page_bytes=page_bytes,
            connections=connections,
        )  # fmt: skip
        self._on_revoked = on_revoked
        self._left = max_chunks
        several = drop_copies and of_several_centres(self._wanted.topics)
        self._copies = Copies() if several else None
        self._ca_file = ca_file
        self._http: aiohttp.ClientSession | None = None
        self._rotation: Rotation | None = None
        self._membership: Membership | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed: asyncio.Future[None] | None = None
        self._failure: LogferryError | None = None
        self._look_at = 0.0
        self._is_closed = False

    async def __aenter__(self) -> AsyncReader:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, timeout_s: float | None = None) -> None:
        """As `Reader.open`."""
        if self._is_closed:
            raise Closed("the reader is closed")
        if self._rotation is not None or self._membership is not None:
            return
        deadline = _deadline(timeout_s)
        self._http = self._http or requests.session(self._ca_file)
        self._wanted = await self._follow(placed(self._wanted), deadline)
        if self._wanted.consumer is not None:
            topics = await self._follow(names(self._wanted), deadline)
            self._membership = Membership(self._wanted.stored(), self._wanted.follow)
            self._begin(self._attend(self._http, self._membership, topics))
            return
        rotation = Rotation(self._wanted.connections)
        for place in await self._follow(starts(self._wanted), deadline):
            rotation.add(*place)
        self._look_at = time.monotonic() + LOOK_INTERVAL_S
        self._rotation = rotation
        for _ in range(self._wanted.connections):
            self._begin(self._fetch(rotation))

    # ---- reading ---------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self.read()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def read(self, timeout_s: float | None = None) -> Chunk | None:
        """The next chunk; None at the end (``follow=False``, ``max_chunks``), or where none came in time."""
        chunk = await self._next(_deadline(timeout_s))
        if chunk is not None:
            self._core.reach(chunk, At(chunk.offset + 1))
        return chunk

    async def lines(self) -> AsyncIterator[Line]:
        """As `Reader.lines`."""
        while (chunk := await self._next(None)) is not None:
            found, at = chunk.lines(), self._core.at(chunk)
            for number in range(at.lines if at.offset == chunk.offset else 0, len(found)):
                self._core.reach(chunk, after_line(chunk, number, len(found)))
                yield Line(chunk.source_id, chunk.seqno, number, found[number], chunk)
            self._core.reach(chunk, At(chunk.offset + 1))

    @property
    def position(self) -> Position:
        """Where to go on after what was handed out; its `str` is to be stored. Empty before `open`."""
        return self._core.position if self._rotation or self._membership else Position({})

    async def cursors(self, timeout_s: float | None = None) -> Cursors:
        """As `Reader.cursors`."""
        return await self._follow(cursors_of(self._wanted, self.position), _deadline(timeout_s))

    async def translate(
        self, topic: str, partition: int, offset: int, from_dc: str, to_dc: str, timeout_s: float | None = None
    ) -> int:
        """As `Reader.translate`."""
        steps = translated(self._wanted, (topic, partition), offset, from_dc, to_dc)
        self._http = self._http or requests.session(self._ca_file)
        return await self._follow(steps, _deadline(timeout_s))

    @property
    def is_over(self) -> bool:
        """Nothing more will come: the end, or `max_chunks`, is reached."""
        return self._left == 0 or (bool(self._rotation or self._membership) and self._core.is_over)

    async def commit(self, timeout_s: float | None = None) -> None:
        """As `Reader.commit`."""
        membership = self._membership
        if self._wanted.consumer is None:
            raise ValueError("commit: a reader without a consumer has nowhere to commit; store its position")
        if membership is None:
            return
        body, path = membership.to_commit(), self._wanted.commit_path(membership.session)
        if body is not None:
            await self._insist(path, _deadline(timeout_s), json.dumps(body).encode())
            membership.committed(body)
        lost = membership.lost()
        if lost:
            raise Superseded(lost_partitions(lost))

    async def close(self) -> None:
        """Ends the requests under way. Nothing is committed by it. Calling it again is safe."""
        self._is_closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tell()
        if self._http is not None:
            await self._http.close()

    @property
    def _core(self) -> Rotation | Membership:
        core = self._rotation or self._membership
        if core is None:
            raise Closed("the reader is not open")
        return core

    async def _next(self, deadline: float | None) -> Chunk | None:
        if self._left == 0:
            return None
        await self.open(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        while True:
            try:
                chunk = await self._await_chunk(deadline)
            except Revoked:
                if self._on_revoked is not None:
                    await self._on_revoked()
                continue
            except LogferryError as error:
                self._failure = self._failure or error
                raise
            if chunk is not None and self._copies is not None and self._copies.is_copy(chunk):
                self._core.reach(chunk, At(chunk.offset + 1))
                continue
            if chunk is not None and self._left is not None:
                self._left -= 1
            return chunk

    async def _await_chunk(self, deadline: float | None) -> Chunk | None:
        while True:
            if self._is_closed:
                raise Closed("the reader is closed")
            with suppress(Again):  # the session is opened anew
                freed = self._core.freed
                try:
                    chunk = self._core.next_chunk()
                finally:
                    if self._core.freed != freed:
                        self._tell()  # there is room
                if chunk is not None:
                    return chunk
                if self._failure is not None:
                    raise self._failure
                if self._core.is_over:
                    return None
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                await self._wait(left)

    # ---- asking ----------------------------------------------------------------------------------------------

    async def _follow(self, steps: Generator[str, Reply, _T], deadline: float | None) -> _T:
        try:
            path = next(steps)
            while True:
                path = steps.send(await self._insist(path, deadline))
        except StopIteration as result:
            found: _T = result.value
            return found

    async def _insist(self, path: str, deadline: float | None, body: bytes | None = None) -> Reply:
        """Asks until there is a good answer. Raises what the caller must hear of."""
        failures = 0
        while True:
            try:
                reply = await self._ask(path, body)
                content_of(reply)
                return reply
            except Again as again:
                failures += 1
                pause_s = again.pause_s(failures)
                if deadline is not None and time.monotonic() + pause_s >= deadline:
                    raise Unknown(f"no answer in time: {again}") from None
            await asyncio.sleep(pause_s)

    async def _ask(self, path: str, body: bytes | None = None, accept: bool = False) -> Reply:
        """GETs, or POSTs a ``body``; ``accept``: chunks. Raises `Again` where there is no answer."""
        if self._http is None or self._is_closed:
            raise Closed("the reader is closed")
        base = self._wanted.cluster.given()
        headers = self._wanted.headers(base, decoder().media_type if accept else "")
        headers["Accept-Encoding"] = "gzip" if accept and self._wanted.gzip else "identity"
        if body is not None:
            headers["Content-Type"] = "application/json"
        method = "GET" if body is None else "POST"
        try:
            reply = await requests.exchange(self._http, method, base + path, headers, body)
        except NoAnswer as error:
            self._wanted.cluster.failed(base)
            raise Again(str(error)) from None
        if reply.status == 503:
            self._wanted.cluster.failed(base)
        return reply

    # ---- in the tasks ----------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except LogferryError as error:
            self._failure = self._failure or error
        except Exception as error:  # noqa: BLE001  a defect: the caller must hear of it
            self._failure = self._failure or LogferryError(repr(error))
        self._tell()

    async def _fetch(self, rotation: Rotation) -> None:
        while self._failure is None and not self._is_closed and not rotation.is_over:
            now = time.monotonic()
            if self._wanted.follow and now >= self._look_at:
                self._look_at = now + LOOK_INTERVAL_S
                await self._look(rotation)
                continue
            ask = rotation.next_ask(now)
            if ask is None:
                times = [at for at in (rotation.due(now), self._look_at if self._wanted.follow else None) if at]
                await self._wait(max(min(times) - now, 0.0) if times else None)
                continue
            await self._fetch_page(rotation, ask)
            self._tell()

    async def _fetch_page(self, rotation: Rotation, ask: Ask) -> None:
        try:
            chunks, next_offset = page_of(await self._ask(page_path(self._wanted, ask), accept=True))
        except Again as again:
            rotation.hold(ask, time.monotonic() + again.pause_s(rotation.fail(ask)))
        except OutOfRange as error:  # the answer does not say of what
            raise OutOfRange(str(error), *ask.partition, error.first, error.next) from None
        else:
            rotation.take(ask, chunks, next_offset)

    async def _look(self, rotation: Rotation) -> None:
        """In vain is no harm: it is done again."""
        steps = grown(self._wanted, rotation)
        with suppress(StopIteration, LogferryError, Again):
            path = next(steps)
            while True:
                path = steps.send(await self._ask(path))

    async def _attend(self, http: aiohttp.ClientSession, membership: Membership, topics: list[str]) -> None:
        """Session after session, until an error that the next one would have, too."""
        failures = 0
        while self._failure is None and not self._is_closed:
            again = Again("the session ended")
            try:
                has_begun = await self._attend_once(http, membership, topics)
            except Again as error:
                has_begun, again = False, error
            failures = 1 if has_begun else failures + 1
            await asyncio.sleep(again.pause_s(failures))

    async def _attend_once(self, http: aiohttp.ClientSession, membership: Membership, topics: list[str]) -> bool:
        base = self._wanted.cluster.given()
        format_ = decoder()
        url = URL(base + self._wanted.stream_path(topics), encoded=True)
        headers = {**self._wanted.headers(base, format_.media_type), "Accept-Encoding": "identity"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S, sock_connect=requests.CONNECT_TIMEOUT_S)
        has_begun = False
        try:
            async with http.get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    lower = {name.lower(): value for name, value in answer.headers.items()}
                    error = trouble(Reply(answer.status, lower, await answer.read()))
                    if isinstance(error, Again):
                        self._wanted.cluster.failed(base)
                    raise error
                async for data in answer.content.iter_any():
                    frames = list(format_.feed(data))
                    while membership.has_frames:
                        await self._wait(None)
                    membership.feed(frames)
                    has_begun = has_begun or has_news(frames)
                    self._tell()
        except requests.TROUBLE as error:
            self._wanted.cluster.failed(base)
            if not has_begun:
                raise Again(f"{base}: {error or type(error).__name__}") from None
        return has_begun

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something has changed."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._changed], timeout=timeout_s)

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
