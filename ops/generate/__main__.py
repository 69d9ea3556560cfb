"""Writes access logs of a web server into several growing files, until a signal ends it.

    python -m logferry.ops.generate --dir /tmp/logs --rate 3 --seed 7

The files behave like real ones: writes come in bursts, some end in mid-line, and one file is rotated as logrotate
does it: renamed, still written for a moment, then reopened.

The seed determines everything but the clock. Every file ends with a newline after an orderly stop.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from logferry.ops.generate.access_log import SITES, AccessLog

TICK_S: Final = 0.05
_CATCH_UP_S: Final = 1.0
_REOPEN_S: Final = 0.5
_CUT_SHARE: Final = 0.1
_CALM: Final = 0.1


class LogFile:
    """One growing file of a site. A write may be cut; the rest is written with the next one."""

    def __init__(self, path: Path, lines: AccessLog) -> None:
        self._path, self._lines = path, lines
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._rest = b""
        self._owed = 0.0  # bytes due and not yet generated; negative after a long line
        self.bytes = 0

    def grow(self, size: float, cut: float = 1.0) -> None:
        """Appends the first ``cut`` (0 to 1) of the lines that are due: over many calls, ``size`` bytes each."""
        self._owed += size
        now_s, found = time.time(), [self._rest]
        while self._owed > 0:
            found.append(self._lines.line(now_s))
            self._owed -= len(found[-1])
        data = b"".join(found)
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
        self._file.write(self._rest)
        self.bytes += len(self._rest)
        self._rest = b""
        self._file.close()


def generate(
    folder: Path,
    rate: float,
    seed: int,
    is_wanted: Callable[[], bool],
    rotate_at_s: float = math.inf,
    calm_after_s: float = math.inf,
) -> dict[str, int]:
    """Writes until ``is_wanted`` returns False. Returns bytes by site, rotated files included.

    ``rate``: bytes per second of all files, a tenth of it from ``calm_after_s`` on. ``rotate_at_s``: time of the first
    file's rotation.
    """
    rng = random.Random(seed)
    files = {site: LogFile(folder / site, AccessLog(site, seed)) for site in SITES}
    rotated = next(iter(files.values()))
    rotation = [(rotate_at_s, rotated.rename), (rotate_at_s + _REOPEN_S, rotated.reopen)]
    started = last = time.monotonic()
    while is_wanted():
        time.sleep(TICK_S)
        now = time.monotonic()
        due = rate * min(now - last, _CATCH_UP_S) * (_CALM if now - started >= calm_after_s else 1)
        last = now
        for site, file in files.items():
            burst = 0.25 + 1.5 * rng.random()
            cut = rng.random() if rng.random() < _CUT_SHARE else 1.0
            file.grow(due * SITES[site] * burst, cut)
        while rotation and now - started >= rotation[0][0]:
            rotation.pop(0)[1]()
    for file in files.values():
        file.close()
    return {site: file.bytes for site, file in files.items()}


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT; prints seed and bytes as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m logferry.ops.generate", description="Writes growing access logs.")
    parser.add_argument("--dir", type=Path, required=True, help="folder of the files; created if missing")
    parser.add_argument("--rate", type=float, default=3.0, metavar="MB_S", help="of all files (default: %(default)s)")
    parser.add_argument("--rotate-at", type=float, metavar="S", help="rotate the first file after S seconds")
    parser.add_argument("--calm-after", type=float, metavar="S", help="write a tenth of the rate after S seconds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the lines (default: %(default)s)")
    parser.set_defaults(rotate_at=math.inf, calm_after=math.inf)
    args = parser.parse_args(argv)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopped.append(number))
    args.dir.mkdir(parents=True, exist_ok=True)
    written = generate(args.dir, args.rate * 1e6, args.seed, lambda: not stopped, args.rotate_at, args.calm_after)
    print(json.dumps({"seed": args.seed, "bytes": written}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
