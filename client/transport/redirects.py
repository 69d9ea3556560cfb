"""One request on its way through redirects to an answer; no I/O. Who may see the token is the `Cluster`'s to say.

trip = Trip(cluster, base, path)
while (outcome := …) is None:
    send trip.url with trip.authorization(); then outcome = trip.answered(reply) or trip.unanswered(why)
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urljoin

from logferry.client.transport.cluster import Cluster
from logferry.client.transport.connections import Reply
from logferry.client.transport.responses import NO_ANSWER, Answer, read_answer

MOST_REDIRECTS = 5


class Outcome(NamedTuple):
    """``url``: the gateway that gave the answer, as a base for the next request. ``sent_bytes``: the bodies sent."""

    answer: Answer
    url: str | None
    sent_bytes: int = 0


class Trip:
    """``opens``: see `read_answer`."""

    def __init__(self, cluster: Cluster, base: str, path: str, opens: bool) -> None:
        self.url = base + path
        self._cluster, self._base, self._path, self._opens = cluster, base, path, opens
        self._redirects = 0

    def authorization(self) -> dict[str, str]:
        """The header for the present `url`."""
        return self._cluster.authorization(self.url)

    def unanswered(self, why: str) -> Outcome:
        self._cluster.failed(self._base)
        return Outcome(Answer(NO_ANSWER, detail=why), None)

    def answered(self, reply: Reply) -> Outcome | None:
        """None: the request goes on to another `url`."""
        if reply.status not in (307, 308):
            return Outcome(read_answer(reply.status, reply.headers, reply.body, self._opens), self._base)
        target = _target(self.url, reply.headers.get("location", ""))
        if target is None or not self._cluster.may_follow(target):
            return Outcome(Answer(307, "redirect", f"not followed to {target}"), None)
        self._redirects += 1
        if self._redirects >= MOST_REDIRECTS:
            return Outcome(Answer(NO_ANSWER, detail=f"more than {MOST_REDIRECTS} redirects"), None)
        self.url = target
        self._base = target[: -len(self._path)] if target.endswith(self._path) else self._base
        return None


def _target(url: str, location: str) -> str | None:
    """Where a redirect leads; None when it says nothing that can be followed."""
    try:
        return urljoin(url, location) if location else None
    except ValueError:
        return None
