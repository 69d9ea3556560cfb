"""What commands with Spark share: the session and its loader, the report, signals, and the operator's consent."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path

from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.commands.options import job_config, no_such_table
from logferry.loaders.config import Config, TableJob, jar_files
from logferry.loaders.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    LoaderConfigError,
    LoadError,
    StorageUnavailable,
)
from logferry.loaders.planning.reset_plan import PositionChange
from logferry.loaders.runs.report import Reporter
from logferry.loaders.runs.run_tables import TableRunner
from logferry.loaders.spark.kafka_access import kafka_topics
from logferry.loaders.spark.session import is_submitted, scratch_folder, spark_session
from rich.console import Console
from rich.markup import escape

Confirm = Callable[[Sequence[PositionChange]], bool]


def run_reported(options: argparse.Namespace, command: Callable[[argparse.Namespace, Reporter], int]) -> int:
    """Runs a command and returns its exit status; a failure is reported as text or JSON."""
    reporter = Reporter(Console(), as_json=options.json)
    try:
        return command(options, reporter)
    except LoadError as error:
        return reporter.finish(error)
    except KeyboardInterrupt:
        return _interrupted()


def _interrupted() -> int:
    print("interrupted; the next run resumes at the table's position", file=sys.stderr)
    return EXIT_INTERRUPTED


@contextmanager
def open_tables(settings: Config, jars: str | None, reporter: Reporter) -> Iterator[TableRunner]:
    """The tables of a configuration with a loader for them. Raises LoaderConfigError, Transient."""
    files = [] if is_submitted() else jar_files(jars)
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder(settings.spark.scratch))
        except OSError as error:
            raise StorageUnavailable(f"no scratch folder can be created: {error}") from error
        with reporter.starting("Spark starts"):
            spark = stack.enter_context(spark_session(settings.spark, files, scratch))
        kafka = stack.enter_context(kafka_topics(spark, settings.kafka))
        offsets = stack.enter_context(closing(MirrorOffsets(settings.kafka, settings.prefix, settings.dc)))
        window = timedelta(days=settings.duplicate_window_days)
        loader = Loader(
            *(spark, kafka, settings.dc, uuid.uuid4().hex, window, settings.gateways, offsets),
            other_kafka=settings.other_kafka,
        )
        yield TableRunner(loader, settings, reporter, threading.Event())


def chosen_jobs(tables: TableRunner, path: Path | None) -> list[TableJob]:
    """The job of the table at ``path``, or all jobs. Raises LoaderConfigError, KafkaUnavailable."""
    jobs = tables.jobs()
    chosen = [job for job in jobs if path is None or job.path == path.absolute()]
    if not chosen and path is not None:
        raise LoaderConfigError(no_such_table(path, jobs))
    return chosen


def change_table(
    options: argparse.Namespace,
    reporter: Reporter,
    done: str,
    change: Callable[[Loader, TableJob], BatchDone | None],
    effect: Callable[[BatchDone], str] = lambda _: "",
) -> int:
    """Changes one table by a batch and returns the exit status: 2 when the operator does not agree (None).

    ``done``: as in "not reset". Raises LoadError.
    """
    with open_tables(job_config(options, options.path), options.jars, reporter) as tables:
        jobs = chosen_jobs(tables, options.path)
        if len(jobs) != 1:
            raise LoaderConfigError(f"table {options.command} applies to one table: name it by PATH")
        batch = change(tables.loader, jobs[0])
        if batch is None:
            reporter.console.print(f"nothing was {done}")
            return EXIT_USAGE
        reporter.begin(jobs[0].path).add(batch)
        if not options.json:
            reporter.console.print(f"{done}, as batch {batch.batch}{effect(batch)}", highlight=False)
        return reporter.finish()


def run_until_signal(tables: TableRunner, work: Callable[[], None], *, until_signal: bool = False) -> int:
    """Does the work with progress shown and returns the exit status. A signal lets batches in progress finish.

    ``until_signal``: a signal is the regular end of this work.
    """
    with _stop_on_signals(tables.stop) as signals:
        with tables.reporter.showing():
            work()
        status = tables.reporter.finish()
        return _interrupted() if status == EXIT_DONE and signals and not until_signal else status


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[list[int]]:
    """The first signal sets ``stop``, the second has its usual effect. Yields the signals received."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def take(number: int, _: object) -> None:
        received.append(number)
        stop.set()
        for other, handler in before.items():
            signal.signal(other, handler)
        print("ends after the batches in progress", file=sys.stderr)

    for number in before:
        signal.signal(number, take)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def confirmation(options: argparse.Namespace, console: Console, done: str) -> Confirm:
    """Asks for consent: ``--yes``, or the operator's answer at a terminal. ``done``: as in "not reset".

    The function that it returns prints the changes, and raises LoaderConfigError where nobody can be asked.
    """

    def confirm(moves: Sequence[PositionChange]) -> bool:
        if not options.json:
            for move in moves:
                console.print(_described(move), highlight=False, soft_wrap=True)
        if options.yes:
            return True
        if sys.stdin.isatty() and not options.json:
            return console.input("Proceed? Type yes: ").strip() == "yes"
        raise LoaderConfigError(f"not {done}: review the changes above and repeat with --yes")

    return confirm


def _described(move: PositionChange) -> str:
    before = "none" if move.before is None else f"{move.before:,}"
    after = "none" if move.after is None else f"{move.after:,}"
    return f"{escape(move.topic)} {move.partition}: {before} → {after}: {escape(move.means)}"
