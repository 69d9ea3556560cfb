"""All tables of a configuration in one session: so many at a time, once or for ever. One that fails stops no other.

A load that follows looks again every ``follow_s``. What is away is waited for, each table for itself; what somebody
must look at ends that table, and the run when no table is left. A signal lets each table finish the batch it is at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final

from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import Config, TableJob
from logferry.loaders.errors import LoadError, SparkAway, Transient
from logferry.loaders.jobs import check_apart, expand
from logferry.loaders.planning.batch_size import Bound, Limits, Sizes
from logferry.loaders.runs.report import Reporter, TableReport
from logferry.loaders.runs.table_run import LoadEvent, load_table

_RETRY_S: Final = 1.0
_RETRY_MOST_S: Final = 60.0

Work = Callable[[Loader, TableJob], Iterator[LoadEvent]]


class Tables:
    """The tables of a run. ``stop``: set to end after the batches that are under way."""

    def __init__(self, loader: Loader, settings: Config, reporter: Reporter, stop: threading.Event) -> None:
        self._loader, self._settings, self._reporter, self._stop = loader, settings, reporter, stop
        self._started = time.monotonic()

    def jobs(self) -> list[TableJob]:
        """The configuration's, with templates for what there is now. Raises ConfigError, KafkaAway."""
        found: list[TableJob] = []
        for job in self._settings.tables:
            if job.is_template:
                found += expand(job, self._loader.kafka.names(job.topics))
            else:
                found.append(job)
        check_apart(found)
        return found

    def each(self, work: Work) -> None:
        """Does the same with every table."""
        jobs = self.jobs()
        with ThreadPoolExecutor(self._settings.parallel) as pool:
            for future in [pool.submit(self._do, job, work) for job in jobs]:
                future.result()

    def once(self, limits: Limits) -> None:
        """Everything that Kafka has now, or as much of it as the limits say."""
        self.each(lambda loader, job: load_table(loader, job, self._bound(limits)))

    def follow(self) -> None:
        """Returns when it is told to stop, when no table is left, or when Spark has ended."""
        reports: dict[str, TableReport] = {}
        threads: list[threading.Thread] = []
        while not self._stop.is_set():
            # What cannot be listed now is listed the next time.
            with suppress(Transient):
                for job in self.jobs():
                    if str(job.path) not in reports:
                        reports[str(job.path)] = self._reporter.begin(job.path)
                        thread = threading.Thread(target=self._follow, args=(job, reports[str(job.path)]))
                        thread.start()
                        threads.append(thread)
            if any(isinstance(report.error, SparkAway) for report in reports.values()):
                self._stop.set()
            elif threads and not any(thread.is_alive() for thread in threads):
                break
            self._stop.wait(self._settings.follow_s)
        for thread in threads:
            thread.join()

    def _follow(self, job: TableJob, report: TableReport) -> None:
        self._in_own_pool(job)
        sizes = Sizes(job.max_records, job.batch_bytes)
        wait_s = _RETRY_S
        while not self._stop.is_set():
            bound = self._bound(Limits())
            self._reporter.follow(report, load_table(self._loader, job, bound, sizes))
            error = report.error
            if error is None:
                wait_s = _RETRY_S
                self._stop.wait(self._settings.follow_s)
            elif isinstance(error, Transient) and not isinstance(error, SparkAway):
                self._stop.wait(wait_s)
                wait_s = min(2 * wait_s, _RETRY_MOST_S)
            else:
                return

    def _do(self, job: TableJob, work: Work) -> None:
        self._in_own_pool(job)
        self._reporter.table(job.path, work(self._loader, job))

    def _in_own_pool(self, job: TableJob) -> None:
        """Tables share Spark's tasks fairly; the large one does not hold up the small."""
        with suppress(LoadError):
            self._loader.spark.sparkContext.setLocalProperty("spark.scheduler.pool", str(job.path))

    def _bound(self, limits: Limits) -> Bound:
        bound = Bound(limits, time.monotonic, self._stop.is_set)
        return replace(bound, started=self._started)


__all__: Sequence[str] = ["Tables", "Work"]
