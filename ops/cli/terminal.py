"""The terminal of a command: signals that end it as one exception, and a console for output that may be piped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

_WIDTH: Final = 140  # columns where the output is not a terminal
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """The user asked for the end; not an error."""


@contextmanager
def stop_on_signals(announce: bytes = b"stopping\n") -> Iterator[None]:
    """The first signal raises `StopRequested` in the body. Later ones are ignored until the body has ended, which must
    be bounded in time. The previous handlers are restored afterwards. For the main thread only.

    ``announce`` is written to standard error at once; pass nothing where the command draws on the terminal.
    """
    before = {number: signal.getsignal(number) for number in _NUMBERS}

    def stop(number: int, frame: object) -> None:
        for other in _NUMBERS:
            signal.signal(other, signal.SIG_IGN)
        os.write(2, announce)  # the signal may have interrupted a print
        raise StopRequested

    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def console_for_output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
