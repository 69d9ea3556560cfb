"""Ranges of offsets, or of seqnos. Pure."""

from __future__ import annotations

from bisect import bisect_right
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

    def __bool__(self) -> bool:
        return bool(self.starts)

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else 0
