"""Benchmarks of a fleet: 5,000 push-clients with a file each, at two gateways that are killed and started again.

Each simulated client runs the push-client's own code for a source: when it sends, what it does after each answer, how
long it pauses, which gateway it asks next. Its threads and sockets are tasks on one event loop. So it shows whether the
clients come back together, as a herd, or spread.

The loop shares the machine with the gateways, so the figures are of a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import uvloop
from logferry.client.agent.config import Config, DataCentre, FileGroup
from logferry.client.agent.source import FileSource
from logferry.client.agent.workers import Pusher
from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.identity import fingerprint, source_id
from logferry.client.files.tail import FileTail
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, NoResponse, Reply
from logferry.client.transport.failover import FailoverPolicy
from logferry.client.transport.source_request import Outcome, SourceRequest, shows_life
from logferry.ops.bench.harness.figures import Figure, Side
from logferry.ops.bench.harness.gateways import gateway_pids, make_topic, running_stack
from logferry.ops.bench.harness.usage import UsageMeter, rss_mb
from logferry.ops.stack.stack import Stack

_CLIENTS: Final = 5_000
_TOPIC: Final = "fleet"
_LINE_EVERY_S: Final = 20.0
_LINE: Final = b"x" * 999 + b"\n"
_HEARTBEAT_S: Final = 15.0
_START_S: Final = 15.0  # over which the clients start
_STEADY_S: Final = 15.0
_AWAY_S: Final = 30.0
_AFTER_S: Final = 40.0
_SOON_S: Final = 5.0
_NAMES: Final = ("gateway-0", "gateway-1")


def fleet_gateway_killed() -> Figure:
    """One of two gateways is killed for 30 s. The value: the most connections of one second, by their even spread."""
    return _measured(_NAMES[1:])


def fleet_all_gateways_killed() -> Figure:
    """Both gateways are killed for 30 s. The value: the most connections of one second, by their even spread."""
    return _measured(_NAMES)


class _Record:
    """What all clients did, in monotonic time. ``connected``: when each attempt began; ``delays``: when each line was
    recorded, and after how many seconds; ``answers``: what each request got."""

    def __init__(self) -> None:
        self.connected: list[float] = []
        self.delays: list[tuple[float, float]] = []
        self.answers: list[tuple[float, str]] = []


class _SimulatedClient:
    """A push-client with one file, which gets a line every `_LINE_EVERY_S`."""

    def __init__(self, number: int, path: Path, urls: list[str], record: _Record) -> None:
        self._record = record
        files = FileGroup((str(path),), _TOPIC)
        centre = DataCentre("", tuple(urls))
        config = Config((centre,), "", f"h{number}", (files,), heartbeat_s=_HEARTBEAT_S)
        self._idle_s = config.idle_s
        self._centres = FailoverPolicy([centre.name], config.failover_s, config.failback_s)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        now = time.monotonic()
        tail = FileTail.open(str(path), now)
        assert tail is not None
        name = source_id(config.host, str(path), 1)
        entry = CheckpointEntry(name, str(path), str(path), *tail.key, tail.head, 0, fingerprint(b""), 0, topic=_TOPIC)
        self._tail, self._source = tail, FileSource(entry, tail, config, files, self._centres)
        self._pusher = Pusher([GatewayCluster(urls, None)], _no_exchange, config.compression)
        self._links: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._waiting: deque[tuple[int, float]] = deque()  # end of a line, and when it was due

    @property
    def waits_since(self) -> float:
        """When the oldest line was due that is not recorded; infinite: there is none."""
        return self._waiting[0][1] if self._waiting else float("inf")

    async def run(self, start_s: float, until: Callable[[], bool]) -> None:
        await asyncio.sleep(start_s)
        source, tail, size = self._source, self._tail, 0
        due = time.monotonic() + random.uniform(0, _LINE_EVERY_S)
        while not until():
            now = time.monotonic()
            while due <= now:
                size += os.write(self._fd, _LINE)
                self._waiting.append((size, due))
                due += _LINE_EVERY_S
            tail.next_look = now
            tail.look(now)
            job = source.next_job(now, int(time.time() * 1000), self._idle_s, False)
            if job is None:
                await asyncio.sleep(max(min(source.next_due(now, self._idle_s), due) - time.monotonic(), 0.0))
                continue
            source.unsaved = False  # the checkpoint is not simulated
            source.leave(job, now)
            outcome = await self._follow(self._pusher.request(job))
            now = time.monotonic()
            answer = outcome.answer
            self._record.answers.append((now, answer.type or str(answer.status or "none")))
            self._centres.record(0, shows_life(answer), now)
            source.take(job, outcome, now, False)
            while self._waiting and self._waiting[0][0] <= source.reading.position:
                self._record.delays.append((now, now - self._waiting.popleft()[1]))
        tail.close()
        os.close(self._fd)
        for _, writer in self._links.values():
            writer.close()

    async def _follow(self, request: SourceRequest) -> Outcome:
        outcome = None
        while outcome is None:
            try:
                outcome = request.answered(await self._exchange(request))
            except NoResponse as error:
                outcome = request.unanswered(error)
        return outcome

    async def _exchange(self, request: SourceRequest) -> Reply:
        """As `Connections.exchange`: a kept connection that turns out to be closed is replaced once."""
        parts = urlsplit(request.url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        body = request.body if isinstance(request.body, bytes) else b"".join(request.body)
        headers = {"Host": parts.netloc, **request.headers(), "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        data = f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + body
        try:
            kept = self._links.pop(parts.netloc, None)
            if kept is not None:
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    return await self._once(parts.netloc, kept, data)
            self._record.connected.append(time.monotonic())
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                link = await asyncio.open_connection(parts.hostname, parts.port)
            return await self._once(parts.netloc, link, data)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise NoResponse(str(error)) from error

    async def _once(self, origin: str, link: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> Reply:
        reader, writer = link
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                writer.write(data)
                status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
        except BaseException:
            writer.close()
            raise
        self._links[origin] = link
        return Reply(int(status.split(" ")[1]), headers, body, time.time())


def _no_exchange(*_: object) -> Reply:
    raise RuntimeError("requests are sent by the event loop")


# ---- one run -----------------------------------------------------------------------------------------------------


def _measured(killed: tuple[str, ...]) -> Figure:
    with running_stack(1, nodes=2, restart=False) as stack:
        make_topic(stack, _TOPIC)
        ours, even = uvloop.run(_run(stack, killed))
    ratio = round(ours["connects_1s"] / even["connects_1s"], 2)
    return Figure("peak of connections / even spread", ours, even, 1, ratio)


async def _run(stack: Stack, killed: tuple[str, ...]) -> tuple[Side, Side]:
    """``served_again_s``: from the return on, until the last line that was due before it is recorded; ``waiting``: at
    the end, clients with such lines. ``first_lines_after_s``: from the kill on, until those of its first seconds are.
    """
    record, stop = _Record(), asyncio.Event()
    folder = stack.data / "files"
    folder.mkdir()
    clients = []
    for number in range(_CLIENTS):
        urls = random.sample(stack.urls(), len(_NAMES))
        clients.append(_SimulatedClient(number, folder / f"{number}.log", urls, record))
    side: Side = {}
    async with asyncio.TaskGroup() as running:
        for client in clients:
            running.create_task(client.run(random.uniform(0, _START_S), stop.is_set))
        await asyncio.sleep(_START_S + _LINE_EVERY_S)
        with UsageMeter(gateway_pids(stack)) as meter:
            steady = time.monotonic()
            await asyncio.sleep(_STEADY_S)
        side["steady_cpu_percent"] = round(100 * meter.cpu_s / meter.wall_s, 1)
        gone = time.monotonic()
        side |= _delays(record, steady, gone, "steady")
        for name in killed:
            stack.kill(name)
        await asyncio.sleep(_AWAY_S)
        back = time.monotonic()
        await asyncio.gather(*(asyncio.to_thread(stack.restart, name) for name in killed))
        with UsageMeter(gateway_pids(stack)) as meter:
            await asyncio.sleep(_AFTER_S)
        end = time.monotonic()
        side["cpu_percent"] = round(100 * meter.cpu_s / meter.wall_s, 1)
        side["rss_mb"] = round(rss_mb(gateway_pids(stack)), 1)
        stop.set()
    # While gateways are away, and once they are back: which of the two is the herd's.
    told = partial(_spread, record.connected)
    peaks = max((told(gone, back), told(back, end)), key=lambda found: found[0]["connects_1s"])
    side |= peaks[0] | _delays(record, gone, end, "fault")
    side["waiting"] = float(sum(client.waits_since < back for client in clients))
    side["served_again_s"] = round(max(at for at, delay in record.delays if at - delay < back) - back, 1)
    moved = [at - gone for at, delay in record.delays if gone <= at - delay < gone + _SOON_S]
    side["first_lines_after_s"] = round(max(moved, default=0.0), 1)
    errors = Counter(what for at, what in record.answers if at >= gone and what != "200")
    side |= {f"answers_{what}": float(count) for what, count in sorted(errors.items())}
    return side, peaks[1]


def _spread(times: list[float], begin: float, end: float) -> tuple[Side, Side]:
    """The most connections within a second and within 100 ms, and what an even spread over the whole time has."""
    within = [at for at in times if begin <= at < end]
    found: Side = {"connects": float(len(within))}
    even: Side = {}
    for name, width in (("connects_1s", 1.0), ("connects_100ms", 0.1)):
        counts = Counter(int((at - begin) / width) for at in within)
        found[name] = float(max(counts.values(), default=0))
        even[name] = round(len(within) * width / (end - begin), 1)
    return found, even


def _delays(record: _Record, begin: float, end: float, of: str) -> Side:
    found = sorted(delay for at, delay in record.delays if begin <= at < end)
    if not found:
        raise RuntimeError(f"no line was recorded in {end - begin:.0f} s: {of}")
    places = {"p50": len(found) // 2, "p99": int(len(found) * 0.99), "max": -1}
    return {f"{of}_{name}_ms": round(1000 * found[place], 1) for name, place in places.items()}
