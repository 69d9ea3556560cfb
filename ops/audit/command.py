"""``logferry audit``: proves or refutes, over what is stored, that nothing was lost and nothing doubled."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Final

from logferry.gateway.config import ConfigError, KafkaSettings, load
from logferry.gateway.contract.chunk import Malformed, check_dc
from logferry.gateway.tls import kafka_options
from logferry.mirror.config import load as load_mirror
from logferry.ops.audit.audit import Copy, audit
from logferry.ops.audit.compare.mirror_copy import audit_mirror
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.config import AuditConfig, CopySettings, found_files, is_audit
from logferry.ops.audit.config import load as load_audit
from logferry.ops.audit.render import brief, console_for_output, progress, show
from logferry.ops.cli.problems import Problem, WrongUse
from rich.console import Console

EXACT: Final = 0
REFUTED: Final = 1


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 exact, 1 refuted, 2 wrong use, 3 Kafka or a table cannot be read."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    # What the client library has to say comes as an error, once, and in our words.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        if args.mirror is not None:
            return _audit_mirror(args, console)
        report = asyncio.run(_audit(args, console))
    except Problem as problem:
        print(f"logferry audit: {problem}", file=sys.stderr)
        return problem.exit_status
    if args.json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    elif args.brief:
        brief(report, console_for_output())
    else:
        show(report, console_for_output())
    return EXACT if report.exact else REFUTED


def _audit_mirror(args: argparse.Namespace, console: Console) -> int:
    original, colon, copy = args.mirror.partition(":")
    if not (original and colon and copy):
        raise WrongUse(f"--mirror: {args.mirror!r} is not like dc1:dc2, the original and its copy")
    if args.config is None:
        raise WrongUse(f"--mirror: which clusters? Give the configuration of {copy}'s mirror: --config mirror.toml")
    try:
        config = load_mirror(args.config)
    except ConfigError as error:
        raise WrongUse(str(error)) from None
    if copy != config.dc:
        raise WrongUse(f"--mirror: {args.config} is the configuration of {config.dc}'s mirror, not of {copy}'s")
    with progress(console) as advance:
        report = asyncio.run(audit_mirror(config, original, args.topic, args.keep, advance, full=args.full))
    if args.json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
        return EXACT if report.exact else REFUTED
    for found in report.partitions:
        if found.wrong is not None:
            print(f"{found.topic}-{found.partition}: {found.wrong}")
    print(report.verdict)
    return EXACT if report.exact else REFUTED


async def _audit(args: argparse.Namespace, console: Console) -> Report:
    config = _configuration(args)
    try:
        security = kafka_options(config.kafka)
        copies = [Copy(copy.dc, kafka_options(copy.kafka), copy.topics) for copy in config.copies]
    except ConfigError as error:
        raise WrongUse(str(error)) from None
    if args.full and config.keep is None:
        raise WrongUse("--full: everything is read anyway, unless --keep FILE says what was proven before")
    with progress(console) as advance:
        return await audit(
            config.kafka.bootstrap_servers,
            config.dc,
            topics=config.topics,
            tables=config.tables,
            files=found_files(config.files) + args.file,
            prefix=config.prefix,
            source_retention_ms=config.source_retention_ms,
            security=security,
            copies=copies,
            keep=config.keep,
            full=args.full,
            progress=advance,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry audit",
        description="Proves or refutes, by reading what is stored, that nothing was lost and nothing doubled: in "
        "Kafka, between Kafka and the gateway's states, in another data centre's copy, in the tables and their "
        "segments, and against the original files.",
        epilog="example: logferry audit --config audit.toml --keep /var/lib/logferry/audit.kept --brief",
    )
    parser.add_argument("--topic", action="append", default=[], metavar="T", help="this topic only; may be repeated")
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="a table that topics are loaded into; may be repeated",
    )
    parser.add_argument(
        "--file",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        metavar="PATH",
        help="original files that were pushed",
    )
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="Kafka's address (default: that of --config)")
    parser.add_argument("--dc", help="the data centre (default: that of --config, else the only one in this Kafka)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration of the audit, or of the gateway")
    parser.add_argument(
        "--copy",
        action="append",
        default=[],
        metavar="DC=HOST:PORT",
        help="another data centre that mirrors the topics, and its Kafka; may be repeated",
    )
    parser.add_argument(
        "--mirror", metavar="DC1:DC2", help="instead: compare a copy with its original; --config is the mirror's"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="what is proven is kept there, and only what is new is read"
    )
    parser.add_argument("--full", action="store_true", help="read everything again, whatever --keep says, and keep it")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.add_argument("--brief", action="store_true", help="print one line if all is well, else what is not")
    return parser


def _configuration(args: argparse.Namespace) -> AuditConfig:
    """The options go before the configuration: an audit's, or a gateway's. Raises WrongUse."""
    try:
        config = _configured(args)
        dc = check_dc(args.dc) if args.dc is not None else config.dc
        copies = [_copy(text) for text in args.copy] or config.copies
        kafka = config.kafka
    except (ConfigError, Malformed) as error:
        raise WrongUse(str(error)) from None
    if args.bootstrap is not None:
        kafka = kafka.model_copy(update={"bootstrap_servers": args.bootstrap})
    return config.model_copy(
        update={
            "dc": dc,
            "kafka": kafka,
            "copies": copies,
            "topics": args.topic or config.topics,
            "tables": args.table or config.tables,
            "keep": args.keep or config.keep,
            "files": [] if args.file else config.files,
        }
    )


def _configured(args: argparse.Namespace) -> AuditConfig:
    if args.config is None:
        if args.bootstrap is None:
            raise WrongUse("which Kafka? Give --config FILE or --bootstrap HOST:PORT")
        return AuditConfig(kafka=KafkaSettings(bootstrap_servers=args.bootstrap))
    if is_audit(args.config):
        return load_audit(args.config)
    gateway = load(args.config)
    return AuditConfig(
        dc=gateway.dc, prefix=gateway.prefix, kafka=gateway.kafka, source_retention_ms=gateway.source_retention_ms
    )


def _copy(text: str) -> CopySettings:
    dc, equals, bootstrap = text.partition("=")
    if not (dc and equals and bootstrap):
        raise WrongUse(f"--copy: {text!r} is not like dc2=HOST:PORT, a data centre and its Kafka")
    return CopySettings(dc=check_dc(dc), kafka=KafkaSettings(bootstrap_servers=bootstrap))
