"""Reads one file of a table: sums its rows by source, and compares the parser's columns with the lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from logferry.gateway.contract.names import TopicPartition
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Cell, Tally
from logferry.ops.audit.tables.parsed_columns import ColumnDifference
from logferry.ops.audit.tables.row_groups import CHUNK
from logferry.ops.audit.tables.rows import AGAIN, MAIN, ChunkRows, FileFacts, FileId, RowClassifier
from logferry.ops.audit.tables.table_reader import AuditedFile, RowScanner

_PLACE = (*CHUNK, "line")


@dataclass
class FileScan:
    """``cells``: the compared rows by source. ``strays``: rows that no batch accounts for. ``findings``: columns that
    the parser does not make of their line."""

    id: FileId
    facts: FileFacts
    cells: dict[Cell, Tally] = field(default_factory=dict)
    strays: dict[tuple[str, TopicPartition], Finding] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)


@dataclass
class TableWork:
    """Work for the pool: its jobs are the files of a table."""

    scanner: RowScanner
    classifier: RowClassifier

    async def __aenter__(self) -> TableWork:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def handles(self) -> Sequence[int]:
        return ()

    def adopt(self, handles: list[int]) -> None:
        pass

    def name(self, job: AuditedFile) -> str:
        paths = self.scanner.paths
        return f"{paths.main if job.id.table == MAIN else paths.quarantine}/{job.id.name}"

    async def do(self, job: AuditedFile, advance: Callable[[int], None]) -> FileScan:
        """Raises Unavailable."""
        found = FileScan(job.id, FileFacts(job.stat))
        self.classifier.take(found.facts, job.id, self._rows(job, found), found.cells, found.strays)
        if found.findings:
            found.facts.stat = AGAIN
        return found

    def _rows(self, job: AuditedFile, found: FileScan) -> Iterator[ChunkRows]:
        for batch in self.scanner.batches(job):
            if job.id.table == MAIN:
                self._check_columns(batch, found)
            yield from self.scanner.groups(job, batch)

    def _check_columns(self, batch: pa.RecordBatch, found: FileScan) -> None:
        check = self.scanner.parsed.check(batch)
        found.facts.parsed += check.compared
        found.facts.unparsed += check.unknown
        for one in check.differences:
            found.findings.add(_finding(batch, one))


def _finding(batch: pa.RecordBatch, one: ColumnDifference) -> Finding:
    have = batch.schema.names
    place = {name: batch.column(name)[one.row].as_py() if name in have else None for name in _PLACE}
    line = "" if place["line"] is None else f", line {place['line']}"
    is_date = one.column in ("event_date", "recorded_date")
    detail = f"seqno {place['seqno']}{line}: {one.column} is {one.stored} in the table, but {one.parsed} by its "
    detail += "time" if is_date else "text"
    where = f"{place['topic']}-{place['partition']}"
    return Finding("changed-column", where, detail, place["source_id"], place["offset"], place["offset"])
