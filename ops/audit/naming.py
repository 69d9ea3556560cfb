"""Where log and rows differ, looked at once more: the chunks of those partitions one by one, and then line by line.

Read again are the partitions with sources that differ, as far as Kafka still has them, so many offsets at a time; and
the rows at these offsets. So memory does not grow with what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from logferry.gateway.contract import Malformed
from logferry.gateway.kafka import EARLIEST, Kafka
from logferry.ops.audit.account import Account
from logferry.ops.audit.chunks import Namer
from logferry.ops.audit.findings import Finding, Findings
from logferry.ops.audit.lines import NO_IDENTITY, identity_of, rows_of, sum_of, whole_record
from logferry.ops.audit.loaded import Place
from logferry.ops.audit.partition import decoded
from logferry.ops.audit.ranges import Ranges
from logferry.ops.audit.reading import committed
from logferry.ops.audit.rows import is_whole_record, stray
from logferry.ops.audit.sums import Cell, Tally
from logferry.ops.audit.tabled import TableProof

# 40 bytes of memory for each chunk.
_WINDOW: Final = 200_000


async def name_differences(kafkas: Mapping[str, Kafka], proof: TableProof, findings: Findings) -> None:
    """Adds to the findings what is wrong with the table. Raises Unavailable, KafkaError."""
    places = {cell.place for cell in proof.bad}
    explained: set[Place] = set()
    namers = {dc: Namer(kafka, proof.tables, findings) for dc, kafka in kafkas.items()}
    for dc, place in sorted(proof.seen):
        if place in places and dc in namers and await _named(namers[dc], proof, dc, place):
            explained.add(place)
    for cell, (expected, rows) in sorted(proof.bad.items(), key=lambda one: (one[0].place, one[0].source_id or "")):
        if cell.place not in explained:
            findings.add(_unexplained(proof, cell, expected, rows))


async def _named(namer: Namer, proof: TableProof, dc: str, place: Place) -> bool:
    """Whether something wrong was found, chunk by chunk."""
    earliest = await namer.kafka.offset(*place, EARLIEST)
    seen = proof.seen[dc, place]
    found = False
    for low, high in seen.within(earliest, max(earliest, seen.end)):
        for start in range(low, high, _WINDOW):
            end = min(high, start + _WINDOW)
            found |= await _window(namer, proof, dc, place, start, end)
    return found


async def _window(namer: Namer, proof: TableProof, dc: str, place: Place, start: int, end: int) -> bool:
    account = await _account(namer.kafka, proof, place, start, end)
    strays: dict[tuple[str, Place], Finding] = {}
    for row in proof.tables.rows(*place, start, end):
        if row.dc != dc:
            continue
        whole = is_whole_record(row) or row.source_id is None or row.seqno is None
        identity = NO_IDENTITY if whole else identity_of(row.source_id or "", row.seqno or 0)
        if not account.found(row.offset, identity, sum_of(row.lines)):
            stray(strays, "rows-without-record", "rows of which the log has no record", row)
    for finding in strays.values():
        namer.findings.add(finding)
    return await namer.name(dc, place, account) > 0 or bool(strays)


async def _account(kafka: Kafka, proof: TableProof, place: Place, start: int, end: int) -> Account:
    """The chunks of these offsets that must be in the table."""
    account, gone = Account(), Ranges()
    left_out = {
        note.offset: identity_of(note.source_id, note.seqno)
        for note in proof.tables.left_out
        if (note.topic, note.partition) == place and note.kept != note.topic
    }
    async for fetched in committed(kafka, place, start, end, gone.add):
        for record in fetched.records:
            if record.offset >= end:
                break
            try:
                source_id, chunk = decoded(record)
            except Malformed:
                account.expect(record.offset, NO_IDENTITY, sum_of([whole_record(record.value or b"")]))
                continue
            identity = identity_of(source_id, chunk.seqno)
            if left_out.get(record.offset) != identity:
                account.expect(record.offset, identity, sum_of(rows_of(chunk.data, proof.tables.whole_chunks)))
            else:
                account.expect(record.offset, identity, sum_of([]))
    return account


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
