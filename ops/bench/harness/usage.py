"""CPU seconds and resident memory of processes, from /proc, and the lag of a worker's event loop.

Memory is in units of 10^6 bytes.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import urlopen

_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.01
_LAG_BUCKET: Final = re.compile(r'logferry_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)')

Buckets = list[tuple[float, float]]


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time so far, summed over the processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def exact_cpu_s(pid: int) -> float:
    """As `cpu_s` of one process, without its threads that have ended, by the scheduler's clock: a tick of 10 ms is too
    much for a process that hardly runs.
    """
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def rss_mb(pids: Iterable[int]) -> float:
    """Resident memory now, summed over the processes."""
    return sum(memory_mb(Path(f"/proc/{pid}/status").read_text(), "VmRSS:") for pid in pids)


def peak_rss_mb(pid: int) -> float:
    """Peak resident memory so far. Raises OSError or StopIteration when it has ended."""
    return memory_mb(Path(f"/proc/{pid}/status").read_text(), "VmHWM:")


def memory_mb(status: str, field: str) -> float:
    """A field of the text of /proc/PID/status."""
    return next(int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith(field))


class UsageMeter:
    """CPU and wall seconds of a block: ``with Meter(pids) as meter: …``, then ``meter.cpu_s``."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self.cpu_s = self.wall_s = 0.0

    def __enter__(self) -> Self:
        self._cpu, self._wall = cpu_s(self._pids), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cpu_s = round(cpu_s(self._pids) - self._cpu, 2)
        self.wall_s = time.perf_counter() - self._wall


class Program:
    """A program from its start: its duration, and the peak memory of it and of its children."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._cpu_before_s = ended_cpu_s()
        self._began = time.perf_counter()
        self._process = subprocess.Popen(command, **options)
        self.pid = self._process.pid
        self.took_s = self.peak_mb = self.children_peak_mb = 0.0

    def until(self, done: Callable[[], bool] | None = None, bound_s: float = 300.0) -> Self:
        """Watches it until ``done``, or until it ends. Raises RuntimeError when it fails or takes too long."""
        while not (done() if done else self._process.returncode is not None):
            with suppress(OSError, StopIteration):  # a process that is starting or ending has no value
                self.peak_mb = peak_rss_mb(self.pid)
                for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                    self.children_peak_mb = max(self.children_peak_mb, peak_rss_mb(int(child)))
            if self._process.poll():
                raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode}")
            if time.perf_counter() - self._began > bound_s:
                self.kill()
                raise RuntimeError(f"{self._process.args!r} is not done after {bound_s} s")
            time.sleep(_LOOK_S)
        self.took_s = time.perf_counter() - self._began
        return self

    def kill(self) -> float:
        """Kills it if it runs. Returns its CPU seconds; no other child of this process may have ended meanwhile."""
        self._process.kill()
        self._process.wait()
        return ended_cpu_s() - self._cpu_before_s


def ended_cpu_s() -> float:
    """User and system time of the children of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_lags(url: str) -> Buckets:
    """The histogram that a worker exports: upper bound in seconds and how many were below it, in order."""
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        return [(float(bound), float(count)) for bound, count in _LAG_BUCKET.findall(answer.read().decode())]


def quantile_ms(before: Buckets, after: Buckets, share: float) -> float:
    """The quantile of what was counted in between, interpolated in its bucket, in ms."""
    counted = [(bound, count - old) for (bound, count), (_, old) in zip(after, before, strict=True)]
    wanted, low, below = share * counted[-1][1], 0.0, 0.0
    for bound, count in counted:
        if count >= wanted and count > below:
            high = bound if bound != float("inf") else low
            return 1000 * (low + (high - low) * (wanted - below) / (count - below))
        low, below = bound, count
    raise RuntimeError("the worker counted nothing")
