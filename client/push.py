"""A source's requests: open a session, write chunks, say how far it is; whom they go to, who may see the token.

Every request may be repeated: a session may be opened again, chunks carry seqno and ``prev``, so that the
gateway takes each once, and a heartbeat says the same twice. One `Pusher` belongs to one thread; the `Cluster`
is shared by all.

Whom the token is sent to: the URLs that were given, and those that a session's answer named as the owner's. A
redirect to anywhere else is not followed with a token; the source asks a given URL for its session again and
so learns the owner's URL from one that it trusts.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import quote, urljoin

from logferry.client.answers import NO_ANSWER, Answer, read_answer
from logferry.client.batch import Batch
from logferry.client.connections import NoAnswer, Reply, origin_of
from logferry.gateway.contract import MSGPACK, pack_chunk

MOST_REDIRECTS = 5
USER_AGENT = "logferry-push"
BACK_TO_FIRST_S = 60.0


class Exchange(Protocol):
    def __call__(self, url: str, headers: dict[str, str], body: bytes) -> Reply:
        """One POST; raises `NoAnswer`."""


class Beat(NamedTuple):
    """What a source says of itself: its file's ``size`` in bytes, and up to which ``position`` it was sent.

    ``watermark_ms``: what was in the file at that time (Unix, milliseconds) was sent. None: not known, or not so.
    """

    position: int
    size: int | None
    watermark_ms: int | None
    finished: bool


class Job(NamedTuple):
    """One request of a source of ``topic``. Without batch and beat it opens a session.

    ``url``: the owner as far as known. ``direct``: redirects are welcome; else the gateway forwards.
    """

    topic: str
    source_id: str
    url: str | None
    direct: bool
    session: int | None
    batch: Batch | None
    beat: Beat | None = None


class Outcome(NamedTuple):
    """``url``: the gateway that gave the answer, as a base for the next request. ``sent_bytes``: the bodies sent."""

    answer: Answer
    url: str | None
    sent_bytes: int = 0


class Cluster:
    """The gateways of one data centre: the URLs that were given, and who else may see the token.

    The first URL is the preferred one: away from it, it is tried again every `BACK_TO_FIRST_S`.
    """

    def __init__(self, urls: Sequence[str], token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._turn = 0
        self._clock = clock
        self._left_at = 0.0
        self._token = token
        self._own = {origin_of(url) for url in urls}

    def given(self) -> str:
        """The given URL that is tried now."""
        if self._turn and self._clock() - self._left_at >= BACK_TO_FIRST_S:
            self._turn = 0
        return self._urls[self._turn]

    def failed(self, url: str) -> None:
        """No answer from ``url``: the next one that was given is tried from now on."""
        if url == self._urls[self._turn]:
            if self._turn == 0:
                self._left_at = self._clock()
            self._turn = (self._turn + 1) % len(self._urls)

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


@dataclass
class Pusher:
    """Carries out jobs, one at a time."""

    cluster: Cluster
    exchange: Exchange
    gzip: bool = True

    def perform(self, job: Job) -> Outcome:
        """Never raises for what the network or the gateway does: that is in the outcome."""
        source = f"/v1/topics/{quote(job.topic, safe='')}/sources/{quote(job.source_id, safe='')}"
        if job.beat is not None:
            return self._beat(source, job, job.beat)
        if job.batch is None:
            return self._open(source)
        headers, body = self._body(job.batch)
        if job.direct:
            headers["X-Logferry-Redirect"] = "1"
        base = (job.direct and job.url) or self.cluster.given()
        outcome = self._post(base, f"{source}/chunks?session={job.session}", headers, body, opens=False)
        return outcome._replace(sent_bytes=len(body))

    def _open(self, source: str) -> Outcome:
        """Asks a given URL, which forwards to the owner: so the owner's URL comes from one that is trusted."""
        base = self.cluster.given()
        headers = {"Content-Type": "application/json"}
        outcome = self._post(base, f"{source}/session", headers, b"", opens=True)
        owner = (outcome.answer.url or "").rstrip("/")
        self.cluster.learn(owner, told_by=base)
        return Outcome(outcome.answer, owner) if self.cluster.may_follow(owner) else outcome

    def _beat(self, source: str, job: Job, beat: Beat) -> Outcome:
        said = {name: value for name, value in beat._asdict().items() if value is not None}
        headers = {"Content-Type": "application/json"}
        path = f"{source}/heartbeat?session={job.session}"
        return self._post(self.cluster.given(), path, headers, json.dumps(said).encode(), opens=True)

    def _body(self, batch: Batch) -> tuple[dict[str, str], bytes]:
        if not self.gzip:
            return {"Content-Type": MSGPACK}, b"".join(pack_chunk(chunk) for chunk in batch.chunks())
        squeeze = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
        parts = [squeeze.compress(pack_chunk(chunk)) for chunk in batch.chunks()]
        return {"Content-Type": MSGPACK, "Content-Encoding": "gzip"}, b"".join([*parts, squeeze.flush()])

    def _post(self, base: str, path: str, headers: dict[str, str], body: bytes, opens: bool) -> Outcome:
        url = base + path
        for _ in range(MOST_REDIRECTS):
            try:
                reply = self.exchange(
                    url, {"User-Agent": USER_AGENT, **headers, **self.cluster.authorization(url)}, body
                )
            except NoAnswer as error:
                self.cluster.failed(base)
                return Outcome(Answer(NO_ANSWER, detail=str(error)), None)
            if reply.status not in (307, 308):
                return Outcome(read_answer(reply.status, reply.headers, reply.body, opens), base)
            target = _target(url, reply.headers.get("location", ""))
            if target is None or not self.cluster.may_follow(target):
                return Outcome(Answer(307, "redirect", f"not followed to {target}"), None)
            url = target
            base = url[: -len(path)] if url.endswith(path) else base
        return Outcome(Answer(NO_ANSWER, detail=f"more than {MOST_REDIRECTS} redirects"), None)


def _target(url: str, location: str) -> str | None:
    """Where a redirect leads; None when it says nothing that can be followed."""
    try:
        return urljoin(url, location) if location else None
    except ValueError:
        return None
