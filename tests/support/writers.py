"""Writers that keep the rules of the interface, each in its own way, and write down every answer.

* `ChainedWriter`: one request in flight, with ``prev``; a single chunk or many in a request.
* `PipelinedWriter`: several chunks in flight, with ``prev``, after the first acknowledgement. They overtake each other:
  a gap is then an answer like any other, and the chunk is sent again when the one before it was acknowledged.
* `SessionWriter`: opens a session, continues at its position, and now and then starts again, even in mid-request.

A retriable or unknown answer: the same bytes again. Some ask for redirects, the others let the workers forward.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk

from tests.support.checker import Answer, History

_ATTEMPT_S = 12.0
_WINDOW = 4


@dataclass
class Shared:
    """What the writers of one load have in common. ``acknowledgements``: (source, when) of each.

    ``topic_may_go``: an answer that there is none is no protest; `ChainedWriter` alone continues then.
    """

    topic: str
    urls: list[str]
    session: aiohttp.ClientSession
    history: History
    acknowledgements: list[tuple[str, float]]
    goes_on: Callable[[], bool]
    topic_may_go: bool = False


@dataclass
class Writer:
    """One source. ``recorded``: where it continues. `run` of each kind writes until it is stopped."""

    name: str
    shared: Shared
    rng: random.Random
    redirects: bool
    size_bytes: int = 3000
    recorded: int = 0
    _url: str = ""

    def cut(self, prev: int) -> Chunk:
        data = self.rng.randbytes(self.rng.randint(1, self.size_bytes)) + b"\n"
        return Chunk(prev + len(data), prev, None, {}, data)

    async def write(self, chunks: list[Chunk], many: bool = False, session: int | None = None) -> tuple[Answer, str]:
        """One attempt: how it was answered, written down, and the type of the problem."""
        headers, query, body = {}, [], chunks[0].data
        if many:
            headers["Content-Type"] = MSGPACK
            body = b"".join(map(pack_chunk, chunks))
        else:
            query = [f"seqno={chunks[0].seqno}", f"prev={chunks[0].prev}"]
        if session is not None:
            query.append(f"session={session}")
        answer: Answer = "unknown"
        began_in = self.shared.history.incarnation
        document: dict[str, Any] = {}
        try:
            status, document = await self.ask("chunks?" + "&".join(query), body, headers)
            answer = self._meaning(status)
        finally:  # cancelled by its writer, it may be recorded all the same
            for chunk in chunks:
                self.shared.history.note(self.name, chunk.seqno, chunk.data, answer, began_in)
        if answer == "ok":
            self.shared.acknowledgements.append((self.name, time.monotonic()))
        return answer, str(document.get("type", "")).rpartition("/")[2]

    async def ask(self, rest: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Status and document; status 0 when no answer came."""
        url = self._url or self.shared.urls[0]
        path = f"/v1/topics/{self.shared.topic}/sources/{quote(self.name, safe='')}/{rest}"
        if self.redirects:
            headers = {**headers, "X-Logferry-Redirect": "1"}
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                async with self.shared.session.post(url + path, data=body, headers=headers) as response:
                    text = await response.text()
                    return response.status, json.loads(text)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0, {}

    @staticmethod
    def _meaning(status: int) -> Answer:
        if status == 200:
            return "ok"
        return "fail" if status in (429, 503) or 400 <= status < 500 else "unknown"

    async def pause(self) -> None:
        """Before trying again, elsewhere."""
        at = self._url or self.shared.urls[0]
        self._url = self.rng.choice([url for url in self.shared.urls if url != at] or [at])
        await asyncio.sleep(self.rng.uniform(0.02, 0.2))  # as a client does

    def protest(self, what: str) -> None:
        """An answer that a correct gateway does not give."""
        self.shared.history.protests.append(f"{self.name} at {self.recorded}: {what}")


@dataclass
class ChainedWriter(Writer):
    """``many``: up to five chunks in a request, as MessagePack."""

    many: bool = False

    async def run(self) -> None:
        while self.shared.goes_on():
            chunks = [self.cut(self.recorded)]
            while self.many and len(chunks) < self.rng.randint(1, 5):
                chunks.append(self.cut(chunks[-1].seqno))
            if not await self.insist(chunks):
                return

    async def insist(self, chunks: list[Chunk]) -> bool:
        """Until they are acknowledged. False: the answer is one that a correct gateway does not give."""
        passing = {"", "not-owner-yet", "kafka-unavailable", "overloaded", "outcome-unknown"}
        if self.shared.topic_may_go:
            passing.add("unknown-topic")
        while (said := await self.write(chunks, self.many))[0] != "ok":
            if said[1] not in passing:
                self.protest(said[1])
                return False
            await self.pause()
        self.recorded = chunks[-1].seqno
        return True


@dataclass
class PipelinedWriter(Writer):
    async def run(self) -> None:
        room = asyncio.Semaphore(1)
        before: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before.set_result(None)
        async with asyncio.TaskGroup() as flying:
            while self.shared.goes_on():
                await room.acquire()
                chunk = self.cut(self.recorded)
                self.recorded = chunk.seqno
                task = flying.create_task(self._insist(chunk, before))
                task.add_done_callback(lambda _: room.release())
                if chunk.prev == 0:
                    await task
                    for _ in range(_WINDOW - 1):
                        room.release()
                before = task

    async def _insist(self, chunk: Chunk, before: asyncio.Future[None]) -> None:
        while True:
            answer, problem = await self.write([chunk])
            if answer == "ok":
                return
            if problem == "gap":
                await asyncio.wait([before])
            elif problem in ("overlap", "superseded", "out-of-order", "bad-request", "unknown-topic"):
                self.protest(f"{chunk.seqno} after {chunk.prev}: {problem}")
                return
            await self.pause()


@dataclass
class SessionWriter(Writer):
    """``acknowledged``: the highest acknowledged seqno; a session must know of it."""

    acknowledged: int = 0

    async def run(self) -> None:
        while self.shared.goes_on():
            session = await self._open()
            chunks_left = self.rng.randint(1, 30)
            while chunks_left and self.shared.goes_on() and await self._record(session, self.cut(self.recorded)):
                chunks_left -= 1
            if self.rng.random() < 0.5:
                await self._abandon(session)

    async def _open(self) -> int:
        while True:
            status, document = await self.ask("session", b"", {})
            if status == 200:
                self.recorded = document["recorded_seqno"] or 0
                if self.recorded < self.acknowledged:
                    self.protest(f"a session does not know of {self.acknowledged}, which was acknowledged")
                return int(document["session"])
            await self.pause()

    async def _record(self, session: int, chunk: Chunk) -> bool:
        """False: superseded, perhaps by an opening of our own whose answer was lost."""
        while True:
            answer, problem = await self.write([chunk], session=session)
            if answer == "ok":
                self.recorded = self.acknowledged = chunk.seqno
                return True
            if problem == "superseded":
                return False
            if problem in ("gap", "overlap", "out-of-order", "bad-request", "unknown-topic"):
                self.protest(f"{chunk.seqno} after {chunk.prev}: {problem}")
                return False
            await self.pause()

    async def _abandon(self, session: int) -> None:
        """Gives up a request on its way, as a client that is killed does."""
        attempt = asyncio.create_task(self.write([self.cut(self.recorded)], session=session))
        await asyncio.wait([attempt], timeout=self.rng.uniform(0, 0.05))
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
