"""Waits for other processes: always with a time limit, and ended by the failure of a required process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from logferry.ops.cli.problems import CommandError, Unavailable
from logferry.ops.stack.processes import Child

LIMIT_S: Final = 60.0
_LOOK_S: Final = 0.05
_LINES: Final = 8


class BoundedWait:
    """``must_run``: children whose end fails the demo. ``meanwhile``: called at each look. ``suspects``: children whose
    logs are printed after a time-out."""

    def __init__(self, meanwhile: Callable[[], None], suspects: Callable[[], Sequence[Child]]) -> None:
        self.must_run: list[Child] = []
        self._meanwhile, self._suspects = meanwhile, suspects

    def until(self, done: Callable[[], bool], what: str, limit_s: float = LIMIT_S, look_s: float = _LOOK_S) -> None:
        """Returns when ``done``. Raises Unavailable after the limit, CommandError when a required child has ended."""
        deadline = time.monotonic() + limit_s
        while not done():
            for child in self.must_run:
                if not child.running:
                    raise failure(child)
            if time.monotonic() > deadline:
                raise Unavailable(f"not reached within {limit_s:.0f} s: {what}{self._logs()}")
            self._meanwhile()
            time.sleep(look_s)

    def _logs(self) -> str:
        ends = ((child, "\n".join(child.log_tail().splitlines()[-_LINES:])) for child in self._suspects())
        return "".join(f"\nThe end of {child.log}:\n{tail}" for child, tail in ends)


def failure(child: Child) -> CommandError:
    """The error for a child that ended unexpectedly, with the last lines of its log."""
    return child.failed(f"ended with status {child.exit_status}")


def stop_child(child: Child, limit_s: float) -> None:
    """Stops a child. Raises CommandError when it does not stop in time or its status is not 0."""
    if not child.stop(limit_s):
        raise child.failed(f"did not stop within {limit_s:.0f} s")
    if child.exit_status != 0:
        raise failure(child)
