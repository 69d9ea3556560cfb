"""Order-independent sums over lines, by which two sides are compared: in total, or chunk by chunk. Pure.

A chunk's digest (see `lines`) is multiplied by an odd number of 128 bits that identifies it, modulo 2^128, and the
products are added. So rows of any chunks can be added in any order and in any parts, and a row under another chunk's
identity does not cancel out. Two different sets of rows have the same sum with a probability of about 1 in 2^128; the
sums are not designed to withstand an attacker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from typing import Final, NamedTuple

from logferry.ops.audit.digests.lines import MODULUS, LineSum

_IDENTITY: Final = struct.Struct("<qqi")
_CHUNK: Final = struct.Struct("<q")
# The offset of rows whose offsets are not compared.
ANY_OFFSET: Final = -1


class Cell(NamedTuple):
    """The unit of comparison: one source in one partition. ``source_id`` None: records that no gateway wrote."""

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

    def __bool__(self) -> bool:
        return bool(self.lines or self.size_bytes or self.digest)


def weight_of(source_id: str | None, seqno: int | None, offset: int) -> int:
    """The odd number of 128 bits that identifies a chunk; of a record that no gateway wrote, its offset alone."""
    if source_id is None or seqno is None:
        raw = _IDENTITY.pack(-1, offset, 1)
    else:
        raw = _IDENTITY.pack(seqno, offset, 0) + source_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(raw, digest_size=16).digest(), "little") | 1


def weighed(total: LineSum, weight: int) -> int:
    return total.digest * weight % MODULUS


def chunk_digest(seqno: int, data: bytes) -> int:
    """The digest of a chunk in a file or log; the digests of a source are added modulo 2^128."""
    return int.from_bytes(blake2b(_CHUNK.pack(seqno) + data, digest_size=16).digest(), "little")


def shown(digest: int) -> str:
    """The external form of a digest: 32 hexadecimal digits."""
    return f"{digest:032x}"


def totals(tallies: Iterable[Tally]) -> Tally:
    return reduce(Tally.plus, tallies, Tally())


# ---- chunk by chunk ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Balance:
    identity: int
    lines: int
    digest: int
    has_foreign_rows: bool = False


@dataclass(slots=True)
class ChunkAccount:
    """The account of one partition's chunks between Kafka and the table.

    The chunks of the log are entered first; then each row of the table is subtracted. A chunk is settled if the balance
    is zero: as many rows as lines, a zero difference of the digests, and every row under the (source, seqno) of its
    record.
    """

    _balances: dict[int, _Balance] = field(default_factory=dict)

    def expect(self, offset: int, identity: int, total: LineSum) -> None:
        """Enters a chunk of the log."""
        self._balances[offset] = _Balance(identity, *total)

    def found(self, offset: int, identity: int, total: LineSum) -> bool:
        """Subtracts all or some rows of a chunk. False: the log has no chunk at this offset."""
        balance = self._balances.get(offset)
        if balance is None:
            return False
        balance.lines -= total.lines
        balance.digest = (balance.digest - total.digest) % MODULUS
        balance.has_foreign_rows |= identity != balance.identity
        return True

    def unsettled(self) -> Iterator[tuple[int, int]]:
        """Yields (offset, missing rows) of the other chunks, in the order of the log; negative: too many rows; 0: as
        many, but different."""
        for offset, balance in self._balances.items():
            if balance.lines or balance.digest or balance.has_foreign_rows:
                yield offset, balance.lines
