"""A campaign: load and faults until the time is over, then everything is mended and settles, then the checks.

The order of the settling matters: links and processes first, then the files' last lines, the writers' last chunks, the
copies, the table, and the audit at the very end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from logferry.ops.cli.problems import CommandError
from logferry.ops.runtime.jars import spark_environment
from logferry.ops.stack.processes import Child

from tests.soak import verdict
from tests.soak.evidence import read_rows, read_segments, read_topic
from tests.soak.files import HostFile, Messages
from tests.soak.http_writers import WRITERS, Read, Silence, SoakShared, read_partition, write_lines
from tests.soak.injector import Injector
from tests.soak.plan import DCS, HOSTS, MODES, TOPIC, Fault
from tests.soak.verdict import FileTruth, Row, SegmentChange, Stored, Witness
from tests.soak.world import IDLE_S, WINDOW_S, Span, World
from tests.support.checker import History
from tests.support.mirror import differences_in_the_end

_LINES_PER_S: Final = 5
_TICK_S: Final = 0.2
_SETTLE_S: Final = 240.0
_TABLE_S: Final = 600.0
_COMMAND_S: Final = 400.0
_ENOUGH_IN_SYNC: Final = 2
_SAY_EACH_S: Final = 15.0
_SILENCES: Final = 5
# After so long a window must have become READY, or nothing was shown of that.
_READY_AFTER_S: Final = 300.0


@dataclass
class CampaignOutcome:
    """``refuted``: by check, what contradicts the promise; empty: exact. ``silences``: the longest ones, with the
    faults of that time."""

    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    silences: list[tuple[Silence, list[str]]] = field(default_factory=list)
    refuted: dict[str, list[str]] = field(default_factory=dict)


class Campaign:
    def __init__(self, data: Path, plan: Sequence[Fault], seed: int, samples: Path | None) -> None:
        self._world = World(data)
        self._shared: dict[str, SoakShared] = {}
        self._outcome = CampaignOutcome()
        self._plan, self._seed = plan, seed
        self._messages = Messages(samples, random.Random(seed))
        self._files: dict[str, list[HostFile]] = {}
        for host in HOSTS:
            folder = data / "hosts" / host
            folder.mkdir(parents=True)
            self._files[host] = [
                HostFile(f"{host}/{mode}", folder / f"{mode}.log", mode, self._messages) for mode in MODES
            ]
        self._injector = Injector(self._world, self._files)
        self._healthy_s: dict[str, dict[int, float]] = {dc: defaultdict(float) for dc in DCS}
        self._stopping, self._files_stopping = asyncio.Event(), asyncio.Event()
        self._stored: dict[str, list[Stored]] = {}
        self._reads: dict[str, list[list[Read]]] = {dc: [] for dc in DCS}

    async def run(self, seconds: float) -> CampaignOutcome:
        """Raises CommandError if something could not run at all."""
        try:
            print("starting Kafka, gateways and mirrors of two data centres")
            await self._world.start()
            for host, files in self._files.items():
                for file in files:
                    file.write(1)
                self._world.start_client(host, host, files)
            self._world.start_loader()
            async with asyncio.TaskGroup() as load:
                background = [load.create_task(self._sample_health(dc)) for dc in DCS]
                writing = load.create_task(self._write_files())
                readers = [load.create_task(self._read(dc)) for dc in DCS]
                self._shared = {dc: self._writers_of(dc) for dc in DCS}
                writers = [
                    load.create_task(write_lines(n, dc, self._seed, self._shared[dc]))
                    for dc in DCS
                    for n in range(len(WRITERS))
                ]
                await self._disturb(seconds)
                self._outcome.seconds = self._world.elapsed_s
                print("settling: everything runs again, the last chunks are sent")
                await self._world.wait_ready()
                self._files_stopping.set()
                await writing
                for file in self._all_files():
                    file.close()
                await self._within("the files' last lines", self._send_rest())
                self._stopping.set()
                await self._within("the writers' last chunks", asyncio.gather(*writers))
                for dc in DCS:
                    self._stored[dc] = await read_topic(self._world.bootstrap(dc), f"{dc}.{TOPIC}")
                await self._within("the readers", asyncio.gather(*readers))
                for task in background:
                    task.cancel()
            await self._check()
            return self._outcome
        except BaseExceptionGroup as group:
            found: BaseException | None = group.subgroup(CommandError)
            while isinstance(found, BaseExceptionGroup):
                found = found.exceptions[0]
            raise found or group from None
        finally:
            await self._world.stop()

    # ---- load and faults ---------------------------------------------------------------------------------------------

    def _writers_of(self, dc: str) -> SoakShared:
        return SoakShared(
            *(TOPIC, self._world.urls[dc], self._world.session, History(), [], lambda: not self._stopping.is_set()),
            world=self._world,
            messages=self._messages,
            healthy_s=self._healthy_s[dc],
        )

    def _all_files(self) -> list[HostFile]:
        return [file for files in self._files.values() for file in files]

    async def _write_files(self) -> None:
        rng = random.Random(self._seed)
        while not self._files_stopping.is_set():
            for file in self._all_files():
                file.write(rng.choices((0, 1, 2, 5), (40, 40, 15, 5))[0])
            await asyncio.sleep(1 / _LINES_PER_S)

    async def _read(self, dc: str) -> None:
        """A reader of every partition, also of those that are added; each ends at the last chunk that is stored."""
        async with asyncio.TaskGroup() as readers:
            while dc not in self._stored:
                for number in range(len(self._reads[dc]), self._injector.partitions[dc]):
                    self._reads[dc].append([])
                    until = partial(self._read_end, dc, number)
                    readers.create_task(read_partition(self._world, dc, number, self._reads[dc][number], until))
                await asyncio.sleep(_TICK_S)

    def _read_end(self, dc: str, partition: int) -> int:
        if dc not in self._stored:
            return -1
        return max((one.offset + 1 for one in self._stored[dc] if one.partition == partition), default=0)

    async def _disturb(self, seconds: float) -> None:
        said_s = 0.0
        async with asyncio.TaskGroup() as faults:
            for fault in self._plan:
                await asyncio.sleep(max(0.0, fault.at_s - self._world.elapsed_s))
                if self._world.elapsed_s > seconds:
                    break
                with (self._world.data / "faults.log").open("a", encoding="utf-8") as log:
                    log.write(f"{time.strftime('%H:%M:%S')} {fault}\n")
                faults.create_task(self._injector.do(fault))
                if self._world.elapsed_s - said_s >= _SAY_EACH_S:
                    said_s = self._world.elapsed_s
                    print(self._summary())
        self._outcome.done, self._outcome.skipped = self._injector.done, self._injector.skipped

    async def _sample_health(self, dc: str) -> None:
        """Counts the seconds in which each partition had a leader, two replicas in sync, and no frozen broker."""
        while True:
            admin = AIOKafkaAdminClient(bootstrap_servers=self._world.bootstrap(dc), request_timeout_ms=3000)
            with suppress(Exception):  # Kafka is away: no partition is healthy
                await admin.start()
                before = time.monotonic()
                while True:
                    (topic,) = await admin.describe_topics([f"{dc}.{TOPIC}"])
                    now = time.monotonic()
                    is_frozen = any("frozen: " in span.what and _is_of_kafka(span, dc) for span in self._world.active())
                    for partition in topic["partitions"]:
                        well = partition["leader"] >= 0 and len(partition["isr"]) >= _ENOUGH_IN_SYNC
                        if well and not is_frozen:
                            self._healthy_s[dc][partition["partition"]] += now - before
                    before = now
                    await asyncio.sleep(_TICK_S)
            with suppress(Exception):
                await admin.close()
            await asyncio.sleep(_TICK_S)

    def _summary(self) -> str:
        longest = max((silence.healthy_s for silence in self._silences()), default=0.0)
        active = ", ".join(span.what for span in self._world.active())
        faults = f"{self._world.elapsed_s:5.0f} s: {self._injector.done.total()} faults"
        return f"{faults}, longest silence {longest:.1f} s; now {active or 'nothing'}"

    # ---- settling ----------------------------------------------------------------------------------------------------

    def _silences(self) -> list[Silence]:
        return [silence for shared in self._shared.values() for silence in shared.silences]

    async def _within(self, what: str, work: Awaitable[Any]) -> None:
        """A settling that does not end is a refutation: what was acknowledged has to arrive when all is mended."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                await work
        except TimeoutError:
            self._note(f"settling: {what}", [f"not done {_SETTLE_S:.0f} s after everything was mended"])

    async def _send_rest(self) -> None:
        """Stops the push-clients and runs each with ``--once``: it ends when all is sent."""
        clients = list(self._world.clients)
        for name in clients:
            self._world.held[name] += 1
            await asyncio.to_thread(self._world.children[name].stop, 20)
        await asyncio.gather(*(self._to_end(f"push-{name}", self._once(name)) for name in clients))

    def _once(self, name: str) -> list[str]:
        config = str(self._world.data / f"push-{name}.toml")
        return ["logferry.client", "--config", config, "--verbose", "--once", "--timeout", str(int(_SETTLE_S))]

    async def _to_end(self, name: str, command: Sequence[str], statuses: Sequence[int] = (0,)) -> Child:
        """Runs a program of ours to its end. Another exit status is a refutation."""
        env = {**os.environ, **spark_environment()}
        child = Child(name, [sys.executable, "-m", *command], self._world.logs / f"{name}-end.log", env)
        child.start()
        try:
            await asyncio.to_thread(child.wait_for_end, _COMMAND_S)
            if child.exit_status not in statuses:
                self._note(name, [f"exit status {child.exit_status}: {child.log_tail()[-1500:]}"])
        finally:
            child.send(signal.SIGKILL)
        return child

    # ---- checks ------------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        print("checking: Kafka and the copies")
        for dc, other in zip(DCS, reversed(DCS), strict=True):
            self._note(f"HTTP in {dc}", verdict.check_http(self._shared[dc].history, self._stored[dc]))
            original, copy = ((self._world.bootstrap(one), f"{dc}.{TOPIC}") for one in (dc, other))
            self._note(f"copy of {dc} in {other}", await differences_in_the_end(original, copy, _SETTLE_S))
            for partition, got in enumerate(self._reads[dc]):
                there = [one for one in self._stored[dc] if one.partition == partition]
                self._note(f"reader of {dc}-{partition}", verdict.check_reader([one[:4] for one in got], there))
        sources, unequal = verdict.union(self._stored.values())
        self._note("data centres", unequal)
        found, lost = verdict.check_files(sources, self._truths())
        self._note("files", found)
        print("checking: the table")
        await self._check_table(sources)
        print("checking: the audit's own verdict")
        await self._check_audit()
        longest = sorted(self._silences(), reverse=True)[:_SILENCES]
        self._outcome.silences = [(silence, self._wrong_during(silence)) for silence in longest]
        down = [span.what for span in self._world.timeline if span.what.startswith("down: ")]
        self._outcome.restarts = Counter(what.removeprefix("down: ") for what in down)
        self._outcome.counts |= {
            "chunks": sum(map(len, self._stored.values())),
            "chunks over HTTP": sum(len(shared.history.answers) for shared in self._shared.values()),
            "lines in files": sum(file.number for file in self._all_files()),
            "lines lost by copytruncate with compress": lost,
            **{f"rotations by {mode}": sum(f.rotations for f in self._all_files() if f.mode == mode) for mode in MODES},
        }

    def _wrong_during(self, silence: Silence) -> list[str]:
        """The faults and restarts in that time, without those of the other data centre and of the hosts."""
        dc = silence.source.partition("-")[0]
        spans = [s for s in self._world.timeline if s.from_s <= silence.to_s and s.to_s >= silence.from_s]
        return [f"{s.what} ({s.from_s:.1f}-{s.to_s:.1f})" for s in spans if f"{dc}/" in s.what or s.what.endswith(dc)]

    def _truths(self) -> Mapping[str, Sequence[FileTruth]]:
        truths = {
            host: [FileTruth(file.log, file.number, file.truncated) for file in files]
            for host, files in self._files.items()
        }
        for name, (host, since) in self._injector.copied.items():
            truths[name] = [truth._replace(since=since[truth.log]) for truth in truths[host]]
        return truths

    async def _check_table(self, sources: Mapping[str, Sequence[Stored]]) -> None:
        wanted = verdict.lines_of(sources)
        over, deadline = self._windows_over(), time.monotonic() + _TABLE_S
        while time.monotonic() < deadline:
            rows, changes = await self._rows(), await asyncio.to_thread(read_segments, self._world.table)
            if len(rows) >= len(wanted) and len(_ready(changes)) >= over:
                break
            await asyncio.sleep(1)
        self._world.held["loader"] += 1
        await asyncio.to_thread(self._world.children["loader"].stop, 60)
        rows, changes = await self._rows(), await asyncio.to_thread(read_segments, self._world.table)
        if len(rows) < len(wanted):
            self._note("settling: the table", [f"{len(rows)} of {len(wanted)} lines are there after {_TABLE_S:.0f} s"])
        self._note("table", verdict.check_rows(wanted, rows))
        found, late = verdict.check_segments(changes, rows, self._witness(sources), WINDOW_S, IDLE_S)
        ready = _ready(changes)
        if not ready and self._outcome.seconds >= _READY_AFTER_S:
            found.append(f"no window of {WINDOW_S} s became READY; `logferry table segments list` has the reasons")
        self._note("segments", found)
        self._outcome.counts |= {"rows": len(rows), "windows READY": len(ready), **late}

    def _windows_over(self) -> int:
        """How many windows of event time were over when the faults ended."""
        ended_s = time.time() - self._world.elapsed_s + self._outcome.seconds
        return int(ended_s // WINDOW_S - (time.time() - self._world.elapsed_s) // WINDOW_S)

    def _witness(self, sources: Mapping[str, Sequence[Stored]]) -> Witness:
        read_ms: dict[tuple[str, int], int] = {}
        for one in (one for dc in DCS for got in self._reads[dc] for one in got):
            chunk = one.source, one.seqno
            read_ms[chunk] = min(one.at_ms, read_ms.get(chunk, one.at_ms))
        recorded_ms = {(one.source, one.seqno): one.recorded_ms for stored in sources.values() for one in stored}
        beats = {source: beats for shared in self._shared.values() for source, beats in shared.beats.items()}
        return Witness(read_ms, recorded_ms, beats)

    async def _rows(self) -> list[Row]:
        return await asyncio.to_thread(read_rows, self._world.table)

    async def _check_audit(self) -> None:
        exact = not self._outcome.refuted.keys() - {"segments"}  # the audit reads no segments
        configs = self._world.write_audit()
        commands = {dc: ["logferry.ops", "audit", "--config", str(file), "--json"] for dc, file in configs.items()}
        children = await asyncio.gather(*(self._to_end(f"audit-{dc}", one, (0, 1)) for dc, one in commands.items()))
        if all(child.exit_status == 0 for child in children) == exact:
            return
        for dc, child in zip(commands, children, strict=True):
            tail = child.log_tail()
            with suppress(ValueError, KeyError, IndexError):
                report = json.loads(tail.splitlines()[-1])
                tail = f"{report['verdict']} {report['counts']} {report['findings'][:3]}"
            self._note(
                f"audit of {dc}", [f"exit status {child.exit_status}; exact by the other checks: {exact}: {tail}"]
            )

    def _note(self, check: str, found: list[str]) -> None:
        if found:
            print(f"{check}: {found[0]}")
            self._outcome.refuted.setdefault(check, []).extend(found)


def _ready(changes: Sequence[SegmentChange]) -> set[datetime]:
    return {change.start for change in changes if change.state == "READY"}


def _is_of_kafka(span: Span, dc: str) -> bool:
    return f": {dc}/kafka-" in span.what or span.what.endswith(f"brokers frozen: {dc}")
