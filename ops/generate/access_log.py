"""Realistic lines of a web server's access log, from a seed.

The format is nginx's *combined* with ``escape=json``: all alphabets are UTF-8, control characters are ``\\u00XX``. So
lines of port scanners may be invalid UTF-8, as in real logs. Visitors return, and some requests are tens of KB long.
"""

from __future__ import annotations

import random
import time
from typing import Final
from urllib.parse import quote_plus

# The files and their shares of the traffic.
SITES: Final = {
    "shop.log": 0.30,
    "api.log": 0.22,
    "static.log": 0.20,
    "search.log": 0.12,
    "blog.log": 0.08,
    "metrics.log": 0.05,
    "admin.log": 0.02,
    "default.log": 0.01,
}
_VISITORS: Final = 4000
_HUGE_SHARE: Final = 0.0002
_GREETING_SHARE: Final = 0.002
_AGENTS: Final = (
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36",
    "Mozilla/5.0 (X11; Linux x86_64; rv:145.0) Gecko/20100101 Firefox/145.0",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_6 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.6"
    " Mobile/15E148 Safari/604.1",
    "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)",
    "Яндекс.Погода/7.2 (Android 14; ru_RU)",
    "python-requests/2.32.5",
    "okhttp/4.12.0",
    "curl/8.14.1",
    "-",
)
_WORDS: Final = ("kaffee", "zürich", "билеты в Казань", "東京 ホテル", "الطقس", "żółw", "headphones 🎧", "c++ book")
_PLACES: Final = (
    *("GET /", "GET /about", "GET /cart", "POST /checkout", "GET /katalog/Фото", "GET /straße/köln", "GET /.env"),
    *("GET /static/js/app.{:x}.js", "GET /static/img/hero-{:x}.avif", "GET /static/fonts/{:x}.woff2"),
    *("GET /api/v1/items/{}", "POST /api/v1/orders/{}", "GET /api/v1/prices/{}", "GET /collect?v=2&t=pageview&data={}"),
    # Browsers escape non-ASCII text; some programs send it as it is.
    *(f"GET /search?q={quote_plus(word)}&page={{}}" for word in _WORDS),
    *(f"GET /search?q={word}&page={{}}" for word in _WORDS if " " not in word),
)
_REFERERS: Final = ("-",) * 4 + ("https://shop.example/", "https://поиск.example/?text=кофе")
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
