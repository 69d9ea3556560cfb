"""What an answer to a reader's request means: it is good, it is to be asked again, or the caller must hear of it."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

from logferry.client.errors import OutOfRange, Rejected, Superseded
from logferry.client.transport.backoff import RETRY_S, pause_s
from logferry.client.transport.connections import Reply
from logferry.client.transport.responses import Do, judge, read_answer


class Again(Exception):
    """Ask again: the gateway cannot now, or did not answer. ``after_s``: what it asked for at least."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s

    def pause_s(self, failures: int) -> float:
        return max(pause_s(failures, RETRY_S), self.after_s * random.uniform(1.0, 1.2))


def content_of(reply: Reply) -> bytes:
    """The body of a good answer, decompressed. Raises `Again`, or what the caller must hear of."""
    if reply.status != 200:
        raise trouble(reply)
    if reply.headers.get("content-encoding") == "gzip":
        return zlib.decompress(reply.body, 16 + zlib.MAX_WBITS)
    return reply.body


def document_of(reply: Reply) -> dict[str, Any]:
    """The same, of an answer that is a JSON object."""
    try:
        found = json.loads(content_of(reply))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Again(f"not a gateway's answer: {reply.body[:200]!r}")
    return found


def trouble(reply: Reply) -> Exception:
    answer = read_answer(reply.status, reply.headers, reply.body, opens=False)
    if judge(answer) in (Do.WAIT, Do.AGAIN, Do.ADVANCE):
        return Again(f"{reply.status} {answer.type}: {answer.detail}", answer.retry_after_s)
    try:
        return problem(json.loads(reply.body))
    except ValueError:
        return Rejected(f"{reply.status}: {answer.detail}", answer.type, reply.status)


def problem(document: Any) -> Exception:
    """The same, of a problem document alone: that of an answer, or of a stream's last frame."""
    if not isinstance(document, dict):
        return Again(f"not a gateway's problem: {document!r}")
    kind = str(document.get("type") or "").rstrip("/").rpartition("/")[2].rpartition(":")[2]
    status = document.get("status")
    text = f"{kind or status}: {document.get('detail') or document.get('title')}"
    if kind == "out-of-range" and "first" in document:
        place = str(document.get("topic", "")), int(document.get("partition", -1))
        return OutOfRange(text, *place, document["first"], document["next"])
    if not isinstance(status, int) or status >= 500 or status in (408, 429):
        return Again(text)
    return (Superseded if kind == "superseded" else Rejected)(text, kind, status)
