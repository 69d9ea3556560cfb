"""The report of an audit: counts, sources, findings and one verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from logferry.ops.audit.compare.mirror_copy import MirrorReport
from logferry.ops.audit.digests.findings import Findings
from logferry.ops.audit.log.original_files import FileReport

JSON_SOURCES: Final = 1000
JSON_SEGMENTS: Final = 1000
# The kinds of breaks, and the fields with their counts.
BREAKS: Final = {"gap": "gaps", "overlap": "overlaps", "double": "doubles", "out-of-order": "out_of_order"}


class SourceCopy(NamedTuple):
    """A source's chunks in another data centre."""

    dc: str
    chunks: int
    size_bytes: int
    hash: str


class SourceReport(NamedTuple):
    """One source in one partition. ``is_cut``: retention removed its beginning, so ``base`` could not be checked.

    ``rows``: its rows in the tables, None where no table was audited. ``gaps`` to ``out_of_order``: counts of breaks.
    ``hash``: of its chunks; ``copies``: in other data centres.
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
    hash: str = ""
    copies: tuple[SourceCopy, ...] = ()

    @property
    def breaks(self) -> int:
        return self.gaps + self.overlaps + self.doubles + self.out_of_order


class SegmentReport(NamedTuple):
    """``rows`` and ``size_bytes``: of the table; ``said_rows``, ``said_bytes``: as the segment table states them."""

    start: str
    state: str
    version: int
    rows: int
    size_bytes: int
    hash: str
    said_rows: int
    said_bytes: int

    @property
    def equal(self) -> bool:
        return (self.rows, self.size_bytes) == (self.said_rows, self.said_bytes)


class TableAuditReport(NamedTuple):
    """``compared``: rows that were compared with the log. ``not_loaded``: chunks of the log that no batch has read yet.
    ``parsed``: rows whose parsed columns were compared with their text; ``unparsed``: those only the JVM can parse.

    ``not_comparable``: rows whose records retention removed, or that are of another data centre's offsets.
    """

    path: str
    batches: int
    rows: int
    compared: int
    not_comparable: int
    not_loaded: int
    hash: str = ""
    segments: tuple[SegmentReport, ...] = ()
    parsed: int = 0
    unparsed: int = 0


class ReadReport(NamedTuple):
    """The data that this audit read: records and bytes of the log, files and rows of the tables. ``incremental``: it
    resumed from an earlier audit's proof."""

    records: int
    size_bytes: int
    files: int
    rows: int
    incremental: bool


@dataclass(frozen=True)
class Report:
    """``exact``: no finding refutes the guarantee."""

    dc: str
    topics: list[str]
    chunks: int
    lines: int
    size_bytes: int
    sources: list[SourceReport]
    tables: list[TableAuditReport]
    files: list[FileReport]
    findings: Findings
    seconds: float
    read: ReadReport | None = None
    copies: list[MirrorReport] = field(default_factory=list)

    @property
    def table(self) -> TableAuditReport | None:
        """The first one."""
        return self.tables[0] if self.tables else None

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
        """The sources with findings that refute."""
        return {finding.source_id for finding in self.findings if finding.refutes}

    def worst_first(self) -> list[SourceReport]:
        """Sources with findings come first, then the large ones."""
        blamed = self.blamed()
        return sorted(self.sources, key=lambda s: (-s.breaks, s.source_id not in blamed, -s.size_bytes, s.source_id))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: at most `JSON_SOURCES` sources, the worst first."""
        tables = [table._asdict() for table in self.tables]
        for table in tables:
            table["segments"] = [{**one._asdict(), "equal": one.equal} for one in table["segments"][-JSON_SEGMENTS:]]
        worst = self.worst_first()[:JSON_SOURCES]
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
            "table": tables[0] if tables else None,
            "tables": tables,
            "read": self.read._asdict() if self.read else None,
            "copies": [copy.as_dict() for copy in self.copies],
            "files": [{**file._asdict(), "equal": file.equal} for file in self.files],
            "findings": [asdict(finding) for finding in self.findings],
            "sources": [{**one._asdict(), "copies": [copy._asdict() for copy in one.copies]} for one in worst],
            "seconds": round(self.seconds, 3),
        }
