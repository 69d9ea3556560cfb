"""Benchmarks of the push-client against rsyslog (``imfile`` to ``omkafka``): the same files, the same Kafka, in turn.

Plain: no gzip on the way. Ours counts until the gateway has acknowledged the last chunk and the client has ended,
theirs until Kafka has all lines. CPU and memory are those of the program on the host alone, client or rsyslogd: the
gateway runs elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.ops.bench.harness import rsyslog
from logferry.ops.bench.harness.figures import Figure, Side, alternate, median_ratio, medians
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


def push_drain_vs_rsyslog() -> Figure:
    """MB/s of a backlog of 100 files; and after a SIGKILL in its middle, how many lines are doubled and lost."""
    mine, others, killed = _measured()
    ours, theirs = medians(mine) | killed[0], medians(others) | killed[1]
    ratio = median_ratio(mine, others, "mb_s")
    return Figure("push_drain_vs_rsyslog", "MB/s ours / theirs", ours, theirs, _ROUNDS, ratio)


def push_cpu_vs_rsyslog() -> Figure:
    """Seconds of a processor for each GB of lines, without gzip."""
    mine, others, _ = _measured()
    ratio = median_ratio(mine, others, "cpu_s_per_gb")
    return Figure("push_cpu_vs_rsyslog", "CPU ours / theirs", medians(mine), medians(others), _ROUNDS, ratio)


def push_rss_mb() -> Figure:
    """Most memory while a backlog of 100 files is drained; allowed is the bare interpreter and 8 MB."""
    mine, others, _ = _measured()
    bare = _bare_rss_mb()
    theirs = {"allowed_mb": bare + 8, "bare_mb": bare, "rsyslog_mb": medians(others)["rss_mb"]}
    ours = {"rss_mb": medians(mine)["rss_mb"]}
    return Figure("push_rss_mb", "MB while draining", ours, theirs, _ROUNDS, value=ours["rss_mb"])


@functools.lru_cache(maxsize=1)
def _measured() -> tuple[list[Side], list[Side], tuple[Side, Side]]:
    """Rounds of ours and theirs, and what the kill did to each: one run for all three figures."""
    rsyslog.find()
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


# ---- what is killed ------------------------------------------------------------------------------------------


def _ours_killed(stack: Stack, folder: Path, lines: int) -> Side:
    topic = make_topic(stack.urls()[0], "ours-killed", _PARTITIONS)

    def start() -> _Run:
        return _Run(_client(stack, folder / "state-killed", folder / "few", "ours-killed"))

    with _ends(stack.cluster().bootstrap, topic) as written:
        run = start()
        run.until(lambda: written() > 30)  # chunks of 256 KiB
        run.kill()
        run = start()
        run.until(lambda: not run.runs())
    return _account(stack.cluster().bootstrap, topic, lines)


def _theirs_killed(stack: Stack, folder: Path, lines: int) -> Side:
    bootstrap = stack.cluster().bootstrap
    topic = make_topic(stack.urls()[0], "theirs-killed", _PARTITIONS)

    def start() -> _Run:
        return _Run(rsyslog.start(folder / "work-killed", folder / "few" / "*.log", topic, bootstrap))

    with _ends(bootstrap, topic) as written:
        run = start()
        run.until(lambda: written() > lines // 3)
        run.kill()
        run = start()
        before = -1
        while before != written():  # how many will come is not known: until nothing comes for a while
            before = written()
            time.sleep(3.0)
        run.kill()
    return _account(bootstrap, topic, lines)


def _account(bootstrap: str, topic: str, lines: int) -> Side:
    """By reading everything: each line begins with its number."""
    seen = asyncio.run(_read(bootstrap, topic, lines))
    return {
        "doubled_after_kill": float(sum(count - 1 for count in seen if count > 1)),
        "lost_after_kill": float(seen.count(0)),
    }


async def _read(bootstrap: str, topic: str, lines: int) -> bytearray:
    seen = bytearray(lines)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, number) for number in range(_PARTITIONS)])
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    for line in (record.value or b"").splitlines():
                        number = int(line.split(b" ", 1)[0])
                        seen[number] = min(seen[number] + 1, 255)
    finally:
        await consumer.stop()
    return seen


# ---- what runs -----------------------------------------------------------------------------------------------


class _Run:
    """A program from its start: its processor time, its most memory, its time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._began = time.perf_counter()
        self._most_rss_kb = 0
        self._cpu_s = 0.0
        self._took_s = 0.0

    def runs(self) -> bool:
        return self._process.returncode is None

    def until(self, done: Callable[[], bool]) -> None:
        """Watches it. Raises RuntimeError when it fails or takes too long."""
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
            "rss_mb": self._most_rss_kb * 1024 / 1e6,
        }

    def _look(self) -> None:
        if not self.runs():
            return
        self._most_rss_kb = max(self._most_rss_kb, _most_rss_kb(self._process.pid))
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid:
            self._ended((pid, status, usage))
            if status:
                raise RuntimeError(f"{self._process.args!r} ended with {status}")

    def _ended(self, ended: tuple[int, int, resource.struct_rusage]) -> None:
        _, self._process.returncode, usage = ended
        self._cpu_s = usage.ru_utime + usage.ru_stime


def _most_rss_kb(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _client(stack: Stack, state: Path, logs: Path, topic: str) -> subprocess.Popen[bytes]:
    urls = [part for url in stack.urls() for part in ("--url", url)]
    command = [sys.executable, "-m", "logferry.client", *urls, "--topic", topic, "--state-dir", str(state), "--no-gzip"]
    return subprocess.Popen([*command, "--once", str(logs / "*.log")], stderr=subprocess.DEVNULL)


def _bare_rss_mb() -> float:
    with subprocess.Popen([sys.executable, "-c", _BARE], stdin=subprocess.PIPE) as process:
        before = -1
        while (now := _most_rss_kb(process.pid)) != before:
            before = now
            time.sleep(0.3)
        process.communicate()
    return now * 1024 / 1e6


@contextmanager
def _ends(bootstrap: str, topic: str) -> Iterator[Callable[[], int]]:
    """How many records, markers too, are in the topic now, by asking Kafka."""
    with asyncio.Runner() as runner:
        consumer = runner.run(_consumer(bootstrap))
        partitions = [TopicPartition(topic, number) for number in range(_PARTITIONS)]
        try:
            yield lambda: sum(runner.run(consumer.end_offsets(partitions)).values())
        finally:
            runner.run(consumer.stop())


async def _consumer(bootstrap: str) -> AIOKafkaConsumer:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await consumer.start()
    return consumer


def _write(folder: Path, lines: int) -> int:
    """Files of numbered lines, each number once; returns how many there are in all."""
    folder.mkdir()
    rng = random.Random(7)
    some = [access_line(rng, second) for second in range(2000)]
    for number in range(_FILES):
        with (folder / f"{number:03d}.log").open("w") as file:
            file.writelines(f"{number * lines + n} {some[(number + n) % len(some)]}" for n in range(lines))
    return _FILES * lines
