"""Where log and rows differ, looked at once more: the chunks of those partitions one by one, and then line by line.

Read again are the partitions with sources that differ, as far as Kafka still has them, so many offsets at a time; and
the rows at these offsets. So memory does not grow with what is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC
from typing import Final

from logferry.gateway.contract.chunk import Malformed
from logferry.gateway.kafka.client import EARLIEST, Kafka
from logferry.ops.audit.account import Account
from logferry.ops.audit.chunks import Namer, only_missing
from logferry.ops.audit.compare.table import TableProof
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.lines import NO_IDENTITY, identity_of, rows_of, sum_of, whole_record
from logferry.ops.audit.digests.ranges import Ranges
from logferry.ops.audit.digests.sums import Cell, Tally
from logferry.ops.audit.log.partition import decoded
from logferry.ops.audit.log.read import committed
from logferry.ops.audit.tables.file_rows import is_whole_record, stray
from logferry.ops.audit.tables.ledger_check import Place
from logferry.ops.audit.tables.table_reader import ChunkRows

# 40 bytes of memory for each chunk.
_WINDOW: Final = 200_000
# So many chunks with their rows are looked at together.
_AT_ONCE: Final = 100
_FAR: Final = (1 << 63) - 1


async def name_differences(kafka: Kafka, proof: TableProof, findings: Findings) -> None:
    """Adds to the findings what is wrong with the table. ``kafka``: of its home. Raises Unavailable, KafkaError.

    Rows that the ledger says were dropped are missing rightly; which ones that were is not known, so there it is only
    seen that whatever rows there are are right. What is explained by that is wrong no more (`TableProof.bad`).
    """
    places = {cell.place for cell in proof.bad}
    namer = Namer(kafka, proof.tables.whole_chunks, findings)
    named = {place: await _named(namer, proof, place) for place in sorted(proof.seen) if place in places}
    dropped = 0
    for cell, (expected, rows) in sorted(proof.bad.items(), key=lambda one: (one[0].place, one[0].source_id or "")):
        if named.get(cell.place):
            continue
        if proof.drops and rows.lines < expected.lines:
            dropped += expected.lines - rows.lines
            proof.accept(cell)
        else:
            findings.add(_unexplained(proof, cell, expected, rows))
    if dropped:
        cutoff = proof.drops[-1].cutoff
        before = "" if cutoff is None else f" from before {cutoff.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        batches = ", ".join(str(entry.batch) for entry in proof.drops)
        detail = f"{dropped} rows{before} were dropped by retention (batch {batches}): not checked"
        findings.add(Finding("dropped-by-retention", proof.path, detail, count=dropped, refutes=False))


async def _named(namer: Namer, proof: TableProof, place: Place) -> bool:
    """Whether something wrong was found, chunk by chunk."""
    earliest = await namer.kafka.offset(*place, EARLIEST)
    seen = proof.seen[place]
    found = False
    for low, high in seen.within(earliest, max(earliest, seen.end)):
        for start in range(low, high, _WINDOW):
            window = await _Window.read(namer.kafka, proof, place, start, min(high, start + _WINDOW))
            strays: dict[tuple[str, Place], Finding] = {}
            for offset, row in window.rows(None):
                identity = NO_IDENTITY if is_whole_record(row) else identity_of(row.source_id or "", row.seqno or 0)
                if not window.account.found(offset, identity, sum_of(row.lines)):
                    stray(strays, "rows-without-record", "rows of which the log has no record", row)
            for finding in strays.values():
                namer.findings.add(finding)
            await _forgive(namer, proof, window)
            found |= await namer.name(place, window.account, window.rows) > 0 or bool(strays)
    return found


async def _forgive(namer: Namer, proof: TableProof, window: _Window) -> None:
    """Settles chunks of which nothing is wrong but that old rows were dropped."""
    dropped = proof.dropped(window.place)
    suspects = [offset for offset, missing in window.account.unsettled() if missing > 0 and offset in dropped]
    for at in range(0, len(suspects), _AT_ONCE):
        offsets = suspects[at : at + _AT_ONCE]
        for offset in await only_missing(namer, window.place, window.rows, offsets):
            window.account.settle(offset)


@dataclass
class _Window:
    """Offsets of one partition in the home's log. ``places``: of a table that moved, where each chunk is in there."""

    proof: TableProof
    place: Place
    start: int
    end: int
    account: Account
    places: dict[int, int]

    @classmethod
    async def read(cls, kafka: Kafka, proof: TableProof, place: Place, start: int, end: int) -> _Window:
        """With the chunks that must be in the table."""
        found, gone = cls(proof, place, start, end, Account(), {}), Ranges()
        notes = [n for n in proof.tables.left_out if (n.topic, n.partition) == place and n.kept != n.topic]
        left_out = {(n.offset, identity_of(n.source_id, n.seqno)) for n in notes}
        copies = {identity for _, identity in left_out} if proof.moved else set()
        async for fetched in committed(kafka, place, start, end, gone.add):
            for record in fetched.records:
                if record.offset >= end:
                    break
                try:
                    source_id, chunk = decoded(record)
                    identity = identity_of(source_id, chunk.seqno)
                    rows = rows_of(chunk.data, proof.tables.whole_chunks)
                except Malformed:
                    identity, rows = NO_IDENTITY, [whole_record(record.value or b"")]
                if (record.offset, identity) in left_out or identity in copies:
                    rows = []
                found.account.expect(record.offset, identity, sum_of(rows))
                if proof.moved:
                    found.places[identity] = record.offset
        return found

    def rows(self, offsets: Collection[int] | None) -> Iterator[tuple[int, ChunkRows]]:
        """Rows of these chunks (None: all) with the offset of the chunk in the home's log. Raises Unavailable."""
        tables, home = self.proof.tables, self.proof.home
        if not self.proof.moved:
            for row in tables.rows(*self.place, self.start, self.end):
                if row.dc == home and (offsets is None or row.offset in offsets):
                    yield row.offset, row
            return
        for row in tables.rows(*self.place, 0, _FAR):
            if is_whole_record(row):
                continue
            offset = self.places.get(identity_of(row.source_id or "", row.seqno or 0))
            if offset is not None and (offsets is None or offset in offsets):
                yield offset, row


def _unexplained(proof: TableProof, cell: Cell, expected: Tally, rows: Tally) -> Finding:
    """Kafka has these chunks no more, or somebody mended the table meanwhile."""
    detail = (
        f"{expected.lines} lines of {expected.size_bytes} bytes were read from the log, the table has {rows.lines} "
        f"rows of {rows.size_bytes}; the log has not the records any more to say which"
    )
    if proof.changed:
        shown = ", ".join(proof.changed[:3]) + (f" and {len(proof.changed) - 3} more" if len(proof.changed) > 3 else "")
        detail += f"; gone or changed since the last audit: {shown}"
    number = abs(expected.lines - rows.lines) or 1
    kind = "missing-row" if rows.lines < expected.lines else "doubled-row"
    if rows.lines == expected.lines:
        kind = "changed-row"
    return Finding(kind, f"{cell.topic}-{cell.partition}", detail, cell.source_id, count=number)
