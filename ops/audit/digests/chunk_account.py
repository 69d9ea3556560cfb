"""The account of one partition's chunks between Kafka and the table. Pure.

The chunks of the log are entered first; then each row of the table is subtracted. A chunk is settled if the balance is
zero: as many rows as lines, a zero difference of the digests, and every row under the (source, seqno) of its record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from logferry.ops.audit.digests.lines import MODULUS, LineSum


@dataclass(slots=True)
class _Balance:
    identity: int
    lines: int
    digest: int
    has_foreign_rows: bool = False


@dataclass(slots=True)
class ChunkAccount:
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

    def settle(self, offset: int) -> None:
        """Settles a chunk whose difference is explained otherwise."""
        del self._balances[offset]

    def unsettled(self) -> Iterator[tuple[int, int]]:
        """Yields (offset, missing rows) of the other chunks, in the order of the log; negative: too many rows; 0: as
        many, but different."""
        for offset, balance in self._balances.items():
            if balance.lines or balance.digest or balance.has_foreign_rows:
                yield offset, balance.lines
