"""The end of the demo: the audit's verdict, rows of the table, delays and throughput.

The audit compares the stored data. The demo checks more, because it knows that all data was sent and loaded:

* no byte of the files is left to send, and no chunk is left to load
* the independent reader got exactly the stored chunks, in the order of every source
* the query returned every row before all of them were loaded, and every segment is READY
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
from logferry.gateway.config import KafkaSettings
from logferry.loaders.planning.segment_states import READY
from logferry.loaders.planning.source_facts import utc_text as time_of
from logferry.loaders.storage.ledger import open_table
from logferry.ops.audit.audit import audit
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.config import AuditConfig, CopySettings
from logferry.ops.audit.render import progress, show
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo.loader_runs import stored_rows
from logferry.ops.demo.plan import DC, OTHER_DC, SEGMENT_S, DemoPlan
from logferry.ops.demo.readers import ReaderAccount, percentile
from logferry.ops.demo.story import Story, StoryRecord
from logferry.ops.stack.stack import Stack
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_ROWS: Final = 10
_COLUMNS: Final = ("source_id", "seqno", "line", "text")
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


def mirror_shortfalls(report: Report, account: ReaderAccount) -> list[str]:
    """Differences in the other data centre. ``account``: of the roaming reader."""
    behind = sum(partition.behind for copy in report.copies for partition in copy.partitions)
    found = [f"{behind:,} records are not mirrored"] if behind else []
    return found + _reader_differences("the reader that moved between the data centres", report, account)


def shortfalls(report: Report, account: ReaderAccount) -> list[str]:
    """Differences at the end of a demo that an audit in general does not count as errors."""
    found = []
    not_sent = sum(file.not_sent_bytes for file in report.files)
    if not_sent:
        found.append(f"{not_sent:,} bytes of the files are not stored")
    if report.table is None:
        found.append("the table was not audited")
    elif report.table.not_loaded:
        found.append(f"{report.table.not_loaded:,} chunks are not loaded")
    elif report.table.rows != report.lines:
        found.append(f"the table has {report.table.rows:,} rows for {report.lines:,} lines")
    return found + _reader_differences("the live reader", report, account)


def _reader_differences(who: str, report: Report, account: ReaderAccount) -> list[str]:
    found = []
    if (account.chunks, account.bytes) != (report.chunks, report.size_bytes):
        found.append(
            f"{who} got {account.chunks:,} chunks with {account.bytes:,} bytes;"
            f" Kafka has {report.chunks:,} with {report.size_bytes:,}"
        )
    if account.breaks:
        found.append(f"{who} saw {account.breaks:,} chunks out of the order of their source")
    return found


def query_shortfalls(record: StoryRecord, rows: int, *, is_live: bool) -> list[str]:
    """Differences of the query and the segments from the table's final ``rows``."""
    found = []
    if record.asked is None or record.asked.rows != rows:
        found.append(f"the query returned {record.asked.rows if record.asked else 0:,} rows, the table has {rows:,}")
    if is_live:
        counted = sum(segment.rows for segment in record.segments.values())
        if counted != rows:
            found.append(f"the segments count {counted:,} rows, the table has {rows:,}")
        waiting = [segment for segment in record.segments.values() if segment.state != READY]
        if waiting:
            found.append(f"{len(waiting):,} segments are not READY")
    return found


def print_summary(report: Report, story: Story, console: Console) -> bool:
    """Prints the summary. Returns whether every line was delivered exactly once."""
    table = story.plan.table
    wrong = shortfalls(report, story.reader.account) + mirror_shortfalls(report, story.roaming.account)
    wrong += query_shortfalls(story.record, stored_rows(table), is_live=story.plan.is_live)
    if report.exact:
        console.print(_files(report))
    else:
        show(report, console)
    console.print(_rows(table))
    if story.record.segments:
        console.print(_segments(story.record))
    console.print(_waits(report, story))
    for text in _throughput(story):
        console.print(text, highlight=False)
    for text in wrong:
        console.print(f"but {text}", style="bold red", highlight=False)
    exact = report.exact and not wrong
    style = "bold green" if exact else "bold red"
    moved = f"a reader moved between the data centres {story.roaming.moves} times and got each chunk once"
    for text in (report.verdict, f"{report.copies[0].verdict}; {moved}", verdict(report, story.record, exact)):
        console.print(escape(text), style=style, highlight=False, soft_wrap=not console.is_terminal)
    return exact


def verdict(report: Report, record: StoryRecord, exact: bool) -> str:
    """One sentence."""
    killed = ", ".join(record.killed) or "nothing"
    if not exact:
        return f"NO: the stored data differs from the data sent. Killed meanwhile: {killed}."
    return (
        f"YES: every line of the {len(report.files):,} files is in the table once, byte for byte, and in the other data"
        f" centre, although these were killed: {killed}."
    )


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """A column named text takes the remaining width."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.expand = "text" in columns
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        ratio = 1 if name == "text" else None
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", ratio=ratio)
    return table


def _files(report: Report) -> Table:
    """The audit's counts per original file."""
    numbers = ("bytes", "chunks", "lines", "gaps", "doubles", "table rows")
    table = _table("the files, as the audit found them in Kafka and in the table", "file", *numbers, right=numbers)
    sources = {(source.topic, source.source_id): source for source in report.sources}
    for file in report.files:
        source = sources.get((file.topic or "", file.source_id or ""))
        if source is not None:  # an empty file has none
            values = (file.recorded, source.chunks, source.lines, source.gaps, source.doubles, source.rows or 0)
            table.add_row(escape(Path(file.path).name), *(f"{value:,}" for value in values))
    return table


def _rows(path: Path) -> Table:
    title = f"{_ROWS} rows of the table, read by delta-rs, without Spark"
    table = _table(title, "file", "seqno", "line", "text", right=("seqno", "line"))
    for row in some_rows(path):
        name = row["source_id"].rpartition("/")[2].rpartition("#")[0]
        text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in row["text"])
        table.add_row(escape(name), f"{row['seqno']:,}", f"{row['line']:,}", escape(text))
    return table


def _segments(record: StoryRecord) -> Table:
    title = f"segments of {SEGMENT_S} s, by the time in the lines"
    table = _table(title, "begins", "state", "rows", "bytes", "late rows", right=("rows", "bytes", "late rows"))
    for start, segment in sorted(record.segments.items()):
        if not segment.rows:
            continue
        counts = (segment.rows, segment.bytes, segment.late_rows)
        table.add_row(time_of(start), segment.state, *(f"{count:,}" for count in counts))
    return table


def some_rows(path: Path) -> Sequence[dict[str, Any]]:
    """Ten rows spread over the table, or all if there are fewer. Raises Unavailable."""
    found = open_table(path)
    if found is None:
        raise Unavailable(f"{path}: no table there")
    try:
        dataset = found.to_pyarrow_dataset()
        count = dataset.count_rows()
        wanted = sorted({count * number // _ROWS for number in range(_ROWS)} if count else ())
        rows: list[dict[str, Any]] = dataset.take(wanted, columns=list(_COLUMNS)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    return rows


def _throughput(story: Story) -> list[str]:
    account = story.reader.account
    lines = []
    if account.seconds:
        size = account.bytes / 1e6
        lines.append(f"file → readable: {size:,.1f} MB in {account.seconds:.1f} s, {size / account.seconds:.1f} MB/s")
    for loaded in story.record.loads:
        if loaded.seconds:
            rate = f"{loaded.rows / loaded.seconds:,.0f} rows/s"
            lines.append(f"Kafka → table, run {loaded.run}: {loaded.rows:,} rows in {loaded.seconds:.1f} s, {rate}")
    return lines


def _waits(report: Report, story: Story) -> Table:
    """Delays until a reader had a chunk: from its creation, and from the write of its last byte to the file."""
    shares, limits = [f"p{share * 100:g}" for share in _SHARES], [f"under {limit // 1000} s" for limit in _SOONER_MS]
    names = [*shares, "longest", *limits]
    table = _table("delay until readable, kills included", "from", *names, right=names)
    account = story.reader.account
    for name, waits in (("chunk created", account.ages_ms), ("line written", _waits_ms(report, story))):
        if waits:
            table.add_row(name, *wait_columns(sorted(waits)))
    return table


def _waits_ms(report: Report, story: Story) -> list[float]:
    """Only for generated files, whose growth the demo recorded."""
    found: list[float] = []
    for file in report.files if story.plan.is_live else ():
        seen = story.reader.account.sources.get(file.source_id or "")
        if seen is not None:
            found += story.present.growth.waits_ms(Path(file.path), seen)
    return found


def wait_columns(ms: Sequence[float]) -> list[str]:
    """Percentiles, maximum and shares below limits of sorted values."""
    marks = [f"{percentile(ms, share) / 1000:.2f} s" for share in _SHARES]
    sooner = [f"{sum(one < limit for one in ms) / len(ms):.1%}" for limit in _SOONER_MS]
    return [*marks, f"{ms[-1] / 1000:.2f} s", *sooner]
