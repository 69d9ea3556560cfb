"""Renders a report on the terminal: sources, hops, findings, verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from logferry.loaders.terminal import escape
from logferry.ops.audit.compare.report import ReadReport, Report, SourceReport
from logferry.ops.audit.digests.sums import MODULUS, shown
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

SHOWN_SOURCES: Final = 50
SHOWN_FINDINGS: Final = 50
_HASH: Final = 12  # digits


def show(report: Report, console: Console) -> None:
    """The verdict is the last line."""
    console.print(_sources(report))
    console.print(_hops(report))
    for line in _facts(report):
        console.print(escape(line), highlight=False, soft_wrap=True)
    for refutes, title in ((False, "notes"), (True, "findings")):
        _findings(report, console, refutes, title)
    style = "bold green" if report.exact else "bold red"
    console.print(escape(report.verdict), style=style, highlight=False, soft_wrap=True)


def brief(report: Report, console: Console) -> None:
    """Prints one line if the verdict is exact, for the log of a scheduler; else the findings and the verdict."""
    if not report.exact:
        _findings(report, console, True, "findings")
    read = "" if report.read is None else f" ({_read(report.read)}, {report.seconds:.1f} s)"
    console.print(escape(report.verdict + read), highlight=False, soft_wrap=True)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Shows the progress of each stage, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=min(done, total), total=total)

        yield advance


def _sources(report: Report) -> Table:
    topics = ", ".join(report.topics) if len(report.topics) <= 5 else f"{len(report.topics)} topics"
    ordered, blamed = report.worst_first(), report.blamed()
    columns = [name for name in _COLUMNS if name in _ALWAYS or any(_COLUMNS[name](source) for source in ordered)]
    table = _table(f"{report.dc}: {topics}", ("topic-partition", "source"), columns, 8)
    for source in ordered[:SHOWN_SOURCES]:
        values = (_COLUMNS[name](source) for name in columns)
        cells = (f"{value:,}" if isinstance(value, int) else value or "" for value in values)
        place = f"{source.topic}-{source.partition}"
        style = "red" if source.breaks or source.source_id in blamed else None
        table.add_row(place, escape(source.source_id), *cells, style=style)
    if len(ordered) > SHOWN_SOURCES:
        table.caption = f"and {len(ordered) - SHOWN_SOURCES:,} more"
    return table


def _table(title: str, texts: Iterable[str], numbers: Iterable[str], min_width: int | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name, overflow="fold", min_width=min_width)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


# Other columns are shown if any source has a value in them.
_ALWAYS: Final = ("chunks", "lines", "bytes", "seqno", "gaps", "doubles", "hash")
_COLUMNS: Final[dict[str, Callable[[SourceReport], int | str | None]]] = {
    "chunks": lambda source: source.chunks,
    "lines": lambda source: source.lines,
    "bytes": lambda source: source.size_bytes,
    "seqno": lambda source: f"{'…' if source.is_cut else ''}{source.first} → {source.last}",
    "gaps": lambda source: source.gaps,
    "doubles": lambda source: source.doubles,
    "overlaps": lambda source: source.overlaps,
    "out of order": lambda source: source.out_of_order,
    "hash": lambda source: source.hash[-_HASH:],
    "copied": lambda source: _copied(source),
    "table rows": lambda source: source.rows,
}


def _copied(source: SourceReport) -> str:
    """The copies in other data centres; ``=``: identical."""
    same = source.chunks, source.hash
    return ", ".join(f"{c.dc} {'=' if (c.chunks, c.hash) == same else f'{c.chunks:,}'}" for c in source.copies)


def _hops(report: Report) -> Table:
    """From the files to the rows: the amount at each hop, and its digest."""
    table = _table("hop by hop", ("hop",), ("chunks", "bytes", "lines", "hash"))
    table.add_column("besides", overflow="fold")
    if report.files:
        chunks, size = sum(f.chunks for f in report.files), sum(f.recorded - f.begin for f in report.files)
        left = sum(f.not_sent_bytes for f in report.files)
        besides = f"not sent yet: {left:,} bytes" if left else ""
        digest = _sum(f.hash for f in report.files)
        table.add_row(f"{len(report.files)} files", f"{chunks:,}", f"{size:,}", "", digest, besides)
    digest = _sum(source.hash for source in report.sources)
    numbers = (f"{report.chunks:,}", f"{report.size_bytes:,}", f"{report.lines:,}", digest)
    table.add_row(f"log of {report.dc}", *numbers, "")
    for copy in report.copies:
        sources = [one for source in report.sources for one in source.copies if one.dc == copy.copy]
        chunks, size = sum(one.chunks for one in sources), sum(one.size_bytes for one in sources)
        behind = sum(partition.behind for partition in copy.partitions)
        besides = f"not mirrored yet: {behind:,} records" if behind else ""
        digest = _sum(one.hash for one in sources)
        table.add_row(f"copy in {copy.copy}", f"{chunks:,}", f"{size:,}", "", digest, besides)
    for one in report.tables:
        said = {"not loaded yet: {:,} chunks": one.not_loaded, "not comparable: {:,} rows": one.not_comparable}
        besides = ", ".join(text.format(number) for text, number in said.items() if number)
        table.add_row(f"rows of {escape(one.path)}", "", "", f"{one.rows:,}", f"rows {one.hash[-_HASH:]}", besides)
    return table


def _sum(hashes: Iterable[str]) -> str:
    return shown(sum(int(text or "0", 16) for text in hashes) % MODULUS)[-_HASH:]


def _read(read: ReadReport) -> str:
    since = "only newer data was read" if read.incremental else "read"
    log = f"{read.records:,} records of {read.size_bytes:,} bytes"
    return f"{since}: {log}, {read.files:,} files with {read.rows:,} rows"


def _facts(report: Report) -> Iterator[str]:
    cut = sum(source.is_cut for source in report.sources)
    if cut:
        yield f"retention: {cut:,} sources are truncated (…): their retained part is proven"
    if report.read is not None and report.read.incremental:
        yield _read(report.read)
    for table in report.tables:
        yield (
            f"table {table.path}: {table.batches:,} batches, {table.rows:,} rows: {table.compared:,} compared with "
            f"the log, {table.not_comparable:,} not comparable, {table.not_loaded:,} chunks of the log not loaded yet"
        )
    for file in report.files:
        said = file.flaw or f"bytes {file.begin:,} to {file.recorded:,} are stored unchanged"
        yield f"file {file.path}: {said}; not sent yet: {file.not_sent_bytes:,} bytes"


def _findings(report: Report, console: Console, refutes: bool, title: str) -> None:
    kept = [finding for finding in report.findings if finding.refutes == refutes]
    refuting = report.findings.refuting.total()
    total = refuting if refutes else report.findings.counts.total() - refuting
    if not total:
        return
    console.print(f"{title}: {total:,}", style="bold")
    for finding in kept[:SHOWN_FINDINGS]:
        times = f" ({finding.count:,}×)" if finding.count > 1 else ""
        console.print(escape(f"  {finding}{times}"), highlight=False, soft_wrap=True)
    if total > SHOWN_FINDINGS:
        console.print(f"  … and {total - min(SHOWN_FINDINGS, len(kept)):,} more", highlight=False)
