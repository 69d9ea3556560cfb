"""What an audit tells of each source: the log's side and the tables'. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from logferry.ops.audit.compare.report import SourceReport
from logferry.ops.audit.compare.table import TableProof
from logferry.ops.audit.digests.sums import Cell, shown, totals
from logferry.ops.audit.log.partition import PartitionLog


def source_reports(logs: Iterable[PartitionLog], proofs: Sequence[TableProof]) -> list[SourceReport]:
    found = []
    for log in logs:
        for source_id, chain in log.chains.items():
            breaks = chain.breaks
            rows = [proof.rows.get(Cell(log.topic, log.partition, source_id)) for proof in proofs]
            loaded = totals(tally for tally in rows if tally is not None)
            found.append(
                SourceReport(
                    topic=log.topic,
                    source_id=source_id,
                    partition=log.partition,
                    chunks=chain.chunks,
                    lines=chain.lines,
                    size_bytes=chain.size_bytes,
                    base=chain.base,
                    first=chain.first,
                    last=chain.last,
                    is_cut=log.is_cut and not chain.head_seen,
                    rows=loaded.lines if proofs else None,
                    gaps=breaks.get("gap", 0),
                    overlaps=breaks.get("overlap", 0),
                    doubles=breaks.get("double", 0),
                    out_of_order=breaks.get("out-of-order", 0),
                    hash=shown(chain.digest),
                    rows_hash=shown(loaded.digest) if proofs else None,
                )
            )
    return found
