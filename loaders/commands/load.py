"""``logferry load``: loads Kafka topics into tables, every line once. All commands with Spark share its session and
loader, its report and signals, and the operator's consent.

    logferry load --table /data/nginx --topics 'dc1.nginx' --bootstrap 127.0.0.1:9092
    logferry load --config load.toml --json
    logferry load --config load.toml --follow

Exit status: 0 everything up to the start of this run is in the tables, or as much as the limits allow; 1 refused, an
operator must act; 2 wrong use or configuration; 3 Kafka, storage or Spark is unavailable, and the same call can be
repeated; 130 interrupted. The first SIGINT or SIGTERM lets the batches in progress finish, the second does not.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path

from logferry.gateway.contract.names import visible
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.commands.options import add_job_options, count, job_config, location, no_such_table
from logferry.loaders.config import Config, TableJob, jar_files
from logferry.loaders.errors import EXIT_DONE, EXIT_SIGNAL, EXIT_USAGE, LoaderConfigError, LoadError, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Limits
from logferry.loaders.planning.position_plan import PositionChange
from logferry.loaders.runs.gateway_report import TableReports
from logferry.loaders.runs.metrics import observed
from logferry.loaders.runs.table_runner import Reporter, TableRunner, number
from logferry.loaders.spark.kafka_access import kafka_topics
from logferry.loaders.spark.session import is_submitted, scratch_folder, spark_session, submit_options
from logferry.loaders.spark.stores import store_settings
from logferry.loaders.storage.files import STORAGE_ERRORS, storage_errors
from logferry.loaders.terminal import escape
from rich.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one load and returns the exit status."""
    return run_reported(_parser().parse_args(argv), _run)


def _run(options: argparse.Namespace, reporter: Reporter) -> int:
    if options.print_submit:
        print(submit_options(jar_files(options.jars)))
        return EXIT_DONE
    if options.follow:
        for name in ("--once", "--stop-records", "--stop-bytes", "--stop-s"):
            if getattr(options, name[2:].replace("-", "_")):
                raise LoaderConfigError(f"--follow and {name} exclude each other")
    if options.config is not None and options.table is not None:
        raise LoaderConfigError("--config excludes --table: the file names the tables")
    if options.config is not None and options.register is not None:
        raise LoaderConfigError("--config excludes --register: the file has it as `register` of each table")
    settings = job_config(options, options.table)
    with (
        observed(*_metrics_places(options, settings)) as metrics,
        open_tables(settings, options.jars, reporter) as tables,
    ):
        reporter.metrics = metrics
        if options.follow:
            return run_until_signal(tables, _reported(tables, tables.follow, follows=True), until_signal=True)
        limits_of_run = Limits(options.stop_records, options.stop_bytes, options.stop_s)
        status = run_until_signal(tables, _reported(tables, lambda: tables.once(limits_of_run), follows=False))
        if metrics is not None:
            metrics.exit_status = status
        return status


def _reported(tables: TableRunner, work: Callable[[], None], *, follows: bool) -> Callable[[], None]:
    """The work, with reports to the gateway if the configuration has ``report``."""
    to, reporter = tables.settings.report, tables.reporter
    if to is None:
        return work

    def run() -> None:
        reports = reporter.reports = TableReports(tables.settings, to, follows=follows, say=_warn)
        try:
            work()
        finally:
            reports.close()

    return run


def _warn(text: str) -> None:
    print("logferry:", visible(text), file=sys.stderr)


def _metrics_places(options: argparse.Namespace, settings: Config) -> tuple[str | None, Path | None, str | None]:
    """Where the metrics go: the address of a run that follows, file and Pushgateway of another one.

    Raises LoaderConfigError.
    """
    if options.metrics_listen and not options.follow:
        raise LoaderConfigError("--metrics-listen needs --follow; for other loads there is --metrics-file")
    if options.follow and (options.metrics_file or options.metrics_push):
        raise LoaderConfigError("--follow excludes --metrics-file and --metrics-push; there is --metrics-listen")
    if options.follow:
        return options.metrics_listen or settings.metrics_listen, None, None
    return None, options.metrics_file or settings.metrics_file, options.metrics_push or settings.metrics_push


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry load",
        usage="%(prog)s [--config FILE | --table PATH] [OPTION ...]",
        description="example: logferry load --table /data/nginx --topics '*.nginx' --bootstrap 127.0.0.1:9092\n\n"
        "Loads Kafka topics into Delta tables, every line once, up to the last record committed at the start.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command="load")
    option = parser.add_argument
    option("--table", type=location, metavar="PATH", help="folder or URI of the table; created if it does not exist")
    add_job_options(parser)
    option("--once", action="store_true", help="load what is committed at the start, then end (default)")
    option("--follow", action="store_true", help="keep loading until SIGINT or SIGTERM")
    option("--stop-records", type=count, metavar="N", help="load at most N offsets of each table")
    option("--stop-bytes", type=count, metavar="N", help="plan no further batch of a table after N bytes")
    option("--stop-s", type=count, metavar="S", help="plan no further batch after S seconds")
    option("--register", metavar="NAME", help="name of the table in the catalog of the Spark session: logs.nginx")
    option("--max-records", type=int, metavar="N", help="at most N offsets in a batch")
    option("--metrics-listen", metavar="HOST:PORT", help="with --follow, serve metrics for Prometheus there")
    option("--metrics-file", type=Path, metavar="FILE", help="write metrics to this *.prom file at the end")
    option("--metrics-push", metavar="URL", help="push metrics to this Pushgateway at the end")
    option("--print-submit", action="store_true", help="print the arguments for spark-submit --master … and exit")
    return parser


# ---- for all commands with Spark -----------------------------------------------------------------------------


Confirm = Callable[[Sequence[PositionChange]], bool]
ConfirmAny = Callable[[Iterable[object]], bool]


def run_reported(options: argparse.Namespace, command: Callable[[argparse.Namespace, Reporter], int]) -> int:
    """Runs a command and returns its exit status; a failure is reported as text or JSON."""
    reporter = Reporter(Console(), as_json=options.json)
    try:
        with storage_errors("storage cannot be accessed", STORAGE_ERRORS):
            return command(options, reporter)
    except LoadError as error:
        return reporter.finish(error)
    except KeyboardInterrupt:
        return _interrupted()


def _interrupted() -> int:
    print("interrupted; the next run resumes at the table's position", file=sys.stderr)
    return EXIT_SIGNAL


@contextmanager
def open_tables(settings: Config, jars: str | None, reporter: Reporter) -> Iterator[TableRunner]:
    """The tables of a configuration with a loader for them. Raises LoaderConfigError, Transient."""
    files = [] if is_submitted() else jar_files(jars)
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder(settings.spark.scratch))
        except OSError as error:
            raise StorageUnavailable(f"no scratch folder can be created: {error}") from error
        with reporter.console.status("Spark starts"):
            spark = stack.enter_context(spark_session(settings.spark, files, scratch, store_settings(settings)))
        kafka = stack.enter_context(kafka_topics(spark, settings.kafka))
        offsets = stack.enter_context(closing(MirrorOffsets(settings.kafka, settings.prefix, settings.dc)))
        window = timedelta(days=settings.duplicate_window_days)
        here = (spark, kafka, settings.dc, uuid.uuid4().hex, window, settings.gateways, offsets)
        loader = Loader(*here, other_kafka=settings.other_kafka, ledger_batches=settings.ledger_batches)
        yield TableRunner(loader, settings, reporter, threading.Event())


def chosen_jobs(tables: TableRunner, path: Location | None) -> list[TableJob]:
    """The job of the table at ``path``, or all jobs. Raises LoaderConfigError, KafkaUnavailable."""
    jobs = tables.jobs()
    chosen = [job for job in jobs if path is None or job.path == path]
    if not chosen and path is not None:
        raise LoaderConfigError(no_such_table(path, jobs))
    return chosen


def change_table(
    options: argparse.Namespace,
    reporter: Reporter,
    done: str,
    change: Callable[[Loader, TableJob, ConfirmAny], BatchDone | None],
) -> int:
    """Changes one table by a batch and returns the exit status: 2 when the operator does not agree (None).

    ``done``: as in "not reset". Raises LoadError.
    """
    with open_tables(job_config(options, options.path), options.jars, reporter) as tables:
        jobs = chosen_jobs(tables, options.path)
        if len(jobs) != 1:
            raise LoaderConfigError(f"table {options.command} applies to one table: name it by PATH")
        batch = change(tables.loader, jobs[0], confirmation(options, reporter.console, done))
        if batch is None:
            reporter.console.print(f"nothing was {done}")
            return EXIT_USAGE
        reporter.begin(jobs[0].path).add(batch)
        rows = f": {number(batch.rows)} rows, {number(batch.quarantined)} quarantined" if batch.ranges else ""
        reporter.console.print(f"{done}, as batch {batch.batch}{rows}", highlight=False)
        return reporter.finish()


def run_until_signal(tables: TableRunner, work: Callable[[], None], *, until_signal: bool = False) -> int:
    """Does the work with progress shown and returns the exit status. A signal lets batches in progress finish.

    ``until_signal``: a signal is the regular end of this work.
    """
    received: list[int] = []
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def take(signum: int, _: object) -> None:
        received.append(signum)
        tables.stop.set()
        # The second one has its usual effect.
        restore()
        print("ends after the batches in progress", file=sys.stderr)

    for signum in before:
        signal.signal(signum, take)
    try:
        with tables.reporter.progress:
            work()
        status = tables.reporter.finish()
        return _interrupted() if status == EXIT_DONE and received and not until_signal else status
    finally:
        restore()


def confirmation(options: argparse.Namespace, console: Console, done: str) -> ConfirmAny:
    """Asks for consent: ``--yes``, or the operator's answer at a terminal. ``done``: as in "not reset".

    The function that it returns prints the effects, and raises LoaderConfigError where nobody can be asked.
    """

    def confirm(effects: Iterable[object]) -> bool:
        for effect in effects:
            console.print(escape(str(effect)), highlight=False, soft_wrap=True)
        if options.yes:
            return True
        if sys.stdin.isatty() and not options.json:
            return console.input("Proceed? Type yes: ").strip() == "yes"
        raise LoaderConfigError(f"not {done}: review the changes above and repeat with --yes")

    return confirm
