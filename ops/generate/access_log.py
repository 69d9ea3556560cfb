"""One line of a web server's access log after the other, as they look in real life. Pure, but for randomness by a seed.

The format is nginx's *combined* with ``escape=json``: text of all alphabets stands as UTF-8, control characters as
``\\u00XX``. What port scanners send may therefore be no UTF-8 at all, as in life. Visitors come back, and a request
now and then is tens of KB long.
"""

from __future__ import annotations

import base64
import random
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

_VISITORS: Final = 4000
_HUGE_SHARE: Final = 0.0002

_BROWSERS: Final = (
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36",
    "Mozilla/5.0 (X11; Linux x86_64; rv:145.0) Gecko/20100101 Firefox/145.0",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_6 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.6"
    " Mobile/15E148 Safari/604.1",
    "Mozilla/5.0 (Linux; Android 15; SM-S928B) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Mobile"
    " Safari/537.36",
    "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)",
    "Mozilla/5.0 (compatible; YandexBot/3.0; +http://yandex.com/bots)",
    "Яндекс.Погода/7.2 (Android 14; ru_RU)",
    "北京地铁/4.1.0 (iPhone; iOS 18.6; zh-Hans)",
)
_PROGRAMS: Final = (
    "okhttp/4.12.0",
    "python-requests/2.32.5",
    "Go-http-client/2.0",
    "curl/8.14.1",
    "Wärmepumpe/1.4",
    "-",
)
_WORDS: Final = (
    "kaffee", "zürich", "bücher", "кофе", "погода", "билеты в Казань", "カメラ", "東京 ホテル", "الطقس", "ελλάδα",
    "jalapeño", "naïve café", "smörgåsbord", "żółw", "headphones 🎧", "🚲 rental", "שלום", "한국어 책", "running shoes",
    "lamp", "used bicycle", "hotel", "weather tomorrow", "c++ book",
)  # fmt: skip
_PAGES: Final = ("/", "/about", "/cart", "/checkout", "/account/orders", "/delivery", "/katalog/Фото", "/straße/köln")
_ASSETS: Final = ("js/app.{:x}.js", "js/vendor.{:x}.js", "css/site.{:x}.css", "img/hero-{:x}.avif", "fonts/{:x}.woff2")
_CALLS: Final = ("items", "orders", "users/me", "cart", "prices", "stock", "events", "reviews")
_SCANS: Final = ("/wp-login.php", "/.env", "/.git/config", "/phpmyadmin/index.php", "/cgi-bin/luci", "/vendor/phpunit")
_STATUS: Final = (200,) * 80 + (304,) * 8 + (302,) * 4 + (404,) * 4 + (301, 403, 499, 500)


@dataclass(frozen=True)
class Site:
    """One log file. ``share``: of the traffic; ``kinds``: a kind of request and its weight."""

    name: str
    share: float
    kinds: dict[str, int]


SITES: Final = (
    Site("shop.log", 0.30, {"page": 60, "search": 20, "asset": 18, "scan": 1, "beacon": 1}),
    Site("api.log", 0.22, {"call": 97, "scan": 3}),
    Site("static.log", 0.20, {"asset": 100}),
    Site("search.log", 0.12, {"search": 92, "page": 8}),
    Site("blog.log", 0.08, {"page": 80, "asset": 15, "scan": 5}),
    Site("metrics.log", 0.05, {"call": 60, "beacon": 40}),
    Site("admin.log", 0.02, {"page": 50, "call": 40, "scan": 10}),
    Site("default.log", 0.01, {"scan": 100}),
)


class AccessLog:
    """The lines of one site."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._rng = random.Random(f"{seed}/{site.name}")
        self._random = self._rng.random
        makers: dict[str, Callable[[], tuple[str, str]]] = {
            "page": self._page,
            "search": self._search,
            "asset": self._asset,
            "call": self._call,
            "beacon": self._beacon,
        }
        self._kinds = [makers.get(kind) for kind, weight in site.kinds.items() for _ in range(weight)]
        self._visitors = [self._visitor() for _ in range(_VISITORS)]
        self._second, self._stamp = -1, ""

    def line(self, now_s: float) -> bytes:
        """One line, newline included, as if it was written at that Unix time."""
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._stamp = time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(self._second))
        make = self._one_of(self._kinds)
        if make is None:
            return self._scan()
        address, user, agent = self._visitors[int(self._random() ** 3 * _VISITORS)]
        if make == self._call:
            agent = self._one_of(_PROGRAMS)
        request, referer = make()
        if self._random() < _HUGE_SHARE:
            request += f"{'&' if '?' in request else '?'}state={self._blob(8_000, 60_000)}"
        status = self._one_of(_STATUS)
        size = 0 if status == 304 else int(10 ** (2 + 3 * self._random()))
        asked = f'"{request} HTTP/{self._http()}"'
        return f'{address} - {user} [{self._stamp}] {asked} {status} {size} "{referer}" "{agent}"\n'.encode()

    # ---- requests: the request without the protocol, and the referer -------------------------------------------

    def _page(self) -> tuple[str, str]:
        query = f"?utm_source=mail&id={self._number()}" if self._random() < 0.3 else ""
        return f"GET {self._one_of(_PAGES)}{query}", self._referer()

    def _search(self) -> tuple[str, str]:
        """Browsers escape what is not ASCII; many a program sends it as it is."""
        word = self._one_of(_WORDS)
        asked = urllib.parse.quote_plus(word) if self._random() < 0.7 else word.replace(" ", "+")
        return f"GET /search?q={asked}&page={1 + int(self._random() ** 4 * 20)}", self._referer()

    def _asset(self) -> tuple[str, str]:
        return f"GET /static/{self._one_of(_ASSETS).format(self._number())}", "https://shop.example/"

    def _call(self) -> tuple[str, str]:
        method = "POST" if self._random() < 0.3 else "GET"
        return f"{method} /api/v1/{self._one_of(_CALLS)}/{self._number()}", "-"

    def _beacon(self) -> tuple[str, str]:
        return f"GET /collect?v=2&t=pageview&dl=https%3A%2F%2Fshop.example%2F&data={self._blob(100, 1500)}", "-"

    def _scan(self) -> bytes:
        """Someone tries doors: a path that is not there, or a TLS greeting on a plain port."""
        address, agent = self._address(), self._one_of(_PROGRAMS)
        if self._random() < 0.95:
            request = f"GET {self._one_of(_SCANS)} HTTP/1.1"
            return f'{address} - - [{self._stamp}] "{request}" 404 153 "-" "{agent}"\n'.encode()
        greeting = b"\x16\x03\x01" + self._rng.randbytes(4 + int(self._random() * 60))
        shown = b"".join(_escaped(byte) for byte in greeting)
        return f'{address} - - [{self._stamp}] "'.encode() + shown + b'" 400 157 "-" "-"\n'

    # ---- parts --------------------------------------------------------------------------------------------------

    def _one_of(self, these: Sequence[T]) -> T:
        return these[int(self._random() * len(these))]

    def _number(self) -> int:
        return int(self._random() * 10**9)

    def _http(self) -> str:
        return "2.0" if self._random() < 0.7 else "1.1"

    def _referer(self) -> str:
        if self._random() < 0.4:
            return "-"
        if self._random() < 0.1:
            return f"https://поиск.example/?text={self._one_of(_WORDS).replace(' ', '+')}"
        return f"https://shop.example{self._one_of(_PAGES)}"

    def _blob(self, least: int, most: int) -> str:
        size = int((least + self._random() * (most - least)) * 3 / 4)
        return base64.urlsafe_b64encode(self._rng.randbytes(size)).decode().rstrip("=")

    def _address(self) -> str:
        if self._random() < 0.15:
            return (
                f"2001:db8:{self._rng.getrandbits(16):x}:{self._rng.getrandbits(16):x}::{self._rng.getrandbits(16):x}"
            )
        return ".".join(str(1 + int(self._random() * 254)) for _ in range(4))

    def _visitor(self) -> tuple[str, str, str]:
        user = self._one_of(("müller", "ann", "иван")) if self._random() < 0.02 else "-"
        return self._address(), user, self._one_of(_BROWSERS)


def _escaped(byte: int) -> bytes:
    if byte < 0x20:
        return b"\\u%04X" % byte
    return b"\\" + bytes((byte,)) if byte in b'"\\' else bytes((byte,))
