"""The one command, ``logferry``: finds the sub-command, runs it, and turns its problems into an exit status.

Standard library only and Python 3.9+: ``logferry push`` has to work where nothing else is installed. So each
sub-command is imported when it is called, and owns its options.

Exit status: 0 done, 1 the answer is no, 2 wrong use or configuration, 3 a service it needs is not there.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import NamedTuple

WRONG_USE = 2
INTERRUPTED = 130
_CUT_PIPE = 141
_OPERATORS_PYTHON = (3, 11)


class Command(NamedTuple):
    """A sub-command: ``main(argv) -> int`` in ``module``, and which extra of the package it needs."""

    module: str
    extra: str
    summary: str


COMMANDS = {
    "demo": Command("logferry.ops.demo", "ops", "the whole way on this machine, with a proof at the end"),
    "up": Command("logferry.ops.commands.up", "ops", "a local stack in the foreground: Kafka and the gateway"),
    "gateway": Command("logferry.gateway.__main__", "gateway", "the gateway of one data centre"),
    "mirror": Command("logferry.mirror.__main__", "gateway", "brings the topics of other data centres here"),
    "push": Command("logferry.client.agent.agent", "", "tails files and sends their lines"),
    "read": Command("logferry.ops.commands.read", "ops", "writes the chunks of a topic to standard output"),
    "load": Command("logferry.ops.load", "ops", "loads topics into a warehouse table"),
    "query": Command(
        "logferry.ops.commands.query", "query", "SQL over a table and what is not loaded yet, without Spark"
    ),
    "segments": Command("logferry.loaders.commands.segments", "ops", "which hours of a table are complete"),
    "compact": Command("logferry.loaders.commands.compact", "ops", "merges a table's small files, drops old rows"),
    "audit": Command("logferry.ops.audit", "ops", "proves or refutes the promise over what is stored"),
    "status": Command("logferry.ops.status.command", "ops", "what is wrong with the gateway or a mirror, and why"),
    "topics": Command("logferry.ops.commands.topics", "ops", "lists, creates and grows topics"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command and returns its exit status; what the user can mend is one message, no traceback."""
    given = list(sys.argv[1:] if argv is None else argv)
    # `logferry --config FILE up` is as good as `logferry up --config FILE`.
    leading = given[:2] if given[:1] == ["--config"] else given[:1] if given[:1] and _is_config(given[0]) else []
    given = given[len(leading) :]
    if not given:
        print(usage(), file=sys.stderr)
        return WRONG_USE
    name, rest = given[0], leading + given[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"logferry {_version()}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else "; see logferry --help"
        return _fail(f"there is no command {name!r}{hint}", WRONG_USE)
    return _run(name, COMMANDS[name], rest)


def usage() -> str:
    lines = ["usage: logferry COMMAND …", ""]
    lines += [f"  {name:<9} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "logferry COMMAND --help shows its options and an example."])


def _run(name: str, command: Command, argv: list[str]) -> int:
    from logferry.ops.cli.problems import Problem

    if command.extra and sys.version_info < _OPERATORS_PYTHON:
        return _fail(f"{name} needs Python 3.11 or newer; only push runs on older ones", WRONG_USE)
    try:
        status = importlib.import_module(command.module).main(argv)
        sys.stdout.flush()
    except Problem as problem:
        return _fail(str(problem), problem.exit_status)
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] == "logferry":
            raise
        extra = command.extra or "ops"
        return _fail(f"{name} needs {error.name}: pip install 'logferry[{extra}]'", WRONG_USE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CUT_PIPE
    return int(status)


def _is_config(argument: str) -> bool:
    return argument.startswith("--config=")


def _version() -> str:
    from importlib.metadata import version

    return version("logferry")


def _fail(text: str, status: int) -> int:
    print(f"logferry: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
