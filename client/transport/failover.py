"""Failover: which data centre the client writes to. Pure.

The first data centre is the preferred one. The client leaves it when none of its gateways has worked for
``failover_s``, and only for a data centre that answers. It fails back when the preferred one has answered every probe
for ``failback_s``. Each wait is longer by a random part, up to `SPREAD` of it, drawn when it begins: clients that lost
a data centre at the same moment neither leave it nor return to it together.

A data centre is judged as a whole: any answer of any of its gateways that is not a 5xx, to any source, shows that it
works. Refusals and quotas are answers, too: they are meant, and must not be evaded by a failover.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

PROBE_S = 5.0
SPREAD = 0.25
STALE_S = 60.0  # failures further apart show nothing about the time between them


class _Centre:
    """``longer``: the factor of its present wait: until it is left, or until it is gone back to."""

    def __init__(self) -> None:
        self.works_since: float | None = None
        self.fails_since: float | None = None
        self.longer = 1.0
        self.answered_at = self.failed_at = self.probed_at = float("-inf")


class FailoverPolicy:
    """``here``: the number of the data centre that the client writes to; 0 is the preferred one."""

    def __init__(self, names: Sequence[str], failover_s: float, failback_s: float, here: int = 0) -> None:
        self.names = tuple(names)
        self.here = here
        self.since: float | None = None  # when it switched to this one, if it has
        self.why = "it was the last one before the restart" if here else ""
        self._failover_s = failover_s
        self._failback_s = failback_s
        self._probe_s = min(PROBE_S, failover_s / 4, failback_s / 4)
        self._centres = [_Centre() for _ in names]

    def number(self, name: str) -> int | None:
        """None for one that is not configured (any more)."""
        return self.names.index(name) if name in self.names else None

    def record(self, number: int, works: bool, now: float) -> None:
        """The outcome of a request to a data centre, or of a probe."""
        centre = self._centres[number]
        if works:
            if centre.works_since is None:
                centre.works_since, centre.longer = now, random.uniform(1, 1 + SPREAD)
            centre.fails_since, centre.answered_at = None, now
            return
        if centre.fails_since is None or now - centre.failed_at > STALE_S:
            centre.fails_since, centre.longer = now, random.uniform(1, 1 + SPREAD)
        centre.failed_at, centre.works_since = now, None

    def is_gone(self, number: int, now: float) -> bool:
        """Every attempt has failed for ``failover_s`` and its random part."""
        centre = self._centres[number]
        return centre.fails_since is not None and now - centre.fails_since >= self._failover_s * centre.longer

    def others(self, now: float) -> list[int]:
        """The other data centres that are not gone."""
        return [number for number in range(len(self.names)) if number != self.here and not self.is_gone(number, now)]

    def status(self, now: float) -> dict[str, Any]:
        """For ``--status``: the present data centre, since when and why, and the state of the others."""
        others = [{"name": name, "state": self._state(n, now)} for n, name in enumerate(self.names) if n != self.here]
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
        """Which one to probe now, if any: those that are preferred, and all others while the present one fails."""
        troubled = self._centres[self.here].fails_since is not None
        wanted = [n for n in range(len(self.names)) if n < self.here or (troubled and n != self.here)]
        due = [n for n in wanted if now - self._centres[n].probed_at >= self._probe_s]
        if not due:
            return None
        number = min(due, key=lambda n: self._centres[n].probed_at)
        self._centres[number].probed_at = now
        return number

    def switch(self, now: float) -> bool | None:
        """Switches to another data centre if that is due; returns whether to a preferred one. None: it stays."""
        found = self._back(now) or self._away(now)
        if found is None:
            return None
        before, (self.here, self.why), self.since = self.here, found, now
        return self.here < before

    def _back(self, now: float) -> tuple[int, str] | None:
        for number in range(self.here):
            since, longer = self._centres[number].works_since, self._centres[number].longer
            if since is not None and now - since >= self._failback_s * longer and self._answers(number, now):
                return number, f"{self.names[number]} has answered for {now - since:.0f} s again"
        return None

    def _away(self, now: float) -> tuple[int, str] | None:
        fails_since = self._centres[self.here].fails_since
        if fails_since is None or not self.is_gone(self.here, now):
            return None
        for number in range(len(self.names)):
            if number != self.here and self._answers(number, now):
                return number, f"nothing of {self.names[self.here]} has worked for {now - fails_since:.0f} s"
        return None

    def _answers(self, number: int, now: float) -> bool:
        centre = self._centres[number]
        return centre.works_since is not None and now - centre.answered_at <= 2 * PROBE_S + self._probe_s
