"""Realistic lines of a web server's access log, from a seed.

The format is nginx's *combined* with ``escape=json``: all alphabets are UTF-8, control characters are ``\\u00XX``. So
lines of port scanners may be invalid UTF-8, as in real logs. Visitors return, and some requests are tens of KB long.
"""

from __future__ import annotations

import random
import time
import tomllib
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote_plus

_DATA: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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
    """The lines of one site."""

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
