"""Loads all tables of a configuration in one session, several at a time, once or continuously.

A failing table does not stop the others. A load that follows repeats every ``follow_s``. A transient error delays its
table only; an error that needs an operator ends its table, and the run when no table is left. A signal lets each table
finish its present batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from logferry.gateway.contract.names import split_topic
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TOPIC, Config, TableJob
from logferry.loaders.errors import LoaderConfigError, LoadError, SparkUnavailable, Transient
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import BatchSizer, Limits, RunBound
from logferry.loaders.runs.report import LoadReport, Reporter
from logferry.loaders.runs.table_run import LoadEvent, load_table

_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0
# Topic names that would lead out of the folder of the template.
_NO_FOLDERS: Final = (".", "..")

Work = Callable[[Loader, TableJob], Iterator[LoadEvent]]


class TableRunner:
    """The tables of a run. ``stop``: set to end after the batches in progress."""

    def __init__(self, loader: Loader, settings: Config, reporter: Reporter, stop: threading.Event) -> None:
        self.loader, self.settings, self.reporter, self.stop = loader, settings, reporter, stop
        self._started = time.monotonic()
        self.refused: dict[Path, LoaderConfigError] = {}

    def jobs(self) -> list[TableJob]:
        """The configuration's jobs, with templates expanded to the present topics. Raises LoadError.

        Those that cannot be loaded beside the others are left out; `refused` has them.
        """
        found: list[TableJob] = []
        without_folder: dict[Path, LoaderConfigError] = {}
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
        self.each(lambda loader, job: load_table(loader, job, self._bound(limits)))

    def follow(self) -> None:
        """Returns when ``stop`` is set, when no table is left, or when Spark has ended."""
        refused: set[Path] = set()
        threads: dict[Path, threading.Thread] = {}
        while not self.stop.is_set():
            # Topics that cannot be listed now are listed the next time.
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
        self._in_own_pool(job)
        sizes = BatchSizer(job.max_records, job.batch_bytes)
        wait_s = _RETRY_S
        while not self.stop.is_set():
            bound = self._bound(Limits())
            self.reporter.follow(report, load_table(self.loader, job, bound, sizes))
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
        self._in_own_pool(job)
        self.reporter.table(job.path, work(self.loader, job))

    def _in_own_pool(self, job: TableJob) -> None:
        """Tables share Spark's tasks fairly: a large one does not delay a small one."""
        with suppress(LoadError):
            self.loader.spark.sparkContext.setLocalProperty("spark.scheduler.pool", str(job.path))

    def _bound(self, limits: Limits) -> RunBound:
        return RunBound(limits, time.monotonic, self.stop.is_set, self._started)


def expand_template(job: TableJob, topics: Iterable[str]) -> list[TableJob]:
    """The jobs of a template, whose path holds ``{topic}``. ``topics``: the full names that match its patterns now.

    Topics of one name are loaded into one table, whatever data centre they come from.
    """
    by_name: dict[str, list[str]] = {}
    for topic in sorted(set(topics)):
        name = split_topic(topic)[1]
        if name not in _NO_FOLDERS:
            by_name.setdefault(name, []).append(topic)
    return [
        job.model_copy(update={"path": Path(str(job.path).replace(TOPIC, name)), "topics": found})
        for name, found in by_name.items()
    ]


def apart(
    jobs: Sequence[TableJob], is_loaded: Callable[[TableJob], bool]
) -> tuple[list[TableJob], dict[Path, LoaderConfigError]]:
    """The jobs that share no folder, and why the others are refused. No folder may belong to two tables.

    Of two that would share one, the table that was loaded before stays; else the one with the shorter path.
    """
    taken: dict[Path, Path] = {}
    refused: dict[Path, LoaderConfigError] = {}
    for job in sorted(jobs, key=lambda job: (not is_loaded(job), len(str(job.path)), job.path)):
        folders = TablePaths.of(job.path)
        if shared := [folder for folder in folders if folder in taken]:
            other = taken[shared[0]]
            refused[job.path] = LoaderConfigError(f"{shared[0]} would belong to two tables, {other} and {job.path}")
        else:
            taken |= dict.fromkeys(folders, job.path)
    return [job for job in jobs if job.path not in refused], refused


def is_loaded(job: TableJob) -> bool:
    """Whether table and ledger exist, so that the folder is not merely a side table of another one."""
    return all((folder / "_delta_log").is_dir() for folder in TablePaths.of(job.path)[:2])


def _raised(error: LoadError) -> Iterator[LoadEvent]:
    raise error
    yield
