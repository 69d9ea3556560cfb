"""``logferry audit``: proves or refutes, over what is stored, that nothing was lost and nothing doubled."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.gateway.config import ConfigError, load
from logferry.gateway.contract import Malformed, check_dc
from logferry.gateway.tls import kafka_options
from logferry.mirror.config import load as load_mirror
from logferry.ops.audit.mirror import audit_mirror
from logferry.ops.audit.proof import SOURCE_RETENTION_MS, audit
from logferry.ops.audit.report import Report
from logferry.ops.audit.show import console_for_output, progress, show
from logferry.ops.problems import Problem, WrongUse
from rich.console import Console

EXACT: Final = 0
REFUTED: Final = 1


class _Where(NamedTuple):
    """The cluster, and the gateway's settings. ``dc`` None: the only one that it has."""

    bootstrap: str
    dc: str | None
    prefix: str = "logferry"
    source_retention_ms: int = SOURCE_RETENTION_MS
    security: Mapping[str, Any] | None = None


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 exact, 1 refuted, 2 wrong use, 3 Kafka or the table cannot be read."""
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
        report = asyncio.run(audit_mirror(config, original, args.topic, args.keep, advance))
    if args.json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
        return EXACT if report.exact else REFUTED
    for found in report.partitions:
        if found.wrong is not None:
            print(f"{found.topic}-{found.partition}: {found.wrong}")
    print(report.verdict)
    return EXACT if report.exact else REFUTED


async def _audit(args: argparse.Namespace, console: Console) -> Report:
    where = _where(args)
    with progress(console) as advance:
        return await audit(
            where.bootstrap,
            where.dc,
            topics=args.topic,
            table=args.table,
            files=args.file,
            prefix=where.prefix,
            source_retention_ms=where.source_retention_ms,
            security=where.security,
            progress=advance,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry audit",
        description="Proves or refutes, by reading what is stored, that nothing was lost and nothing doubled: in "
        "Kafka, between Kafka and the gateway's states, in the table, and against the original files.",
        epilog="example: logferry audit --config gateway.toml --table /data/nginx --file /var/log/nginx/access.log",
    )
    parser.add_argument("--topic", action="append", default=[], metavar="T", help="this topic only; may be repeated")
    parser.add_argument("--table", type=Path, metavar="PATH", help="the table that the topics are loaded into")
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
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration of the gateway")
    parser.add_argument(
        "--mirror", metavar="DC1:DC2", help="instead: compare a copy with its original; --config is the mirror's"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="with --mirror: what is proven, to go on from it later"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _where(args: argparse.Namespace) -> _Where:
    """The options go before the configuration. Raises WrongUse."""
    try:
        dc = check_dc(args.dc) if args.dc is not None else None
        config = load(args.config) if args.config is not None else None
        options = kafka_options(config.kafka) if config is not None else None
    except (ConfigError, Malformed) as error:
        raise WrongUse(str(error)) from None
    if config is not None:
        bootstrap = args.bootstrap or config.kafka.bootstrap_servers
        return _Where(bootstrap, dc or config.dc, config.prefix, config.source_retention_ms, options)
    if args.bootstrap is None:
        raise WrongUse("which Kafka? Give --config FILE or --bootstrap HOST:PORT")
    return _Where(args.bootstrap, dc)
