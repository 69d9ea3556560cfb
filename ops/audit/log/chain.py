"""The rule that the log of one source must keep, record by record. Pure.

In offset order the seqnos rise, and each ``prev`` that a writer gave is the seqno before it. What breaks that:

* double: a seqno that the log had passed already;
* out-of-order: a seqno that the log had passed, but had left out: it lies in an earlier gap or before the base;
* gap: ``prev`` lies above the last seqno, so that something between them is not there;
* overlap: ``prev`` lies below the last seqno, so that the same part of the source is there twice.

After a break the chain goes on from the highest seqno, so that one wrong record is one break (a record in the
wrong place is two: the gap where it is missing, and itself). Without ``prev`` a gap cannot be seen.

A source that the gateway was told to forget (or that expired) may begin anew, at the ``prev`` that its next state
names as the base. That is no break; but what it had recorded before and records again is a double, and for such a
source all that it ever recorded is kept as ranges to see it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.ops.audit.digests.ranges import Ranges

_KEPT_HOLES: Final = 64


class Break(NamedTuple):
    """``kind``: one of the words above, or ``begins-anew``, which is none; ``detail`` names the seqnos."""

    kind: str
    detail: str
    refutes: bool = True


@dataclass(slots=True)
class Forgotten:
    """A source that was forgotten. ``bases``: with which ``prev`` it may begin anew, once for each time; ``used``:
    with which it did."""

    bases: list[int | None]
    covered: Ranges = field(default_factory=Ranges)
    used: list[int | None] = field(default_factory=list)

    def cover(self, seqno: int, prev: int | None, size_bytes: int) -> bool:
        """Whether some of what this chunk stands for was recorded before. At most its bytes: seqnos may jump."""
        begin = max(seqno - 1 if prev is None else prev, seqno - max(1, size_bytes))
        before = self.covered.overlaps(begin, seqno)
        self.covered.add(begin, seqno)
        return before


@dataclass(slots=True)
class Chain:
    """One source in one partition, so far. ``base``: the ``prev`` of its first record, which is taken as given.

    ``settled``: the highest seqno below the fence, an offset at which the log stood before the states were read;
    ``later``: the seqnos above it. ``cut``: a part of the log was removed while it was read, so that the next
    record may lie above a gap that means nothing. ``head_seen``: a record follows the base that the state names.
    """

    base: int | None
    first: int
    last: int
    first_offset: int
    last_offset: int
    chunks: int = 0
    lines: int = 0
    size_bytes: int = 0
    digest: int = 0
    last_ms: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    settled: int | None = None
    later: list[int] = field(default_factory=list)
    cut: bool = False
    head_seen: bool = False
    forgotten: Forgotten | None = None
    holes: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, offset: int, seqno: int, prev: int | None, size_bytes: int = 0, forgotten: Forgotten | None = None
    ) -> Chain:
        if forgotten is not None:
            forgotten.cover(seqno, prev, size_bytes)
        return cls(prev, seqno, seqno, offset, offset, forgotten=forgotten)

    def follow(self, offset: int, seqno: int, prev: int | None, size_bytes: int = 0) -> Break | None:
        """Takes the next record over, and says what it breaks. Records and sizes are counted by the caller."""
        broken = self._judge(seqno, prev)
        if self.forgotten is not None:
            broken = self._after_forgetting(self.forgotten, broken, seqno, prev, size_bytes)
        if broken is not None and broken.refutes:
            self.breaks[broken.kind] = self.breaks.get(broken.kind, 0) + 1
        self.last = max(self.last, seqno)
        self.last_offset = offset
        self.cut = False
        return broken

    def go_on(self, reborn: list[int | None] | None) -> None:
        """For the next audit: what lay above the fence is settled by then. ``reborn``: with which bases its states
        have begun anew, if they have."""
        self.settled = max([*self.later, *([] if self.settled is None else [self.settled])], default=None)
        self.later.clear()
        if reborn is None:
            return
        if self.forgotten is None:
            covered = Ranges()
            covered.add(self.first - 1 if self.base is None else self.base, self.last)
            self.forgotten = Forgotten([], covered)
            for low, high in self.holes:
                covered = covered.minus(Ranges([low], [high]))
            self.forgotten.covered = covered
        left = list(reborn)
        for base in self.forgotten.used:
            if base in left:
                left.remove(base)
        self.forgotten.bases = left

    def note(self, seqno: int, *, is_settled: bool) -> None:
        """Called for each record: what the states are compared with."""
        if is_settled:
            self.settled = seqno if self.settled is None else max(self.settled, seqno)
        else:
            self.later.append(seqno)

    def _after_forgetting(
        self, forgotten: Forgotten, broken: Break | None, seqno: int, prev: int | None, size_bytes: int
    ) -> Break | None:
        reached = self.last
        if broken is not None and prev in forgotten.bases:
            forgotten.bases.remove(prev)
            forgotten.used.append(prev)
            self.base, self.last, self.settled = prev, seqno, None
            self.later.clear()
            self.holes.clear()
            broken = Break("begins-anew", f"seqno {seqno} after {reached}: the source was forgotten between", False)
        if forgotten.cover(seqno, prev, size_bytes):
            return Break("double", f"seqno {seqno} after {reached}: recorded again after the source was forgotten")
        return broken

    def _judge(self, seqno: int, prev: int | None) -> Break | None:
        if seqno <= self.last:
            return self._passed(seqno, prev)
        if prev is None or prev == self.last:
            return None
        if prev > self.last:
            if self.cut:
                return None
            if len(self.holes) < _KEPT_HOLES:
                self.holes.append((self.last, prev))
            return Break("gap", f"prev is {prev}, but the log had reached {self.last}: what lies between is not there")
        return Break("overlap", f"prev is {prev}, but the log had reached {self.last}: cut anew and recorded twice")

    def _passed(self, seqno: int, prev: int | None) -> Break:
        if self.base is not None and seqno <= self.base:
            return Break("out-of-order", f"seqno {seqno} lies before the first chunk, which follows {self.base}")
        for index, (below, upto) in enumerate(self.holes):
            if below < seqno <= upto:
                begin = below if prev is None else max(prev, below)
                left = [(low, high) for low, high in ((below, begin), (seqno, upto)) if low < high]
                self.holes[index : index + 1] = left
                return Break("out-of-order", f"seqno {seqno} comes after {self.last}")
        return Break("double", f"seqno {seqno} again: the log had reached {self.last}")
