"""Ranges of offsets, or of seqnos. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ranges:
    """Numbers as disjoint [start, end), ascending, with nothing between two that touch."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self.starts, offset) - 1
        return index >= 0 and offset < self.ends[index]

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any offset of [start, end) is in the ranges."""
        index = bisect_right(self.starts, end - 1) - 1
        return start < end and index >= 0 and self.ends[index] > start

    def add(self, start: int, end: int) -> None:
        """Merges the range in."""
        if start >= end:
            return
        pairs = sorted([*self, (start, end)])
        self.starts, self.ends = [], []
        for low, high in pairs:
            if self.ends and low <= self.ends[-1]:
                self.ends[-1] = max(high, self.ends[-1])
            else:
                self.starts.append(low)
                self.ends.append(high)

    def minus(self, other: Ranges) -> Ranges:
        """The numbers in these ranges that are not in the others."""
        found = Ranges()
        for at, end in self:
            for low, high in other:
                if at < high and low < end:
                    found.add(at, low)
                    at = max(at, high)
            found.add(at, end)
        return found

    def within(self, start: int, end: int) -> Ranges:
        """The part of them in [start, end)."""
        found = Ranges()
        for low, high in self:
            found.add(max(low, start), min(high, end))
        return found

    def update(self, other: Ranges) -> None:
        for low, high in other:
            self.add(low, high)

    def copy(self) -> Ranges:
        return Ranges(list(self.starts), list(self.ends))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self.starts, self.ends, strict=True)))

    def __bool__(self) -> bool:
        return bool(self.starts)

    @property
    def start(self) -> int:
        return self.starts[0] if self.starts else 0

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else 0
