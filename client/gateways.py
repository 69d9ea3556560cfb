"""Whom `Writer` and `Reader` ask, as the program gave it: checked at once, with words that name the argument."""

from __future__ import annotations

from collections.abc import Iterable

from logferry.client.transport.cluster import Cluster
from logferry.client.transport.connections import origin_of

USER_AGENT = "logferry-client"
ANSWER_TIMEOUT_S = 40.0  # a little more than the gateway gives itself


def cluster_of(urls: str | Iterable[str], token: str | None) -> Cluster:
    """Raises ValueError."""
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise ValueError("urls: at least one is needed, like http://127.0.0.1:8080")
    for url in given:
        if not isinstance(url, str) or origin_of(url) is None or "@" in url or "?" in url or "#" in url:
            raise ValueError(f"urls: {url!r} is not http(s)://host[:port][/path]")
    if token is not None and (not token.isascii() or not token.isprintable() or not token.strip() or " " in token):
        raise ValueError("token: is not one word of printable ASCII")
    return Cluster(given, token)
