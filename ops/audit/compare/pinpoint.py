"""Pinpoints where log and rows differ: the chunks of the partition one by one, and then line by line.

Partitions with sources that differ are read again, as far as Kafka still has them, a bounded range of offsets at a
time, and with them the rows at these offsets. So memory does not grow with the stored data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.ops.audit.compare.table import TableComparison
from logferry.ops.audit.digests import sums
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Cell, ChunkAccount, ChunkLine, Damage, Ranges, Tally
from logferry.ops.audit.log.partition import head_of, record_head
from logferry.ops.audit.log.read import committed, fetch
from logferry.ops.audit.records.batches import StoredRecord
from logferry.ops.audit.records.formats import NotAChunk, stored_chunk
from logferry.ops.audit.tables.rows import ChunkRows, add_stray

# This many chunks are compared line by line, each with a fetch; of the others the number of rows is reported.
DETAILED: Final = 50
_FETCH_BYTES: Final = 1 << 20
# Offsets that are compared together, at 270 bytes of memory each.
_CHUNKS_AT_ONCE: Final = 200_000
# Chunks whose rows are read together.
_AT_ONCE: Final = 100
_FAR: Final = (1 << 63) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Pinpointer:
    """``kafka``: of the table's home. ``budget``: how many more chunks are compared line by line."""

    kafka: KafkaClient
    comparison: TableComparison
    findings: Findings
    budget: int = DETAILED

    async def run(self) -> None:
        """Adds the differences of the table to the findings. Raises Unavailable, KafkaError.

        Rows that the ledger names as dropped are missing rightly. Which rows were dropped is unknown, so there only the
        remaining rows are checked. A difference that dropped rows explain is removed from `TableComparison.bad`.
        """
        comparison = self.comparison
        places = {cell.place for cell in comparison.bad}
        named = {place: await self._compare_chunks(place) for place in sorted(places & comparison.sides.keys())}
        dropped = 0
        by_place = sorted(comparison.bad.items(), key=lambda one: (one[0].place, one[0].source_id or ""))
        for cell, (expected, rows) in by_place:
            if named.get(cell.place):
                continue
            if comparison.drops and rows.lines < expected.lines:
                dropped += expected.lines - rows.lines
                comparison.accept(cell)
            else:
                self.findings.add(_unexplained(comparison, cell, expected, rows))
        if dropped:
            cutoff = comparison.drops[-1].cutoff
            before = "" if cutoff is None else f" from before {cutoff.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
            batches = ", ".join(str(entry.batch) for entry in comparison.drops)
            detail = f"{dropped} rows{before} were dropped by retention (batch {batches}): not checked"
            self.findings.add(Finding("dropped-by-retention", comparison.path, detail, count=dropped, refutes=False))

    async def _compare_chunks(self, place: TopicPartition) -> bool:
        """Whether the comparison chunk by chunk found a difference."""
        earliest = await self.kafka.offset(*place, EARLIEST)
        seen = self.comparison.seen[place]
        found = False
        for low, high in seen.within(earliest, max(earliest, seen.end)):
            for start in range(low, high, _CHUNKS_AT_ONCE):
                end = min(high, start + _CHUNKS_AT_ONCE)
                part = await _OffsetRange.read(self.kafka, self.comparison, place, start, end)
                strays: dict[tuple[str, TopicPartition], Finding] = {}
                for offset, row in part.rows(None):
                    if not part.account.found(offset, row.account, sums.sum_of(row.lines)):
                        add_stray(strays, "rows-without-record", "the log has no record of these rows", row)
                for finding in strays.values():
                    self.findings.add(finding)
                found |= await self._name_unsettled(part) or bool(strays)
        return found

    async def _name_unsettled(self, part: _OffsetRange) -> bool:
        """Adds the unsettled chunks to the findings, but those whose only difference is that old rows were dropped.

        Returns whether there are any.
        """
        dropped = self.comparison.dropped(part.place)
        unsettled, found = list(part.account.unsettled()), False
        for at in range(0, len(unsettled), _AT_ONCE):
            some = unsettled[at : at + _AT_ONCE]
            suspects = {offset for offset, missing in some if missing > 0 and offset in dropped}
            others = [offset for offset, _ in some if offset not in suspects][: self.budget]
            self.budget -= len(others)
            rows: dict[int, list[ChunkRows]] = {offset: [] for offset in (*suspects, *others)}
            for offset, row in part.rows(rows.keys()) if rows else ():
                rows[offset].append(row)
            for offset, missing in some:
                named = await self._chunk_findings(part.place, offset, rows[offset]) if offset in rows else None
                if offset in suspects and named is not None and all(one.kind == "missing-row" for one in named):
                    continue
                found = True
                for finding in [_unnamed(part.place, offset, missing)] if named is None else named:
                    self.findings.add(finding)
        return found

    async def _chunk_findings(self, place: TopicPartition, offset: int, rows: list[ChunkRows]) -> list[Finding] | None:
        """None if retention removed the record meanwhile."""
        try:
            fetched = await fetch(self.kafka, place, offset, max_bytes=_FETCH_BYTES)
        except errors.OffsetOutOfRangeError:
            return None
        record = next((one for one in fetched.records if one.offset == offset), None)
        return None if record is None else chunk_findings(place, record, rows, self.comparison.tables.whole_chunks)


def chunk_findings(
    place: TopicPartition, record: StoredRecord, rows: Iterable[ChunkRows], whole_chunks: bool = False
) -> list[Finding]:
    """``rows``: all rows of the table at the record's offset."""
    source_id: str | None = None
    seqno: int | None = None
    head: sums.Head
    try:
        chunk = stored_chunk(record)
        source_id, seqno, head = chunk.source_id, chunk.seqno, head_of(chunk)
        expected = sums.rows_of(chunk.data, whole_chunks)
    except NotAChunk:
        expected, head = [sums.whole_record(record.value or b"")], record_head(record)
    own: list[ChunkLine] = []
    found: list[Damage] = []
    for row in rows:
        if source_id is None or (row.source_id, row.seqno) == (source_id, seqno):
            own += row.lines
            found += [sums.changed_column(row.lines, *one) for one in _differing(row.head, head)]
        else:
            detail = f"rows name source {row.source_id}, seqno {row.seqno}; the record has seqno {seqno}"
            found.append(Damage("row-of-another-chunk", detail, len(row.lines)))
    found += sums.name_damage(expected, own)
    where, at = f"{place[0]}-{place[1]}", record.offset
    chunk_is = "" if seqno is None else f"seqno {seqno}, "
    return [Finding(one.kind, where, chunk_is + one.detail, source_id, at, at, one.rows) for one in found]


def _differing(row: sums.Head, record: sums.Head) -> Iterator[tuple[str, str, str]]:
    """The columns that a row has not as its record says, each with both values."""
    if row is None or record is None or type(row) is not type(record):
        return
    for name, stored, expected in zip(record._fields, row, record, strict=True):
        if stored != expected:
            yield name.removesuffix("_us"), _shown(name, stored), _shown(name, expected)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "null"
    if not name.endswith("_us"):
        return repr(dict(value) if name == "attributes" else value)[:200]
    try:
        return (_EPOCH + timedelta(microseconds=value)).isoformat()
    except OverflowError:
        return f"{value} µs since 1970"


def _kind(missing: int) -> str:
    """``missing``: lines without a row; negative: rows too many; 0: as many, but not the same."""
    if missing == 0:
        return "changed-row"
    return "doubled-row" if missing < 0 else "missing-row"


def _unnamed(place: TopicPartition, offset: int, missing: int) -> Finding:
    detail = "as many rows as the chunk has lines, but with other content"
    if missing:
        many = f"{missing} rows of this chunk are missing"
        detail = many if missing > 0 else f"{-missing} rows more than the chunk has lines"
    return Finding(_kind(missing), f"{place[0]}-{place[1]}", detail, None, offset, offset, max(1, abs(missing)))


@dataclass
class _OffsetRange:
    """Offsets of one partition in the home's log. ``places``: of a relocated table, the offset of each chunk there."""

    comparison: TableComparison
    place: TopicPartition
    start: int
    end: int
    account: ChunkAccount
    places: dict[int, int]

    @classmethod
    async def read(
        cls, kafka: KafkaClient, comparison: TableComparison, place: TopicPartition, start: int, end: int
    ) -> _OffsetRange:
        """Reads the chunks that must be in the table."""
        found, gone = cls(comparison, place, start, end, ChunkAccount(), {}), Ranges()
        async for fetched in committed(kafka, place, start, end, gone.add):
            for record in fetched.records:
                if record.offset >= end:
                    break
                try:
                    chunk = stored_chunk(record)
                except NotAChunk:
                    rows = sums.sum_of([sums.whole_record(record.value or b"")])
                    found.account.expect(record.offset, sums.account_of(None, None, record_head(record)), rows)
                    continue
                account = sums.account_of(chunk.source_id, chunk.seqno, head_of(chunk))
                found.account.expect(record.offset, account, comparison.sides[place].rows_of(record.offset, chunk))
                if comparison.moved:
                    found.places[sums.identity_of(chunk.source_id, chunk.seqno)] = record.offset
        return found

    def rows(self, offsets: Collection[int] | None) -> Iterator[tuple[int, ChunkRows]]:
        """Rows of these chunks (None: all) with the offset of the chunk in the home's log. Raises Unavailable."""
        tables, home = self.comparison.tables, self.comparison.home
        if not self.comparison.moved:
            for row in tables.rows(*self.place, self.start, self.end):
                if row.dc == home and (offsets is None or row.offset in offsets):
                    yield row.offset, row
            return
        for row in tables.rows(*self.place, 0, _FAR):
            offset = None if row.is_whole_record else self.places.get(row.identity)
            if offset is not None and (offsets is None or offset in offsets):
                yield offset, row


def _unexplained(comparison: TableComparison, cell: Cell, expected: Tally, rows: Tally) -> Finding:
    """Kafka does not have these chunks any more, or the table was repaired meanwhile."""
    detail = (
        f"{expected.lines} lines of {expected.size_bytes} bytes were read from the log, the table has {rows.lines} "
        f"rows of {rows.size_bytes}; the records are not in the log any more, so the rows cannot be named"
    )
    if comparison.changed:
        more = f" and {len(comparison.changed) - 3} more" if len(comparison.changed) > 3 else ""
        detail += f"; gone or changed since the last audit: {', '.join(comparison.changed[:3])}{more}"
    missing = expected.lines - rows.lines
    where = f"{cell.topic}-{cell.partition}"
    return Finding(_kind(missing), where, detail, cell.source_id, count=max(1, abs(missing)))
