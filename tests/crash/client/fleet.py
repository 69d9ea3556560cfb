"""A host of a fleet: its files, a program and an operator that write, rotate, cut and remove them, and its push-client.

Every byte of each incarnation of a file is kept, and how much of it has to be stored whatever happens:

* rotation by renames, also of a file with a second name (a hard link): all of it;
* a file behind a symbolic link that leads to another one then, and ``copytruncate``: all of it, except what was written
  between the copy and the truncation. Both are done only to a file that the client knows by its checkpoint;
* a file that is truncated, replaced, or removed within a second: any part from its beginning. What is missing counts as
  lost, and the client has to have said so of each source that ends early, unless its disk was full: it logs to a file.

A host whose state folder is lost sends everything again, as the guide says: its bytes may be stored twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from logferry.ops.stack.processes import Child

from tests.soak.files import is_in_checkpoints

_LINE_BYTES: Final = 20_000
_FULL_BYTES: Final = 1 << 10
_SAID: Final = ("source-over", "source-copied", "file-gone", "deleted-dropped")
# Kinds of lines, by weight.
_LINES: Final = {"text": 60, "binary": 8, "nul": 4, "crlf": 6, "empty": 4, "long": 1, "open": 8}


@dataclass
class Incarnation:
    """What one file held from its creation, or from a truncation, on. ``owed``: so many bytes of it have to be stored;
    None: all. ``ended_by``: what took the rest."""

    name: str
    data: bytearray = field(default_factory=bytearray)
    owed: int | None = None
    ended_by: str = ""


class Log:
    """A file that is written, under its present name."""

    def __init__(self, host: Host, name: str, folder: Path) -> None:
        self.path = folder / name
        self._host, self._name = host, name
        self._number = 0
        self._fd = -1
        self.now = Incarnation("")

    def write(self, lines: int) -> None:
        if self._fd < 0:
            self.begin()
        for _ in range(lines):
            self._put(self._host.line(f"{self.now.name} {len(self.now.data)} "))

    def begin(self) -> None:
        """A new incarnation, in a new file unless the old one is still open."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._number += 1
        self.now = Incarnation(f"{self._host.name} {self._name} {self._number}")
        self._host.incarnations.append(self.now)
        self._put(f"{self.now.name} begins\n".encode())

    def end(self, by: str = "", owed: int | None = None) -> None:
        """Nothing more of this incarnation is written. Truncates the file unless it is closed before."""
        self.now.ended_by, self.now.owed = by, owed

    def truncate(self) -> None:
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, data: bytes) -> None:
        assert os.write(self._fd, data) == len(data)
        self.now.data += data


class Host:
    """``done`` counts what happened, to all hosts. ``forgets``: its state folder may be lost. ``fills``: its disk may
    be full."""

    def __init__(
        self, number: int, root: Path, seed: int, push: Sequence[str], clock: Path, done: Counter[str]
    ) -> None:
        self.name = f"host{number:02d}"
        self.root = root / self.name
        self.logs, self._aside, self.state = self.root / "logs", self.root / "aside", self.root / "state"
        for folder in (self.logs, self._aside):
            folder.mkdir(parents=True)
        self.forgets, self.fills = number % 10 == 3, number % 2 == 1
        self.incarnations: list[Incarnation] = []
        self._rng = random.Random(f"{seed} {number}")
        self._chance = random.Random(f"{seed} {number} process")  # another task draws from it
        self._done = done
        self._app, self._copied, self._cut, self._replaced = (
            Log(self, name, self.logs) for name in ("app.log", "ct.log", "cut.log", "new.log")
        )
        self._turns = 0
        self._linked = self._link()
        self.clock = self.root / "clock"
        self.clock.write_text("0")
        patterns = [str(self.logs / name) for name in ("app*", "ct.log", "cut.log", "new.log", "short-*", "link.log")]
        limits = ["--line-bytes", str(_LINE_BYTES), "--idle-s", "2", "--heartbeat-s", "30", "--threads", "2"]
        places = ["--state-dir", str(self.state), "--link-root", str(self._aside), "--host", self.name]
        self._command = [sys.executable, "-m", "logferry.client", *push, *limits, *places, *patterns]
        env = {**os.environ, "PYTHONPATH": str(clock), "SOAK_CLOCK": str(self.clock)}
        self.log = self.root / "push.log"
        self.client = Child(self.name, self._command, self.log, env)
        self._once = Child(f"{self.name} --once", [*self._command, "--once", "--timeout", "240"], self.log, env)

    # ---- lines -------------------------------------------------------------------------------------------------------

    def line(self, begin: str) -> bytes:
        rng = self._rng
        kind = rng.choices(list(_LINES), list(_LINES.values()))[0]
        words = rng.randbytes(rng.randint(0, 60)).hex()
        if kind == "text":
            return f"{begin}größe 日本 {words}\n".encode()
        if kind == "binary":
            return begin.encode() + rng.randbytes(rng.randint(0, 300)) + b"\n"
        if kind == "nul":
            return begin.encode() + bytes(rng.randint(1, 300)) + b"\n"
        if kind == "long":
            return begin.encode() + rng.randbytes(rng.randint(_LINE_BYTES // 4, _LINE_BYTES)).hex().encode() + b"\n"
        return {"crlf": f"{begin}{words}\r\n".encode(), "empty": b"\n", "open": f"{begin}{words}".encode()}[kind]

    async def write(self, until: asyncio.Event, every_s: float) -> None:
        """Lines, and what programs and operators do to files, until the event."""
        verbs: dict[Callable[[], Awaitable[None]], int] = {
            self._rotate: 10, self._copy_truncate: 8, self._truncate: 4, self._replace: 3, self._short_lived: 5,
            self._relink: 4, self._hard_link: 3, self._touch: 2,
        }  # fmt: skip
        logs = [self._app, self._copied, self._cut, self._replaced]
        while not until.is_set():
            for log in (*logs, self._linked):
                log.write(self._rng.choices((0, 1, 2, 8), (45, 35, 15, 5))[0])
            if self._rng.random() < 0.08:
                await self._rng.choices(list(verbs), list(verbs.values()))[0]()
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), every_s * self._rng.uniform(0.5, 1.5))
        for log in (*logs, self._linked):
            log.close()

    # ---- files -------------------------------------------------------------------------------------------------------

    async def _rotate(self) -> None:
        self._turns += 1
        self._app.write(1)
        self._app.path.rename(self.logs / f"app.log.{self._turns}")
        await self._moment()
        self._app.write(2)  # as a program that has not reopened its log yet
        self._app.close()
        self._done["renamed by rotation"] += 1

    async def _copy_truncate(self) -> None:
        if not self._is_known(self._copied.path):
            self._done["skipped: not known to the client yet"] += 1
            return
        self._turns += 1
        copied = len(self._copied.now.data)
        shutil.copyfile(self._copied.path, self.logs / f"ct.log.{self._turns}")
        if self._rng.random() < 0.5:  # the window
            await self._moment()
            self._copied.write(self._rng.randint(1, 5))
            await self._moment()
        self._copied.end("copytruncate", 0 if self.forgets else copied)
        self._copied.truncate()
        self._copied.begin()
        self._done["copied and truncated"] += 1

    async def _truncate(self) -> None:
        self._cut.write(1)
        await self._moment()
        self._cut.end("truncated", 0)
        self._cut.truncate()
        if self._rng.random() < 0.5:
            await self._moment()
        self._cut.begin()
        self._cut.write(self._rng.randint(0, 20))
        self._done["truncated"] += 1

    async def _replace(self) -> None:
        """As an editor does: a new file takes the name."""
        self._replaced.write(1)
        await self._moment()
        self._replaced.end("replaced", 0)
        self._replaced.close()
        self._replaced.path.unlink()
        self._replaced.begin()
        self._done["replaced"] += 1

    async def _short_lived(self) -> None:
        self._turns += 1
        log = Log(self, f"short-{self._turns}", self.logs)
        log.write(self._rng.randint(1, 30))
        await asyncio.sleep(self._rng.uniform(0, 1))
        log.write(1)
        log.end("removed", 0)
        log.close()
        log.path.unlink()
        self._done["created and removed within a second"] += 1

    def _link(self) -> Log:
        """``link.log`` leads to a new file from now on."""
        self._turns += 1
        log = Log(self, f"target-{self._turns}", self._aside)
        log.write(1)
        new = self._aside / "link.new"
        new.symlink_to(log.path)
        new.replace(self.logs / "link.log")
        return log

    async def _relink(self) -> None:
        if not self._is_known(self._linked.path):
            self._done["skipped: not known to the client yet"] += 1
            return
        self._linked.write(1)
        self._linked.close()
        if self.forgets:
            self._linked.end("the state was lost", 0)
        self._linked = self._link()
        self._done["symbolic link turned"] += 1

    async def _hard_link(self) -> None:
        second = self.logs / "app-second-name"
        second.unlink(missing_ok=True)
        if self._rng.random() < 0.7:
            self._app.write(1)
            second.hardlink_to(self._app.path)
        self._done["hard link"] += 1

    async def _touch(self) -> None:
        at = self._app.path.stat().st_mtime + self._rng.uniform(-86_400, 86_400) if self._app.path.exists() else 0
        if at:
            os.utime(self._app.path, (at, at))
        self._done["time of a file moved"] += 1

    def _is_known(self, path: Path) -> bool:
        with suppress(OSError):
            return is_in_checkpoints([self.state], path)
        return False

    async def _moment(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.4))))

    # ---- the client --------------------------------------------------------------------------------------------------

    async def disturb(self, until: asyncio.Event, every_s: float) -> None:
        """Faults of the client's process, one after the other."""
        verbs: dict[Callable[[], Awaitable[None]], int] = {self._kill: 8, self._freeze: 5, self._end: 3, self._shift: 2}
        verbs |= {self._fill: 3} if self.fills else {}
        verbs |= {self._forget: 2} if self.forgets else {}
        while not until.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), self._chance.expovariate(1 / every_s))
                return
            await self._chance.choices(list(verbs), list(verbs.values()))[0]()

    async def _kill(self) -> None:
        self.client.send(signal.SIGKILL)
        await asyncio.sleep(self._chance.choice((0, 0, self._chance.uniform(0, 6))))
        self.client.start()
        self._done["client killed"] += 1

    async def _end(self) -> None:
        assert await asyncio.to_thread(self.client.stop, 60), f"{self.name} did not end by SIGTERM"
        early = -signal.SIGTERM  # before it had begun
        assert self.client.exit_status in (0, early), f"{self.client.exit_status}: {self.client.log_tail()}"
        self.client.start()
        self._done["client ended and started"] += 1

    async def _freeze(self) -> None:
        self.client.send(signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(1, 8))
        self.client.send(signal.SIGCONT)
        self._done["client frozen"] += 1

    async def _shift(self) -> None:
        self.clock.write_text(str(self._chance.randint(-300, 300)))
        await asyncio.sleep(self._chance.uniform(1, 6))
        self.clock.write_text("0")
        self._done["clock shifted"] += 1

    async def _fill(self) -> None:
        """No file of the process may grow beyond 1 KiB, so a write fails as on a full disk."""
        if self.client.pid is None:
            return
        _, hard = resource.prlimit(self.client.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.client.pid, resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))
        await asyncio.sleep(self._chance.uniform(1, 8))
        resource.prlimit(self.client.pid, resource.RLIMIT_FSIZE, (hard, hard))
        self._done["disk full"] += 1

    async def _forget(self) -> None:
        self.client.send(signal.SIGKILL)
        shutil.rmtree(self.state, ignore_errors=True)
        self.client.start()
        self._done["state folder lost"] += 1

    def finish(self, timeout_s: float) -> None:
        """The client sends what is left, and ends. In place of the one that ran."""
        if self.client.running:
            self.client.stop(timeout_s)
        self._once.start()
        assert self._once.wait_for_end(timeout_s), f"{self._once.name} has not ended: {self._once.log_tail()}"
        self._once.check_end()

    def unsaid(self, ended_early: Iterable[str]) -> list[str]:
        """Those of these sources of whose loss the client's log says nothing."""
        if self.fills:
            return []
        said = {
            part.removeprefix("source=").strip('"')
            for line in self.log.read_text("utf-8", "replace").splitlines()
            if any(f" {event} " in line for event in _SAID)
            for part in line.split(" ")
            if part.startswith("source=")
        }
        return [source for source in ended_early if source not in said]


# ---- the verdict ---------------------------------------------------------------------------------------------------


class StoredChunk(NamedTuple):
    """In the order of the log."""

    source: str
    seqno: int
    data: bytes


class FleetVerdict(NamedTuple):
    """``ended_early``: sources that lack bytes of their incarnation, by host."""

    problems: list[str]
    counts: Counter[str]
    ended_early: dict[str, list[str]]


def judge(hosts: Mapping[str, Sequence[Incarnation]], stored: Iterable[StoredChunk], forgets: set[str]) -> FleetVerdict:
    """Whether each incarnation is stored byte for byte and once, by sources whose chunks meet end to end.

    ``forgets``: hosts that lost their state; they may have sources twice.
    """
    problems: list[str] = []
    counts: Counter[str] = Counter()
    ended_early: dict[str, list[str]] = defaultdict(list)
    streams: dict[str, tuple[int, bytearray]] = {}
    for chunk in stored:
        begin, data = streams.setdefault(chunk.source, (chunk.seqno - len(chunk.data), bytearray()))
        if chunk.seqno - len(chunk.data) != begin + len(data):
            problems.append(f"{chunk.source}: the chunk to {chunk.seqno} does not meet {begin + len(data)}")
        data += chunk.data
    pieces: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for source, (begin, data) in streams.items():
        end, host = begin + len(data), source.partition(":")[0]
        found = [each for each in hosts.get(host, ()) if each.data[begin:end] == data]
        if not found:
            problems.append(f"{source}: the bytes {begin} to {end} are in no file: {bytes(data[:80])!r}")
        for each in found[:1]:
            pieces[id(each)].append((begin, end, source))
    for host, incarnations in hosts.items():
        for each in incarnations:
            counts["incarnations"] += 1
            counts["bytes written"] += len(each.data)
            parts = sorted(pieces[id(each)])
            to = _end_of(host, each, parts, problems, counts, host in forgets)
            counts["bytes stored"] += to
            if to < (len(each.data) if each.owed is None else each.owed):
                problems.append(f"lost: {host} {each.name!r} ends at {to} of {len(each.data)}, owed {each.owed}")
            elif to < len(each.data):
                kind = "in the window of copytruncate" if each.ended_by == "copytruncate" else each.ended_by
                counts[f"bytes lost, {kind}"] += len(each.data) - to
                counts[f"files that lost some, {kind}"] += 1
            if parts and to < len(each.data):
                ended_early[host].append(parts[-1][2])
    return FleetVerdict(problems, counts, ended_early)


def _end_of(
    host: str,
    of: Incarnation,
    parts: Sequence[tuple[int, int, str]],
    problems: list[str],
    counts: Counter[str],
    may_double: bool,
) -> int:
    """Up to where it is stored without a hole."""
    to = 0
    for (*_, first), (begin, end, second) in pairwise([(0, 0, ""), *parts]):
        if begin > to:
            problems.append(f"lost: {host} {of.name!r} from {to} to {begin}, between {first} and {second}")
        if begin < to and not may_double:
            problems.append(f"doubled: {host} {of.name!r} from {begin} to {min(to, end)}, by {first} and {second}")
        counts["bytes stored twice, as the state was lost"] += max(min(to, end) - begin, 0)
        to = max(to, end)
    return to
