"""``logferry load --move-to dc2``: the tables one after the other; one that cannot go stops no other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from logferry.loaders.agreeing import agreement
from logferry.loaders.batches.execute import Loader
from logferry.loaders.commands.move import move_table
from logferry.loaders.config import Config, TableJob
from logferry.loaders.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from logferry.loaders.planning.reset_plan import Target
from logferry.loaders.runs.report import Reporter
from logferry.loaders.runs.table_run import LoadEvent


def check_place(options: argparse.Namespace, settings: Config) -> None:
    """The configuration is the new place's. Raises ConfigError."""
    if options.move_to != settings.dc:
        raise ConfigError(
            f"--move-to {options.move_to} takes the configuration of {options.move_to}, its Kafka above all; this one "
            f"says dc = {settings.dc}"
        )


def move_tables(
    loader: Loader,
    settings: Config,
    jobs: Sequence[TableJob],
    targets: Sequence[Target],
    options: argparse.Namespace,
    reporter: Reporter,
) -> int:
    """Moves them to the loader's data centre, where each job goes on by its next load. Returns the exit status."""
    if targets and len(jobs) != 1:
        raise ConfigError("--reset is of one table: name it by --table, --topics and --bootstrap")
    agreed = agreement(options, reporter.console, "moved")
    declined: list[TableJob] = []

    def moved(job: TableJob) -> Iterator[LoadEvent]:
        done = move_table(loader, job, settings.prefix, targets, options.wait, agreed)
        if done is None:
            declined.append(job)
            reporter.console.print("nothing is moved")
            return
        yield from done
        if not options.json:
            said = f"moved to {loader.dc}" if done else f"it is loaded in {loader.dc} already"
            reporter.console.print(said, highlight=False)

    for job in jobs:
        reporter.table(job.path, moved(job))
    status = reporter.finish()
    return EXIT_USAGE if declined and status == EXIT_DONE else status
