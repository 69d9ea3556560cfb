"""The time of the gateways, by which segments close: a loader's own clock may be wrong.

A gateway's response has its time in the header ``Date``, in whole seconds. A difference that these and the duration of
the request can explain is none.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

_NONE: Final = timedelta(0)


class GatewayClock:
    """Of several gateways the one that is furthest behind counts. Without one the host's clock does."""

    def __init__(self) -> None:
        self._ahead = _NONE

    def now(self) -> datetime:
        return self.host_time() + self._ahead

    def host_time(self) -> datetime:
        return datetime.now(UTC)

    def of_gateways(self, host_time: datetime) -> datetime:
        return host_time + self._ahead

    def learn(self, differences: list[timedelta]) -> None:
        """From all responses of one check; none: no gateway is configured, or their responses have no time."""
        self._ahead = min(differences, default=_NONE)


def difference(date: str | None, asked: datetime, answered: datetime) -> timedelta | None:
    """How far a gateway is ahead of the host, at the least; negative: behind. ``date``: its header; None: unknown."""
    try:
        theirs = parsedate_to_datetime(date or "").astimezone(UTC)
    except (ValueError, TypeError):
        return None
    return max(theirs - answered, min(_NONE, theirs + timedelta(seconds=1) - asked))
