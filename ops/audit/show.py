"""A report on the terminal: the sources, the findings, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from logferry.ops.audit.proof import STAGES
from logferry.ops.audit.report import Report, SourceReport
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

SHOWN_SOURCES: Final = 50
SHOWN_FINDINGS: Final = 50
_WIDTH: Final = 140  # where the output is not a terminal


def console_for_output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def show(report: Report, console: Console) -> None:
    """The verdict is the last line."""
    console.print(_sources(report))
    for line in _facts(report):
        console.print(escape(line), highlight=False, soft_wrap=True)
    for refutes, title in ((False, "notes"), (True, "findings")):
        _findings(report, console, refutes, title)
    style = "bold green" if report.exact else "bold red"
    console.print(escape(report.verdict), style=style, highlight=False, soft_wrap=True)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Shows how far each stage is, on a terminal only."""
    if not console.is_terminal:
        yield lambda _stage, _done, _total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {stage: bars.add_task(stage, total=None, visible=False) for stage in (*STAGES, "mirror")}

        def advance(stage: str, done: int, total: int) -> None:
            bars.update(tasks[stage], completed=min(done, total), total=total, visible=True)

        yield advance


def _sources(report: Report) -> Table:
    topics = ", ".join(report.topics) if len(report.topics) <= 5 else f"{len(report.topics)} topics"
    ordered, blamed = report.worst_first(), report.blamed()
    columns = [name for name in _COLUMNS if name in _ALWAYS or any(_COLUMNS[name](source) for source in ordered)]
    table = Table(title=f"{report.dc}: {topics}", title_justify="left")
    for name in ("topic-partition", "source"):
        table.add_column(name, overflow="fold", min_width=8)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for source in ordered[:SHOWN_SOURCES]:
        cells = (_text(_COLUMNS[name](source)) for name in columns)
        place = f"{source.topic}-{source.partition}"
        style = "red" if source.breaks or source.source_id in blamed else None
        table.add_row(place, escape(source.source_id), *cells, style=style)
    if len(ordered) > SHOWN_SOURCES:
        table.caption = f"and {len(ordered) - SHOWN_SOURCES:,} more"
    return table


# The other columns are shown where there is something in them.
_ALWAYS: Final = ("chunks", "lines", "bytes", "seqno", "gaps", "doubles")
_COLUMNS: Final[dict[str, Callable[[SourceReport], int | str | None]]] = {
    "chunks": lambda source: source.chunks,
    "lines": lambda source: source.lines,
    "bytes": lambda source: source.size_bytes,
    "seqno": lambda source: f"{'…' if source.is_cut else ''}{source.first} → {source.last}",
    "gaps": lambda source: source.gaps,
    "doubles": lambda source: source.doubles,
    "overlaps": lambda source: source.overlaps,
    "out of order": lambda source: source.out_of_order,
    "table rows": lambda source: source.rows,
}


def _text(value: int | str | None) -> str:
    return f"{value:,}" if isinstance(value, int) else value or ""


def _facts(report: Report) -> Iterator[str]:
    cut = sum(source.is_cut for source in report.sources)
    if cut:
        yield f"retention: {cut:,} sources are cut (…): what is retained of them was proven from there on"
    table = report.table
    if table is not None:
        yield (
            f"table {table.path}: {table.batches:,} batches, {table.rows:,} rows: {table.compared:,} held against the "
            f"log, {table.not_comparable:,} not comparable, {table.not_loaded:,} chunks of the log not loaded yet"
        )
    for file in report.files:
        said = file.flaw or f"bytes {file.begin:,} to {file.recorded:,} are what is stored"
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
