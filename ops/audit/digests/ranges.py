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
        """Whether some offset of [start, end) is among them."""
        index = bisect_right(self.starts, end - 1) - 1
        return start < end and index >= 0 and self.ends[index] > start

    def add(self, start: int, end: int) -> None:
        """Merges the range in."""
        if start >= end:
            return
        pairs = sorted([*zip(self.starts, self.ends, strict=True), (start, end)])
        merged: list[tuple[int, int]] = []
        for low, high in pairs:
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.starts, self.ends = [low for low, _ in merged], [high for _, high in merged]

    def minus(self, other: Ranges) -> Ranges:
        """What is among these and not among the others."""
        found = Ranges()
        cuts = list(zip(other.starts, other.ends, strict=True))
        for start, end in zip(self.starts, self.ends, strict=True):
            at = start
            for low, high in cuts:
                if high <= at or low >= end:
                    continue
                found.add(at, low)
                at = max(at, high)
            found.add(at, end)
        return found

    def within(self, start: int, end: int) -> Ranges:
        """The part of them in [start, end)."""
        found = Ranges()
        for low, high in zip(self.starts, self.ends, strict=True):
            found.add(max(low, start), min(high, end))
        return found

    def update(self, other: Ranges) -> None:
        for low, high in zip(other.starts, other.ends, strict=True):
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
