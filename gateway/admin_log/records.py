"""What the log of acts and refusals holds: which requests are acts, and how refusals are counted. Pure.

* Each administrative act is a record of its own: who, from where, what, on what, and how it ended.
* Refusals (401 and 403) are counted by caller, address, route and kind, in windows of `WINDOW_S`; a window has at most
  `_KINDS_OF_REFUSALS` records, and one more for the rest. So whoever sends a flood of requests fills neither Kafka
  nor the memory.
* No record has a token, a hash, a header, a query or a body.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from logferry.gateway.contract.names import MAX_SEQNO
from logferry.gateway.errors import Problem
from pydantic import BaseModel, ConfigDict, Field

# The names of the routes that change what belongs to others, or what is delivered to whom.
ACTS: Final = frozenset(
    {
        *("put_topic", "forget", "put_offsets", "delete_table", "delete_hbase_report"),
        *("put_subscription", "delete_subscription"),
        *("pause_subscription", "resume_subscription", "replay_subscription"),
    }
)
REFUSALS: Final = frozenset({"unauthenticated", "forbidden"})
WINDOW_S: Final = 10.0
_KINDS_OF_REFUSALS: Final = 50
_TEXT: Final = 300
_Number = Annotated[int, Field(ge=0, le=MAX_SEQNO)]
Record = dict[str, Any]


class AdminLogRecord(BaseModel):
    """``at_ms``: of a refusal the last of ``count``, since ``first_ms``. ``caller`` null: not known, or of several.

    ``address``: of the connection; a proxy's where one is in front, another worker's where ``is_forwarded``. ``act``:
    the operationId of this document. ``reason`` null: it was done. ``facts``: what the act was to do. ``id``: a record
    that was written twice has the same.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str
    offset: _Number
    at_ms: _Number
    caller: str | None
    address: str | None
    is_forwarded: bool
    worker: str
    act: str | None
    method: str | None
    path: str | None
    status: int
    result: Literal["done", "failed", "refused"]
    reason: str | None
    facts: dict[str, Any]
    count: _Number
    first_ms: _Number


class AdminLogPage(BaseModel):
    """In the order of their offsets. ``next``: the ``offset`` of the next page."""

    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["acts", "refusals"]
    records: list[AdminLogRecord]
    next: _Number


def reason_of(problem: Problem | None) -> str | None:
    return None if problem is None else shortened(f"{problem.kind}: {problem.detail}")


def shortened(text: str) -> str:
    """The beginning of a text that a caller may have chosen."""
    return text if len(text) <= _TEXT else text[:_TEXT] + "…"


class Refusals:
    """Those of the present window."""

    def __init__(self) -> None:
        self._counted: dict[tuple[Any, ...], Record] = {}
        self._rest: Record | None = None

    def add(self, record: Record, kind: str) -> None:
        """Counts it with those of the same caller, address, route and kind."""
        key = record["caller"], record["address"], record["act"], kind
        known = self._counted.get(key)
        if known is None and len(self._counted) < _KINDS_OF_REFUSALS:
            self._counted[key] = record
            return
        if known is None:
            if self._rest is None:
                several = dict.fromkeys(("caller", "address", "act", "method", "path"))
                self._rest = {**record, **several, "reason": "several: more kinds of refusals than are kept apart"}
                return
            known = self._rest
        known["count"] += 1
        known["at_ms"] = record["at_ms"]

    def take(self) -> list[Record]:
        """All of the window, which is empty then."""
        found = [*self._counted.values(), *([] if self._rest is None else [self._rest])]
        self._counted, self._rest = {}, None
        return found
