"""The options that `load` and the sub-commands of `table` share, and the configuration that results. Without Spark."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logferry.loaders import config
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.location import Location


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that starts Spark and connects to Kafka."""
    option = parser.add_argument
    option("--config", type=Path, metavar="FILE", help="TOML file with all settings, for one table or several")
    option("--topics", nargs="+", metavar="PATTERN", help="topics of the table: dc1.nginx, or a pattern like '*.nginx'")
    option("--bootstrap", metavar="HOST:PORT", help="Kafka of this data centre")
    option("--dc", help="the data centre whose Kafka this is (default: dc1)")
    option("--parser", metavar="FORMAT", help="lines (default), chunk or access; other formats need --config")
    option("--master", metavar="URL", help="Spark's master (default: local[*])")
    option("--driver-memory", metavar="SIZE", help="heap of Spark's driver (default: 1g)")
    option("--spark-conf", action="append", metavar="NAME=VALUE", help="a setting of Spark itself; may be repeated")
    option(
        "--jars", metavar="JAR:JAR…", help=f"jars of Spark's Kafka connector and Delta (else {config.JARS_VARIABLE})"
    )
    option("--json", action="store_true", help="print one line of JSON at the end and nothing else")


def location(text: str) -> Location:
    """The type of an option: a folder or URI of a table."""
    try:
        return Location.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """The type of an option: a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def job_config(options: argparse.Namespace, path: Location | None, dc: str = "dc1") -> config.Config:
    """The file's settings, or those of the options: the two cannot be mixed. Raises LoaderConfigError.

    ``path``: the table. ``dc``: the data centre unless ``--dc`` names one.
    """
    if options.config is not None:
        if options.topics or options.bootstrap:
            raise LoaderConfigError("--config excludes --topics and --bootstrap: the file holds them")
        return config.load_config(options.config)
    table_option = "--table" if options.command == "load" else "PATH"
    given = {table_option: path, "--topics": options.topics, "--bootstrap": options.bootstrap}
    if missing := [name for name, value in given.items() if not value]:
        raise LoaderConfigError(f"missing: {', '.join(missing)} (or --config FILE)")
    table: dict[str, Any] = {"path": path, "topics": options.topics}
    if getattr(options, "max_records", None) is not None:
        table["max_records"] = options.max_records
    if getattr(options, "register", None) is not None:
        table["register"] = options.register
    if options.parser is not None:
        table["parser"] = {"format": options.parser}
    pairs = [text.partition("=") for text in options.spark_conf or ()]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise LoaderConfigError(f"--spark-conf {wrong[0]!r}: NAME=VALUE expected")
    conf = {name: value for name, _, value in pairs} or None
    spark = {"master": options.master, "driver_memory": options.driver_memory, "conf": conf}
    raw = {
        "dc": options.dc or dc,
        "kafka": {"bootstrap_servers": options.bootstrap},
        "spark": {name: value for name, value in spark.items() if value is not None},
        "tables": [table],
    }
    return config.check_config(raw, "options")


def table_paths(options: argparse.Namespace, paths: Sequence[Location]) -> list[Location]:
    """The tables of a command without Kafka: those given, else all of the configuration. Raises LoaderConfigError."""
    if options.config is None:
        if not paths:
            raise LoaderConfigError("missing: PATH of a table (or --config FILE)")
        return list(paths)
    settings = config.load_config(options.config)
    jobs, paths = settings.tables, [Location.of(path, *settings.accesses) for path in paths]
    for path in paths:
        if not any(is_path_of(job, path) for job in jobs):
            raise LoaderConfigError(no_such_table(path, jobs))
    if not paths and (templates := [str(job.path) for job in jobs if job.is_template]):
        raise LoaderConfigError(f"{templates[0]} stands for one table per topic: name the table by PATH")
    return paths or [job.path for job in jobs]


def is_path_of(job: config.TableJob, path: Location) -> bool:
    """Whether the job loads the table at ``path``, or one of a template's tables is there."""
    pattern = re.escape(str(job.path)).replace(re.escape(config.TOPIC), "[^/]+")
    return re.fullmatch(pattern, str(path)) is not None


def no_such_table(path: Location, jobs: Sequence[config.TableJob]) -> str:
    return f"{path} is not a table of this configuration; its tables are {', '.join(str(job.path) for job in jobs)}"
