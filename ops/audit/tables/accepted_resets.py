"""Resets that the operator accepts by name. Pure.

A reset leaves a jump in the ledger: a gap of offsets that no batch loads, or an overlap of offsets that are loaded
again. An acceptance names a table and the batch of a reset, and covers exactly the jumps of that entry. It says nothing
of rows: each offset that the ledger covers must still have its rows in the table, once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from logferry.loaders.planning.ledger_entry import RESET, LedgerEntry
from logferry.loaders.planning.plan import Range
from logferry.ops.cli.problems import UsageError


class ResetName(NamedTuple):
    """The batch of a reset, as the operator names it."""

    table: str
    batch: int

    @classmethod
    def parse(cls, written: str) -> ResetName:
        """Raises UsageError."""
        table, colon, batch = written.rpartition(":")
        if not (table and colon and batch.isdecimal() and batch.isascii()):
            form = "must have the form TABLE:BATCH, a table and the batch of its reset"
            raise UsageError(f"--accept-reset: {written!r} {form}")
        return cls(table, int(batch))


class ResetJump(NamedTuple):
    """The offsets that a reset skipped, or that are loaded again after it, in one partition.

    ``run``: of the entry, so that another entry under the number of the batch is not taken for it.
    """

    table_id: str
    batch: int
    run: str
    topic: str
    partition: int
    topic_id: str
    first: int
    last: int


@dataclass
class AcceptedResets:
    """Those of one table. ``batches``: named for this audit; ``known``: accepted for an earlier one; ``met``: jumps
    of the ledger that are accepted."""

    table_id: str = ""
    batches: Collection[int] = ()
    known: Collection[ResetJump] = ()
    met: list[ResetJump] = field(default_factory=list)

    def accepts(self, entry: LedgerEntry, r: Range, first: int, last: int) -> bool:
        jump = ResetJump(self.table_id, entry.batch, entry.run, *r.key, r.topic_id, first, last)
        if entry.kind != RESET or not (entry.batch in self.batches or jump in self.known):
            return False
        self.met.append(jump)
        return True

    def check(self, table: str, entries: Iterable[LedgerEntry]) -> None:
        """Raises UsageError for a named batch of which nothing was accepted."""
        kinds = {entry.batch: entry.kind for entry in entries}
        for batch in sorted(set(self.batches) - {jump.batch for jump in self.met}):
            kind = kinds.get(batch)
            if kind is None:
                why = "the ledger has no such batch"
            elif kind != RESET:
                why = f"batch {batch} is no reset, but a {kind}"
            else:
                why = "the reset skipped no offsets of the audited topics, and repeated none"
            raise UsageError(f"--accept-reset {table}:{batch}: {why}; name a batch that a finding of the ledger names")


def named_batches(names: Iterable[ResetName], tables: Iterable[str]) -> dict[str, set[int]]:
    """The accepted batches of each audited table. Raises UsageError for a table that is not audited."""
    found: dict[str, set[int]] = {table: set() for table in tables}
    for name in names:
        if name.table not in found:
            raise UsageError(f"--accept-reset {name.table}:{name.batch}: the table is not audited; check --table")
        found[name.table].add(name.batch)
    return found
