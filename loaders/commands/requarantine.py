"""``logferry table requarantine``: parses the quarantined lines again and moves those that fit into the table."""

from __future__ import annotations

import argparse

from logferry.loaders.commands.job import chosen_jobs, open_tables, run_until_signal
from logferry.loaders.commands.options import job_config
from logferry.loaders.runs.report import Reporter
from logferry.loaders.runs.table_run import requarantine_table


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    with open_tables(job_config(options, options.path), options.jars, reporter) as tables:
        jobs = chosen_jobs(tables, options.path)
        return run_until_signal(tables, lambda: tables.each(requarantine_table, jobs))
