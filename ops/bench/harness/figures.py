"""Figures of benchmarks: mostly ratios to a peer measured in the same run; printed and appended to bench.jsonl."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

_FILE: Final = Path(__file__).resolve().parents[3] / "bench.jsonl"

Side = dict[str, float]
Rounds = tuple[list[Side], list[Side]]


class Figure(NamedTuple):
    """``ours`` and ``theirs``: medians over the rounds, by quantity. The result is ``ratio`` or ``value``."""

    unit: str
    ours: Side
    theirs: Side
    rounds: int
    ratio: float | None = None
    value: float | None = None


def medians(rounds: list[Side]) -> Side:
    return {key: round(statistics.median(side[key] for side in rounds), 4) for key in rounds[0]}


def alternate(
    rounds: int, ours: Callable[[int], Side], theirs: Callable[[int], Side], warm_up_s: float = 90.0
) -> Rounds:
    """Runs both in turn, so that a drifting machine speed favours neither. Rounds that begin while it warms up do not
    count: at first a broker spends more time on JIT compilation than on records.
    """
    pairs: list[tuple[Side, Side]] = []
    began, number = time.monotonic(), 0
    while len(pairs) < rounds:
        is_warm = time.monotonic() - began >= warm_up_s
        pair = _told("ours", number, ours(number)), _told("theirs", number, theirs(number))
        pairs += [pair] if is_warm else []
        number += 1
    return [mine for mine, _ in pairs], [others for _, others in pairs]


def _told(name: str, number: int, side: Side) -> Side:
    """Shows the figures of a round as soon as they are there: a benchmark takes minutes."""
    found = "  ".join(f"{key} {value:g}" for key, value in side.items())
    print(f"  round {number}, {name}: {found}", file=sys.stderr, flush=True)
    return side


def median_ratio(rounds: Rounds, key: str) -> float:
    """The median of the rounds' ratios."""
    return round(statistics.median(a[key] / b[key] for a, b in zip(*rounds, strict=True)), 3)


def compared(unit: str, key: str, rounds: Rounds) -> Figure:
    """The figure whose result is the median ratio of ``key``."""
    ours, theirs = rounds
    return Figure(unit, medians(ours), medians(theirs), len(ours), median_ratio(rounds, key))


def append_figure(name: str, figure: Figure) -> None:
    """Appends the figure to ``bench.jsonl`` at the root."""
    row = {key: value for key, value in figure._asdict().items() if value is not None}
    with _FILE.open("a") as file:
        file.write(json.dumps({"name": name, **row, "at": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")


def print_figures(figures: dict[str, Figure]) -> None:
    table = Table(show_lines=True)
    for column in ("benchmark", "result", "unit", "ours", "theirs", "rounds"):
        table.add_column(column, no_wrap=True)
    for name, figure in figures.items():
        result = f"{figure.ratio:.2f}" if figure.ratio is not None else f"{figure.value:g}"
        sides = ("\n".join(f"{key} {value:g}" for key, value in side.items()) for side in (figure.ours, figure.theirs))
        table.add_row(name, result, figure.unit, *sides, str(figure.rounds))
    Console(width=160).print(table)
