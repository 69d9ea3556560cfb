"""The account of one partition's chunks between Kafka and the table. Pure.

Kafka's side is entered first, in offset order; then each row that is found in the table is taken off. A chunk is
settled when nothing is left of it: as many rows as lines, the digests' difference zero, and every row under the
(source, seqno) of its record. 40 bytes a chunk, because a table has millions of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from logferry.ops.audit.digests.lines import MODULUS, Sum

_DIGEST_BYTES = 16


@dataclass(slots=True)
class Account:
    """``rows``: how many rows were taken off."""

    rows: int = 0
    _offsets: array[int] = field(default_factory=lambda: array("q"))
    _identities: array[int] = field(default_factory=lambda: array("Q"))
    _lines: array[int] = field(default_factory=lambda: array("q"))
    _digests: bytearray = field(default_factory=bytearray)
    _foreign: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._offsets)

    def expect(self, offset: int, identity: int, total: Sum) -> None:
        """A chunk of the log, at a higher offset than the one before."""
        if self._offsets and offset <= self._offsets[-1]:
            raise ValueError(f"offset {offset} follows {self._offsets[-1]}")
        self._offsets.append(offset)
        self._identities.append(identity)
        self._lines.append(total.lines)
        self._digests += total.digest.to_bytes(_DIGEST_BYTES, "little")

    def found(self, offset: int, identity: int, total: Sum) -> bool:
        """Rows of the table, all or some of a chunk's. False: the log has no chunk at this offset."""
        index = bisect_left(self._offsets, offset)
        if index == len(self._offsets) or self._offsets[index] != offset:
            return False
        self.rows += total.lines
        if self._identities[index] != identity:
            self._foreign.add(offset)
        self._lines[index] -= total.lines
        place = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
        left = (int.from_bytes(self._digests[place], "little") - total.digest) % MODULUS
        self._digests[place] = left.to_bytes(_DIGEST_BYTES, "little")
        return True

    def leave_out(self, offset: int, identity: int) -> bool:
        """A chunk of which the table says that it has the copy that came by another data centre: no row of it is
        expected. False: the log has no such chunk there. Before any row of it is taken off.
        """
        index = bisect_left(self._offsets, offset)
        if index == len(self._offsets) or self._offsets[index] != offset or self._identities[index] != identity:
            return False
        self._lines[index] = 0
        self._digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES] = bytes(_DIGEST_BYTES)
        return True

    def settle(self, offset: int) -> None:
        """Whatever is left of the chunk is accounted for otherwise."""
        index = bisect_left(self._offsets, offset)
        self._lines[index] = 0
        self._digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES] = bytes(_DIGEST_BYTES)
        self._foreign.discard(offset)

    def unsettled(self) -> Iterator[tuple[int, int]]:
        """(offset, lines that are missing; negative: too many; 0: as many, but not the same) of what is left."""
        zero = bytes(_DIGEST_BYTES)
        for index, offset in enumerate(self._offsets):
            digest = self._digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]
            if self._lines[index] or digest != zero or offset in self._foreign:
                yield offset, self._lines[index]
