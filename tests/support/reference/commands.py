"""The page of commands."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Final
from unittest import mock

from logferry.ops.cli.main import COMMANDS, main

from tests.support.reference.configuration import HEAD

_COLUMNS: Final = "100"


def pages() -> dict[str, str]:
    return {"cli.md": _commands()}


def help_of(*arguments: str) -> str:
    """What ``logferry ARGUMENTS --help`` prints, at a width of 100 columns."""
    written = io.StringIO()
    environment = {"COLUMNS": _COLUMNS, "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(written):
        with contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _commands() -> str:
    parts = [HEAD, "", "# Commands", "", "```text", help_of(), "```"]
    for name in COMMANDS:
        parts += ["", f"## logferry {name}", "", "```text", help_of(name), "```"]
        for inner in SUBCOMMANDS.get(name, ()):
            parts += ["", f"### logferry {name} {inner}", "", "```text", help_of(name, *inner.split()), "```"]
    return "\n".join(parts) + "\n"


SUBCOMMANDS: Final = {
    "table": (
        *("state", "reset", "reload", "move", "requarantine", "compact"),
        *("segments list", "segments wait", "segments exclude", "segments include"),
    ),
    "hbase": ("subscribe", "list", "status", "pause", "resume", "remove", "tail"),
    "mirror": ("resume",),
    "keeper": ("status", "plan", "log", "pause", "resume"),
}
