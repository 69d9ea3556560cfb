"""How much a batch reads, and when a run has done enough. Pure but for the clock that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

# What an offset is taken for before any was read.
_GUESS_BYTES: Final = 256 << 10
_GROWTH: Final = 8


@dataclass
class Sizes:
    """Cuts a backlog into batches of about ``batch_bytes``, by what offsets held so far; ``max_records`` at most."""

    max_records: int
    batch_bytes: int
    average: float = _GUESS_BYTES
    _last: int = 0

    def next_offsets(self) -> int:
        """How many offsets the next batch reads at most; at least one."""
        wanted = int(self.batch_bytes / max(self.average, 1.0))
        if self._last:
            # One batch of small chunks is no proof that all are small.
            wanted = min(wanted, self._last * _GROWTH)
        return max(1, min(wanted, self.max_records))

    def saw(self, offsets: int, size: int) -> None:
        """A batch had so many offsets, control records among them, and bytes."""
        if offsets:
            self.average = (self.average + size / offsets) / 2 if self._last else size / offsets
            self._last = offsets


class Limits(NamedTuple):
    """Of one run, for each table: offsets and bytes; ``seconds`` of the run. None: no limit."""

    offsets: int | None = None
    bytes: int | None = None
    seconds: float | None = None


@dataclass
class Bound:
    """Of one table in one run. A batch is never cut for it that the ledger has already."""

    limits: Limits
    now: Callable[[], float]
    is_stopped: Callable[[], bool] = lambda: False
    started: float = 0.0
    offsets: int = 0
    bytes: int = 0

    def spent(self, offsets: int, size: int) -> None:
        self.offsets += offsets
        self.bytes += size

    def reached(self) -> str | None:
        """Why no further batch is to be planned; None: go on."""
        if self.is_stopped():
            return "stopped"
        if self.limits.offsets is not None and self.offsets >= self.limits.offsets:
            return f"the limit of {self.limits.offsets:,} records is reached"
        if self.limits.bytes is not None and self.bytes >= self.limits.bytes:
            return f"the limit of {self.limits.bytes:,} bytes is reached"
        if self.limits.seconds is not None and self.now() - self.started >= self.limits.seconds:
            return f"the limit of {self.limits.seconds:g} s is reached"
        return None

    def cut(self, sizes: Sizes) -> int:
        """How many offsets the next batch reads at most."""
        wanted = sizes.next_offsets()
        if self.limits.offsets is not None:
            wanted = min(wanted, self.limits.offsets - self.offsets)
        if self.limits.bytes is not None:
            wanted = min(wanted, int((self.limits.bytes - self.bytes) / max(sizes.average, 1.0)))
        return max(1, wanted)


def unbounded() -> Bound:
    return Bound(Limits(), lambda: 0.0)
