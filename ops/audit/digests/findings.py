"""Findings of an audit, each with its place. Pure.

A finding either refutes the guarantee or is a note: a fact that the reader needs to judge the verdict, such as data
that retention removed and that could not be compared. All findings are counted. Of each kind only the first
`MAX_KEPT` are kept in full, because a table that lost a file of rows has a million of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

MAX_KEPT: Final = 200


@dataclass(slots=True)
class Finding:
    """``kind``: one of those in ops/docs/reference/findings.md, held equal by a test. ``first`` and ``last``: the
    offsets concerned, where there are any; ``count``: records, lines or sources. ``where``: a topic,
    ``topic-partition``, table or file."""

    kind: str
    where: str
    detail: str
    source_id: str | None = None
    first: int | None = None
    last: int | None = None
    count: int = 1
    refutes: bool = True

    @property
    def span(self) -> str:
        """The offsets as text, empty where there are none."""
        if self.first is None:
            return ""
        return f"offset {self.first}" if self.last in (None, self.first) else f"offsets {self.first} to {self.last}"

    def __str__(self) -> str:
        place = " ".join(part for part in (self.where, self.span, self.source_id) if part)
        return f"{self.kind}: {place}: {self.detail}"


@dataclass(slots=True)
class Findings:
    """``counts`` and ``refuting`` are complete; iteration yields the kept findings in the order of `add`."""

    counts: Counter[str] = field(default_factory=Counter)
    refuting: Counter[str] = field(default_factory=Counter)
    _kept: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if finding.refutes:
            self.refuting[finding.kind] += 1
        if self.counts[finding.kind] <= MAX_KEPT:
            self._kept.append(finding)

    def merge(self, other: Findings) -> None:
        """Adds all findings of the other, in its order."""
        room = {kind: MAX_KEPT - min(MAX_KEPT, number) for kind, number in self.counts.items()}
        for finding in other:
            left = room.get(finding.kind, MAX_KEPT)
            if left:
                self._kept.append(finding)
            room[finding.kind] = left - bool(left)
        self.counts += other.counts
        self.refuting += other.refuting

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._kept)

    def __len__(self) -> int:
        return self.counts.total()
