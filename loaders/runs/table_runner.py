"""Loads all tables of a configuration in one session, several at a time, once or continuously, and reports the run.

A failing table does not stop the others. A load that follows repeats every ``follow_s``. A transient error delays its
table only; an error that needs an operator ends its table, and the run when no table is left. A signal lets each table
finish its present batch.

The report: one line per batch, progress on a terminal with one line per table, or one line of JSON for programs.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from logferry.gateway.contract.names import split_topic
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.config import TOPIC, Config, TableJob
from logferry.loaders.errors import EXIT_DONE, EXIT_REFUSED, LoaderConfigError, LoadError, SparkUnavailable, Transient
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import BatchSizer, Limits, Range, StoppedTopic
from logferry.loaders.runs.gateway_report import TableReports
from logferry.loaders.runs.metrics import LoadMetrics
from logferry.loaders.runs.table_run import Backlog, CatalogNotice, LoadEvent, RunEnded, SegmentNotice, load_table
from logferry.loaders.spark.stores import renew_keys
from logferry.loaders.storage.files import STORAGE_ERRORS, is_empty, storage_errors
from logferry.loaders.terminal import escape
from rich.console import Console
from rich.progress import Progress, TaskID

_RANGES_SHOWN: Final = 16
# A run that follows may last for months: only the newest batches are kept.
_BATCHES_KEPT: Final = 1000
_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0
# Topic names that would lead out of the folder of the template.
_NO_FOLDERS: Final = (".", "..")


@dataclass
class LoadReport:
    """The work on one table. ``rows``: written by this run, not by another loader. ``left``: offsets not loaded, as of
    the start of the last load. ``check_failure``: why segments could not be checked or notified.
    ``catalog_failure``: why the catalog does not have the name of the table.
    """

    path: Location
    bar: TaskID
    batches: list[BatchDone] = field(default_factory=list)
    stopped: list[StoppedTopic] = field(default_factory=list)
    error: LoadError | None = None
    ended: str | None = None
    check_failure: str | None = None
    catalog_failure: str | None = None
    seconds: float = 0.0
    rows: int = 0
    quarantined: int = 0
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

    def as_json(self) -> dict[str, Any]:
        return {
            "table": str(self.path),
            "rows": self.rows,
            "quarantined": self.quarantined,
            "seconds": round(self.seconds, 3),
            "batches": [
                {**vars(batch), "seconds": round(batch.seconds, 3), "ranges": [r._asdict() for r in batch.ranges]}
                for batch in self.batches
            ],
            "stopped": [stop._asdict() for stop in self.stopped],
            "left": self.left,
            "ended": self.ended,
            "check_failure": self.check_failure,
            "catalog_failure": self.catalog_failure,
            "error": str(self.error) if self.error else None,
        }


class Reporter:
    """Shows the progress of a run. ``as_json``: silent until `finish`, which prints one line."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        console.quiet = as_json
        self.console = console
        self.as_json = as_json
        self.metrics: LoadMetrics | None = None
        self.reports: TableReports | None = None
        self.tables: list[LoadReport] = []
        self.progress = Progress(console=console, transient=True, disable=as_json or not console.is_terminal)

    def begin(self, path: Location) -> LoadReport:
        report = LoadReport(path, self.progress.add_task(escape(path.name), total=None))
        self.tables.append(report)
        return report

    def table(self, path: Location, events: Iterable[LoadEvent]) -> None:
        """Follows one table's load to its end. An error ends the load and is part of the report."""
        report = self.begin(path)
        self.follow(report, events)
        self._print(f"[bold]{escape(str(path))}[/]\n{_total(report)}")

    def follow(self, report: LoadReport, events: Iterable[LoadEvent]) -> None:
        """One more load of a table. Its error, or none, replaces that of the load before."""
        started = time.monotonic()
        before, error, ended = report.error, None, None
        already = {stop.reason for stop in report.stopped}
        stopped: list[StoppedTopic] = []
        check_failure = catalog_failure = None
        name = f"[bold]{escape(report.path.name)}[/]"
        if self.metrics is not None:
            self.metrics.begin(report.path)
        try:
            # Whatever a store does in a load ends this load only.
            with storage_errors(f"{report.path} cannot be accessed", STORAGE_ERRORS):
                for event in events:
                    if self.metrics is not None:
                        self.metrics.saw(report.path, event)
                    if isinstance(event, RunEnded):
                        ended = event.reason
                    elif isinstance(event, SegmentNotice):
                        check_failure = event.reason
                        if check_failure != report.check_failure:
                            self._print(f"{name} segments: {escape(check_failure)}")
                    elif isinstance(event, CatalogNotice):
                        catalog_failure = event.reason
                        if catalog_failure != report.catalog_failure:
                            self._print(f"{name} catalog: {escape(catalog_failure)}")
                    elif isinstance(event, StoppedTopic):
                        stopped.append(event)
                        if event.reason not in already:
                            way = f"; the way on: logferry table reset {report.path} --to {event.topic}=…"
                            self._print(f"{name} [red]stopped[/] {escape(event.reason + way)}")
                    elif isinstance(event, Backlog):
                        report.left = event.records
                        self.progress.reset(report.bar, total=event.records or None, description=_progress(report, 0.0))
                    else:
                        report.add(event)
                        if self.reports is not None:
                            self.reports.batch_done(report.path, event)
                        said = _progress(report, event.bytes / max(event.seconds, 0.001))
                        self.progress.update(report.bar, advance=sum(r.size for r in event.ranges), description=said)
                        self._print(_batch_line(report.path.name, event))
        except LoadError as raised:
            error = raised
            if str(before) != str(raised):
                self._print(f"{name} [red]{escape(str(raised))}[/]")
        if self.metrics is not None:
            self.metrics.end(report.path, error)
        if self.reports is not None:
            self.reports.load_ended(report.path, error, check_failure)
        # A load that ended early has not checked all topics.
        report.stopped = stopped if ended is None else [*{*report.stopped, *stopped}]
        report.error, report.ended, report.check_failure = error, ended, check_failure
        report.catalog_failure = catalog_failure
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
    rows = f"  {escape(report.path.name)} · {report.rows:,} rows"
    return f"{rows} · {bytes_per_s / 1e6:.1f} MB/s · {report.left:,} offsets behind"


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
    if report.ended is not None and report.exit_status == EXIT_DONE:
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


# ---- runs ------------------------------------------------------------------------------------------------


Work = Callable[[Loader, TableJob], Iterator[LoadEvent]]


class TableRunner:
    """The tables of a run. ``stop``: set to end after the batches in progress."""

    def __init__(self, loader: Loader, settings: Config, reporter: Reporter, stop: threading.Event) -> None:
        self.loader, self.settings, self.reporter, self.stop = loader, settings, reporter, stop
        self._started = time.monotonic()
        self.refused: dict[Location, LoaderConfigError] = {}

    def jobs(self) -> list[TableJob]:
        """The configuration's jobs, with templates expanded to the present topics. Raises LoadError.

        Those that cannot be loaded beside the others are left out; `refused` has them.
        """
        found: list[TableJob] = []
        without_folder: dict[Location, LoaderConfigError] = {}
        for job in self.settings.tables:
            if not job.is_template:
                found.append(job)
                continue
            names = self.loader.kafka.names(job.topics)
            found += expand_template(job, names)
            for name in names:
                if split_topic(name)[1] in _NO_FOLDERS:
                    without_folder[job.path] = LoaderConfigError(f"{name} cannot be loaded: it names no folder")
        found, refused = apart(found, is_loaded)
        self.refused = without_folder | refused
        return found

    def each(self, work: Work, jobs: Sequence[TableJob] | None = None) -> None:
        """Does the same with every table, or with those of ``jobs``."""
        if jobs is None:
            jobs = self.jobs()
            for path, error in self.refused.items():
                self.reporter.table(path, _raised(error))
        with ThreadPoolExecutor(self.settings.parallel) as pool:
            for future in [pool.submit(self._do, job, work) for job in jobs]:
                future.result()

    def once(self, limits: Limits) -> None:
        """Everything that Kafka has now, or as much of it as the limits allow."""
        self.each(lambda loader, job: load_table(loader, job, self._sizes(job, limits)))

    def follow(self) -> None:
        """Returns when ``stop`` is set, when no table is left, or when Spark has ended."""
        refused: set[Location] = set()
        threads: dict[Location, threading.Thread] = {}
        while not self.stop.is_set():
            # Topics that cannot be listed now are listed the next time; the same holds of keys that cannot be read.
            with suppress(Transient, LoaderConfigError):
                renew_keys(self.loader.spark, self.settings)
            with suppress(Transient):
                jobs = self.jobs()
                for path in [path for path in self.refused if path not in refused]:
                    refused.add(path)
                    self.reporter.follow(self.reporter.begin(path), _raised(self.refused[path]))
                for job in jobs:
                    if job.path not in threads:
                        report = self.reporter.begin(job.path)
                        threads[job.path] = threading.Thread(target=self._follow, args=(job, report))
                        threads[job.path].start()
            if any(isinstance(report.error, SparkUnavailable) for report in self.reporter.tables):
                self.stop.set()
            elif threads and not any(thread.is_alive() for thread in threads.values()):
                break
            self.stop.wait(self.settings.follow_s)
        for thread in threads.values():
            thread.join()

    def _follow(self, job: TableJob, report: LoadReport) -> None:
        self._begin(job)
        sizes = self._sizes(job, Limits())
        wait_s = _RETRY_S
        while not self.stop.is_set():
            self.reporter.follow(report, load_table(self.loader, job, sizes))
            error = report.error
            if error is None:
                wait_s = _RETRY_S
                self.stop.wait(self.settings.follow_s)
            elif isinstance(error, Transient) and not isinstance(error, SparkUnavailable):
                self.stop.wait(wait_s)
                wait_s = min(2 * wait_s, _MAX_RETRY_S)
            else:
                return

    def _do(self, job: TableJob, work: Work) -> None:
        self._begin(job)
        self.reporter.table(job.path, work(self.loader, job))

    def _begin(self, job: TableJob) -> None:
        """Tables share Spark's tasks fairly: a large one does not delay a small one."""
        with suppress(LoadError):
            self.loader.spark.sparkContext.setLocalProperty("spark.scheduler.pool", str(job.path))
        if self.reporter.metrics is not None and job.segments is not None:
            self.reporter.metrics.begin(job.path, has_segments=True)

    def _sizes(self, job: TableJob, limits: Limits) -> BatchSizer:
        return BatchSizer(job.max_records, job.batch_bytes, limits, time.monotonic, self.stop.is_set, self._started)


def expand_template(job: TableJob, topics: Iterable[str]) -> list[TableJob]:
    """The jobs of a template, whose path holds ``{topic}``. ``topics``: the full names that match its patterns now.

    Topics of one name are loaded into one table, whatever data centre they come from.
    """
    by_name: dict[str, list[str]] = {}
    for topic in sorted(set(topics)):
        name = split_topic(topic)[1]
        if name not in _NO_FOLDERS:
            by_name.setdefault(name, []).append(topic)
    jobs = []
    for name, found in by_name.items():
        path = Location.of(str(job.path).replace(TOPIC, name), job.path.access)
        # Catalogs take fewer characters than Kafka.
        registered = job.register_as and job.register_as.replace(TOPIC, re.sub(r"[^A-Za-z0-9_]", "_", name))
        jobs.append(job.model_copy(update={"path": path, "topics": found, "register_as": registered}))
    return jobs


def apart(
    jobs: Sequence[TableJob], is_loaded: Callable[[TableJob], bool]
) -> tuple[list[TableJob], dict[Location, LoaderConfigError]]:
    """The jobs that share no folder, and why the others are refused. No folder may belong to two tables.

    Of two that would share one, the table that was loaded before stays; else the one with the shorter path.
    """
    taken: dict[Location, Location] = {}
    refused: dict[Location, LoaderConfigError] = {}
    for job in sorted(jobs, key=lambda job: (not is_loaded(job), len(str(job.path)), job.path)):
        folders = TablePaths.of(job.path)
        if shared := [folder for folder in folders if folder in taken]:
            other = taken[shared[0]]
            refused[job.path] = LoaderConfigError(f"{shared[0]} would belong to two tables, {other} and {job.path}")
        else:
            taken |= dict.fromkeys(folders, job.path)
    return [job for job in jobs if job.path not in refused], refused


def is_loaded(job: TableJob) -> bool:
    """Whether table and ledger exist, so that the folder is not merely a side table of another one.

    Raises StorageUnavailable.
    """
    with storage_errors(f"{job.path} cannot be read"):
        return all(not is_empty(folder / "_delta_log") for folder in TablePaths.of(job.path)[:2])


def _raised(error: LoadError) -> Iterator[LoadEvent]:
    raise error
    yield
