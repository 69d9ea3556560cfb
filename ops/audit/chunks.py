"""Damaged chunks, looked at once more: the record out of Kafka next to its rows, so that the lines can be named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.chunk import Malformed
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.kafka.client import Kafka
from logferry.ops.audit.account import Account
from logferry.ops.audit.damage import Damage, name_damage
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.lines import Line, rows_of, whole_record
from logferry.ops.audit.log.partition import decoded
from logferry.ops.audit.tables.ledger_check import Place
from logferry.ops.audit.tables.table_reader import ChunkRows

# So many are named line by line, each with a look into Kafka; of the others, how many rows are missing or too many.
DETAILED: Final = 50
_FETCH_BYTES: Final = 1 << 20

RowsAt = Callable[[Collection[int]], Iterable[tuple[int, ChunkRows]]]


class Damaged(NamedTuple):
    """``missing``: lines without a row; negative: rows too many; 0: as many, but not the same."""

    place: Place
    offset: int
    missing: int


@dataclass
class Namer:
    """``budget``: of so many more chunks each line is named."""

    kafka: Kafka
    whole_chunks: bool
    findings: Findings
    budget: int = DETAILED

    async def name(self, place: Place, account: Account, rows_at: RowsAt) -> int:
        """Adds what is left in the account to the findings; how many chunks that were. Raises Unavailable, KafkaError.

        ``rows_at``: gives the rows of the chunks at some offsets.
        """
        count = 0
        first: list[Damaged] = []
        for offset, missing in account.unsettled():
            count += 1
            if len(first) < self.budget:
                first.append(Damaged(place, offset, missing))
            else:
                self.findings.add(_unnamed(Damaged(place, offset, missing)))
        self.budget -= len(first)
        rows: dict[int, list[ChunkRows]] = {one.offset: [] for one in first}
        if first:
            for offset, row in rows_at(rows.keys()):
                rows[offset].append(row)
        for one in first:
            record = await _record(self.kafka, one)
            if record is None:
                self.findings.add(_unnamed(one))
                continue
            for finding in name(place, record, rows[one.offset], self.whole_chunks):
                self.findings.add(finding)
        return count


async def only_missing(namer: Namer, place: Place, rows_at: RowsAt, offsets: Sequence[int]) -> dict[int, int]:
    """Of these chunks those whose rows are all right, but not all there: how many are not. Raises as `Namer.name`."""
    rows: dict[int, list[ChunkRows]] = {offset: [] for offset in offsets}
    for offset, row in rows_at(rows.keys()):
        rows[offset].append(row)
    found: dict[int, int] = {}
    for offset, there in rows.items():
        record = await _record(namer.kafka, Damaged(place, offset, 0))
        if record is not None:
            wrong = name(place, record, there, namer.whole_chunks)
            if all(one.kind == "missing-row" for one in wrong):
                found[offset] = sum(one.count for one in wrong)
    return found


def name(place: Place, record: KafkaRecord, rows: Iterable[ChunkRows], whole_chunks: bool = False) -> list[Finding]:
    """``rows``: all that the table has at the record's place."""
    source_id: str | None = None
    seqno: int | None = None
    try:
        source_id, chunk = decoded(record)
        seqno, expected = chunk.seqno, rows_of(chunk.data, whole_chunks)
    except Malformed:
        expected = [whole_record(record.value or b"")]
    own: list[Line] = []
    found: list[Damage] = []
    for row in rows:
        if source_id is None or (row.source_id, row.seqno) == (source_id, seqno):
            own += row.lines
        else:
            detail = f"rows say source {row.source_id}, seqno {row.seqno}, the record says seqno {seqno}"
            found.append(Damage("row-of-another-chunk", detail, len(row.lines)))
    found += name_damage(expected, own)
    where = f"{place[0]}-{place[1]}"
    chunk_is = "" if seqno is None else f"seqno {seqno}, "
    return [
        Finding(one.kind, where, chunk_is + one.detail, source_id, record.offset, record.offset, one.rows)
        for one in found
    ]


def _unnamed(one: Damaged) -> Finding:
    if one.missing > 0:
        kind, detail = "missing-row", f"{one.missing} rows of this chunk are missing"
    elif one.missing < 0:
        kind, detail = "doubled-row", f"{-one.missing} rows more than the chunk has lines"
    else:
        kind, detail = "changed-row", "as many rows as the chunk has lines, but not the same"
    where = f"{one.place[0]}-{one.place[1]}"
    return Finding(kind, where, detail, None, one.offset, one.offset, max(1, abs(one.missing)))


async def _record(kafka: Kafka, one: Damaged) -> KafkaRecord | None:
    """None when retention removed it meanwhile."""
    try:
        fetched = await kafka.fetch(*one.place, one.offset, max_bytes=_FETCH_BYTES, stop_bytes=1)
    except errors.OffsetOutOfRangeError:
        return None
    return next((record for record in fetched.records if record.offset == one.offset), None)
