"""How a lane fares: its state, since when and why, and what it last had to wait for. Nothing is decided by it.

A lane *waits* while it does not serve, and while a commit takes longer than `SLOW_MS`. Times are Unix ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

# opening: before the fence, and between tries. closed: it is another worker's, or the worker ends.
STATES: Final = ("opening", "fencing", "replaying", "serving", "closed")
SLOW_MS: Final = 1000


def now_ms() -> int:
    return int(time.time() * 1000)


@dataclass(slots=True)
class Wait:
    """``ended_ms`` None: it lasts."""

    reason: str
    began_ms: int
    ended_ms: int | None = None


@dataclass(slots=True)
class Course:
    """Changed by its lane alone.

    ``why`` names no topic, since whoever has to wait is told of it; ``error`` may, and is for those who may see all.
    """

    clock_ms: Callable[[], int] = now_ms
    state: str = "opening"
    why: str = "taken over"
    since_ms: int = field(init=False)
    transaction_ms: int | None = None
    committed_ms: int | None = None
    wait: Wait | None = field(init=False)
    error: str | None = None
    error_ms: int | None = None

    def __post_init__(self) -> None:
        self.since_ms = self.clock_ms()
        self.wait = Wait(self.why, self.since_ms)

    def enter(self, state: str, why: str | None = None) -> None:
        """``why`` None: for the same reason as before."""
        now = self.clock_ms()
        if state != self.state:
            self.state, self.since_ms = state, now
        if why is not None:
            self.why = why
        if state != "serving":
            if self.wait is None or self.wait.ended_ms is not None:
                self.wait = Wait(self.why, now)
            self.wait.reason = self.why
        elif self.wait is not None and self.wait.ended_ms is None:
            self.wait.ended_ms = now

    def fail(self, error: BaseException) -> None:
        """It opens again, and keeps what was wrong until something else is. The wait began with its transaction."""
        kind, text, state, began_ms = type(error).__name__, str(error), self.state, self.transaction_ms
        self.transaction_ms = None
        self.enter("opening", f"it failed ({kind})")
        if began_ms is not None and self.wait is not None:
            self.wait.began_ms = min(self.wait.began_ms, began_ms)
        if isinstance(error, TimeoutError) or text == TimeoutError.__name__:
            text = "Kafka did not answer in time"
        # Some errors begin with their name.
        self.error = f"while {state}: " + (text if kind in text else f"{kind}: {text}" if text else kind)
        self.error_ms = self.clock_ms()

    def begin(self) -> None:
        """A transaction."""
        self.transaction_ms = self.clock_ms()

    def commit(self) -> None:
        """The one that was begun."""
        began_ms, self.committed_ms = self.transaction_ms, self.clock_ms()
        self.transaction_ms = None
        if began_ms is not None and self.committed_ms - began_ms > SLOW_MS:
            self.wait = Wait("a commit took long", began_ms, self.committed_ms)
