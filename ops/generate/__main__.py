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
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote_plus

_DATA: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("access_log.toml").read_text(encoding="utf-8"))
SITES: Final[dict[str, float]] = _DATA["sites"]
_AGENTS: Final[list[str]] = _DATA["agents"]
_REFERERS: Final[list[str]] = _DATA["referers"]
_PLACES: Final[list[str]] = [
    *_DATA["places"],
    *(f"GET /search?q={quote_plus(word)}&page={{}}" for word in _DATA["words"]),
    *(f"GET /search?q={word}&page={{}}" for word in _DATA["words"] if " " not in word),
]
_VISITORS: Final = 4000
_HUGE_SHARE: Final = 0.0002
_GREETING_SHARE: Final = 0.002
_STATUS: Final = (200,) * 80 + (304,) * 8 + (302,) * 4 + (404,) * 4 + (301, 403, 499, 500)


class AccessLog:
    """The lines of one site, in nginx's *combined* format with ``escape=json``: alphabets are UTF-8, control characters
    ``\\u00XX``. So lines of port scanners may be invalid UTF-8, as in real logs; some requests are tens of KB long.
    """

    def __init__(self, site: str, seed: int) -> None:
        self._rng = random.Random(f"{seed}/{site}")
        self._second, self._stamp = -1, ""

    def line(self, now_s: float) -> bytes:
        """One line, with its newline, as written at that Unix time."""
        rng = self._rng
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._stamp = time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(self._second))
        visitor = int(rng.random() ** 3 * _VISITORS)
        address = f"198.51.{visitor >> 8}.{visitor & 255}" if visitor % 7 else f"2001:db8::{visitor:x}"
        head = f"{address} - - [{self._stamp}]"
        if rng.random() < _GREETING_SHARE:
            # A port scanner's TLS greeting on a plain port.
            shown = b"".join(map(_escaped, b"\x16\x03\x01" + rng.randbytes(rng.randint(4, 64))))
            return f'{head} "'.encode() + shown + b'" 400 157 "-" "-"\n'
        request = rng.choice(_PLACES).format(rng.randrange(10**9))
        if rng.random() < _HUGE_SHARE:
            request += f"{'&' if '?' in request else '?'}state={rng.randbytes(rng.randint(4_000, 30_000)).hex()}"
        size = int(10 ** (2 + 3 * rng.random()))
        answer = f'{rng.choice(_STATUS)} {size} "{rng.choice(_REFERERS)}" "{_AGENTS[visitor % len(_AGENTS)]}"'
        return f'{head} "{request} HTTP/1.1" {answer}\n'.encode()


def _escaped(byte: int) -> bytes:
    if byte < 0x20:
        return b"\\u%04X" % byte
    return b"\\" + bytes((byte,)) if byte in b'"\\' else bytes((byte,))


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
