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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from logferry.gateway.contract.names import visible
from logferry.loaders.commands.options import add_job_options, count, location
from logferry.loaders.config import JARS_VARIABLE
from logferry.loaders.errors import LoadError
from logferry.loaders.storage.merge import TARGET_MB
from logferry.loaders.storage.retention import RETAIN

# These work where neither Spark nor Java is installed; compact, where it need not read files to drop rows.
WITHOUT_SPARK: Final = ("state", "compact", "segments")
# The module of a sub-command, unless it bears its name.
_MODULES: Final = {
    **dict.fromkeys(("state", "segments"), "inspection"),
    **dict.fromkeys(("reset", "reload", "requarantine"), "repair"),
}
_MANY: Final[dict[str, Any]] = {"nargs": "+", "action": "extend"}
_PATH: Final[dict[str, Any]] = {"type": location, "metavar": "PATH"}
# Arguments and options of several sub-commands.
_SHARED: Final[dict[str, dict[str, Any]]] = {
    "path": {"nargs": "?", **_PATH, "help": "folder of the table; one of --config's"},
    "paths": {"nargs": "*", **_PATH, "help": "folder of a table (default: all tables of --config)"},
    "--config": {"type": Path, "metavar": "FILE", "help": "the loader's TOML file, which names the tables"},
    "--yes": {"action": "store_true", "help": "agree to the changes without being asked"},
}
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None, provide_java: Callable[[], None] = lambda: None) -> int:
    """Runs one sub-command and returns its exit status. ``provide_java``: called before Spark starts, if it does."""
    options = _parser().parse_args(argv)
    options.provide_java = provide_java
    module = _MODULES.get(options.command, options.command)
    command = getattr(importlib.import_module(f"logferry.loaders.commands.{module}"), f"run_{options.command}")
    if options.command not in WITHOUT_SPARK:
        from logferry.loaders.commands.load import run_reported

        provide_java()
        return run_reported(options, command)
    from logferry.loaders.storage.files import STORAGE_ERRORS, storage_errors

    try:
        with storage_errors("storage cannot be accessed", STORAGE_ERRORS):
            return int(command(options))
    except LoadError as error:
        print("logferry:", visible(str(error), "\n"), file=sys.stderr)
        return error.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry table",
        description="example: logferry table state /warehouse/nginx\n\n"
        "Inspects, repairs and maintains the tables that `logferry load` writes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    summary = "print offsets, lag, parser, planned batch and quarantine of tables"
    state = _add_command(commands, "state", "[PATH ...]", "state /warehouse/nginx", summary, "paths", "--config")
    state.add_argument("--bootstrap", metavar="HOST:PORT", help="Kafka, for the lag by topic (--config has it)")
    state.add_argument("--json", action="store_true", help="print JSON, one array with an object per table")
    _add_repairs(commands)
    _add_compact(commands)
    _add_segments(commands)
    return parser


def _add_command(
    commands: _Commands, name: str, usage: str | None, example: str, summary: str, *shared: str
) -> argparse.ArgumentParser:
    """``usage`` None: argparse's own. A parser with sub-commands needs it, since their names are made from it."""
    parser = commands.add_parser(
        name,
        usage=None if usage is None else f"%(prog)s {usage} [OPTION ...]",
        help=summary,
        description=f"example: logferry table {example}\n\n{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in shared:
        parser.add_argument(option, **_SHARED[option])
    return parser


def _add_repairs(commands: _Commands) -> None:
    """The sub-commands with Spark."""

    def command(name: str, usage: str, options: str, summary: str) -> argparse.ArgumentParser:
        example = f"{name} /warehouse/nginx --config {options}"
        parser = _add_command(commands, name, usage, example, summary, "path")
        add_job_options(parser)
        return parser

    reset = command("reset", "[PATH] --to TARGET", "load.toml --to dc1.nginx=latest", "set positions of a table")
    said = "TOPIC=earliest|latest|forget or TOPIC:PARTITION=earliest|latest|OFFSET; may be repeated"
    reset.add_argument("--to", required=True, metavar="TARGET", help=said, **_MANY)
    example = "load.toml --from 2026-11-20T10..2026-11-20T12"
    reload = command("reload", "[PATH] --from RANGE", example, "read ranges from Kafka again and replace their rows")
    said = (
        "TOPIC, TOPIC:PARTITION, TOPIC:PARTITION=START..END (offsets), or TIME..TIME of recording like "
        "2026-11-20T10..2026-11-20T12 (UTC); may be repeated"
    )
    reload.add_argument("--from", dest="ranges", required=True, metavar="RANGE", help=said, **_MANY)
    move = command("move", "[PATH] --to DC", "load-dc2.toml --to dc2", "move tables to another data centre")
    said = "the data centre to move to; --bootstrap and --config are of this one"
    move.add_argument("--to", required=True, metavar="DC", help=said)
    said = "topics that have no position there: TOPIC=forget, TOPIC[:PARTITION]=earliest or =latest; may be repeated"
    move.add_argument("--reset", metavar="TARGET", help=said, **_MANY)
    said = "seconds to wait for the mirror to catch up (default: 0)"
    move.add_argument("--wait", type=count, default=0, metavar="S", help=said)
    command("requarantine", "[PATH]", "load.toml", "parse the lines of the quarantine again")
    for parser in (reset, reload, move):
        parser.add_argument("--yes", **_SHARED["--yes"])


def _add_compact(commands: _Commands) -> None:
    summary = "merge small files, drop old rows, remove unused files"
    example = "compact /warehouse/nginx --retain-days 90"
    option = _add_command(commands, "compact", "[PATH ...]", example, summary, "paths", "--config").add_argument
    option("--retain-days", type=_days, metavar="N", help="drop rows older than N days, by whole segments or days")
    said = "the table gets no rows any more: drop by this host's clock alone"
    option("--idle", action="store_true", help=said)
    said = "older versions of the table stay readable for H hours (default: %(default)s)"
    hours = int(RETAIN.total_seconds() // 3600)
    option("--version-retention-hours", type=count, default=hours, metavar="H", help=said)
    option("--target-mb", type=int, default=TARGET_MB, metavar="N", help="size of merged files (default: %(default)s)")
    said = "before rows are dropped, seconds to wait for a loader's planned batch (default: %(default)s)"
    option("--wait-s", type=float, default=300.0, metavar="S", help=said)
    said = "sort rows by source and time, by Spark: queries of a source or an hour read less"
    option("--cluster", action="store_true", help=said)
    option("--master", metavar="URL", help="Spark's master; one that is not local merges, too (default: local[*])")
    option("--driver-memory", metavar="SIZE", help="heap of Spark's driver (default: 1g)")
    option("--jars", metavar="JAR:JAR…", help=f"jars of Delta for Spark (else {JARS_VARIABLE})")
    option("--json", action="store_true", help="print one line of JSON and nothing else")


def _add_segments(commands: _Commands) -> None:
    summary = "list segments, wait until one is READY, or exclude sources"
    example = "segments wait /warehouse/nginx 2026-11-20T10"
    parser = _add_command(commands, "segments", None, example, summary)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    summary = "list the newest segments, and why they are not READY"
    listed = "segments list /warehouse/nginx"
    lists = _add_command(actions, "list", "[PATH ...]", listed, summary, "paths", "--config")
    lists.add_argument("--last", type=count, default=48, metavar="N", help="number of segments (default: %(default)s)")
    lists.add_argument("--json", action="store_true", help="print one line of JSON per table")

    def of_one(name: str, what: str, given: str, summary: str, then: str) -> argparse.ArgumentParser:
        example = f"segments {name} /warehouse/nginx {given}"
        parser = _add_command(actions, name, f"[PATH] {what}", example, summary)
        said = f"folder of the table (not needed with --config), then the {then}"
        parser.add_argument("names", nargs="+", metavar=f"PATH {what}", help=said)
        parser.add_argument("--config", **_SHARED["--config"])
        return parser

    said = "start of the segment in UTC: 2026-11-20T10, 2026-11-20, 2026-11-20T10:15"
    waits = of_one("wait", "SEGMENT", "2026-11-20T10", "return when a segment is READY", said)
    waits.add_argument("--timeout-s", type=float, metavar="S", help="0 asks once (default: no timeout)")
    waits.add_argument("--version", type=count, default=1, metavar="N", help="wait for this version or a later one")
    decisions = {"exclude": "do not wait for a source", "include": "wait for an excluded source again"}
    for name, summary in decisions.items():
        of_one(name, "SOURCE", "'web7:*'", summary, "source; * stands for any text")


def _days(text: str) -> float:
    days = float(text)
    if not 1 <= days <= 36_500:
        raise argparse.ArgumentTypeError("1 to 36500 days")
    return days


if __name__ == "__main__":
    sys.exit(main())
