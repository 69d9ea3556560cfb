"""The live read sessions and event streams of this worker: opening, finding and ending them, and sessions' ids.

A session's id contains the URL of its worker, so that any worker can forward a commit. The URL is used only if Kafka
confirms that it is a worker's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.limits import FairShare, ReadLimit
from logferry.gateway.metrics import SESSIONS
from logferry.gateway.reading import consumer_offsets
from logferry.gateway.reading.assignment import Subscription
from logferry.gateway.reading.event_stream import EventStream
from logferry.gateway.reading.formats import Encoding
from logferry.gateway.reading.session import ReadSession
from logferry.gateway.reading.stream import FrameStream

_LOOK_INTERVAL_S: Final = 5.0
# Every so many looks also at the members of the groups.
_MEMBERS_LOOKS: Final = 2
_SHOWN: Final = 5
_STOP_S: Final = 3.0
_LEAST_BYTES: Final = 64 << 10


class SessionRegistry:
    """Those of one worker, at most ``limits.sessions`` of both together, in shares of the tokens."""

    def __init__(
        self,
        config: Config,
        kafka: KafkaClient,
        url: str,
        quota_of: Callable[[str | None], ReadLimit | None] = lambda _: None,
    ) -> None:
        self._config, self._kafka, self._url, self._quota_of = config, kafka, url, quota_of
        self._sessions: dict[str, ReadSession] = {}
        self._event_streams: set[EventStream] = set()
        self._room = FairShare(config.limits.sessions)
        self._leaving: set[asyncio.Task[None]] = set()
        self._topics: Mapping[str, bytes] = {}
        # Consumer → the client ids of members that are not read sessions.
        self._strangers: dict[str, list[str]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False
        self._none_left = asyncio.Event()
        SESSIONS.set_function(lambda: self._room.used)

    async def topics(self) -> Mapping[str, bytes]:
        """The topics that exist now, and their ids; the sessions see them from now on."""
        view = await self._kafka.describe()
        self._topics = {name: topic.id for name, topic in view.topics.items()}
        return self._topics

    def check_room(self, token: str | None) -> None:
        """Raises Problem ``overloaded``."""
        if self._stopping:
            raise Problem("overloaded", "the worker is stopping; try again, or at another worker")
        if self._room.room(token) < 1:
            detail = f"{self._room.used} read sessions are open in this worker"
            if token is not None:
                detail += f", {self._room.of_token(token)} of them with the token {token}"
            raise Problem("overloaded", detail, limit_sessions=self._room.limit)

    async def stream(
        self, request: web.BaseRequest, wanted: Subscription, encoding: Encoding, token: str | None
    ) -> web.StreamResponse:
        """Answers with a session, from its first frame to its last. Raises Problem ``overloaded`` before the first."""
        self.check_room(token)
        session_id = f"{named(self._url)}.{secrets.token_hex(8)}"
        response = web.StreamResponse(headers={"Content-Type": encoding.media_type, "Cache-Control": "no-store"})
        limits = self._config.limits
        out = FrameStream(request, response, encoding, limits.session_stall_s)
        self._room.take(token, 1)
        share = max(_LEAST_BYTES, min(limits.session_bytes, limits.reads_bytes // self._room.used))
        session = ReadSession(
            *(session_id, wanted, out, self._config, self._kafka, lambda: self._topics, share),
            lambda: self._quota_of(token),
        )
        self._sessions[session_id] = session
        self._look()
        try:
            await response.prepare(request)
            await session.run()
        except BaseException:
            # The response has begun: cutting the connection is the only way to signal that it is incomplete.
            out.cut()
            raise
        finally:
            del self._sessions[session_id]
            self._left(token)
            task = asyncio.create_task(session.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        return response

    @contextmanager
    def event_stream(self, stream: EventStream, token: str | None) -> Iterator[None]:
        """Counts it while it runs, and stops it with the worker. Raises Problem ``overloaded``."""
        self.check_room(token)
        self._room.take(token, 1)
        self._event_streams.add(stream)
        self._look()
        try:
            yield
        finally:
            self._event_streams.discard(stream)
            self._left(token)

    def _look(self) -> None:
        self._none_left.clear()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._watch())

    def _left(self, token: str | None) -> None:
        self._room.give(token, 1)
        if not self._room.used:
            self._none_left.set()

    def find(self, session_id: str, consumer: str) -> ReadSession:
        """A live session of this worker. Raises Problem ``superseded``."""
        session = self._sessions.get(session_id)
        if session is None or session.wanted.consumer != consumer:
            raise ended(session_id)
        return session

    async def stop(self) -> None:
        """Ends all sessions, so that their partitions move at once; frames not yet taken are dropped."""
        self._stopping = True
        if self._looking is not None:
            self._looking.cancel()
        live: list[ReadSession | EventStream] = [*self._sessions.values(), *self._event_streams]
        for one in live:
            one.stop()
        if live:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._none_left.wait()
            except TimeoutError:
                for one in live:
                    one.out.cut()
                await self._none_left.wait()
        if self._leaving:
            _, late = await asyncio.wait(self._leaving, timeout=_STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _watch(self) -> None:
        """Refreshes the list of topics, and looks for strangers in the groups, while sessions are open."""
        looks = 0
        while self._room.used:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            looks += 1
            try:
                await self.topics()
                if looks % _MEMBERS_LOOKS == 0:
                    await self._find_strangers()
            except (KafkaError, OSError, TimeoutError) as error:
                log.event("topics_not_visible", error=repr(error))
        self._strangers = {}

    async def _find_strangers(self) -> None:
        """A program that joins a consumer's group takes partitions: their chunks never reach the reader."""
        consumers = {session.wanted.consumer for session in self._sessions.values()}
        found = {}
        for consumer in sorted(consumers):
            strangers = await consumer_offsets.strangers(self._kafka, consumer)
            if strangers:
                found[consumer] = sorted(set(strangers))
            if strangers and consumer not in self._strangers:
                log.event("consumer_shared", consumer=consumer, client_ids=found[consumer][:_SHOWN])
        self._strangers = found

    def warnings(self) -> list[str]:
        """The consumers of this worker's sessions whose groups other programs have joined."""
        return [
            f"the group {consumer} has members that are not read sessions and take partitions from them: "
            f"stop {', '.join(client_ids[:_SHOWN])}, or give them another group"
            for consumer, client_ids in self._strangers.items()
        ]


def named(url: str) -> str:
    """A worker's URL as the first part of a session's id."""
    return base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def worker_of(session_id: str) -> str | None:
    """The URL of the worker in a session's id; None if there is none."""
    name = session_id.partition(".")[0]
    try:
        return base64.b64decode(name + "=" * (-len(name) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def ended(session_id: str) -> Problem:
    return Problem("superseded", f"the session {session_id[:200]} has ended or never existed; open a new one")
