"""``logferry load``: loads Kafka topics into tables, every line once.

    logferry load --table /data/nginx --topics 'dc1.nginx' --bootstrap 127.0.0.1:9092
    logferry load --config load.toml --json
    logferry load --config load.toml --follow

Exit status: 0 everything up to the start of this run is in the tables, or as much as the limits allow; 1 refused, an
operator must act; 2 wrong use or configuration; 3 Kafka, storage or Spark is unavailable, and the same call can be
repeated; 130 interrupted. The first SIGINT or SIGTERM lets the batches in progress finish, the second does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from logferry.loaders.commands.job import open_tables, run_reported, run_until_signal
from logferry.loaders.commands.options import add_job_options, count, job_config
from logferry.loaders.config import jar_files
from logferry.loaders.errors import EXIT_DONE, LoaderConfigError
from logferry.loaders.planning.plan import Limits
from logferry.loaders.runs.report import Reporter
from logferry.loaders.spark.session import submit_options


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
    with open_tables(job_config(options, options.table), options.jars, reporter) as tables:
        if options.follow:
            return run_until_signal(tables, tables.follow, until_signal=True)
        limits_of_run = Limits(options.stop_records, options.stop_bytes, options.stop_s)
        return run_until_signal(tables, lambda: tables.once(limits_of_run))


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
    option("--table", type=Path, metavar="PATH", help="folder of the table; created if it does not exist")
    add_job_options(parser)
    option("--once", action="store_true", help="load what is committed at the start, then end (default)")
    option("--follow", action="store_true", help="keep loading until SIGINT or SIGTERM")
    option("--stop-records", type=count, metavar="N", help="load at most N offsets of each table")
    option("--stop-bytes", type=count, metavar="N", help="plan no further batch of a table after N bytes")
    option("--stop-s", type=count, metavar="S", help="plan no further batch after S seconds")
    option("--max-records", type=int, metavar="N", help="at most N offsets in a batch")
    option("--print-submit", action="store_true", help="print the arguments for spark-submit --master … and exit")
    return parser
