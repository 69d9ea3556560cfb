"""The options of ``logferry hbase``."""

from __future__ import annotations

import argparse
from pathlib import Path

from logferry.client.hbase.definition import ENCODINGS, check_name
from logferry.ops.cli.gateway_client import TOKEN_VARIABLE


def named(text: str) -> str:
    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_status_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", help="of any gateway worker: show also what it has recorded")
    _add_folder_options(parser, is_required=False)
    add(
        "--token-file", metavar="FILE", help=f"file with the token (default: the environment variable {TOKEN_VARIABLE})"
    )
    add("--ca-file", metavar="FILE", help="authorities that verify the gateway's certificate (default: the system's)")


def _add_write_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tables", nargs="+", required=True, metavar="TABLE", help="as TABLE or NAMESPACE:TABLE")
    add("--topic", required=True, help="topic to write, without its data centre; for these tables alone")
    add("--families", nargs="+", default=[], metavar="FAMILY", help="only these column families (default: all)")
    add("--qualifiers", nargs="+", default=[], metavar="QUALIFIER", help="only these columns, and deletes of families")
    add("--row-prefixes", nargs="+", default=[], metavar="PREFIX", help="only rows that begin with one of these")
    add("--row-pattern", default="", metavar="REGEX", help="only rows in which this is found, by bytes")
    add(
        "--format",
        choices=ENCODINGS,
        default="json",
        help="of changes in the topic (default: %(default)s)",
    )
    add("--url", action="append", metavar="URL", help="of a gateway worker; repeat it (default: http://127.0.0.1:8080)")
    add(
        "--token-file", metavar="FILE", help=f"file with the token (default: the environment variable {TOKEN_VARIABLE})"
    )
    add("--ca-file", metavar="FILE", help="authorities that verify the gateway's certificate (default: the system's)")
    add("-v", "--verbose", action="store_true", help="log everything")


def _add_folder_options(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    add, why = parser.add_argument, "" if is_required else ": show also the sizes of its logs"
    kinds = "a folder, or webhdfs://HOST:PORT[,HOST:PORT]/PATH"
    add("--wals", required=is_required, metavar="DIR", help=f"WALs of HBase, {kinds}{why}")
    add("--old-wals", required=is_required, metavar="DIR", help="oldWALs of HBase, in the same HDFS if that is a URL")
    add("--hdfs-user", metavar="NAME", help="reads HDFS without security (default: the user of this process)")
    add("--hdfs-token-file", type=Path, metavar="FILE", help="with a delegation token of HDFS")


def add_tail_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_folder_options(parser, is_required=True)
    add(
        "--positions",
        type=Path,
        metavar="FILE",
        help="remember how far they are written (default: read all again)",
    )
    add("--leave-out", nargs="+", default=[], metavar="NAME", help="files of the log that are not read, by their names")
    add("--poll-s", type=float, default=0.2, metavar="S", help="look for new entries so often (default: %(default)s)")
    _add_write_options(parser)


def add_subscribe_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_write_options(parser)
    add(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="for region servers; port 0: any (default: %(default)s)",
    )
    add("--advertise", metavar="HOST", help="by which region servers reach it (default: the host of --listen)")
    add("--call-mb", type=int, default=128, metavar="N", help="largest call of HBase (default: %(default)s)")
    add("--memory-mb", type=int, default=256, metavar="N", help="all calls that are held (default: %(default)s)")
    add("--metrics-port", type=int, default=0, metavar="PORT", help="serve metrics for Prometheus at 127.0.0.1:PORT")
