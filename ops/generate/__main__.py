"""Writes access logs of a web server into several growing files, until a signal ends it.

    python -m logferry.ops.generate --dir /tmp/logs --rate 3 --seed 7

The files behave like real ones: writes come in bursts, some end in mid-line, and one file is rotated as logrotate
does it: renamed, still written for a moment, then reopened.

The seed determines everything but the clock. Every file ends with a newline after an orderly stop.
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
    """One growing file. A write may be cut; the rest is written with the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._rest = b""
        self.bytes = 0

    def write(self, data: bytes, cut: float = 1.0) -> None:
        """Appends the first ``cut`` (0 to 1) of the data."""
        data = self._rest + data
        end = int(len(data) * cut)
        self._file.write(data[:end])
        self._rest = data[end:]
        self.bytes += end

    def rename(self) -> None:
        """As logrotate: renames the file, which is written until `reopen`."""
        self._path.rename(self._path.with_name(self._path.name + ".1"))

    def reopen(self) -> None:
        """Completes the old file and begins a new one."""
        self.close()
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self.write(b"")
        self._file.close()


@dataclass(frozen=True)
class GeneratorPlan:
    """``rate``: bytes per second of all files. ``rotate_at_s``: time of the first file's rotation, None: never.
    ``calm_after_s``: from then on a tenth of the rate."""

    folder: Path
    rate: float
    seed: int
    rotate_at_s: float | None = None
    calm_after_s: float | None = None

    def rate_at(self, elapsed_s: float) -> float:
        is_calm = self.calm_after_s is not None and elapsed_s >= self.calm_after_s
        return self.rate * _CALM if is_calm else self.rate


def generate(plan: GeneratorPlan, is_wanted: Callable[[], bool]) -> dict[str, int]:
    """Writes until ``is_wanted`` returns False. Returns bytes by site, rotated files included."""
    rng = random.Random(plan.seed)
    streams = [Stream(share, AccessLog(site, plan.seed), LogFile(plan.folder / site)) for site, share in SITES.items()]
    rotation = _rotation(streams[0].file, plan.rotate_at_s)
    started = last = time.monotonic()
    while is_wanted():
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
    return {site: stream.file.bytes for site, stream in zip(SITES, streams, strict=True)}


@dataclass
class Stream:
    """``owed``: bytes due and not yet written; negative after a long line."""

    share: float
    lines: AccessLog
    file: LogFile
    owed: float = 0.0

    def some(self, size: float) -> bytes:
        """Whole lines; over many calls, as many bytes as requested."""
        self.owed += size
        now_s, found = time.time(), []
        while self.owed > 0:
            line = self.lines.line(now_s)
            self.owed -= len(line)
            found.append(line)
        return b"".join(found)


def _rotation(file: LogFile, at_s: float | None) -> Callable[[float], None]:
    """A function of the seconds since the start that does each step of the rotation once."""
    steps = [] if at_s is None else [(at_s, file.rename), (at_s + _REOPEN_S, file.reopen)]

    def step(elapsed_s: float) -> None:
        while steps and elapsed_s >= steps[0][0]:
            steps.pop(0)[1]()

    return step


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT; prints seed and bytes as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m logferry.ops.generate", description="Writes growing access logs.")
    parser.add_argument("--dir", type=Path, required=True, help="folder of the files; created if missing")
    parser.add_argument("--rate", type=float, default=3.0, metavar="MB_S", help="of all files (default: %(default)s)")
    parser.add_argument("--rotate-at", type=float, metavar="S", help="rotate the first file after S seconds")
    parser.add_argument("--calm-after", type=float, metavar="S", help="write a tenth of the rate after S seconds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the lines (default: %(default)s)")
    args = parser.parse_args(argv)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopped.append(number))
    args.dir.mkdir(parents=True, exist_ok=True)
    plan = GeneratorPlan(args.dir, args.rate * 1e6, args.seed, args.rotate_at, args.calm_after)
    print(json.dumps({"seed": args.seed, "bytes": generate(plan, lambda: not stopped)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
