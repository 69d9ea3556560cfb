"""The meaning of a gateway's response for a source. Pure: status and problem kind in, the next step out."""

from __future__ import annotations

import email.utils
import enum
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from logferry.client.transport.connections import Reply

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
    """The part of a response that decides. ``type``: the problem kind, empty if there is none."""

    status: int
    type: str = ""
    detail: str = ""
    recorded_seqno: int | None = None
    session: int | None = None
    url: str | None = None
    retry_after_s: float = 0.0

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
    recorded = content.get("recorded_seqno")
    return GatewayAnswer(
        status,
        type=problem_kind(content),
        detail=str(content.get("detail") or content.get("title") or body[:200].decode("utf-8", "replace")),
        recorded_seqno=recorded if isinstance(recorded, int) and recorded >= 0 else None,
        session=content.get("session"),
        url=content["url"] if isinstance(content.get("url"), str) else None,
        retry_after_s=_retry_after_s(headers.get("retry-after"), received_s),
    )


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
