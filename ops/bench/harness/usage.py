"""CPU seconds and resident memory of processes, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time so far, summed over the processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def rss_mb(pids: Iterable[int]) -> float:
    """Resident memory now in units of 10^6 bytes, summed over the processes."""
    return sum(_memory_mb(pid, "VmRSS:") for pid in pids)


def peak_rss_mb(pid: int) -> float:
    """Peak resident memory so far in units of 10^6 bytes. Raises OSError or StopIteration when it has ended."""
    return _memory_mb(pid, "VmHWM:")


def _memory_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


class UsageMeter:
    """CPU and wall seconds of a block: ``with Meter(pids) as meter: …``, then ``meter.cpu_s``."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self.cpu_s = self.wall_s = 0.0

    def __enter__(self) -> UsageMeter:
        self._cpu, self._wall = cpu_s(self._pids), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cpu_s = round(cpu_s(self._pids) - self._cpu, 2)
        self.wall_s = time.perf_counter() - self._wall
