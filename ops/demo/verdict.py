"""The end of the demo: the audit's verdict, rows of the table read without Spark, and how fast it was.

The verdict is the audit's, over what is stored. More is asked beside, because the demo knows that all was sent and
loaded: nothing of the files is left to send, no chunk is left to load, an independent reader has got exactly what is
stored, in the order of every source, the query had every row before it was loaded, and every segment is READY.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
from logferry.loaders.planning.segment_states import READY
from logferry.loaders.planning.segment_states import said as time_of
from logferry.loaders.storage.ledger import open_table
from logferry.mirror.config import load
from logferry.ops.audit.audit import audit
from logferry.ops.audit.compare.mirror_copy import MirrorReport, audit_mirror
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.render import progress, show
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo.asking import stored_rows
from logferry.ops.demo.plan import DC, SEGMENT_S, Plan
from logferry.ops.demo.readers import Account, percentile
from logferry.ops.demo.story import Story, Told
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_ROWS: Final = 10
_COLUMNS: Final = ("source_id", "seqno", "line", "text")
_SHARES: Final = (0.5, 0.9, 0.99)
_SOONER_MS: Final = (1000, 5000)


def prove(plan: Plan, bootstrap: str, console: Console) -> tuple[Report, MirrorReport]:
    """Audits Kafka, the table and the original files, then the copy in the other data centre.

    Raises Problem when one of them cannot be read.
    """
    with progress(console) as advance:
        report = asyncio.run(audit(bootstrap, DC, table=plan.table, files=plan.originals(), progress=advance))
        return report, asyncio.run(audit_mirror(load(plan.mirror), DC, [], None, advance))


def copied(report: Report, copy: MirrorReport, account: Account) -> list[str]:
    """What is not as it must be in the other data centre. ``account``: of the reader that moved between both."""
    found = []
    if not copy.exact:
        found.append(copy.verdict)
    behind = sum(partition.behind for partition in copy.partitions)
    if behind:
        found.append(f"{behind:,} records are not mirrored")
    if (account.chunks, account.bytes) != (report.chunks, report.size_bytes):
        found.append(
            f"the reader that moved between the data centres got {account.chunks:,} chunks with {account.bytes:,}"
            f" bytes, stored are {report.chunks:,} with {report.size_bytes:,}"
        )
    if account.breaks:
        found.append(f"the reader that moved saw {account.breaks:,} chunks out of the order of their source")
    return found


def shortfalls(report: Report, account: Account) -> list[str]:
    """What is not as it must be at the end of a demo, though the audit may find nothing wrong with it."""
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
    if (account.chunks, account.bytes) != (report.chunks, report.size_bytes):
        found.append(
            f"the live reader got {account.chunks:,} chunks with {account.bytes:,} bytes,"
            f" stored are {report.chunks:,} with {report.size_bytes:,}"
        )
    if account.breaks:
        found.append(f"the live reader saw {account.breaks:,} chunks out of the order of their source")
    return found


def shown(told: Told, rows: int, *, is_live: bool) -> list[str]:
    """What the query and the segments told otherwise. ``rows``: of the table in the end. Pure."""
    found = []
    if told.asked is None or told.asked.rows != rows:
        found.append(f"the query told of {told.asked.rows if told.asked else 0:,} rows, the table has {rows:,}")
    if is_live:
        counted = sum(segment.rows for segment in told.segments.values())
        if counted != rows:
            found.append(f"the segments tell of {counted:,} rows, the table has {rows:,}")
        waiting = [segment for segment in told.segments.values() if segment.state != READY]
        if waiting:
            found.append(f"{len(waiting):,} segments are not READY")
    return found


def end(plan: Plan, report: Report, copy: MirrorReport, story: Story, console: Console) -> bool:
    """Shows it all; whether the promise was kept."""
    account = story.reader.account
    wrong = shortfalls(report, account) + copied(report, copy, story.traveller.account)
    wrong += shown(story.told, stored_rows(plan.table), is_live=plan.is_live)
    if report.exact:
        console.print(_files(report))
    else:
        show(report, console)
    console.print(_rows(plan.table))
    if story.told.segments:
        console.print(_segments(story.told))
    console.print(_waits(report, story))
    for text in _throughput(story):
        console.print(text, highlight=False)
    for text in wrong:
        console.print(f"but {text}", style="bold red", highlight=False)
    exact = report.exact and not wrong
    style = "bold green" if exact else "bold red"
    moved = f"a reader moved between the data centres {story.traveller.moves} times and has each chunk once"
    for text in (report.verdict, f"{copy.verdict}; {moved}", verdict(report, story.told, exact)):
        console.print(escape(text), style=style, highlight=False, soft_wrap=not console.is_terminal)
    return exact


def verdict(report: Report, told: Told, exact: bool) -> str:
    """One sentence."""
    killed = ", ".join(told.killed) or "nothing"
    if not exact:
        return f"NO: what is stored is not what was sent, exactly once. Killed meanwhile: {killed}."
    return (
        f"YES: every line of the {len(report.files):,} files is in the table once, byte for byte, and the other data"
        f" centre has the same, though these were killed: {killed}."
    )


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """A column named text takes the room that the others leave."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.expand = "text" in columns
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        ratio = 1 if name == "text" else None
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", ratio=ratio)
    return table


def _files(report: Report) -> Table:
    """What the audit found of each original file."""
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


def _segments(told: Told) -> Table:
    title = f"segments of {SEGMENT_S} s, by the time in the lines"
    table = _table(title, "begins", "state", "rows", "bytes", "late rows", right=("rows", "bytes", "late rows"))
    for start, segment in sorted(told.segments.items()):
        if not segment.rows:
            continue
        counts = (segment.rows, segment.bytes, segment.late_rows)
        table.add_row(time_of(start), segment.state, *(f"{count:,}" for count in counts))
    return table


def some_rows(path: Path) -> Sequence[dict[str, Any]]:
    """Ten rows, or all if there are fewer, from all over the table. Raises Unavailable."""
    found = open_table(path)
    if found is None:
        raise Unavailable(f"{path}: there is no table")
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
    for loaded in story.told.loads:
        if loaded.rows:
            rate = f"{loaded.rows / loaded.seconds:,.0f} rows/s"
            lines.append(f"Kafka → table, run {loaded.run}: {loaded.rows:,} rows in {loaded.seconds:.1f} s, {rate}")
    return lines


def _waits(report: Report, story: Story) -> Table:
    """How long it took until a reader had it: from a chunk's making, and from when its end was written to the file."""
    shares, limits = [f"p{share * 100:g}" for share in _SHARES], [f"under {limit // 1000} s" for limit in _SOONER_MS]
    names = [*shares, "longest", *limits]
    table = _table("how long until it was readable, kills included", "from", *names, right=names)
    account = story.reader.account
    for name, waits in (("chunk created", account.ages_ms), ("line written", _waits_ms(report, story))):
        if waits:
            table.add_row(name, *waited(sorted(waits)))
    return table


def _waits_ms(report: Report, story: Story) -> list[float]:
    """Files that grew while the demo looked on; those of the user were there before."""
    found: list[float] = []
    for file in report.files if story.is_live else ():
        seen = story.reader.account.sources.get(file.source_id or "")
        if seen is not None:
            found += story.present.growth.waits_ms(Path(file.path), seen)
    return found


def waited(ms: Sequence[float]) -> list[str]:
    """Percentiles, the longest, and shares below limits, of what is sorted by size."""
    marks = [f"{percentile(ms, share) / 1000:.2f} s" for share in _SHARES]
    sooner = [f"{sum(one < limit for one in ms) / len(ms):.1%}" for limit in _SOONER_MS]
    return [*marks, f"{ms[-1] / 1000:.2f} s", *sooner]
