"""A rich console for output that may be piped."""

from __future__ import annotations

from typing import Final

from rich.console import Console

WIDTH: Final = 140  # columns where the output is not a terminal


def console_for_output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
