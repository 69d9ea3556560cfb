"""What processes cost: CPU seconds and resident memory, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time so far, of all of them together."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def rss_mb(pids: Iterable[int]) -> float:
    """Resident now, of all of them together; in units of 10^6 bytes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
    return total / 1e6


def peak_rss_mb(pid: int) -> float:
    """The most that was resident so far; in units of 10^6 bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:"))


class Meter:
    """CPU seconds and wall seconds of a stretch: ``with Meter(pids) as meter: …``, then ``meter.cpu_s``."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self.cpu_s = self.wall_s = 0.0

    def __enter__(self) -> Meter:
        self._cpu, self._wall = cpu_s(self._pids), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cpu_s = round(cpu_s(self._pids) - self._cpu, 2)
        self.wall_s = time.perf_counter() - self._wall
