"""The requests about a source, each followed through redirects to an answer. No I/O.

Each may be repeated: a session may be opened again, chunks carry seqno and ``prev``, so that the gateway records
each once, and a heartbeat is idempotent. `GatewayCluster` decides which URLs see the token.
"""

from __future__ import annotations

import email.utils
import enum
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin

from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.compression import compressed
from logferry.client.transport.connections import Body, NoResponse, Reply
from logferry.gateway.contract.chunk import MSGPACK

NO_ANSWER = 0
LONGEST_RETRY_AFTER_S = 300.0


class NextStep(enum.Enum):
    """What the source does next."""

    ADVANCE = "acknowledged: send the next batch"
    RECUT = "the gateway is at another position: resume there with chunks cut there"
    REOPEN = "a newer session exists: open one once more, but do not fight"
    SMALLER = "too large, certainly not recorded: cut smaller chunks"
    WAIT = "certainly not recorded: send the same again later"
    AGAIN = "outcome unknown: send the very same bytes again"
    ASK = "the redirect leads where the token must not go: ask a given URL for the owner"
    REFUSED = "certainly not recorded, and a retry will not help: report it, retry slowly"


class GatewayAnswer(NamedTuple):
    """The part of a response that decides. ``type``: the problem kind, empty if there is none. ``offsets``: of the
    first and the last chunk that was written; so many before them are ``duplicates``.
    """

    status: int
    type: str = ""
    detail: str = ""
    recorded_seqno: int | None = None
    session: int | None = None
    url: str | None = None
    retry_after_s: float = 0.0
    source_retention_ms: int | None = None
    topic: str = ""
    partition: int | None = None
    duplicates: int = 0
    offsets: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.status or 'no answer'}{' ' if self.type else ''}{self.type}: {self.detail}"


_BY_STATUS = {
    200: NextStep.ADVANCE,
    307: NextStep.ASK,
    408: NextStep.WAIT,
    413: NextStep.SMALLER,
    429: NextStep.WAIT,
    503: NextStep.WAIT,
}
_CONFLICTS = {"gap": NextStep.RECUT, "overlap": NextStep.RECUT, "superseded": NextStep.REOPEN}


def next_step(answer: GatewayAnswer) -> NextStep:
    """The outcome counts as unknown unless the answer says that nothing was recorded."""
    if answer.status == 409:
        return _CONFLICTS.get(answer.type, NextStep.REFUSED)
    if answer.status in _BY_STATUS:
        return _BY_STATUS[answer.status]
    return NextStep.REFUSED if 400 <= answer.status < 500 else NextStep.AGAIN


def shows_life(answer: GatewayAnswer) -> bool:
    """Whether the data centre works: also where it refuses a source that another token writes, which is meant."""
    return NO_ANSWER < answer.status < 500 or answer.type == "source-in-use"


def read_answer(reply: Reply, opens: bool) -> GatewayAnswer:
    """A 200 that is not a gateway's, as of a captive portal, counts as no answer.

    ``opens``: the request opened a session, or was a heartbeat in one, so that its answer has to name it.
    """
    status, headers, body, received_s = reply
    try:
        content: Any = json.loads(body)
        if not isinstance(content, dict):
            raise ValueError("not an object")
        if status == 200:
            required = "session" if opens else "recorded_seqno"
            content[required] = int(content[required])
    except (ValueError, KeyError, TypeError):
        if status == 200:
            return GatewayAnswer(NO_ANSWER, detail=f"not a gateway's answer: {body[:200]!r}")
        content = {}
    recorded, retention_ms = content.get("recorded_seqno"), content.get("source_retention_ms")
    return GatewayAnswer(
        status,
        type=problem_kind(content),
        detail=str(content.get("detail") or content.get("title") or body[:200].decode("utf-8", "replace")),
        recorded_seqno=recorded if isinstance(recorded, int) and recorded >= 0 else None,
        session=content.get("session"),
        url=content["url"] if isinstance(content.get("url"), str) else None,
        retry_after_s=_retry_after_s(headers.get("retry-after"), received_s),
        source_retention_ms=retention_ms if isinstance(retention_ms, int) and retention_ms > 0 else None,
        **_places(content),
    )


def _places(content: Mapping[str, Any]) -> dict[str, Any]:
    topic, partition, duplicates = (content.get(name) for name in ("topic", "partition", "duplicates"))
    if not isinstance(topic, str) or not isinstance(partition, int):
        return {}
    offsets = content.get("offsets")
    is_known = isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(one, int) for one in offsets)
    found = tuple(offsets) if is_known and offsets is not None else None
    return {"topic": topic, "partition": partition, "duplicates": duplicates or 0, "offsets": found}


def problem_kind(document: Mapping[str, Any]) -> str:
    """The last segment of a problem document's type, a URL or a URN."""
    return str(document.get("type") or "").rstrip("/").rpartition("/")[2].rpartition(":")[2]


def _retry_after_s(value: str | None, now_s: float) -> float:
    """Seconds or a date (RFC 9110, 10.2.3); bounded, so that a wrong clock does not silence a source."""
    if not value:
        return 0.0
    try:
        if value.isascii() and value.isdigit():
            seconds = float(value)
        else:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)


MOST_REDIRECTS = 5
FORWARDED_S = 60.0  # an owner that cannot be reached is not asked directly for so long


class SourceAddress(NamedTuple):
    """A source at the gateways of one data centre. ``topic``: without the data centre."""

    cluster: GatewayCluster
    user_agent: str
    topic: str
    source_id: str
    partition_key: str | None = None

    def path(self, action: str, session: int | None) -> str:
        key = None if self.partition_key is None else quote(self.partition_key, safe="")
        values = {"session": session, "partition_key": key}
        query = "&".join(f"{name}={value}" for name, value in values.items() if value is not None)
        names = f"topics/{quote(self.topic, safe='')}/sources/{quote(self.source_id, safe='')}"
        return f"/v1/{names}/{action}{'?' if query else ''}{query}"


class Outcome(NamedTuple):
    """``url``: the gateway that gave the answer, as a base for the next request. ``sent_bytes``: the bodies sent."""

    answer: GatewayAnswer
    url: str | None
    sent_bytes: int = 0


class SourceRequest:
    """One request, to be sent to `url` until there is an outcome.

    ``action``: ``session`` and ``heartbeat`` are asked of a given URL, which forwards: so the owner's URL comes from a
    trusted gateway. ``chunks`` with ``direct`` go to the ``owner``, if it is known, and may be redirected.
    ``encoding``: of the body, one of `COMPRESSIONS`.
    """

    def __init__(
        self,
        to: SourceAddress,
        action: str,
        session: int | None = None,
        body: Body = b"",
        *,
        encoding: str = "none",
        direct: bool = False,
        owner: str | None = None,
    ) -> None:
        is_packed = encoding != "none"
        self.body: Body = [compressed([body] if isinstance(body, bytes) else body, encoding)] if is_packed else body
        self._cluster, self._action, self._path = to.cluster, action, to.path(action, session)
        self._base = (direct and owner) or to.cluster.current_url()
        self.url = self._base + self._path
        self._redirects = 0
        self._headers = {"User-Agent": to.user_agent}
        self._headers["Content-Type"] = MSGPACK if action == "chunks" else "application/json"
        self.parts_bytes = 0 if isinstance(self.body, bytes) else sum(map(len, self.body))
        if not isinstance(self.body, bytes):
            self._headers["Content-Length"] = str(self.parts_bytes)
        if is_packed:
            self._headers["Content-Encoding"] = encoding
        if direct:
            self._headers["X-Logferry-Redirect"] = "1"

    def follow(self, send: Callable[[str, dict[str, str], Body], Reply]) -> Outcome:
        """Calls ``send`` with URL, headers and body until there is an outcome; `NoResponse` is one, too."""
        outcome = None
        while outcome is None:
            try:
                outcome = self.answered(send(self.url, self.headers(), self.body))
            except NoResponse as error:
                outcome = self.unanswered(error)
        return outcome

    def headers(self) -> dict[str, str]:
        """With the token, where the present `url` may see it."""
        return {**self._headers, **self._cluster.authorization(self.url)}

    def unanswered(self, error: NoResponse) -> Outcome:
        self._cluster.failed(self._base)
        return Outcome(GatewayAnswer(NO_ANSWER, detail=str(error)), None)

    def answered(self, reply: Reply) -> Outcome | None:
        """None: the request is to be sent to the new `url`."""
        if reply.status not in (307, 308):
            outcome = Outcome(read_answer(reply, self._action != "chunks"), self._base)
            return self._with_owner(outcome, self._base) if self._action == "session" else outcome
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

    def _with_owner(self, outcome: Outcome, told_by: str) -> Outcome:
        """The owner that the answer names is learned, and used from now on if it may see the token."""
        owner = (outcome.answer.url or "").rstrip("/")
        if not owner:
            return outcome
        self._cluster.learn(owner, told_by)
        return Outcome(outcome.answer, owner) if self._cluster.may_follow(owner) else outcome
