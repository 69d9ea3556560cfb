"""One request followed through redirects to an answer. No I/O. `GatewayCluster` decides which URLs see the token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urljoin

from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import NoResponse, Reply
from logferry.client.transport.responses import NO_ANSWER, GatewayAnswer, read_answer

MOST_REDIRECTS = 5
FORWARDED_FOR_S = 60.0  # an owner that cannot be reached is not asked directly for so long


class Outcome(NamedTuple):
    """``url``: the gateway that gave the answer, as a base for the next request. ``sent_bytes``: the bodies sent."""

    answer: GatewayAnswer
    url: str | None
    sent_bytes: int = 0


class RedirectFollower:
    """The request for ``path``, first at ``base``. ``opens``: see `read_answer`."""

    def __init__(self, cluster: GatewayCluster, base: str, path: str, opens: bool) -> None:
        self.url = base + path
        self._cluster, self._base, self._path, self._opens = cluster, base, path, opens
        self._redirects = 0

    def follow(self, send: Callable[[str, dict[str, str]], Reply]) -> Outcome:
        """Calls ``send`` with a URL and its authorization until there is an outcome; `NoResponse` is one, too."""
        outcome = None
        while outcome is None:
            try:
                outcome = self.answered(send(self.url, self.authorization()))
            except NoResponse as error:
                outcome = self.unanswered(str(error))
        return outcome

    def authorization(self) -> dict[str, str]:
        """The header for the present `url`."""
        return self._cluster.authorization(self.url)

    def unanswered(self, why: str) -> Outcome:
        self._cluster.failed(self._base)
        return Outcome(GatewayAnswer(NO_ANSWER, detail=why), None)

    def answered(self, reply: Reply) -> Outcome | None:
        """None: the request is to be sent to the new `url`."""
        if reply.status not in (307, 308):
            return Outcome(read_answer(reply, self._opens), self._base)
        target: str | None = None
        with suppress(ValueError):
            target = urljoin(self.url, location) if (location := reply.headers.get("location")) else None
        if target is None or not self._cluster.may_follow(target):
            return Outcome(GatewayAnswer(307, "redirect", f"not followed to {target}"), None)
        self._redirects += 1
        if self._redirects >= MOST_REDIRECTS:
            return Outcome(GatewayAnswer(NO_ANSWER, detail=f"more than {MOST_REDIRECTS} redirects"), None)
        self.url = target
        self._base = target[: -len(self._path)] if target.endswith(self._path) else self._base
        return None


def with_owner(cluster: GatewayCluster, outcome: Outcome) -> Outcome:
    """Of an opening: the owner that the answer names is learned, and used from now on if it may see the token."""
    owner = (outcome.answer.url or "").rstrip("/")
    if not owner or outcome.url is None:
        return outcome
    cluster.learn(owner, told_by=outcome.url)
    return Outcome(outcome.answer, owner) if cluster.may_follow(owner) else outcome
