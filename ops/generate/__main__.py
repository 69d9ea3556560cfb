"""Writes a web server's access logs, live, into several files, until told to stop.

    python -m logferry.ops.generate --dir /tmp/logs --rate 3 --seed 7

Beside their lines (`access_log`) the files behave as in life: bursts happen, a full buffer is written in mid-line,
and one file is rotated as logrotate does it: renamed, written on for a moment, then opened anew.

The seed decides all but the clock. Every file ends with a newline once the generator has stopped in order.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from logferry.ops.generate.access_log import SITES, AccessLog

TICK_S: Final = 0.05
_CATCH_UP_S: Final = 1.0
_REOPEN_S: Final = 0.5
_CUT_SHARE: Final = 0.1
_CALM: Final = 0.1


class LogFile:
    """One growing file. What is handed over is written in whole or up to a cut; the rest goes with the next write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._rest = b""
        self.bytes = 0

    def write(self, data: bytes, cut: float = 1.0) -> None:
        """Appends that share of the data."""
        data = self._rest + data
        end = int(len(data) * cut)
        self._file.write(data[:end])
        self._rest = data[end:]
        self.bytes += end

    def rename(self) -> None:
        """As logrotate: the name is free now, the open file is written on until `reopen`."""
        self._path.rename(self._path.with_name(self._path.name + ".1"))

    def reopen(self) -> None:
        """The old file is completed, and a new one begun."""
        self.close()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self.write(b"")
        self._file.close()


@dataclass(frozen=True)
class Plan:
    """``rate``: bytes a second of all files together; ``rotate_at_s``: when the first one is rotated, None: never.

    ``calm_after_s``: from then on a tenth of the rate."""

    folder: Path
    rate: float
    seed: int
    seconds: float | None = None
    rotate_at_s: float | None = None
    calm_after_s: float | None = None

    def rate_at(self, elapsed_s: float) -> float:
        is_calm = self.calm_after_s is not None and elapsed_s >= self.calm_after_s
        return self.rate * _CALM if is_calm else self.rate


def generate(plan: Plan, go_on: Callable[[], bool]) -> dict[str, int]:
    """Writes until ``go_on`` says no or the time is over. Returns the bytes of each site's file, rotated ones too."""
    rng = random.Random(plan.seed)
    streams = [Stream(site.share, AccessLog(site, plan.seed), LogFile(plan.folder / site.name)) for site in SITES]
    rotation = _rotation(streams[0].file, plan.rotate_at_s)
    started = last = time.monotonic()
    while go_on() and (plan.seconds is None or last - started < plan.seconds):
        time.sleep(TICK_S)
        now = time.monotonic()
        due = plan.rate_at(now - started) * min(now - last, _CATCH_UP_S)
        last = now
        for stream in streams:
            burst = 0.25 + 1.5 * rng.random()
            cut = rng.random() if rng.random() < _CUT_SHARE else 1.0
            stream.file.write(stream.some(due * stream.share * burst), cut)
        rotation(last - started)
    for stream in streams:
        stream.file.close()
    return {site.name: stream.file.bytes for site, stream in zip(SITES, streams, strict=True)}


@dataclass
class Stream:
    """``owed``: bytes that should have been written and were not; less than nothing after a long line."""

    share: float
    lines: AccessLog
    file: LogFile
    owed: float = 0.0

    def some(self, size: float) -> bytes:
        """Whole lines; over many calls as many bytes as were asked for."""
        self.owed += size
        now_s, found = time.time(), []
        while self.owed > 0:
            line = self.lines.line(now_s)
            self.owed -= len(line)
            found.append(line)
        return b"".join(found)


def _rotation(file: LogFile, at_s: float | None) -> Callable[[float], None]:
    """Called with the seconds since the start; does each step once."""
    steps = [] if at_s is None else [(at_s, file.rename), (at_s + _REOPEN_S, file.reopen)]

    def step(elapsed_s: float) -> None:
        while steps and elapsed_s >= steps[0][0]:
            steps.pop(0)[1]()

    return step


def main(argv: list[str] | None = None) -> int:
    """Runs until its time is over or SIGTERM or SIGINT comes; prints what it wrote as one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m logferry.ops.generate.__main__", description="Writes access logs, live."
    )
    parser.add_argument("--dir", type=Path, required=True, help="where the files go; made if it is not there")
    parser.add_argument("--rate", type=float, default=3.0, metavar="MB_S", help="of all files (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="how long (default: until told to stop)")
    parser.add_argument("--rotate-at", type=float, metavar="S", help="rotate the first file after so many seconds")
    parser.add_argument("--calm-after", type=float, metavar="S", help="a tenth of the rate after so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopped.append(number))
    args.dir.mkdir(parents=True, exist_ok=True)
    plan = Plan(args.dir, args.rate * 1e6, args.seed, args.seconds, args.rotate_at, args.calm_after)
    print(json.dumps({"seed": args.seed, "bytes": generate(plan, lambda: not stopped)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
