"""``logferry audit``: verifies exactly-once delivery from the stored data."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Final

from logferry.gateway.config import ConfigError, KafkaSettings, load, load_as
from logferry.gateway.contract.names import Malformed, check_dc, visible
from logferry.loaders.commands.options import location
from logferry.mirror.config import load as load_mirror
from logferry.ops.audit.audit import ProgressCallback, audit
from logferry.ops.audit.compare.mirror_copy import MirrorReport, audit_mirror
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.config import MAX_WORKERS, AuditConfig, CopySettings, found_files, is_audit
from logferry.ops.audit.render import brief, progress, show
from logferry.ops.audit.tables.accepted_resets import ResetName
from logferry.ops.cli.options import command_parser
from logferry.ops.cli.problems import CommandError, UsageError
from logferry.ops.cli.terminal import console_for_output
from rich.console import Console

EXACT: Final = 0
REFUTED: Final = 1


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 exact, 1 refuted, 2 wrong use, 3 Kafka or a table cannot be read."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    # Failures of the Kafka client are reported once, as an error of this command.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        with progress(console) as advance:
            report = asyncio.run(_report(args, advance))
    except CommandError as problem:
        print(f"logferry audit: {visible(str(problem))}", file=sys.stderr)
        return problem.exit_status
    if args.json:
        print(json.dumps(report.as_dict()).replace("\x7f", "\\u007f"))
    elif isinstance(report, MirrorReport):
        for found in report.partitions:
            if found.wrong is not None:
                print(f"{found.topic}-{found.partition}: {visible(found.wrong)}")
        print(report.verdict)
    else:
        (brief if args.brief else show)(report, console_for_output())
    return EXACT if report.exact else REFUTED


async def _report(args: argparse.Namespace, advance: ProgressCallback) -> Report | MirrorReport:
    if args.mirror is not None:
        if args.accept_reset:
            raise UsageError("--accept-reset: applies to tables, not with --mirror")
        return await _mirror_report(args, advance)
    config = _configuration(args)
    if args.full and config.state_file is None:
        raise UsageError("--full: applies only with --state-file; without it every audit is a full one")
    names = [ResetName.parse(written) for written in args.accept_reset]
    files = found_files(config.files) + args.file
    return await audit(config, files=files, full=args.full, accept_resets=names, progress=advance)


async def _mirror_report(args: argparse.Namespace, advance: ProgressCallback) -> MirrorReport:
    original, colon, copy = args.mirror.partition(":")
    if not (original and colon and copy):
        raise UsageError(f"--mirror: {args.mirror!r} must have the form dc1:dc2, the original and its copy")
    if args.config is None:
        raise UsageError(
            f"--mirror: specify the clusters by the configuration of {copy}'s mirror: --config mirror.toml"
        )
    try:
        config = load_mirror(args.config)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if copy != config.dc:
        raise UsageError(f"--mirror: {args.config} configures the mirror of {config.dc}, not of {copy}")
    return await audit_mirror(config, original, args.topic, args.state_file, advance, full=args.full)


def _parser() -> argparse.ArgumentParser:
    example = "example: logferry audit --config audit.toml --state-file /var/lib/logferry/audit.state --brief"
    description = (
        "Verifies from the stored data that no line is lost or doubled: in Kafka, between Kafka and the gateway's"
        " states, in the copies of other data centres, in the tables and their segments, and against original files."
    )
    parser = command_parser("audit", "[--config FILE] [--json | --brief] [OPTION ...]", description, example)
    add, many = parser.add_argument, partial(parser.add_argument, action="append", default=[])
    many("--topic", metavar="T", help="audit this topic only; may be repeated")
    many("--table", type=location, metavar="PATH", help="a table that is loaded from the topics; may be repeated")
    files = "original files that were pushed"
    add("--file", nargs="+", action="extend", default=[], type=Path, metavar="PATH", help=files)
    add("--bootstrap", metavar="HOST:PORT", help="Kafka's address (default: from --config)")
    add("--dc", help="the data centre (default: from --config, else the only one in this Kafka)")
    add("--config", type=Path, metavar="FILE", help="configuration of the audit or of the gateway")
    many("--copy", metavar="DC=HOST:PORT", help="a data centre that mirrors the topics, and its Kafka; may be repeated")
    mirror = "only compare the copy in DC2 with its original in DC1; --config is the mirror's"
    add("--mirror", metavar="DC1:DC2", help=mirror)
    state_file = "store the proof here, and read only data that is newer than it"
    add("--state-file", type=Path, metavar="FILE", help=state_file)
    add("--full", action="store_true", help="read everything again, and replace the state file")
    workers = "processes that read at the same time (default: one for each processor)"
    add("--workers", type=_workers, metavar="N", help=workers)
    accept = "accept the reset of a table by the number of its batch; the state file remembers it; may be repeated"
    many("--accept-reset", metavar="TABLE:BATCH", help=accept)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.add_argument("--brief", action="store_true", help="print one line if the verdict is exact, else the findings")
    return parser


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_WORKERS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MAX_WORKERS}")
    return int(text)


def _configuration(args: argparse.Namespace) -> AuditConfig:
    """The configuration of an audit or a gateway; options take precedence. Raises UsageError."""
    given = {"topics": args.topic, "tables": args.table, "state_file": args.state_file, "workers": args.workers}
    try:
        config = _configured(args)
        given["copies"] = [_copy(text) for text in args.copy]
        if args.dc is not None:
            given["dc"] = check_dc(args.dc)
    except (ConfigError, Malformed) as error:
        raise UsageError(str(error)) from None
    if args.bootstrap is not None:
        given["kafka"] = config.kafka.model_copy(update={"bootstrap_servers": args.bootstrap})
    files = [] if args.file else config.files
    return config.model_copy(update={name: value for name, value in given.items() if value} | {"files": files})


def _configured(args: argparse.Namespace) -> AuditConfig:
    if args.config is None:
        if args.bootstrap is None:
            raise UsageError("specify Kafka with --config FILE or --bootstrap HOST:PORT")
        return AuditConfig(kafka=KafkaSettings(bootstrap_servers=args.bootstrap))
    if is_audit(args.config):
        return load_as(AuditConfig, args.config)
    gateway = load(args.config)
    return AuditConfig(
        dc=gateway.dc, prefix=gateway.prefix, kafka=gateway.kafka, source_retention_ms=gateway.source_retention_ms
    )


def _copy(text: str) -> CopySettings:
    dc, equals, bootstrap = text.partition("=")
    if not (dc and equals and bootstrap):
        raise UsageError(f"--copy: {text!r} must have the form dc2=HOST:PORT, a data centre and its Kafka")
    return CopySettings(dc=check_dc(dc), kafka=KafkaSettings(bootstrap_servers=bootstrap))
