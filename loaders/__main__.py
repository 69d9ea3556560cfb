"""``logferry load``: Kafka topics into tables, every line once.

    logferry load --table /data/nginx --topics 'dc1.nginx' --bootstrap 127.0.0.1:9092
    logferry load --config load.toml --json
    logferry load --config load.toml --follow
    logferry load --state --table /data/nginx
    logferry load --move-to dc2 --table /data/nginx --topics 'dc1.nginx' --bootstrap kafka.dc2.example:9092 --yes

Exit status: 0 everything up to the start of this run is in the tables, or as much as the limits say; 1 refused
(somebody must look); 2 wrong use or configuration; 3 Kafka, storage or Spark is away (the same call later goes on); 130
interrupted. A signal (SIGINT, SIGTERM) lets the batches end that are under way; a second one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from logferry.loaders import config
from logferry.loaders.agreeing import agreement
from logferry.loaders.batches.execute import Loader
from logferry.loaders.batches.mirror_offsets import Books
from logferry.loaders.commands.reload import reload_tables
from logferry.loaders.commands.reset import reset_table
from logferry.loaders.commands.state import show, table_facts
from logferry.loaders.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, LoadError, StorageAway
from logferry.loaders.moving_command import check_place, move_tables
from logferry.loaders.planning.batch_size import Limits
from logferry.loaders.planning.reload_plan import Target as ReloadTarget
from logferry.loaders.planning.reset_plan import Target
from logferry.loaders.runs.report import Reporter
from logferry.loaders.runs.run_tables import Tables
from logferry.loaders.runs.table_run import requarantine_table
from logferry.loaders.spark.kafka_offsets import kafka_topics
from logferry.loaders.spark.scratch import scratch_folder
from logferry.loaders.spark.session import spark_session
from logferry.loaders.submitted import is_submitted, submit_options
from rich.console import Console

JARS_VARIABLE = "LOGFERRY_SPARK_JARS"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one load and returns the exit status."""
    options = _parser().parse_args(argv)
    console = Console()
    reporter = Reporter(console, as_json=options.json)
    try:
        if options.state:
            return _state(options, console)
        if options.print_submit:
            print(submit_options(_jars(options)))
            return EXIT_DONE
        _check(options)
        settings = _config(options)
        if options.move_to:
            check_place(options, settings)
        return _run(options, settings, _jars(options), reporter)
    except LoadError as error:
        return reporter.finish(error)
    except KeyboardInterrupt:
        print("interrupted; the next run goes on where the table stands", file=sys.stderr)
        return EXIT_INTERRUPTED


def _state(options: argparse.Namespace, console: Console) -> int:
    """What the tables hold; of the tables given, or of those in the configuration."""
    paths = [job.path for job in config.load(options.config).tables] if options.config else []
    if options.table:
        paths.append(Path(options.table))
    if not paths:
        raise ConfigError("--state is of a table: --table PATH, or --config FILE")
    if any(config.TOPIC in str(path) for path in paths):
        raise ConfigError("--state is of one table: a path with {topic} is many; name it by --table")
    facts = [table_facts(path) for path in paths]
    if options.json:
        print(json.dumps(facts))
        return EXIT_DONE
    for found in facts:
        show(found, console)
    return EXIT_DONE


def _check(options: argparse.Namespace) -> None:
    """Options that do not go together. Raises ConfigError."""
    chosen = [
        name for name in ("once", "follow", "requarantine", "reset", "move_to", "reload") if getattr(options, name)
    ]
    # A move may leave a topic out, or begin it anew.
    if len(chosen) > 1 and chosen != ["reset", "move_to"]:
        said = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise ConfigError(f"{said} exclude each other")
    bounds = [name for name in ("stop_records", "stop_bytes", "stop_s") if getattr(options, name) is not None]
    if bounds and chosen not in ([], ["once"]):
        raise ConfigError(f"--{bounds[0].replace('_', '-')} bounds a load --once")
    if options.yes and not (options.reset or options.move_to or options.reload):
        raise ConfigError("--yes agrees to a --reset, a --reload or a --move-to")
    if options.wait and not options.move_to:
        raise ConfigError("--wait is for the mirror, before a --move-to")
    for text in options.reset or ():
        Target.parse(text)
    for text in options.reload or ():
        ReloadTarget.parse(text)


def _run(options: argparse.Namespace, settings: config.Config, jars: Sequence[Path], reporter: Reporter) -> int:
    targets = [Target.parse(text) for text in options.reset or ()]
    stop = threading.Event()
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder(settings.spark.scratch))
        except OSError as error:
            raise StorageAway(f"no folder for this run: {error}") from error
        with reporter.starting("Spark starts"):
            spark = stack.enter_context(spark_session(settings.spark, jars, scratch))
        kafka = stack.enter_context(kafka_topics(spark, settings.kafka.bootstrap_servers))
        within = timedelta(days=settings.moved_days)
        books = stack.enter_context(closing(Books(settings.kafka.bootstrap_servers, settings.prefix, settings.dc)))
        loader = Loader(spark, kafka, settings.dc, uuid.uuid4().hex, within, settings.gateways, books)
        tables = Tables(loader, settings, reporter, stop)
        if options.move_to:
            return move_tables(loader, settings, tables.jobs(), targets, options, reporter)
        if targets:
            return _reset(loader, settings, targets, options, reporter)
        if options.reload:
            again = [ReloadTarget.parse(text) for text in options.reload]
            return reload_tables(loader, tables.jobs(), again, options, reporter)
        signals = stack.enter_context(_signals(stop))
        with reporter.showing():
            if options.requarantine:
                tables.each(requarantine_table)
            elif options.follow:
                tables.follow()
            else:
                tables.once(Limits(options.stop_records, options.stop_bytes, options.stop_s))
        status = reporter.finish()
        if status == EXIT_DONE and signals and not options.follow:
            print("interrupted; the next run goes on where the table stands", file=sys.stderr)
            return EXIT_INTERRUPTED
        return status


@contextmanager
def _signals(stop: threading.Event) -> Iterator[list[int]]:
    """The first signal sets ``stop``, the second does what signals do. Yields those that came."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def take(number: int, _: object) -> None:
        came.append(number)
        stop.set()
        for other, handler in before.items():
            signal.signal(other, handler)
        print("ends after the batches that are under way", file=sys.stderr)

    for number in before:
        signal.signal(number, take)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reset(
    loader: Loader, settings: config.Config, targets: Sequence[Target], options: argparse.Namespace, reporter: Reporter
) -> int:
    """Says what a reset does, and does it if that is agreed to. Exit status 2 when it is not."""
    if len(settings.tables) != 1 or settings.tables[0].is_template:
        raise ConfigError("--reset is of one table: name it by --table, --topics and --bootstrap")
    (job,) = settings.tables
    console = reporter.console

    done = reset_table(loader, job, targets, agreement(options, console, "reset"))
    if done is None:
        console.print("nothing is reset")
        return EXIT_USAGE
    report = reporter.begin(job.path)
    report.add(done)
    if not options.json:
        console.print(f"reset, as batch {done.batch}", highlight=False)
    return reporter.finish()


def _jars(options: argparse.Namespace) -> list[Path]:
    """Spark's connector to Kafka and the table format, already on this machine: nothing is fetched here."""
    if is_submitted():
        return []
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
    if options.parser is not None:
        table["parser"] = {"format": options.parser}
    spark = {"master": options.master, "driver_memory": options.driver_memory, "conf": _spark_conf(options)}
    raw = {
        "dc": options.dc or options.move_to or "dc1",
        "kafka": {"bootstrap_servers": options.bootstrap},
        "spark": {name: value for name, value in spark.items() if value is not None},
        "tables": [table],
    }
    return config.check(raw, "options")


def _spark_conf(options: argparse.Namespace) -> dict[str, str] | None:
    pairs = [text.partition("=") for text in options.spark_conf or ()]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--spark-conf {wrong[0]!r}: NAME=VALUE")
    return {name: value for name, _, value in pairs} or None


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


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
    parser.add_argument("--dc", help="the data centre whose Kafka this is (default: dc1)")
    parser.add_argument("--once", action="store_true", help="up to what is committed at the start, then end (default)")
    parser.add_argument("--follow", action="store_true", help="goes on for ever, until a signal")
    parser.add_argument("--stop-records", type=_count, metavar="N", help="of each table, load so many offsets at most")
    parser.add_argument("--stop-bytes", type=_count, metavar="N", help="plan no batch of a table after so many bytes")
    parser.add_argument("--stop-s", type=_count, metavar="S", help="plan no batch after so many seconds")
    parser.add_argument("--state", action="store_true", help="loads nothing, but says what the tables hold")
    parser.add_argument(
        "--reset",
        action="append",
        metavar="TOPIC[:PARTITION]=WHERE",
        help="loads nothing, but moves the table's position: earliest, latest, an offset, or forget; may be repeated",
    )
    parser.add_argument(
        "--move-to",
        metavar="DC",
        help="loads nothing, but moves the table's position to this data centre; --bootstrap and --config are of there",
    )
    parser.add_argument("--wait", type=_count, default=0, metavar="S", help="for a mirror that is behind a --move-to")
    parser.add_argument(
        "--reload",
        action="append",
        metavar="WHAT",
        help="loads again, in place of what the table holds of it: TOPIC, TOPIC:PARTITION, TOPIC:PARTITION=START..END "
        "(offsets), or TIME..TIME of recording, like 2026-11-20T10..2026-11-20T12 (UTC); may be repeated",
    )
    parser.add_argument("--yes", action="store_true", help="agrees to what --reset, --reload or --move-to says")
    parser.add_argument("--parser", metavar="FORMAT", help="lines (default), chunk or access; others by --config")
    parser.add_argument(
        "--requarantine", action="store_true", help="loads nothing, but reads the lines of the quarantine again"
    )
    parser.add_argument("--max-records", type=int, metavar="N", help="offsets in a batch, at most")
    parser.add_argument("--master", metavar="URL", help="Spark's master (default: local[*])")
    parser.add_argument("--driver-memory", metavar="SIZE", help="heap of Spark's driver, 1g say")
    parser.add_argument("--spark-conf", action="append", metavar="NAME=VALUE", help="one of Spark's own settings")
    parser.add_argument(
        "--print-submit", action="store_true", help="loads nothing, but says what to put behind spark-submit --master …"
    )
    parser.add_argument("--jars", metavar="JAR:JAR…", help=f"else {JARS_VARIABLE}")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end, nothing else")
    return parser


if __name__ == "__main__":
    sys.exit(main())
