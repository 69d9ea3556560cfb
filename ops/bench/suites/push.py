"""Benchmarks of the push-client against rsyslog (``imfile`` to ``omkafka``): same files, same Kafka, in turn; and its
cost on idle files.

Without gzip. Our time ends when the gateway has acknowledged the last chunk and the client has exited, rsyslog's when
Kafka has all lines. CPU and memory are those of the client or rsyslogd alone, because the gateway runs on another host.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.ops.bench.harness import rsyslog
from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared, median_ratio, medians
from logferry.ops.bench.harness.usage import UsageMeter, peak_rss_mb, rss_mb
from logferry.ops.bench.harness.workload import access_line
from logferry.ops.bench.suites.throughput import make_topic
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 5
_FILES: Final = 100
_LINES: Final = 15_000  # of a file; about 300 MB in all
_KILLED_LINES: Final = 3_000
_PARTITIONS: Final = 8
_BOUND_S: Final = 300.0
_BARE: Final = "import http.client, ssl, sys; sys.stdin.read()"

_IDLE_FILES: Final = 1000
_IDLE_FOLDERS: Final = 20
_IDLE_ROUNDS: Final = 3
_IDLE_S: Final = 15.0
_SETTLED_S: Final = 60.0  # after this silence the client looks at a file once a second


def push_drain_vs_rsyslog() -> Figure:
    """MB/s of a backlog of 100 files; lines doubled and lost after a SIGKILL in the middle of another one."""
    mine, others, killed = _measured()
    ours, theirs = medians(mine) | killed[0], medians(others) | killed[1]
    ratio = median_ratio(mine, others, "mb_s")
    return Figure("push_drain_vs_rsyslog", "MB/s ours / theirs", ours, theirs, _ROUNDS, ratio)


def push_cpu_vs_rsyslog() -> Figure:
    """CPU seconds per GB of lines, without gzip."""
    mine, others, _ = _measured()
    return compared("push_cpu_vs_rsyslog", "CPU ours / theirs", mine, others, "cpu_s_per_gb")


def push_rss_mb() -> Figure:
    """Peak memory while a backlog of 100 files is drained; the limit is the bare interpreter plus 8 MB."""
    mine, others, _ = _measured()
    bare = _bare_rss_mb()
    theirs = {"allowed_mb": bare + 8, "bare_mb": bare, "rsyslog_mb": medians(others)["rss_mb"]}
    ours = {"rss_mb": medians(mine)["rss_mb"]}
    return Figure("push_rss_mb", "MB while draining", ours, theirs, _ROUNDS, value=ours["rss_mb"])


@cache
def _measured() -> tuple[list[Side], list[Side], tuple[Side, Side]]:
    """Rounds of ours and rsyslog's, and the effect of the kill on each: one run for all three figures."""
    rsyslog.find_rsyslogd()
    with (
        tempfile.TemporaryDirectory() as name,
        Stack(Path(name) / "stack", workers=2, heap="1g", jvm=LONG_RUN) as stack,
    ):
        folder = Path(name)
        lines = _write(folder / "logs", _LINES)
        size = sum(path.stat().st_size for path in (folder / "logs").iterdir())
        few = _write(folder / "few", _KILLED_LINES)

        def ours(number: int) -> Side:
            topic = f"ours{number}"
            make_topic(stack.urls()[0], topic, _PARTITIONS)
            run = _Run(_client(stack, folder / f"state{number}", folder / "logs", topic))
            run.until(lambda: not run.runs())
            return run.side(size)

        def theirs(number: int) -> Side:
            topic = make_topic(stack.urls()[0], f"theirs{number}", _PARTITIONS)
            bootstrap = stack.cluster().bootstrap
            with _ends(bootstrap, topic) as written:
                run = _Run(rsyslog.start(folder / f"work{number}", folder / "logs" / "*.log", topic, bootstrap))
                run.until(lambda: written() >= lines)
            return run.side(size)

        mine, others = alternate(_ROUNDS, ours, theirs)
        return mine, others, (_ours_killed(stack, folder, few), _theirs_killed(stack, folder, few))


# ---- with a kill ------------------------------------------------------------------------------------------


@contextmanager
def _restarted(
    stack: Stack, topic: str, start: Callable[[], subprocess.Popen[bytes]], enough: int
) -> Iterator[tuple[_Run, Callable[[], int]]]:
    """Kills a program as soon as ``enough`` records are in the topic, and starts it again. Yields that run, and a
    function that returns the number of records now."""
    with _ends(stack.cluster().bootstrap, topic) as written:
        run = _Run(start())
        run.until(lambda: written() > enough)
        run.kill()
        yield _Run(start()), written


def _ours_killed(stack: Stack, folder: Path, lines: int) -> Side:
    topic = make_topic(stack.urls()[0], "ours-killed", _PARTITIONS)
    start = partial(_client, stack, folder / "state-killed", folder / "few", "ours-killed")
    with _restarted(stack, topic, start, 30) as (run, _):  # chunks of 256 KiB
        run.until(lambda: not run.runs())
    return _account(stack.cluster().bootstrap, topic, lines)


def _theirs_killed(stack: Stack, folder: Path, lines: int) -> Side:
    bootstrap = stack.cluster().bootstrap
    topic = make_topic(stack.urls()[0], "theirs-killed", _PARTITIONS)
    start = partial(rsyslog.start, folder / "work-killed", folder / "few" / "*.log", topic, bootstrap)
    with _restarted(stack, topic, start, lines // 3) as (run, written):
        before = -1
        while before != written():  # the number of doubled lines is unknown: wait until no line arrives for a while
            before = written()
            time.sleep(3.0)
        run.kill()
    return _account(bootstrap, topic, lines)


def _account(bootstrap: str, topic: str, lines: int) -> Side:
    """Reads all lines; each begins with its number."""
    seen = asyncio.run(_read(bootstrap, topic, lines))
    doubled = sum(count - 1 for count in seen if count > 1)
    return {"doubled_after_kill": float(doubled), "lost_after_kill": float(seen.count(0))}


async def _read(bootstrap: str, topic: str, lines: int) -> bytearray:
    seen = bytearray(lines)
    options = {"isolation_level": "read_committed", "auto_offset_reset": "earliest"}
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, **options) as consumer:
        consumer.assign([TopicPartition(topic, number) for number in range(_PARTITIONS)])
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    for line in (record.value or b"").splitlines():
                        number = int(line.split(b" ", 1)[0])
                        seen[number] = min(seen[number] + 1, 255)
    return seen


# ---- processes -----------------------------------------------------------------------------------------------


class _Run:
    """A program from its start: CPU time, peak memory, duration."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._began = time.perf_counter()
        self._peak_rss_mb = self._cpu_s = self._took_s = 0.0

    def runs(self) -> bool:
        return self._process.returncode is None

    def until(self, done: Callable[[], bool]) -> None:
        """Watches it until ``done``. Raises RuntimeError when it fails or takes too long."""
        while not done():
            self._look()
            if time.perf_counter() - self._began > _BOUND_S:
                self.kill()
                raise RuntimeError(f"{self._process.args!r} is not done after {_BOUND_S} s")
            time.sleep(0.01)
        self._took_s = time.perf_counter() - self._began

    def kill(self) -> None:
        if self.runs():
            os.kill(self._process.pid, signal.SIGKILL)
            self._ended(os.wait4(self._process.pid, 0))

    def side(self, size_bytes: int) -> Side:
        self.kill()
        return {
            "mb_s": size_bytes / self._took_s / 1e6,
            "cpu_s_per_gb": self._cpu_s / (size_bytes / 1e9),
            "rss_mb": self._peak_rss_mb,
        }

    def _look(self) -> None:
        if not self.runs():
            return
        with suppress(OSError, StopIteration):  # a process that is about to end has no value
            self._peak_rss_mb = max(self._peak_rss_mb, peak_rss_mb(self._process.pid))
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid:
            self._ended((pid, status, usage))
            if status:
                raise RuntimeError(f"{self._process.args!r} ended with {status}")

    def _ended(self, ended: tuple[int, int, resource.struct_rusage]) -> None:
        _, self._process.returncode, usage = ended
        self._cpu_s = usage.ru_utime + usage.ru_stime


def _client(stack: Stack, state: Path, logs: Path, topic: str) -> subprocess.Popen[bytes]:
    urls = [part for url in stack.urls() for part in ("--url", url)]
    command = [sys.executable, "-m", "logferry.client", *urls, "--topic", topic, "--state-dir", str(state), "--no-gzip"]
    return subprocess.Popen([*command, "--once", str(logs / "*.log")], stderr=subprocess.DEVNULL)


def _bare_rss_mb() -> float:
    with subprocess.Popen([sys.executable, "-c", _BARE], stdin=subprocess.PIPE) as process:
        before = -1.0
        while (now := peak_rss_mb(process.pid)) != before:
            before = now
            time.sleep(0.3)
        process.communicate()
    return now


@contextmanager
def _ends(bootstrap: str, topic: str) -> Iterator[Callable[[], int]]:
    """A function that returns the number of records, markers included, in the topic now."""
    partitions = [TopicPartition(topic, number) for number in range(_PARTITIONS)]

    async def started() -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
        await consumer.start()
        return consumer

    with asyncio.Runner() as runner:
        consumer = runner.run(started())
        try:
            yield lambda: sum(runner.run(consumer.end_offsets(partitions)).values())
        finally:
            runner.run(consumer.stop())


def _write(folder: Path, lines: int) -> int:
    """Files of numbered lines, each number once. Returns the number of lines."""
    folder.mkdir()
    rng = random.Random(7)
    some = [access_line(rng, second) for second in range(2000)]
    for number in range(_FILES):
        with (folder / f"{number:03d}.log").open("w") as file:
            file.writelines(f"{number * lines + n} {some[(number + n) % len(some)]}" for n in range(lines))
    return _FILES * lines


def push_idle_cpu_percent() -> Figure:
    """CPU share of one processor with 1,000 files in 20 folders, all silent for a minute; no inotify is used."""
    with tempfile.TemporaryDirectory() as name, Stack(Path(name) / "stack", workers=1) as stack:
        folder, state = Path(name) / "logs", Path(name) / "state"
        for number in range(_IDLE_FILES):
            path = folder / str(number % _IDLE_FOLDERS) / f"{number}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{number}\n")
        make_topic(stack.urls()[0], "idle", 4)
        command = [sys.executable, "-m", "logferry.client", "--url", stack.urls()[0], "--topic", "idle"]
        command += ["--state-dir", str(state), str(folder / "**" / "*.log")]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as client:
            try:
                _until_sent(state / "status.json")
                time.sleep(_SETTLED_S)
                percents = []
                for _ in range(_IDLE_ROUNDS):
                    with UsageMeter([client.pid]) as meter:
                        time.sleep(_IDLE_S)
                    percents.append(100 * meter.cpu_s / meter.wall_s)
                ours = {"cpu_percent": round(statistics.median(percents), 2), "rss_mb": rss_mb([client.pid])}
            finally:
                client.kill()
    return Figure("push_idle_cpu_percent", "% of a processor", ours, {}, _IDLE_ROUNDS, value=ours["cpu_percent"])


def _until_sent(status: Path) -> None:
    """Raises RuntimeError when it takes too long."""
    deadline = time.monotonic() + _BOUND_S
    while time.monotonic() < deadline:
        if status.exists():
            rows = json.loads(status.read_text())["files"]
            if len(rows) == _IDLE_FILES and not any(row["lag_bytes"] for row in rows):
                return
        time.sleep(0.5)
    raise RuntimeError(f"{_IDLE_FILES} small files are not sent after {_BOUND_S} s")
