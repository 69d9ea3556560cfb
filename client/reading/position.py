"""`Position`: where a reader resumes, as a value and as text to store beside its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from logferry.gateway.contract.names import Cursor, Malformed

Partition = tuple[str, int]


class ReadOffset(NamedTuple):
    """``offset``: of the next chunk. ``lines``: how many of its lines were delivered already."""

    offset: int
    lines: int = 0

    def __str__(self) -> str:
        return f"{self.offset}+{self.lines}" if self.lines else str(self.offset)


class Position(Mapping["Partition", ReadOffset]):
    """Topic and partition → where to resume. Its text is ``dc1.nginx:0:17,dc1.nginx:3:81234``.

    The offsets are those of the data centre that was read.
    """

    def __init__(self, places: Mapping[Partition, ReadOffset]) -> None:
        self._places = dict(places)

    @classmethod
    def parse(cls, text: str) -> Position:
        """The inverse of `str`; also takes one or more cursors, separated by commas. Raises ValueError."""
        places = {}
        for item in text.split(",") if text else ():
            cursor, plus, lines = item.partition("+")
            if plus and not (lines.isascii() and lines.isdigit()):
                raise Malformed(f"position: {item!r} is not <dc>.<topic>:<partition>:<offset>, or that and +<lines>")
            topic, partition, offset = Cursor.parse(cursor)
            places[topic, partition] = ReadOffset(offset, int(lines or 0))
        return cls(places)

    def __getitem__(self, partition: Partition) -> ReadOffset:
        return self._places[partition]

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __str__(self) -> str:
        return ",".join(f"{topic}:{number}:{at}" for (topic, number), at in sorted(self._places.items()))

    def __repr__(self) -> str:
        return f"Position.parse({str(self)!r})"


class Cursors(Position):
    """A position that is valid in every data centre: it has offsets of the original partitions.

    Its text begins with ``cursors:``.
    """

    MARK = "cursors:"

    @classmethod
    def parse(cls, text: str) -> Cursors:
        """The inverse of `str`. Raises ValueError."""
        return cls(super().parse(text.removeprefix(cls.MARK)))

    def __str__(self) -> str:
        return self.MARK + super().__str__()

    def __repr__(self) -> str:
        return f"Cursors.parse({str(self)!r})"
