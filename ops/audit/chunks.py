"""Damaged chunks, looked at once more: the record out of Kafka next to its rows, so that the lines can be named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract import Malformed
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.kafka import Kafka
from logferry.ops.audit.account import Account
from logferry.ops.audit.damage import Damage, name_damage
from logferry.ops.audit.findings import Finding, Findings
from logferry.ops.audit.lines import Line, lines_of, whole_record
from logferry.ops.audit.loaded import Place
from logferry.ops.audit.partition import decoded
from logferry.ops.audit.tables import ChunkRows, Tables

# So many are named line by line, each with a look into Kafka; of the others, how many rows are missing or too many.
DETAILED: Final = 50
_FETCH_BYTES: Final = 1 << 20


class Damaged(NamedTuple):
    """``missing``: lines without a row; negative: rows too many; 0: as many, but not the same."""

    place: Place
    offset: int
    missing: int


def damaged(accounts: Mapping[Place, Account]) -> Iterable[Damaged]:
    for place, account in sorted(accounts.items()):
        for offset, missing in account.unsettled():
            yield Damaged(place, offset, missing)


async def name_damaged(kafka: Kafka, tables: Tables, accounts: Mapping[Place, Account], findings: Findings) -> None:
    """Adds what is left in the accounts to the findings. Raises Unavailable, KafkaError."""
    left = iter(damaged(accounts))
    first = list(islice(left, DETAILED))
    if first:
        rows = _rows_of(tables, first)
        for one in first:
            record = await _record(kafka, one)
            if record is None:
                findings.add(_unnamed(one))
                continue
            for finding in name(one.place, record, rows.get((one.place, one.offset), [])):
                findings.add(finding)
    for one in left:
        findings.add(_unnamed(one))


def name(place: Place, record: KafkaRecord, rows: Iterable[ChunkRows]) -> list[Finding]:
    """``rows``: all that the table has at the record's place."""
    source_id: str | None = None
    seqno: int | None = None
    try:
        source_id, chunk = decoded(record)
        seqno, expected = chunk.seqno, lines_of(chunk.data)
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


def _rows_of(tables: Tables, wanted: Iterable[Damaged]) -> dict[tuple[Place, int], list[ChunkRows]]:
    places = {(one.place, one.offset) for one in wanted}
    found: dict[tuple[Place, int], list[ChunkRows]] = {}
    for row in tables.rows({place[0] for place, _ in places}, {offset for _, offset in places}):
        key = ((row.topic, row.partition), row.offset)
        if key in places:
            found.setdefault(key, []).append(row)
    return found


async def _record(kafka: Kafka, one: Damaged) -> KafkaRecord | None:
    """None when retention removed it meanwhile."""
    try:
        fetched = await kafka.fetch(*one.place, one.offset, max_bytes=_FETCH_BYTES, stop_bytes=1)
    except errors.OffsetOutOfRangeError:
        return None
    return next((record for record in fetched.records if record.offset == one.offset), None)
