"""The command ``logferry``: imports one sub-command, runs it and turns its errors into an exit status.

Standard library only and Python 3.9+: ``logferry push`` has to work where nothing else is installed. A sub-command is
imported when it is called, and defines its own options.

Exit status: 0 done, 1 the answer is no, 2 wrong use or configuration, 3 a required service is not available.
"""

from __future__ import annotations

import atexit
import difflib
import importlib
import itertools
import logging
import os
import sys
from contextlib import suppress
from typing import NamedTuple, NoReturn

from logferry.gateway.contract.names import visible

USAGE_ERROR = 2
INTERRUPTED = 130
_BROKEN_PIPE = 141
_OPERATORS_PYTHON = (3, 11)

_DEMO = "Try it on this machine"
_CLIENTS = "Sources and readers"
_SERVICES = "Services and scheduled jobs"
_OPERATORS = "Operators"


class Command(NamedTuple):
    """A sub-command: ``main(argv) -> int`` in ``module``, the extra of the package that it needs, its line in the help,
    and the heading above that line (none: it is not listed)."""

    module: str
    extra: str
    summary: str
    group: str = ""


COMMANDS = {
    "demo": Command("logferry.ops.demo.command", "ops", "the full pipeline, with kills and a final audit", _DEMO),
    "up": Command("logferry.ops.commands.up", "ops", "a local stack: Kafka, gateways, mirrors", _DEMO),
    "push": Command("logferry.client.agent.main", "", "follow log files and send them to a gateway", _CLIENTS),
    "hbase": Command("logferry.ops.commands.hbase", "hbase", "write the changes of HBase tables to a topic", _CLIENTS),
    "read": Command("logferry.ops.commands.read", "ops", "write the chunks of a topic to standard output", _CLIENTS),
    "query": Command("logferry.ops.commands.query", "query", "SQL over a table and records not loaded yet", _CLIENTS),
    "gateway": Command("logferry.gateway.__main__", "gateway", "the gateway of one data centre", _SERVICES),
    "mirror": Command("logferry.ops.commands.mirror", "gateway", "copy topics from other data centres", _SERVICES),
    "deliver": Command("logferry.gateway.delivery.__main__", "gateway", "push topics to HTTP receivers", _SERVICES),
    "keeper": Command("logferry.ops.keeper.command", "ops", "watch Kafka and its disks, and act in bounds", _SERVICES),
    "load": Command(
        "logferry.ops.commands.load", "loaders", "load topics into tables, once or continuously", _SERVICES
    ),
    "table": Command("logferry.ops.commands.table", "loaders", "inspect, compact, reset or move a table", _SERVICES),
    "status": Command("logferry.ops.status.command", "ops", "health of a gateway or mirror, with causes", _OPERATORS),
    "audit": Command("logferry.ops.audit.command", "ops", "verify exactly-once delivery from stored data", _OPERATORS),
    "doctor": Command("logferry.ops.doctor.command", "gateway", "check this host and its Kafka", _OPERATORS),
    "topics": Command("logferry.ops.commands.topics", "ops", "list, create and grow topics", _OPERATORS),
    "lanes": Command("logferry.ops.commands.lanes", "gateway", "change the number of lanes, or repair one", _OPERATORS),
    "token": Command("logferry.gateway.token_command", "gateway", "create a token for the gateway", _OPERATORS),
    "completion": Command("logferry.ops.cli.completion", "", "print a completion script for bash, zsh or fish"),
}


def program() -> NoReturn:
    """`main` as a process."""
    ended: list[int] = []
    atexit.register(_end, ended)  # the first one that is registered is the last one that is called
    ended.append(main())
    sys.exit(ended[0])


def _end(ended: list[int]) -> None:
    """Ends a process that used Arrow before Python takes itself down. Arrow's threads, which may still be reading ahead
    or closing files, call Python for stores that Arrow does not know itself (Google's, HDFS): from then on that aborts
    the process, and a command that did its work would end with SIGABRT.
    """
    if ended and "pyarrow" in sys.modules:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(ended[0])


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command and returns its exit status. An error that the user can fix is one message on standard
    error, without a traceback."""
    given = list(sys.argv[1:] if argv is None else argv)
    # `logferry --config FILE up` is accepted like `logferry up --config FILE`.
    first = given[0] if given else ""
    leading = given[: 2 if first == "--config" else int(first.startswith("--config="))]
    given = given[len(leading) :]
    if not given:
        print(usage(), file=sys.stderr)
        return USAGE_ERROR
    name, rest = given[0], leading + given[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        from logferry.client import __version__

        print(f"logferry {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else "; see logferry --help"
        return _fail(f"unknown command {name!r}{hint}", USAGE_ERROR)
    return _run(name, COMMANDS[name], rest)


def usage() -> str:
    """The help of ``logferry`` itself: 24 lines of at most 80 columns."""
    lines = ["usage: logferry COMMAND [OPTION ...]"]
    for group, commands in itertools.groupby(COMMANDS.items(), lambda item: item[1].group):
        if group:
            lines += [f"{group}:", *(f"  {name:<9} {command.summary}" for name, command in commands)]
    lines.append("More: logferry COMMAND --help, logferry completion bash, logferry --version")
    return "\n".join(lines)


def _run(name: str, command: Command, argv: list[str]) -> int:
    from logferry.ops.cli.problems import CommandError

    if command.extra and sys.version_info < _OPERATORS_PYTHON:
        return _fail(f"{name} needs Python 3.11 or newer; only push runs on older versions", USAGE_ERROR)
    try:
        status = importlib.import_module(command.module).main(argv)
        sys.stdout.flush()
    except CommandError as error:
        return _fail(str(error), error.exit_status)
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] == "logferry":
            raise
        extra = command.extra or "ops"
        return _fail(f"{name} needs {error.name}: pip install 'logferry[{extra}]'", USAGE_ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; Python would report that once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return int(status)


def _fail(text: str, status: int) -> int:
    print("logferry:", visible(text, "\n"), file=sys.stderr)
    return status


if __name__ == "__main__":
    program()
