"""How much a batch reads, and when a run reaches its limits. The clock is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

# The assumed size of an offset before any was read.
_GUESS_BYTES: Final = 256 << 10
_GROWTH: Final = 8


@dataclass
class BatchSizer:
    """Cuts a backlog into batches of about ``batch_bytes``, by the offsets' sizes so far; ``max_records`` at most."""

    max_records: int
    batch_bytes: int
    average: float = _GUESS_BYTES
    _last: int = 0

    def next_offsets(self) -> int:
        """How many offsets the next batch reads at most; at least one."""
        wanted = int(self.batch_bytes / max(self.average, 1.0))
        if self._last:
            # One batch of small chunks does not prove that all are small.
            wanted = min(wanted, self._last * _GROWTH)
        return max(1, min(wanted, self.max_records))

    def saw(self, offsets: int, size: int) -> None:
        """Takes note of a batch's offsets, control records included, and bytes."""
        if offsets:
            self.average = (self.average + size / offsets) / 2 if self._last else size / offsets
            self._last = offsets


class Limits(NamedTuple):
    """The limits of one run: offsets and bytes of each table, ``seconds`` of the run. None: no limit."""

    offsets: int | None = None
    bytes: int | None = None
    seconds: float | None = None


@dataclass
class RunBound:
    """The limits and counts of one table in one run. A batch in the ledger is never cut for them."""

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
        """Why no further batch is to be planned; None: continue."""
        if self.is_stopped():
            return "stopped"
        if self.limits.offsets is not None and self.offsets >= self.limits.offsets:
            return f"the limit of {self.limits.offsets:,} records is reached"
        if self.limits.bytes is not None and self.bytes >= self.limits.bytes:
            return f"the limit of {self.limits.bytes:,} bytes is reached"
        if self.limits.seconds is not None and self.now() - self.started >= self.limits.seconds:
            return f"the limit of {self.limits.seconds:g} s is reached"
        return None

    def cut(self, sizes: BatchSizer) -> int:
        """How many offsets the next batch reads at most."""
        wanted = sizes.next_offsets()
        if self.limits.offsets is not None:
            wanted = min(wanted, self.limits.offsets - self.offsets)
        if self.limits.bytes is not None:
            wanted = min(wanted, int((self.limits.bytes - self.bytes) / max(sizes.average, 1.0)))
        return max(1, wanted)


def unbounded() -> RunBound:
    return RunBound(Limits(), lambda: 0.0)
