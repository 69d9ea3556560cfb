"""Commands that change where a table stands say what they will do, and do it when that is agreed to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from logferry.loaders.errors import ConfigError
from logferry.loaders.planning.reset_plan import Move
from rich.console import Console
from rich.markup import escape

Agreed = Callable[[Sequence[Move]], bool]


def agreement(options: argparse.Namespace, console: Console, done: str) -> Agreed:
    """By ``--yes``, or by a person at a terminal. ``done``: as in "nothing is …". What it returns raises ConfigError
    where there is neither.
    """

    def agreed(moves: Sequence[Move]) -> bool:
        if not options.json:
            for move in moves:
                console.print(_said(move), highlight=False, soft_wrap=True)
        if options.yes:
            return True
        if sys.stdin.isatty() and not options.json:
            return console.input("Do it? Type yes: ").strip() == "yes"
        raise ConfigError(f"nothing is {done}: call it again with --yes, having read what it does")

    return agreed


def _said(move: Move) -> str:
    before = "nowhere" if move.before is None else f"{move.before:,}"
    after = "nowhere" if move.after is None else f"{move.after:,}"
    return f"{escape(move.topic)} {move.partition}: {before} → {after}: {escape(move.means)}"
