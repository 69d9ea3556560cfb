"""Waiting for what other processes do: never without a limit, and never blind for what ends meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from logferry.ops.cli.problems import Problem, Unavailable
from logferry.ops.stack.processes import Child

LIMIT_S: Final = 60.0
_LOOK_S: Final = 0.05
_LINES: Final = 8


class Waiting:
    """``must_run``: children whose end is the end of the story. ``meanwhile``: called again and again. ``suspects``:
    whose logs are shown when something does not come in time."""

    def __init__(self, meanwhile: Callable[[], None], suspects: Callable[[], Sequence[Child]]) -> None:
        self.must_run: list[Child] = []
        self._meanwhile, self._suspects = meanwhile, suspects

    def until(self, done: Callable[[], bool], what: str, limit_s: float = LIMIT_S, look_s: float = _LOOK_S) -> None:
        """Returns when it is so. Raises Unavailable after the limit, or the Problem of a child that has ended."""
        deadline = time.monotonic() + limit_s
        while not done():
            for child in self.must_run:
                if not child.running:
                    raise failure(child)
            if time.monotonic() > deadline:
                raise Unavailable(f"waited for {limit_s:.0f} s, in vain: {what}{self._logs()}")
            self._meanwhile()
            time.sleep(look_s)

    def _logs(self) -> str:
        ends = ((child, "\n".join(child.said().splitlines()[-_LINES:])) for child in self._suspects())
        return "".join(f"\nThe end of {child.log}:\n{said}" for child, said in ends)


def failure(child: Child) -> Problem:
    """The error for a child that ended as it should not: with the end of its log."""
    return child.failed(f"ended with status {child.exit_status}")


def end(child: Child, limit_s: float) -> None:
    """Asks it to stop and waits. Raises Problem when it does not go, or not with status 0."""
    if not child.stop(limit_s):
        raise child.failed(f"did not stop within {limit_s:.0f} s")
    if child.exit_status != 0:
        raise failure(child)
