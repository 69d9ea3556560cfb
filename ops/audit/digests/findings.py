"""What an audit found, each with where it is. Pure.

A finding either refutes the promise or is a note: something that the reader must know to judge the verdict, such
as what retention removed and could therefore not be compared. All are counted; of each kind only the first
`KEPT` are kept in full, because a table that lost a file of rows has a million of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

KEPT: Final = 200


@dataclass(slots=True)
class Finding:
    """``first`` and ``last``: the offsets that it concerns, where there are some; ``count``: records, lines or
    sources. ``where``: a topic, ``topic-partition``, table or file."""

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
        """The offsets in words, empty where there are none."""
        if self.first is None:
            return ""
        return f"offset {self.first}" if self.last in (None, self.first) else f"offsets {self.first} to {self.last}"

    def __str__(self) -> str:
        place = " ".join(part for part in (self.where, self.span, self.source_id) if part)
        return f"{self.kind}: {place}: {self.detail}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Findings:
    """``counts`` and ``refuting`` are complete; iterating gives what was kept, in the order in which it came."""

    counts: Counter[str] = field(default_factory=Counter)
    refuting: Counter[str] = field(default_factory=Counter)
    _kept: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if finding.refutes:
            self.refuting[finding.kind] += 1
        if self.counts[finding.kind] <= KEPT:
            self._kept.append(finding)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._kept)

    def __len__(self) -> int:
        return self.counts.total()
