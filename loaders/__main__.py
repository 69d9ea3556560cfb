"""``logferry load``: Kafka topics into a table, every line once.

    logferry load --table /data/nginx --topics 'dc1.nginx' --bootstrap 127.0.0.1:9092
    logferry load --config load.toml --json

Exit status: 0 everything up to the start of this run is in the table, 1 refused (somebody must look), 2 wrong use or
configuration, 3 Kafka, storage or Spark is away (the same call later goes on).
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from logferry.loaders import config
from logferry.loaders.errors import EXIT_INTERRUPTED, ConfigError, LoadError, StorageAway
from logferry.loaders.kafka import kafka_topics
from logferry.loaders.load import Loader, load_table
from logferry.loaders.report import Reporter
from logferry.loaders.scratch import scratch_folder
from logferry.loaders.session import spark_session
from rich.console import Console

JARS_VARIABLE = "LOGFERRY_SPARK_JARS"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one load and returns the exit status."""
    options = _parser().parse_args(argv)
    reporter = Reporter(Console(), as_json=options.json)
    try:
        return _run(_config(options), _jars(options), reporter)
    except LoadError as error:
        return reporter.finish(error)
    except KeyboardInterrupt:
        print("interrupted; the next run goes on where the table stands", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(settings: config.Config, jars: Sequence[Path], reporter: Reporter) -> int:
    """Loads the tables one after the other; one that fails does not stop the others."""
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder(settings.spark.scratch))
        except OSError as error:
            raise StorageAway(f"no folder for this run: {error}") from error
        with reporter.starting("Spark starts"):
            spark = stack.enter_context(spark_session(settings.spark, jars, scratch))
        kafka = stack.enter_context(kafka_topics(spark, settings.kafka.bootstrap_servers))
        loader = Loader(spark, kafka, settings.dc, uuid.uuid4().hex)
        for job in settings.tables:
            reporter.table(job.path, load_table(loader, job))
        return reporter.finish()


def _jars(options: argparse.Namespace) -> list[Path]:
    """Spark's connector to Kafka and the table format, already on this machine: nothing is fetched here."""
    given: str | None = options.jars or os.environ.get(JARS_VARIABLE)
    if not given:
        raise ConfigError(
            f"the jars of Spark's Kafka connector and of Delta are not known: name them by --jars or {JARS_VARIABLE} "
            "(`logferry load` does so)"
        )
    jars = [Path(jar).absolute() for jar in given.split(os.pathsep)]
    for jar in jars:
        if not jar.is_file():
            raise ConfigError(f"{jar} is not a file; it is named in --jars or {JARS_VARIABLE}")
    return jars


def _config(options: argparse.Namespace) -> config.Config:
    """The file's settings, or those of the options; the two do not mix."""
    if options.config is not None:
        if options.table or options.topics or options.bootstrap:
            raise ConfigError("--config stands alone: tables, topics and addresses are in the file")
        return config.load(options.config)
    missing = [f"--{name}" for name in ("table", "topics", "bootstrap") if not getattr(options, name)]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)} (or --config)")
    table: dict[str, Any] = {"path": options.table, "topics": options.topics}
    if options.max_records is not None:
        table["max_records"] = options.max_records
    spark = {"master": options.master, "driver_memory": options.driver_memory}
    raw = {
        "dc": options.dc,
        "kafka": {"bootstrap_servers": options.bootstrap},
        "spark": {name: value for name, value in spark.items() if value is not None},
        "tables": [table],
    }
    return config.check(raw, "options")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry load",
        description="Loads Kafka topics into a Delta table, every line once, up to what is committed now.",
        epilog="example: logferry load --table /data/nginx --topics '*.nginx' --bootstrap 127.0.0.1:9092",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML with everything; for several tables")
    parser.add_argument("--table", metavar="PATH", help="folder of the table; made if it is not there")
    parser.add_argument("--topics", nargs="+", metavar="PATTERN", help="dc1.nginx, or a pattern: '*.nginx'")
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="Kafka of this data centre")
    parser.add_argument("--dc", default="dc1", help="the data centre whose Kafka this is (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="up to what is committed at the start, then end (default)")
    parser.add_argument("--max-records", type=int, metavar="N", help="offsets in a batch, at most")
    parser.add_argument("--master", metavar="URL", help="Spark's master (default: local[*])")
    parser.add_argument("--driver-memory", metavar="SIZE", help="heap of Spark's driver, 1g say")
    parser.add_argument("--jars", metavar="JAR:JAR…", help=f"else {JARS_VARIABLE}")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end, and nothing else")
    return parser


if __name__ == "__main__":
    sys.exit(main())
