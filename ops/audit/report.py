"""What an audit says in the end: counts, the sources, the findings and one verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from logferry.ops.audit.files import FileReport
from logferry.ops.audit.findings import Findings
from logferry.ops.audit.partition import PartitionLog
from logferry.ops.audit.rows import RowCounts

JSON_SOURCES: Final = 1000


class SourceReport(NamedTuple):
    """One source in one partition. ``is_cut``: retention removed its beginning, so ``base`` could not be checked.

    ``rows``: its rows in the table, None where no table was audited. The last four count what is wrong.
    """

    topic: str
    source_id: str
    partition: int
    chunks: int
    lines: int
    size_bytes: int
    base: int | None
    first: int
    last: int
    is_cut: bool
    rows: int | None
    gaps: int
    overlaps: int
    doubles: int
    out_of_order: int

    @property
    def breaks(self) -> int:
        return self.gaps + self.overlaps + self.doubles + self.out_of_order


class TableReport(NamedTuple):
    """``compared``: rows that were held against the log. ``not_loaded``: chunks of the log that no batch has read yet.

    ``not_comparable``: rows whose records retention removed, or that are of another data centre's offsets.
    """

    path: str
    batches: int
    rows: int
    compared: int
    not_comparable: int
    not_loaded: int


@dataclass(frozen=True)
class Report:
    """``exact``: nothing was found that refutes the promise."""

    dc: str
    topics: list[str]
    chunks: int
    lines: int
    size_bytes: int
    sources: list[SourceReport]
    table: TableReport | None
    files: list[FileReport]
    findings: Findings
    seconds: float

    @property
    def exact(self) -> bool:
        return not self.findings.refuting

    @property
    def verdict(self) -> str:
        if self.exact:
            sources = len({(source.topic, source.source_id) for source in self.sources})
            return (
                f"exact: {self.chunks:,} chunks of {sources:,} sources, {self.lines:,} lines, "
                f"{self.size_bytes:,} bytes: nothing lost, nothing doubled"
            )
        kinds = ", ".join(f"{number:,} × {kind}" for kind, number in self.findings.refuting.most_common())
        return f"NOT exact: {kinds}"

    def blamed(self) -> set[str | None]:
        """The sources that something was found of."""
        return {finding.source_id for finding in self.findings if finding.refutes}

    def worst_first(self) -> list[SourceReport]:
        """Those that something was found of come first, then the large ones."""
        blamed = self.blamed()
        return sorted(self.sources, key=lambda s: (-s.breaks, s.source_id not in blamed, -s.size_bytes, s.source_id))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: at most `JSON_SOURCES` sources, the worst first."""
        return {
            "verdict": self.verdict,
            "exact": self.exact,
            "dc": self.dc,
            "topics": self.topics,
            "counts": {
                "chunks": self.chunks,
                "sources": len(self.sources),
                "lines": self.lines,
                "bytes": self.size_bytes,
                "findings": dict(self.findings.counts),
                "refuting": dict(self.findings.refuting),
            },
            "table": self.table._asdict() if self.table else None,
            "files": [{**file._asdict(), "equal": file.equal} for file in self.files],
            "findings": [asdict(finding) for finding in self.findings],
            "sources": [source._asdict() for source in self.worst_first()[:JSON_SOURCES]],
            "seconds": round(self.seconds, 3),
        }


def source_reports(logs: Iterable[PartitionLog], rows: RowCounts | None) -> list[SourceReport]:
    found = []
    for log in logs:
        for source_id, chain in log.chains.items():
            breaks = chain.breaks
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
                    rows=None if rows is None else rows.by_source[log.topic, source_id],
                    gaps=breaks.get("gap", 0),
                    overlaps=breaks.get("overlap", 0),
                    doubles=breaks.get("double", 0),
                    out_of_order=breaks.get("out-of-order", 0),
                )
            )
    return found
