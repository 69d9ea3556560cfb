"""The time of the gateways, by which segments close: a loader's own clock may be wrong.

A gateway's response has its time in the header ``Date``, in whole seconds. A difference that these and the duration of
the request can explain is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime


@dataclass
class GatewayClock:
    """``ahead``: how far the gateways are ahead of the host; zero where none is configured, or none sent its time."""

    ahead: timedelta = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


def difference(date: str | None, asked: datetime, answered: datetime) -> timedelta | None:
    """How far a gateway is ahead of the host, at the least; negative: behind. ``date``: its header; None: unknown."""
    try:
        theirs = parsedate_to_datetime(date or "").astimezone(UTC)
    except (ValueError, TypeError):
        return None
    return max(theirs - answered, min(timedelta(0), theirs + timedelta(seconds=1) - asked))
