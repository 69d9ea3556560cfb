"""What an answer of the gateway means for a source. Pure: status and type in, what to do out."""

from __future__ import annotations

import email.utils
import enum
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

NO_ANSWER = 0
LONGEST_RETRY_AFTER_S = 300.0


class Do(enum.Enum):
    """What the source does next."""

    ADVANCE = "acknowledged: go on"
    RECUT = "the gateway is at another position: go there and cut anew"
    REOPEN = "a newer session exists: open one once more, but do not fight"
    SMALLER = "too large, surely not recorded: cut smaller chunks"
    WAIT = "surely not recorded: the same again later"
    AGAIN = "outcome unknown: the very same bytes again"
    ASK = "the redirect leads where our token must not go: ask the given URL for the owner"
    REFUSED = "surely not recorded, and the same again will not help: say so, try slowly"


class Answer(NamedTuple):
    """The part of an answer that decides. ``type``: last segment of the problem's type, empty if none."""

    status: int
    type: str = ""
    detail: str = ""
    recorded_seqno: int | None = None
    session: int | None = None
    url: str | None = None
    retry_after_s: float = 0.0


_BY_STATUS = {
    200: Do.ADVANCE,
    307: Do.ASK,
    408: Do.WAIT,
    413: Do.SMALLER,
    429: Do.WAIT,
    503: Do.WAIT,
}
_CONFLICTS = {"gap": Do.RECUT, "overlap": Do.RECUT, "superseded": Do.REOPEN}


def judge(answer: Answer) -> Do:
    """Everything that is not known to be unrecorded counts as unknown."""
    if answer.status == 409:
        return _CONFLICTS.get(answer.type, Do.REFUSED)
    if answer.status in _BY_STATUS:
        return _BY_STATUS[answer.status]
    return Do.REFUSED if 400 <= answer.status < 500 else Do.AGAIN


def read_answer(status: int, headers: Mapping[str, str], body: bytes, opens: bool) -> Answer:
    """``headers`` with lower-case names. A 200 that is not a gateway's counts as no answer.

    ``opens``: the request opened a session, or was a heartbeat in one, so that its answer has to name it.
    """
    try:
        content: Any = json.loads(body)
        if not isinstance(content, dict):
            raise ValueError("not an object")
        if status == 200 and opens:
            content["session"] = int(content["session"])
        if status == 200 and not opens:
            content["recorded_seqno"] = int(content["recorded_seqno"])
    except (ValueError, KeyError, TypeError):
        if status == 200:
            return Answer(NO_ANSWER, detail=f"not a gateway's answer: {body[:200]!r}")
        content = {}
    kind = str(content.get("type") or "").rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return Answer(
        status,
        type=kind,
        detail=str(content.get("detail") or content.get("title") or body[:200].decode("utf-8", "replace")),
        recorded_seqno=_position(content.get("recorded_seqno")),
        session=content.get("session"),
        url=content["url"] if isinstance(content.get("url"), str) else None,
        retry_after_s=_retry_after_s(headers.get("retry-after")),
    )


def _position(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _retry_after_s(value: str | None) -> float:
    """Seconds or a date (RFC 9110, 10.2.3); bounded, so that a wrong clock does not silence a source."""
    if not value:
        return 0.0
    try:
        if value.isascii() and value.isdigit():
            seconds = float(value)
        else:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)
