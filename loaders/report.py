"""What a run says: a line a batch for people, a progress bar on a terminal, or one line of JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logferry.loaders.errors import EXIT_DONE, EXIT_REFUSED, LoadError
from logferry.loaders.load import Backlog, BatchDone, LoadEvent
from logferry.loaders.plan import Range, Stopped
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_RANGES_SHOWN = 16


@dataclass
class TableReport:
    """What was done with one table. ``rows`` counts what this run wrote, not what another loader did."""

    path: Path
    batches: list[BatchDone] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    error: LoadError | None = None
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        return sum(batch.rows or 0 for batch in self.batches if batch.ours)

    @property
    def quarantined(self) -> int:
        return sum(batch.quarantined or 0 for batch in self.batches if batch.ours)

    @property
    def exit_status(self) -> int:
        if self.error is not None:
            return self.error.exit_status
        return EXIT_REFUSED if self.stopped else EXIT_DONE

    def as_json(self) -> dict[str, Any]:
        return {
            "table": str(self.path),
            "rows": self.rows,
            "quarantined": self.quarantined,
            "seconds": round(self.seconds, 3),
            "batches": [_batch_json(batch) for batch in self.batches],
            "stopped": [stop._asdict() for stop in self.stopped],
            "error": str(self.error) if self.error else None,
        }


def exit_status(tables: Iterable[TableReport]) -> int:
    """That of the run: what somebody must look at (1) before what passes by itself (3)."""
    return min((t.exit_status for t in tables if t.exit_status != EXIT_DONE), default=EXIT_DONE)


class Reporter:
    """Shows a run as it goes on. ``as_json``: silent until `finish`, which prints one line."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        self.console = console
        self.as_json = as_json
        self.tables: list[TableReport] = []

    @contextmanager
    def starting(self, what: str) -> Iterator[None]:
        if self.as_json or not self.console.is_terminal:
            yield
            return
        with self.console.status(what):
            yield

    def table(self, path: Path, events: Iterable[LoadEvent]) -> TableReport:
        """Follows one table's load to its end. An error of the load ends it and stands in the report."""
        report = TableReport(path)
        self.tables.append(report)
        started = time.monotonic()
        self._say(f"[bold]{escape(str(path))}[/]")
        with self._progress() as progress:
            bar = progress.add_task("loading", total=None)
            try:
                for event in events:
                    self._take(report, event, progress, bar)
            except LoadError as error:
                report.error = error
        report.seconds = time.monotonic() - started
        self._say(_total(report))
        return report

    def finish(self, error: LoadError | None = None) -> int:
        """Says the end of the run and returns its exit status. ``error``: what kept it from starting."""
        status = error.exit_status if error else exit_status(self.tables)
        if self.as_json:
            summary = {
                "exit": status,
                "error": str(error) if error else None,
                "rows": sum(t.rows for t in self.tables),
                "quarantined": sum(t.quarantined for t in self.tables),
                "tables": [t.as_json() for t in self.tables],
            }
            self.console.file.write(json.dumps(summary) + "\n")
        elif error is not None:
            self._say(f"[red]{escape(str(error))}[/]")
        return status

    def _take(self, report: TableReport, event: LoadEvent, progress: Progress, bar: TaskID) -> None:
        if isinstance(event, Backlog):
            progress.update(bar, total=event.records)
        elif isinstance(event, Stopped):
            report.stopped.append(event)
            self._say(f"  [red]stopped[/] {escape(event.reason)}")
        else:
            report.batches.append(event)
            progress.advance(bar, sum(r.size for r in event.ranges))
            self._say(_batch_line(event))

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("  "),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("offsets"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=self.as_json or not self.console.is_terminal,
        )

    def _say(self, text: str) -> None:
        if not self.as_json:
            self.console.print(text, highlight=False, soft_wrap=True)


def _batch_line(batch: BatchDone) -> str:
    seconds = f"{batch.read_s + batch.write_s:.1f} s (read {batch.read_s:.1f}, write {batch.write_s:.1f})"
    if batch.ours:
        what = f"{_count(batch.rows)} rows, {_count(batch.quarantined)} quarantined, {batch.bytes / 1e6:.1f} MB"
    else:
        what = "[yellow]another loader wrote it[/], this one goes on"
    return f"  batch {batch.batch}: {what} in {seconds}\n    {escape(_ranges(batch.ranges))}"


def _ranges(ranges: tuple[Range, ...]) -> str:
    by_topic: dict[str, list[str]] = {}
    for r in ranges[:_RANGES_SHOWN]:
        by_topic.setdefault(r.topic, []).append(f"{r.partition}: {r.start}–{r.end}")
    more = f" and {len(ranges) - _RANGES_SHOWN} more" if len(ranges) > _RANGES_SHOWN else ""
    return "; ".join(f"{topic} {', '.join(parts)}" for topic, parts in by_topic.items()) + more


def _total(report: TableReport) -> str:
    others = sum(not batch.ours for batch in report.batches)
    end = "up to date" if report.exit_status == EXIT_DONE else "[red]not complete[/]"
    if report.error is not None:
        end = f"[red]{escape(str(report.error))}[/]"
    batches = f"{len(report.batches)} batch{'' if len(report.batches) == 1 else 'es'}"
    beside = f", {others} by another loader" if others else ""
    return (
        f"  {_count(report.rows)} rows, {_count(report.quarantined)} quarantined, "
        f"{batches}{beside} in {report.seconds:.1f} s; {end}"
    )


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _batch_json(batch: BatchDone) -> dict[str, Any]:
    return {
        "batch": batch.batch,
        "ours": batch.ours,
        "rows": batch.rows,
        "quarantined": batch.quarantined,
        "records": batch.records,
        "bytes": batch.bytes,
        "read_s": round(batch.read_s, 3),
        "write_s": round(batch.write_s, 3),
        "ranges": [r._asdict() for r in batch.ranges],
    }
