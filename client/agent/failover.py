"""Which data centre the client writes to: when it goes on in another one, and when it comes back. Pure.

The first data centre is the preferred one. It is left when nothing of it has answered as a gateway that works does
for ``failover_s``, and only for one that does answer: where all are gone there is nothing to be gained. It is gone
back to when it has answered every probe for ``failback_s``.

What counts is the data centre as a whole. An answer of any of its gateways that is not a 5xx, to whatever source,
says that it works, a refusal and a quota included: those are meant, and are not evaded by going elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

PROBE_S = 5.0
STALE_S = 60.0  # failures further apart say nothing of the time between them


class Move(NamedTuple):
    """``back``: to one that is preferred to where it was."""

    to: int
    why: str
    back: bool


class _Centre:
    def __init__(self) -> None:
        self.works_since: float | None = None
        self.fails_since: float | None = None
        self.heard = self.failed = self.probed = float("-inf")


class Centres:
    """``here``: the number of the data centre that is written to; 0 is the preferred one."""

    def __init__(self, names: Sequence[str], failover_s: float, failback_s: float, here: int = 0) -> None:
        self.names = tuple(names)
        self.here = here
        self.since: float | None = None  # when it came here, if it has moved
        self.why = "goes on where it was" if here else ""
        self._failover_s = failover_s
        self._failback_s = failback_s
        self._probe_s = min(PROBE_S, failover_s / 4, failback_s / 4)
        self._centres = [_Centre() for _ in names]

    def number(self, name: str) -> int | None:
        """None for one that is not configured (any more)."""
        return self.names.index(name) if name in self.names else None

    def heard(self, number: int, works: bool, now: float) -> None:
        """The outcome of a request to a data centre, or of a probe."""
        centre = self._centres[number]
        if works:
            centre.fails_since, centre.heard = None, now
            centre.works_since = now if centre.works_since is None else centre.works_since
            return
        if centre.fails_since is None or now - centre.failed > STALE_S:
            centre.fails_since = now
        centre.failed, centre.works_since = now, None

    def is_gone(self, number: int, now: float) -> bool:
        """Nothing of it has worked for ``failover_s``, as far as was tried."""
        centre = self._centres[number]
        return centre.fails_since is not None and now - centre.fails_since >= self._failover_s

    def standing(self, now: float) -> dict[str, Any]:
        """For people: where it is, for how long and why, and what is known of the others."""
        others = [
            {"name": name, "state": self._state(number, now)}
            for number, name in enumerate(self.names)
            if number != self.here
        ]
        for_s = None if self.since is None else now - self.since
        return {"here": self.names[self.here], "for_s": for_s, "why": self.why, "others": others}

    def _state(self, number: int, now: float) -> str:
        centre = self._centres[number]
        if centre.works_since is not None:
            return f"has answered for {now - centre.works_since:.0f} s"
        if centre.fails_since is not None:
            return f"nothing has worked for {now - centre.fails_since:.0f} s"
        return "not asked"

    def probe(self, now: float) -> int | None:
        """Which one is to be asked now whether it works, if any: those preferred, and all others in trouble."""
        troubled = self._centres[self.here].fails_since is not None
        wanted = [n for n in range(len(self.names)) if n < self.here or (troubled and n != self.here)]
        due = [n for n in wanted if now - self._centres[n].probed >= self._probe_s]
        if not due:
            return None
        number = min(due, key=lambda n: self._centres[n].probed)
        self._centres[number].probed = now
        return number

    def move(self, now: float) -> Move | None:
        """Goes elsewhere if that is due, and says where and why."""
        found = self._back(now) or self._away(now)
        if found is not None:
            self.here, self.since, self.why = found.to, now, found.why
        return found

    def _back(self, now: float) -> Move | None:
        for number in range(self.here):
            since = self._centres[number].works_since
            if since is not None and now - since >= self._failback_s and self._answers(number, now):
                return Move(number, f"{self.names[number]} has answered for {now - since:.0f} s again", True)
        return None

    def _away(self, now: float) -> Move | None:
        fails_since = self._centres[self.here].fails_since
        if fails_since is None or not self.is_gone(self.here, now):
            return None
        for number in range(len(self.names)):
            if number != self.here and self._answers(number, now):
                why = f"nothing of {self.names[self.here]} has worked for {now - fails_since:.0f} s"
                return Move(number, why, number < self.here)
        return None

    def _answers(self, number: int, now: float) -> bool:
        centre = self._centres[number]
        return centre.works_since is not None and now - centre.heard <= 2 * PROBE_S + self._probe_s
