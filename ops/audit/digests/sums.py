"""Sums over lines that two sides can be compared by, in whatever order each side has them. Pure.

A chunk's digest (see `lines`) is multiplied by an odd number of 128 bits that stands for its identity, modulo 2^128,
and the products are added up. So rows of any chunks can be added in any order and in any parts, a row under another
chunk's name does not cancel out, and a sum can be taken off again when the file with those rows is gone. Two different
sets of rows have the same sum by an accident of about one in 2^128; it is not meant to withstand an attacker.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from logferry.ops.audit.digests.lines import MODULUS, Sum

_IDENTITY: Final = struct.Struct("<qqi")
_CHUNK: Final = struct.Struct("<q")
# The offset where none is compared.
ANY_OFFSET: Final = -1


class Cell(NamedTuple):
    """What is compared by itself: one source in one partition. ``source_id`` None: what no gateway wrote."""

    topic: str
    partition: int
    source_id: str | None

    @property
    def place(self) -> tuple[str, int]:
        return self.topic, self.partition


@dataclass(slots=True)
class Tally:
    """``size_bytes``: of the lines' texts, without their endings. ``digest``: below `MODULUS`."""

    lines: int = 0
    size_bytes: int = 0
    digest: int = 0

    def add(self, lines: int, size_bytes: int, digest: int) -> None:
        self.lines += lines
        self.size_bytes += size_bytes
        self.digest = (self.digest + digest) % MODULUS

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.lines + other.lines, self.size_bytes + other.size_bytes, (self.digest + other.digest) % MODULUS
        )

    def minus(self, other: Tally) -> Tally:
        return Tally(
            self.lines - other.lines, self.size_bytes - other.size_bytes, (self.digest - other.digest) % MODULUS
        )

    def __bool__(self) -> bool:
        return bool(self.lines or self.size_bytes or self.digest)

    @property
    def as_list(self) -> list[Any]:
        """For a file: three values, the digest as text."""
        return [self.lines, self.size_bytes, f"{self.digest:x}"]

    @classmethod
    def of_list(cls, said: list[Any]) -> Tally:
        """Raises ValueError, TypeError."""
        lines, size_bytes, digest = said
        return cls(int(lines), int(size_bytes), int(digest, 16))


def weight_of(source_id: str | None, seqno: int | None, offset: int) -> int:
    """The odd number of 128 bits that stands for a chunk. A record that no gateway wrote is its offset alone."""
    if source_id is None or seqno is None:
        raw = _IDENTITY.pack(-1, offset, 1)
    else:
        raw = _IDENTITY.pack(seqno, offset, 0) + source_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(raw, digest_size=16).digest(), "little") | 1


def weighed(total: Sum, weight: int) -> int:
    return total.digest * weight % MODULUS


def chunk_digest(seqno: int, data: bytes) -> int:
    """Of a chunk as it is carried from file to file, log to log; added up over a source, modulo 2^128."""
    return int.from_bytes(blake2b(_CHUNK.pack(seqno) + data, digest_size=16).digest(), "little")


def shown(digest: int) -> str:
    """As it is shown to people and machines: 32 hexadecimal digits."""
    return f"{digest:032x}"


def totals(tallies: Any) -> Tally:
    """The sum of any tallies."""
    found = Tally()
    for tally in tallies:
        found.add(tally.lines, tally.size_bytes, tally.digest)
    return found
