"""``logferry table``: inspects, repairs and maintains tables that `logferry load` writes.

    logferry table state /warehouse/nginx
    logferry table segments wait /warehouse/nginx 2026-11-20T10
    logferry table reload /warehouse/nginx --config load.toml --from dc1.nginx:3=1000..2000

Exit status: 0 done; 1 refused, or the answer is no; 2 wrong use or configuration, or the operator did not agree;
3 Kafka, storage or Spark is unavailable, or another loader was faster: the same call can be repeated; 130 interrupted.

This file has the options of all sub-commands and loads no Spark; the sub-commands are in modules of this package.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from logferry.loaders.commands.options import add_job_options, count
from logferry.loaders.errors import LoadError
from logferry.loaders.storage.compact import RETAIN, TARGET_MB

# These work where neither Spark nor Java is installed.
WITHOUT_SPARK: Final = ("state", "compact", "segments")
# The module of a sub-command, unless it bears its name.
_MODULES: Final = {
    **dict.fromkeys(("state", "segments"), "inspection"),
    **dict.fromkeys(("reset", "reload", "requarantine"), "repair"),
}
_MANY: Final[dict[str, Any]] = {"nargs": "+", "action": "extend"}
_PATH: Final[dict[str, Any]] = {"type": Path, "metavar": "PATH"}
# Arguments and options of several sub-commands.
_SHARED: Final[dict[str, dict[str, Any]]] = {
    "path": {"nargs": "?", **_PATH, "help": "folder of the table; one of --config's"},
    "paths": {"nargs": "*", **_PATH, "help": "folder of a table (default: all tables of --config)"},
    "--config": {"type": Path, "metavar": "FILE", "help": "the loader's TOML file, which names the tables"},
    "--yes": {"action": "store_true", "help": "agree to the changes without being asked"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns its exit status."""
    options = _parser().parse_args(argv)
    module = _MODULES.get(options.command, options.command)
    command = getattr(importlib.import_module(f"logferry.loaders.commands.{module}"), f"run_{options.command}")
    if options.command not in WITHOUT_SPARK:
        from logferry.loaders.commands.load import run_reported

        return run_reported(options, command)
    try:
        return int(command(options))
    except LoadError as error:
        print(f"logferry: {error}", file=sys.stderr)
        return error.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry table",
        description="example: logferry table state /warehouse/nginx\n\n"
        "Inspects, repairs and maintains the tables that `logferry load` writes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, usage: str, arguments: str, summary: str) -> argparse.ArgumentParser:
        return _add_command(commands, name, usage, f"logferry table {name} {arguments}", summary)

    table, job = "/warehouse/nginx", "/warehouse/nginx --config load.toml"
    _state(command("state", "[PATH ...]", table, "print offsets, parser, planned batch and quarantine of tables"))
    _reset(command("reset", "[PATH] --to TARGET", f"{job} --to dc1.nginx=latest", "set positions of a table"))
    example = f"{job} --from 2026-11-20T10..2026-11-20T12"
    _reload(command("reload", "[PATH] --from RANGE", example, "read ranges from Kafka again and replace their rows"))
    example = f"{table} --config load-dc2.toml --to dc2"
    _move(command("move", "[PATH] --to DC", example, "move tables to another data centre"))
    _add_job(command("requarantine", "[PATH]", job, "parse the lines of the quarantine again"))
    summary = "merge small files, drop old rows, remove unused files"
    _compact(command("compact", "[PATH ...]", f"{table} --retain-days 90", summary))
    summary = "list segments, wait until one is READY, or exclude sources"
    example = f"logferry table segments wait {table} 2026-11-20T10"
    _segments(_add_command(commands, "segments", None, example, summary))
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    usage: str | None,
    example: str,
    summary: str,
) -> argparse.ArgumentParser:
    """``usage`` None: argparse's own. A parser with sub-commands needs it, since their names are made from it."""
    return commands.add_parser(
        name,
        usage=None if usage is None else f"%(prog)s {usage} [OPTION ...]",
        help=summary,
        description=f"example: {example}\n\n{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _state(parser: argparse.ArgumentParser) -> None:
    _share(parser, "paths", "--config")
    parser.add_argument("--json", action="store_true", help="print JSON, one array with an object per table")


def _reset(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    said = "TOPIC=earliest|latest|forget or TOPIC:PARTITION=earliest|latest|OFFSET; may be repeated"
    parser.add_argument("--to", required=True, metavar="TARGET", help=said, **_MANY)
    _share(parser, "--yes")


def _reload(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    said = (
        "TOPIC, TOPIC:PARTITION, TOPIC:PARTITION=START..END (offsets), or TIME..TIME of recording like "
        "2026-11-20T10..2026-11-20T12 (UTC); may be repeated"
    )
    parser.add_argument("--from", dest="ranges", required=True, metavar="RANGE", help=said, **_MANY)
    _share(parser, "--yes")


def _move(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    option = parser.add_argument
    said = "the data centre to move to; --bootstrap and --config are of this one"
    option("--to", required=True, metavar="DC", help=said)
    said = "topics that have no position there: TOPIC=forget, TOPIC[:PARTITION]=earliest or =latest; may be repeated"
    option("--reset", metavar="TARGET", help=said, **_MANY)
    option("--wait", type=count, default=0, metavar="S", help="seconds to wait for the mirror to catch up (default: 0)")
    _share(parser, "--yes")


def _compact(parser: argparse.ArgumentParser) -> None:
    _share(parser, "paths", "--config")
    option = parser.add_argument
    option("--retain-days", type=_days, metavar="N", help="drop rows older than N days, by whole segments or days")
    said = "the table gets no rows any more: drop by this host's clock alone"
    option("--idle", action="store_true", help=said)
    said = "older versions of the table stay readable for H hours (default: %(default)s)"
    hours = int(RETAIN.total_seconds() // 3600)
    option("--version-retention-hours", type=count, default=hours, metavar="H", help=said)
    option("--target-mb", type=int, default=TARGET_MB, metavar="N", help="size of merged files (default: %(default)s)")
    said = "before rows are dropped, seconds to wait for a loader's planned batch (default: %(default)s)"
    option("--wait-s", type=float, default=300.0, metavar="S", help=said)
    option("--json", action="store_true", help="print one line of JSON and nothing else")


def _segments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    example = "logferry table segments"
    summary = "list the newest segments, and why they are not READY"
    lists = _add_command(actions, "list", "[PATH ...]", f"{example} list /warehouse/nginx", summary)
    _share(lists, "paths", "--config")
    lists.add_argument("--last", type=count, default=48, metavar="N", help="number of segments (default: %(default)s)")
    lists.add_argument("--json", action="store_true", help="print one line of JSON per table")
    summary = "return when a segment is READY"
    waits = _add_command(actions, "wait", "[PATH] SEGMENT", f"{example} wait /warehouse/nginx 2026-11-20T10", summary)
    said = (
        "folder of the table (not needed with --config), then the start of the segment in UTC: 2026-11-20T10, "
        "2026-11-20, 2026-11-20T10:15"
    )
    waits.add_argument("names", nargs="+", metavar="PATH SEGMENT", help=said)
    _share(waits, "--config")
    waits.add_argument("--timeout-s", type=float, metavar="S", help="0 asks once (default: no timeout)")
    waits.add_argument("--version", type=count, default=1, metavar="N", help="wait for this version or a later one")
    decisions = {"exclude": "do not wait for a source", "include": "wait for an excluded source again"}
    for name, summary in decisions.items():
        decides = _add_command(actions, name, "[PATH] SOURCE", f"{example} {name} /warehouse/nginx 'web7:*'", summary)
        said = "folder of the table (not needed with --config), then the source; * stands for any text"
        decides.add_argument("names", nargs="+", metavar="PATH SOURCE", help=said)
        _share(decides, "--config")


def _add_job(parser: argparse.ArgumentParser) -> None:
    _share(parser, "path")
    add_job_options(parser)


def _share(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def _days(text: str) -> float:
    days = float(text)
    if not 1 <= days <= 36_500:
        raise argparse.ArgumentTypeError("1 to 36500 days")
    return days


if __name__ == "__main__":
    sys.exit(main())
