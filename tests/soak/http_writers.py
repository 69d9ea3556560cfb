"""Writers over HTTP as the crash tests have them, with numbered lines and heartbeats, and readers of partitions."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple
from zlib import crc32

import aiohttp
import msgpack
from logferry.gateway.contract.chunk import Chunk

from tests.soak.files import Messages
from tests.soak.lines import NumberedLine, encode_line
from tests.soak.plan import TOPIC
from tests.soak.world import World
from tests.support.writers import ChainedWriter, PipelinedWriter, SessionWriter, Shared, Writer

_HOLD_STEP_S: Final = 2.0
_BEATS_SHARE: Final = 0.1
_SILENCE_S: Final = 1.0  # a shorter one is not noted
_READ_S: Final = 15.0
_PAGE_WAIT_MS: Final = 1000


class Silence(NamedTuple):
    """A source had lines to send and no acknowledgement, between these seconds of the campaign, during ``healthy_s`` of
    which its partition was healthy."""

    healthy_s: float
    source: str
    partition: int
    from_s: float
    to_s: float


@dataclass(kw_only=True)
class SoakShared(Shared):
    """Of the writers of a data centre. ``healthy_s``: by partition, for how long it was healthy so far. ``beats``: of
    each source the times at which heartbeats were sent and answered, in Unix time."""

    world: World
    messages: Messages
    healthy_s: Mapping[int, float]
    beats: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    silences: list[Silence] = field(default_factory=list)


@dataclass
class LineWriter(Writer):
    """Its chunks are numbered lines. A worker that has not read the new tokens yet is asked again."""

    shared: SoakShared
    _line_at: dict[int, int] = field(default_factory=lambda: {0: 0})  # seqno → the last line up to it
    _partition: int | None = None
    _spoke: tuple[float, float] = (0.0, 0.0)

    def cut(self, prev: int) -> Chunk:
        if prev not in self._line_at:
            self.protest(f"the gateway has recorded {prev}, which was never sent")
        line, data = self._line_at.get(prev, 0), b""
        for _ in range(self.rng.randint(1, 6)):
            line += 1
            data += encode_line(NumberedLine(self.name, line, now_ms()), self.shared.messages.one())
        self._line_at[prev + len(data)] = line
        return Chunk(prev + len(data), prev, None, {}, data)

    async def ask(self, rest: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        status, document = 401, dict[str, Any]()
        while status == 401:
            self._url = self.rng.choice(self.shared.urls)
            try:
                status, document = await super().ask(rest, body, {**headers, **self.shared.world.authorization})
            except ValueError:  # only a piece of the answer
                status = 0
            if status == 401:
                await self.pause()
        if status == 200 and rest.startswith("chunks"):
            self._note_acknowledged(int(document["partition"]))
            await asyncio.sleep(self.rng.uniform(0.05, 0.4))  # the load, not a wait
        return status, document

    async def beat(self, **said: int | bool) -> bool:
        """A heartbeat. ``watermark_ms``: all lines before it are acknowledged."""
        sent_ms = now_ms()
        status, _ = await self.ask("heartbeat", json.dumps(said).encode(), {})
        if status == 200:
            self.shared.beats[self.name].append((sent_ms, now_ms()))
        return status == 200

    def has_lines(self) -> None:
        """From now on it waits for an acknowledgement."""
        healthy_s = 0.0 if self._partition is None else self.shared.healthy_s[self._partition]
        self._spoke = self.shared.world.elapsed_s, healthy_s

    def _note_acknowledged(self, partition: int) -> None:
        is_first, (from_s, healthy_s) = self._partition is None, self._spoke
        self._partition = partition
        self.has_lines()
        silence = Silence(self._spoke[1] - healthy_s, self.name, partition, from_s, self._spoke[0])
        if not is_first and silence.healthy_s > _SILENCE_S:
            self.shared.silences.append(silence)


@dataclass
class ChainedLineWriter(LineWriter, ChainedWriter):
    """Says now and then that everything was sent."""

    async def insist(self, chunks: list[Chunk]) -> bool:
        is_done = await super().insist(chunks)
        if is_done and self.rng.random() < _BEATS_SHARE:
            await self.beat(watermark_ms=now_ms())
        return is_done


@dataclass
class PipelinedLineWriter(LineWriter, PipelinedWriter):
    pass


@dataclass
class SessionLineWriter(LineWriter, SessionWriter):
    pass


@dataclass
class LateLineWriter(LineWriter, ChainedWriter):
    """Sends the lines of a while at once. ``says_so``: its heartbeats tell meanwhile up to when all was sent."""

    many: bool = True
    hold_s: tuple[float, float] = (5.0, 35.0)
    says_so: bool = True

    async def run(self) -> None:
        is_done = True
        while is_done and self.shared.goes_on():
            first_ms, until = now_ms(), time.monotonic() + self.rng.uniform(*self.hold_s)
            chunks = [self.cut(self.recorded)]
            while time.monotonic() < until and self.shared.goes_on():
                chunks.append(self.cut(chunks[-1].seqno))
                if self.says_so:
                    await self.beat(watermark_ms=first_ms)
                await asyncio.sleep(_HOLD_STEP_S)  # the load, not a wait
            self.has_lines()
            is_done = await self.insist(chunks)


WRITERS: Final[tuple[Callable[..., Any], ...]] = (
    ChainedLineWriter,
    partial(ChainedLineWriter, many=True),
    PipelinedLineWriter,
    SessionLineWriter,
    LateLineWriter,
    partial(LateLineWriter, hold_s=(20.0, 80.0), says_so=False),
)


async def write_lines(number: int, dc: str, seed: int, shared: SoakShared) -> None:
    """Writes until the load ends and the last chunk is acknowledged; then says that the source is finished."""
    rng = random.Random(f"{seed} {dc} {number}")
    writer = WRITERS[number](f"{dc}-http-{number}", shared, rng, redirects=False)
    await writer.run()
    while not await writer.beat(finished=True):
        await writer.pause()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Read(NamedTuple):
    """One chunk as a reader got it, at that Unix time."""

    offset: int
    source: str
    seqno: int
    digest: int
    at_ms: int


async def read_partition(world: World, dc: str, partition: int, found: list[Read], until: Callable[[], int]) -> None:
    """Reads the partition of the data centre's own topic page by page, and adds to ``found``.

    Ends at the offset that ``until`` returns; below 0: not known yet.
    """
    rng, at = random.Random(partition), 0
    while until() < 0 or at < until():
        query = f"offset={at}&wait_ms={_PAGE_WAIT_MS}"
        url = f"{rng.choice(world.urls[dc])}/v1/topics/{dc}.{TOPIC}/partitions/{partition}/chunks?{query}"
        try:
            async with asyncio.timeout(_READ_S):
                async with world.session.get(url, headers=world.authorization) as answer:
                    if answer.status == 200:
                        body = await answer.read()
                        unpacker = msgpack.Unpacker(raw=False, max_buffer_size=len(body) or 1)
                        unpacker.feed(body)
                        rows, at = list(unpacker), int(answer.headers["X-Next-Offset"])
                        found += [Read(row[3], row[4], row[5], crc32(row[10]), now_ms()) for row in rows]
                        continue
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            pass  # the page counts only if it came as a whole; the same one again
        await asyncio.sleep(0.3)
