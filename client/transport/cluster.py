"""The gateways of one data centre: which one is asked now, and who may see the token.

Whom the token is sent to: the URLs that were given, and those that a session's answer named as the owner's. A
redirect to anywhere else is not followed with a token; the source asks a given URL for its session again and
so learns the owner's URL from one that it trusts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from logferry.client.transport.connections import origin_of

BACK_TO_FIRST_S = 60.0


class Cluster:
    """The gateways of one data centre: the URLs that were given, and who else may see the token.

    The first URL is the preferred one: away from it, it is tried again every `BACK_TO_FIRST_S`.
    """

    def __init__(self, urls: Sequence[str], token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._turn = 0
        self._clock = clock
        self._left_at = 0.0
        self._token = token
        self._own = {origin_of(url) for url in urls}

    def given(self) -> str:
        """The given URL that is tried now."""
        if self._turn and self._clock() - self._left_at >= BACK_TO_FIRST_S:
            self._turn = 0
        return self.urls[self._turn]

    def failed(self, url: str) -> None:
        """No answer from ``url``: the next one that was given is tried from now on."""
        if url == self.urls[self._turn]:
            if self._turn == 0:
                self._left_at = self._clock()
            self._turn = (self._turn + 1) % len(self.urls)

    def learn(self, url: str, told_by: str) -> None:
        """A session's answer named ``url``; it is trusted like the one that told it, not without its TLS."""
        told, origin = origin_of(told_by), origin_of(url)
        if told in self._own and told and origin and (told[0] == "http" or origin[0] == "https"):
            self._own.add(origin)

    def may_follow(self, url: str) -> bool:
        return origin_of(url) is not None and (self._token is None or origin_of(url) in self._own)

    def authorization(self, url: str) -> dict[str, str]:
        if self._token is None or origin_of(url) not in self._own:
            return {}
        return {"Authorization": f"Bearer {self._token}"}
