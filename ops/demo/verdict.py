"""The end of the demo: the audit's verdict, rows of the table, delays and throughput.

The audit compares the stored data. The demo checks more, because it knows that all data was sent and loaded:

* no byte of the files is left to send, and no chunk is left to load or to mirror
* the independent readers got exactly the stored chunks, in the order of every source
* the query returned every row before all of them were loaded, and every segment is READY
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from logferry.gateway.config import KafkaSettings
from logferry.loaders.location import Location
from logferry.loaders.planning.segment_states import READY
from logferry.loaders.planning.source_facts import utc_text
from logferry.loaders.storage.files import dataset
from logferry.loaders.storage.ledger import pinned_table
from logferry.loaders.storage.side_tables import Segments
from logferry.loaders.terminal import escape
from logferry.ops.audit.audit import audit
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.config import AuditConfig, CopySettings
from logferry.ops.audit.render import progress, show
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo.plan import DC, OTHER_DC, SEGMENT_S, DemoPlan
from logferry.ops.demo.readers import ReaderAccount, percentile
from logferry.ops.demo.story import Story, stored_rows
from logferry.ops.demo.view import add_columns
from logferry.ops.stack.stack import Stack
from rich import box
from rich.console import Console
from rich.table import Table

_ROWS: Final = 10
_SHARES: Final = (0.5, 0.9, 0.99)
_SOONER_MS: Final = (1000, 5000)


def run_audit(plan: DemoPlan, stack: Stack, console: Console) -> Report:
    """Audits Kafka, the table, the original files and the copy in the other data centre.

    Raises CommandError when one of them cannot be read.
    """
    kafka, mirrored = (KafkaSettings(bootstrap_servers=stack.cluster(dc).bootstrap) for dc in (DC, OTHER_DC))
    copies = [CopySettings(dc=OTHER_DC, kafka=mirrored)]
    config = AuditConfig(dc=DC, kafka=kafka, tables=[plan.table], copies=copies)
    with progress(console) as advance:
        return asyncio.run(audit(config, files=plan.originals(), progress=advance))


def shortfalls(report: Report, readers: Mapping[str, ReaderAccount]) -> Iterator[str]:
    """Differences at the end of a demo that an audit in general does not count as errors."""
    if not_sent := sum(file.not_sent_bytes for file in report.files):
        yield f"{not_sent:,} bytes of the files are not stored"
    if report.table is None:
        yield "the table was not audited"
    elif report.table.not_loaded:
        yield f"{report.table.not_loaded:,} chunks are not loaded"
    elif report.table.rows != report.lines:
        yield f"the table has {report.table.rows:,} rows for {report.lines:,} lines"
    if behind := sum(partition.behind for copy in report.copies for partition in copy.partitions):
        yield f"{behind:,} records are not mirrored"
    for who, account in readers.items():
        if (account.chunks, account.bytes) != (report.chunks, report.size_bytes):
            got = f"{who} got {account.chunks:,} chunks with {account.bytes:,} bytes"
            yield f"{got}; Kafka has {report.chunks:,} with {report.size_bytes:,}"
        if account.breaks:
            yield f"{who} saw {account.breaks:,} chunks out of the order of their source"


def query_shortfalls(asked: int, segments: Segments | None, rows: int) -> Iterator[str]:
    """Differences of the query and the segments, if the table has some, from the table's final ``rows``."""
    if asked != rows:
        yield f"the query returned {asked:,} rows, the table has {rows:,}"
    if segments is not None:
        counted = sum(segment.rows for segment in segments.values())
        if counted != rows:
            yield f"the segments count {counted:,} rows, the table has {rows:,}"
        if waiting := sum(segment.state != READY for segment in segments.values()):
            yield f"{waiting:,} segments are not READY"


def print_summary(report: Report, story: Story, console: Console) -> bool:
    """Prints the summary. Returns whether every line was delivered exactly once."""
    table, segments = story.plan.table, story.loads.segments if story.plan.is_live else None
    moving = "the reader that moved between the data centres"
    readers = {"the live reader": story.reader.account, moving: story.roaming.account}
    wrong = [*shortfalls(report, readers), *query_shortfalls(story.asked, segments, stored_rows(table))]
    if report.exact:
        console.print(_files(report))
    else:
        show(report, console)
    console.print(_rows(table))
    if segments:
        console.print(_segments(segments))
    console.print(_waits(report, story))
    for text in _throughput(story):
        console.print(text, highlight=False)
    for text in wrong:
        console.print(f"but {text}", style="bold red", highlight=False)
    exact = report.exact and not wrong
    style = "bold green" if exact else "bold red"
    moved = f"a reader moved between the data centres {story.roaming.moves} times and got each chunk once"
    for text in (report.verdict, f"{report.copies[0].verdict}; {moved}", verdict(report, story.view.killed, exact)):
        console.print(escape(text), style=style, highlight=False, soft_wrap=not console.is_terminal)
    return exact


def verdict(report: Report, killed: Iterable[str], exact: bool) -> str:
    """One sentence."""
    names = ", ".join(killed) or "nothing"
    if not exact:
        return f"NO: the stored data differs from the data sent. Killed meanwhile: {names}."
    return (
        f"YES: every line of the {len(report.files):,} files is in the table once, byte for byte, and in the other data"
        f" centre, although these were killed: {names}."
    )


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    return add_columns(table, texts, numbers)


def _files(report: Report) -> Table:
    """The audit's counts per original file."""
    numbers = ("bytes", "chunks", "lines", "gaps", "doubles", "table rows")
    table = _table("the files, as the audit found them in Kafka and in the table", ("file",), numbers)
    sources = {(source.topic, source.source_id): source for source in report.sources}
    for file in report.files:
        if source := sources.get((file.topic or "", file.source_id or "")):  # an empty file has none
            values = (file.recorded, source.chunks, source.lines, source.gaps, source.doubles, source.rows or 0)
            table.add_row(escape(Path(file.path).name), *map("{:,}".format, values))
    return table


def _rows(place: Location) -> Table:
    """Rows spread over the table, or all if there are few. Raises Unavailable."""
    table = _table(f"{_ROWS} rows of the table, read by delta-rs, without Spark", ("file",), ("seqno", "line"))
    add_columns(table, ("text",), (), "text")
    try:
        stored = dataset(place, pinned_table(place))
        count = stored.count_rows()
        wanted = sorted({count * number // _ROWS for number in range(_ROWS)} if count else ())
        rows = stored.take(wanted, columns=["source_id", "seqno", "line", "text"]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise Unavailable(f"{place} cannot be read: {error}") from error
    for row in rows:
        name = row["source_id"].rpartition("/")[2].rpartition("#")[0]
        table.add_row(escape(name), f"{row['seqno']:,}", f"{row['line']:,}", escape(row["text"]))
    return table


def _segments(segments: Segments) -> Table:
    title = f"segments of {SEGMENT_S} s, by the time in the lines"
    table = _table(title, ("begins", "state"), ("rows", "bytes", "late rows"))
    for start, segment in sorted(segments.items()):
        if segment.rows:
            counts = map("{:,}".format, (segment.rows, segment.bytes, segment.late_rows))
            table.add_row(utc_text(start), segment.state, *counts)
    return table


def _throughput(story: Story) -> Iterator[str]:
    account, size = story.reader.account, story.reader.account.bytes / 1e6
    if account.seconds:
        yield f"file → readable: {size:,.1f} MB in {account.seconds:.1f} s, {size / account.seconds:.1f} MB/s"
    for run in story.loads.reports:
        if run.seconds:
            rate = f"{run.rows / run.seconds:,.0f} rows/s"
            yield f"Kafka → table, run {run.run}: {run.rows:,} rows in {run.seconds:.1f} s, {rate}"


def _waits(report: Report, story: Story) -> Table:
    """Delays until a reader had a chunk: from its creation, and, for generated files, whose growth the demo recorded,
    from the write of its last byte to the file."""
    shares, limits = [f"p{share * 100:g}" for share in _SHARES], [f"under {limit // 1000} s" for limit in _SOONER_MS]
    table = _table("delay until readable, kills included", ("from",), [*shares, "longest", *limits])
    sources = story.reader.account.sources
    written: list[float] = []
    for file in report.files if story.plan.is_live else ():
        if seen := sources.get(file.source_id or ""):
            written += story.present.growth.waits_ms(Path(file.path), seen)
    for name, waits in (("chunk created", story.reader.account.ages_ms), ("line written", written)):
        if waits:
            table.add_row(name, *wait_columns(sorted(waits)))
    return table


def wait_columns(ms: Sequence[float]) -> list[str]:
    """Percentiles, maximum and shares below limits of sorted values."""
    marks = [f"{percentile(ms, share) / 1000:.2f} s" for share in _SHARES]
    sooner = [f"{sum(one < limit for one in ms) / len(ms):.1%}" for limit in _SOONER_MS]
    return [*marks, f"{ms[-1] / 1000:.2f} s", *sooner]
