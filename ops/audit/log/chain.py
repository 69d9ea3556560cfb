"""The rule for the records of one source in the log, and its breaks. Pure.

In offset order the seqnos rise, and each ``prev`` that a writer gave is the seqno before it. The breaks are:

* double: a seqno that the log had passed already;
* out-of-order: a seqno that the log had passed, but had left out: it is in an earlier gap or before the base;
* gap: ``prev`` is above the last seqno, so that a part between them is missing;
* overlap: ``prev`` is below the last seqno, so that a part of the source is in the log twice.

After a break the chain continues from the highest seqno, so that one wrong record is one break (a misplaced record is
two: the gap where it is missing, and the record itself). Without ``prev`` a gap cannot be detected.

A source that was deleted or expired may begin again, at the ``prev`` that its next state names as the base. That is
not a break. But a seqno that it had recorded before is a double, so the chain of such a source holds all its recorded
seqnos as ranges.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.ops.audit.digests.sums import Ranges

_KEPT_HOLES: Final = 64


class Break(NamedTuple):
    """``kind``: one of the above, or ``chain-restarted``, which is not a break; ``detail`` names the seqnos."""

    kind: str
    detail: str
    refutes: bool = True


@dataclass(slots=True)
class ForgottenSource:
    """A source that was deleted or expired. ``bases``: each ``prev`` with which it may begin again; ``used``: those
    with which it did."""

    bases: list[int | None]
    covered: Ranges = field(default_factory=Ranges)
    used: list[int | None] = field(default_factory=list)

    def cover(self, seqno: int, prev: int | None, size_bytes: int) -> bool:
        """Whether a part of this chunk was recorded before. It covers at most its bytes: seqnos may jump."""
        begin = max(seqno - 1 if prev is None else prev, seqno - max(1, size_bytes))
        before = self.covered.overlaps(begin, seqno)
        self.covered.add(begin, seqno)
        return before


@dataclass(slots=True)
class Chain:
    """One source in one partition, so far. ``base``: the ``prev`` of its first record, which is not checked.

    ``settled``: the highest seqno below the fence, the end of the log before the states were read; ``later``: the
    seqnos above it. ``cut``: retention removed a part of the log while it was read, so that a gap before the next
    record is not a break. ``head_seen``: a record follows the base that the state names.
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
    forgotten: ForgottenSource | None = None
    holes: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, offset: int, seqno: int, prev: int | None, size_bytes: int = 0, forgotten: ForgottenSource | None = None
    ) -> Chain:
        if forgotten is not None:
            forgotten.cover(seqno, prev, size_bytes)
        return cls(prev, seqno, seqno, offset, offset, forgotten=forgotten)

    def follow(self, offset: int, seqno: int, prev: int | None, size_bytes: int = 0) -> Break | None:
        """Adds the next record, and returns its break. Records and sizes are counted by the caller."""
        broken = self._judge(seqno, prev)
        if self.forgotten is not None:
            broken = self._after_forgetting(self.forgotten, broken, seqno, prev, size_bytes)
        if broken is not None and broken.refutes:
            self.breaks[broken.kind] = self.breaks.get(broken.kind, 0) + 1
        self.last = max(self.last, seqno)
        self.last_offset = offset
        self.cut = False
        return broken

    def settle_for_next(self, reborn: list[int | None] | None) -> None:
        """Called by the next audit: the seqnos above the old fence are settled by then. ``reborn``: the bases with
        which its states began again, None if they did not."""
        self.settled = max([*self.later, *([] if self.settled is None else [self.settled])], default=None)
        self.later.clear()
        if self.forgotten is None:
            if reborn is None:
                return
            start = self.first - 1 if self.base is None else self.base
            self.forgotten = ForgottenSource([], Ranges.of([(start, self.last)]).minus(Ranges.of(self.holes)))
        self.forgotten.bases = list((Counter(reborn or ()) - Counter(self.forgotten.used)).elements())

    def note(self, seqno: int, *, is_settled: bool) -> None:
        """Called for each record: the states are compared with these seqnos."""
        if is_settled:
            self.settled = seqno if self.settled is None else max(self.settled, seqno)
        else:
            self.later.append(seqno)

    def _after_forgetting(
        self, forgotten: ForgottenSource, broken: Break | None, seqno: int, prev: int | None, size_bytes: int
    ) -> Break | None:
        after = f"seqno {seqno} after {self.last}"
        if broken is not None and prev in forgotten.bases:
            forgotten.bases.remove(prev)
            forgotten.used.append(prev)
            self.base, self.last, self.settled = prev, seqno, None
            self.later.clear()
            self.holes.clear()
            broken = Break("chain-restarted", f"{after}: the source was deleted or expired between", False)
        if forgotten.cover(seqno, prev, size_bytes):
            return Break("double", f"{after}: recorded again after the source was deleted or expired")
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
            return Break("gap", f"prev is {prev}, but the log had reached {self.last}: the part between is missing")
        return Break("overlap", f"prev is {prev}, but the log had reached {self.last}: a part is recorded twice")

    def _passed(self, seqno: int, prev: int | None) -> Break:
        if self.base is not None and seqno <= self.base:
            return Break("out-of-order", f"seqno {seqno} is before the first chunk, which follows {self.base}")
        for index, (below, upto) in enumerate(self.holes):
            if below < seqno <= upto:
                begin = below if prev is None else max(prev, below)
                left = [(low, high) for low, high in ((below, begin), (seqno, upto)) if low < high]
                self.holes[index : index + 1] = left
                return Break("out-of-order", f"seqno {seqno} comes after {self.last}")
        return Break("double", f"seqno {seqno} again: the log had reached {self.last}")
