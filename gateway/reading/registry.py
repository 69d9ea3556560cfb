"""The live read sessions of this worker: opening, finding, ending them, and the names by which others find them.

A session's id carries the URL of the worker that it lives in, so that any worker can hand a commit on. The URL is
used only if Kafka says that it is a worker's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import Mapping
from typing import Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.config import Config
from logferry.gateway.connection import HttpReader
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.metrics import SESSIONS
from logferry.gateway.reading.formats import Encoding
from logferry.gateway.reading.session import Session
from logferry.gateway.selection import Wanted

_LOOK_INTERVAL_S: Final = 5.0
_STOP_S: Final = 3.0


class Readers:
    """The sessions of one worker, at most ``limits.sessions`` of them."""

    def __init__(self, config: Config, kafka: Kafka, url: str) -> None:
        self._config, self._kafka, self._url = config, kafka, url
        self._sessions: dict[str, Session] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._topics: Mapping[str, bytes] = {}
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False
        self._none_left = asyncio.Event()
        SESSIONS.set_function(lambda: len(self._sessions))

    async def topics(self) -> Mapping[str, bytes]:
        """The topics that exist now, and their ids; from here on the sessions see them too."""
        view = await self._kafka.describe()
        self._topics = {name: topic.id for name, topic in view.topics.items()}
        return self._topics

    def check_room(self) -> None:
        """Raises Problem ``overloaded``."""
        if self._stopping:
            raise Problem("overloaded", "the worker is stopping; another one, or this one later, will answer")
        limit = self._config.limits.sessions
        if len(self._sessions) >= limit:
            raise Problem("overloaded", f"{limit} read sessions are open in this worker", limit_sessions=limit)

    async def stream(self, request: web.BaseRequest, wanted: Wanted, encoding: Encoding) -> web.StreamResponse:
        """Answers with a session, from its first frame to its last. Raises Problem ``overloaded`` before the first."""
        self.check_room()
        session_id = f"{named(self._url)}.{secrets.token_hex(8)}"
        response = web.StreamResponse(headers={"Content-Type": encoding.media_type, "Cache-Control": "no-store"})
        reader = HttpReader(request, response)
        session = Session(session_id, wanted, encoding, reader, self._config, self._kafka, lambda: self._topics)
        self._sessions[session_id] = session
        self._none_left.clear()
        self._watch_topics()
        try:
            await response.prepare(request)
            await session.run()
        except BaseException:
            # The answer has begun, so there is no other way to say that it is not whole.
            reader.cut()
            raise
        finally:
            del self._sessions[session_id]
            if not self._sessions:
                self._none_left.set()
            task = asyncio.create_task(session.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        return response

    def find(self, session_id: str, consumer: str) -> Session:
        """A live session of this worker. Raises Problem ``superseded``."""
        session = self._sessions.get(session_id)
        if session is None or session.wanted.consumer != consumer:
            raise ended(session_id)
        return session

    async def stop(self) -> None:
        """Ends all sessions, so that their partitions move at once; what a slow reader did not take is dropped."""
        self._stopping = True
        if self._looking is not None:
            self._looking.cancel()
        for session in self._sessions.values():
            session.stop()
        if self._sessions:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._none_left.wait()
            except TimeoutError:
                for session in self._sessions.values():
                    session.cut()
                await self._none_left.wait()
        if self._leaving:
            _, late = await asyncio.wait(self._leaving, timeout=_STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _watch_topics(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Topics come and go; looked at while there is anybody who reads."""
        while self._sessions:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                await self.topics()
            except (KafkaError, OSError, TimeoutError) as error:
                log.event("warning", "topics_not_seen", error=repr(error))


def named(url: str) -> str:
    """A worker's URL as the first part of a session's id."""
    return base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def worker_of(session_id: str) -> str | None:
    """The URL of the worker that a session's id names; None when it names none."""
    name = session_id.partition(".")[0]
    try:
        return base64.b64decode(name + "=" * (-len(name) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def ended(session_id: str) -> Problem:
    return Problem("superseded", f"the session {session_id[:200]} has ended, or never was; open a new one")
