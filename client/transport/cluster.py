"""The gateways of one data centre: which URL is tried now, and which URLs may see the token.

The token is sent to the URLs that were given, and to those that a session's answer named as the owner's. A redirect
to anywhere else is not followed with a token: the source asks a given URL for its session again, and so learns the
owner's URL from a gateway that it trusts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from logferry.gateway.contract.names import check_token, check_url, origin_of

BACK_TO_FIRST_S = 60.0
USER_AGENT = "logferry-client"
ANSWER_TIMEOUT_S = 40.0  # of the library: a little more than the gateway gives itself


class GatewayCluster:
    """The given URLs of one data centre, and the owners' URLs that were learned.

    The first URL is the preferred one: away from it, it is tried again every `BACK_TO_FIRST_S`. ``token`` may be
    replaced at any time.
    """

    def __init__(self, urls: Sequence[str], token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
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
        """The header with the token, where ``url`` may see it."""
        if self.token is None or origin_of(url) not in self._own:
            return {}
        return {"Authorization": f"Bearer {self.token}"}


def cluster_of(urls: str | Iterable[str], token: str | None) -> GatewayCluster:
    """Validates the ``urls`` and ``token`` arguments of `Writer` and `Reader`. Raises ValueError."""
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise ValueError("urls: at least one is needed, like http://127.0.0.1:8080")
    for url in given:
        check_url(url, "urls:")
    return GatewayCluster(given, None if token is None else check_token(token, "token"))
