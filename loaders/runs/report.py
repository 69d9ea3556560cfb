"""The report of a run: one line per batch, progress on a terminal, or one line of JSON for programs.

Tables may be loaded in several threads at once; each has its own line of progress.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from logferry.loaders.batches.execute import BatchDone
from logferry.loaders.errors import EXIT_DONE, EXIT_REFUSED, LoadError
from logferry.loaders.planning.plan import Range, StoppedTopic
from logferry.loaders.runs.table_run import Backlog, LoadEvent, RunEnded, SegmentNotice
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_RANGES_SHOWN = 16
# A run that follows may last for months: only the newest batches are kept.
_BATCHES_KEPT: Final = 1000


@dataclass
class LoadReport:
    """The work on one table. ``rows``: written by this run, not by another loader. ``left``: offsets not loaded, as of
    the start of the last load. ``check_failure``: why segments could not be checked or notified.
    """

    path: Path
    bar: TaskID
    batches: list[BatchDone] = field(default_factory=list)
    stopped: list[StoppedTopic] = field(default_factory=list)
    error: LoadError | None = None
    ended: str | None = None
    check_failure: str | None = None
    seconds: float = 0.0
    rows: int = 0
    quarantined: int = 0
    bytes: int = 0
    left: int = 0
    done: int = 0

    @property
    def exit_status(self) -> int:
        if self.error is not None:
            return self.error.exit_status
        return EXIT_REFUSED if self.stopped else EXIT_DONE

    def add(self, batch: BatchDone) -> None:
        self.batches = [*self.batches[1 - _BATCHES_KEPT :], batch]
        self.done += 1
        self.left -= min(self.left, sum(r.size for r in batch.ranges))
        if batch.ours:
            self.rows += batch.rows or 0
            self.quarantined += batch.quarantined or 0
            self.bytes += batch.bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "table": str(self.path),
            "rows": self.rows,
            "quarantined": self.quarantined,
            "seconds": round(self.seconds, 3),
            "batches": [_batch_json(batch) for batch in self.batches],
            "stopped": [stop._asdict() for stop in self.stopped],
            "left": self.left,
            "ended": self.ended,
            "check_failure": self.check_failure,
            "error": str(self.error) if self.error else None,
        }


class Reporter:
    """Shows the progress of a run. ``as_json``: silent until `finish`, which prints one line."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        console.quiet = as_json
        self.console = console
        self.as_json = as_json
        self.tables: list[LoadReport] = []
        self.progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[progress]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=as_json or not console.is_terminal,
        )

    def begin(self, path: Path) -> LoadReport:
        report = LoadReport(path, self.progress.add_task(escape(path.name), total=None, progress=""))
        self.tables.append(report)
        return report

    def table(self, path: Path, events: Iterable[LoadEvent]) -> LoadReport:
        """Follows one table's load to its end. An error ends the load and is part of the report."""
        report = self.begin(path)
        self.follow(report, events, print_error=False)
        self._print(f"[bold]{escape(str(path))}[/]\n{_total(report)}")
        return report

    def follow(self, report: LoadReport, events: Iterable[LoadEvent], *, print_error: bool = True) -> None:
        """One more load of a table. Its error, or none, replaces that of the load before."""
        started = time.monotonic()
        before, error, ended = report.error, None, None
        already = {stop.reason for stop in report.stopped}
        stopped: list[StoppedTopic] = []
        check_failure: str | None = None
        name = f"[bold]{escape(report.path.name)}[/]"
        try:
            for event in events:
                if isinstance(event, RunEnded):
                    ended = event.reason
                elif isinstance(event, SegmentNotice):
                    check_failure = event.reason
                    if check_failure != report.check_failure:
                        self._print(f"{name} segments: {escape(check_failure)}")
                elif isinstance(event, StoppedTopic):
                    stopped.append(event)
                    if event.reason not in already:
                        self._print(f"{name} [red]stopped[/] {escape(event.reason)}")
                elif isinstance(event, Backlog):
                    report.left = event.records
                    self.progress.reset(report.bar, total=event.records or None, progress=_progress(report, 0.0))
                else:
                    report.add(event)
                    progress = _progress(report, event.bytes / max(event.seconds, 0.001))
                    self.progress.update(report.bar, advance=sum(r.size for r in event.ranges), progress=progress)
                    self._print(_batch_line(report.path.name, event))
        except LoadError as raised:
            error = raised
            if print_error and str(before) != str(raised):
                self._print(f"{name} [red]{escape(str(raised))}[/]")
        # A load that ended early has not checked all topics.
        report.stopped = stopped if ended is None else [*{*report.stopped, *stopped}]
        report.error, report.ended, report.check_failure = error, ended, check_failure
        report.seconds += time.monotonic() - started

    def finish(self, error: LoadError | None = None) -> int:
        """Reports the end of the run and returns its exit status. ``error``: why it could not start."""
        # A failure that needs an operator (1) comes before one that passes by itself (3).
        ends = [error.exit_status] if error else [t.exit_status for t in self.tables if t.exit_status != EXIT_DONE]
        status = min(ends, default=EXIT_DONE)
        if self.as_json:
            summary = {
                "exit": status,
                "error": str(error) if error else None,
                "rows": sum(t.rows for t in self.tables),
                "quarantined": sum(t.quarantined for t in self.tables),
                "tables": [t.as_json() for t in sorted(self.tables, key=lambda t: str(t.path))],
            }
            self.console.file.write(json.dumps(summary) + "\n")
        elif error is not None:
            self._print(f"[red]{escape(str(error))}[/]")
        return status

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def _progress(report: LoadReport, bytes_per_s: float) -> str:
    return f"{report.rows:,} rows · {bytes_per_s / 1e6:.1f} MB/s · {report.left:,} offsets behind"


def _batch_line(name: str, batch: BatchDone) -> str:
    if batch.ours:
        what = f"{number(batch.rows)} rows, {number(batch.quarantined)} quarantined, {batch.bytes / 1e6:.1f} MB"
        if batch.left_out:
            what += f", {batch.left_out:,} duplicate chunks from another data centre left out"
    else:
        what = "[yellow]another loader wrote it[/], this one continues"
    ranges = f"\n    {escape(_ranges(batch.ranges))}" if batch.ranges else ""
    return f"[bold]{escape(name)}[/] batch {batch.batch}: {what} in {batch.seconds:.1f} s{ranges}"


def _ranges(ranges: tuple[Range, ...]) -> str:
    by_topic: dict[str, list[str]] = {}
    for r in ranges[:_RANGES_SHOWN]:
        by_topic.setdefault(r.topic, []).append(f"{r.partition}: {r.start}–{r.end}")
    more = f" and {len(ranges) - _RANGES_SHOWN} more" if len(ranges) > _RANGES_SHOWN else ""
    return "; ".join(f"{topic} {', '.join(parts)}" for topic, parts in by_topic.items()) + more


def _total(report: LoadReport) -> str:
    others = sum(not batch.ours for batch in report.batches)
    end = "up to date" if report.exit_status == EXIT_DONE else "[red]not complete[/]"
    if report.error is not None:
        end = f"[red]{escape(str(report.error))}[/]"
    elif report.ended is not None and report.exit_status == EXIT_DONE:
        end = f"{escape(report.ended)}, {report.left:,} offsets are left"
    batches = f"{report.done} batch{'' if report.done == 1 else 'es'}"
    beside = f", {others} by another loader" if others else ""
    return (
        f"  {number(report.rows)} rows, {number(report.quarantined)} quarantined, "
        f"{batches}{beside} in {report.seconds:.1f} s; {end}"
    )


def number(value: int | None) -> str:
    """As shown to people; unknown is a question mark."""
    return "?" if value is None else f"{value:,}"


def _batch_json(batch: BatchDone) -> dict[str, Any]:
    return {**vars(batch), "seconds": round(batch.seconds, 3), "ranges": [r._asdict() for r in batch.ranges]}
