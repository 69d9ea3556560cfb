"""The gateways of one data centre: which URL is tried now, after what pause, and which URLs may see the token.

The token is sent to the URLs that were given, and to those that a session's answer named as the owner's. A redirect
to anywhere else is not followed with a token: the source asks a given URL for its session again, and so learns the
owner's URL from a gateway that it trusts.

Tokens and certificates are read again while the push-client runs: they are rotated. A program gives a function
for its token instead.
"""

from __future__ import annotations

import os
import random
import ssl
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Callable, Union

from logferry.client.events import log_event
from logferry.client.transport.connections import Dialer, NoResponse
from logferry.gateway.contract.names import check_token, check_url, is_plain, origin_of

RETRY_S = (0.1, 10.0)  # first and longest pause
TROUBLE_AFTER_S = 5.0  # so long a request may fail before it is logged
TROUBLE_EVERY_S = 60.0
BACK_TO_FIRST_S = 60.0
USER_AGENT = "logferry-client"
ANSWER_TIMEOUT_S = 40.0  # of the library: a little more than the gateway gives itself


Token = Union[str, Callable[[], str], None]

_named: set[object] = set()


def bearer(token: str, url: str) -> dict[str, str]:
    """The header with the token for a request to ``url``. A gateway that it reaches in plain text is logged, once."""
    origin = origin_of(url)
    if origin not in _named and is_plain(url) and origin is not None:
        _named.add(origin)
        why = "the token crosses the network in plain text: give the gateway TLS and its URL with https"
        log_event("token-unencrypted", url="{}://{}:{}".format(*origin), why=why)
    return {"Authorization": f"Bearer {token}"}


class GatewayCluster:
    """The given URLs of one data centre, and the owners' URLs that were learned.

    The first URL is the preferred one: away from it, it is tried again every `BACK_TO_FIRST_S`. ``token``, or a
    function that is asked for it before each request, may be replaced at any time.
    """

    def __init__(self, urls: Sequence[str], token: Token, clock: Callable[[], float] = time.monotonic) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._turn = 0
        self._clock = clock
        self._left_at = 0.0
        self.token = token
        self._own = {origin_of(url) for url in urls}

    def current_url(self) -> str:
        """The given URL to use now."""
        if self._turn and self._clock() - self._left_at >= BACK_TO_FIRST_S:
            self._turn = 0
        return self.urls[self._turn]

    def failed(self, url: str) -> None:
        """No answer came from ``url``: the next given URL is used from now on."""
        if url == self.urls[self._turn]:
            if self._turn == 0:
                self._left_at = self._clock()
            self._turn = (self._turn + 1) % len(self.urls)

    def learn(self, url: str, told_by: str) -> None:
        """A session's answer named ``url``: it is trusted as its source is, but never without that one's TLS."""
        told, origin = origin_of(told_by), origin_of(url)
        if told in self._own and told and origin and (told[0] == "http" or origin[0] == "https"):
            self._own.add(origin)

    def may_follow(self, url: str) -> bool:
        return origin_of(url) is not None and (self.token is None or origin_of(url) in self._own)

    def authorization(self, url: str) -> dict[str, str]:
        """The header with the token, where ``url`` may see it. Raises `NoResponse` if the function has none."""
        if self.token is None or origin_of(url) not in self._own:
            return {}
        if isinstance(self.token, str):
            return bearer(self.token, url)
        try:
            return bearer(check_token(self.token(), "token"), url)
        except Exception as error:  # of the program's function; the request may be repeated
            raise NoResponse(f"the function for the token: {error!r}") from error


def cluster_of(urls: str | Iterable[str], token: Token) -> GatewayCluster:
    """Validates the ``urls`` and ``token`` arguments of `Writer` and `Reader`. Raises ValueError."""
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise ValueError("urls: at least one is needed, like http://127.0.0.1:8080")
    for url in given:
        check_url(url, "urls:")
    return GatewayCluster(given, check_token(token, "token") if isinstance(token, str) else token)


def read_token(path: str) -> str:
    """The token that the file of ``--token-file`` holds. Raises ValueError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {path}: {error}") from None
    return check_token(text, f"--token-file {path}")


class Credentials:
    """The files behind ``clusters``, by their numbers, and behind ``dialer``; None: there is no file."""

    def __init__(self, clusters: Sequence[GatewayCluster], token_files: Sequence[str | None], dialer: Dialer) -> None:
        self._clusters = clusters
        self._token_files = token_files
        self._dialer = dialer
        self._seen = self._look()

    def read(self, always: bool = False) -> bool:
        """Reads the files again if one changed, or ``always``. True: new values are used from the next connection on.

        If a file cannot be used, that is logged, and what was read before stays in use.
        """
        seen = self._look()
        if seen == self._seen and not always:
            return False
        self._seen = seen
        try:
            tokens = [None if path is None else read_token(path) for path in self._token_files]
            self._dialer.reload()
        except (ValueError, OSError, ssl.SSLError) as error:
            log_event("credentials-unusable", reason=error)
            return False
        for cluster, token in zip(self._clusters, tokens):
            if token is not None:
                cluster.token = token
        log_event("credentials-read")
        return True

    def _look(self) -> list[tuple[int, ...]]:
        """What tells a file from the one before; a file that is missing has nothing of it."""
        found: list[tuple[int, ...]] = []
        for path in (*self._token_files, *self._dialer.files):
            try:
                facts = None if path is None else os.stat(path)  # noqa: PTH116
            except OSError:
                facts = None
            found.append(() if facts is None else (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return found


class TroubleLog:
    """Logs that nothing worked for `TROUBLE_AFTER_S`, and again every `TROUBLE_EVERY_S`: a wrong URL is no secret.

    ``what``: who waits, for the log. Call it without a lock that a handler of `logging` may need.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None
        self._next = 0.0

    def worked(self) -> None:
        self._since, self._next = None, 0.0

    def failed(self, began: float, why: object) -> None:
        """A request that ``began`` then, in monotonic time, is to be repeated."""
        now = time.monotonic()
        self._since = began if self._since is None else self._since
        if now - self._since >= TROUBLE_AFTER_S and now >= self._next:
            self._next = now + TROUBLE_EVERY_S
            log_event("gateway-silent", who=self._what, for_s=round(now - self._since), why=why)


def pause_s(failures: int, bounds: tuple[float, float], asked_s: float = 0.0) -> float:
    """Exponential with jitter, between half and the whole of the step, so that clients do not retry together.

    ``asked_s``: by a gateway, which asks all clients alike. The pause is that, if it is longer than its own, and up to
    a second more, or a fifth of it; but not more than twice of it.
    """
    first, longest = bounds
    own_s = min(first * 2.0 ** min(failures - 1, 30), longest) * random.uniform(0.5, 1.0)
    return max(own_s, asked_s + random.uniform(0.0, max(min(asked_s, 1.0), asked_s / 5)))


def deadline_of(timeout_s: float | None) -> float | None:
    """The monotonic time at which the caller's patience ends; None: never."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def left_s(deadline: float | None) -> float | None:
    """Seconds until the deadline, 0 once it has passed; None: there is none."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
