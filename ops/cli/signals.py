"""The signals by which a user wants an end, as one exception; for commands that have processes to end in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The user wants an end; not an error."""


@contextmanager
def stopped_by_signals(announce: bytes = b"stopping\n") -> Iterator[None]:
    """The first of SIGINT, SIGTERM, SIGHUP raises `Stopped` in the body; later ones wait for the orderly end, which
    is bounded. What was in force before is in force again afterwards. For the main thread only.

    ``announce`` goes to standard error at once; nothing for those who draw on the terminal.
    """
    before = {number: signal.getsignal(number) for number in _NUMBERS}

    def stop(number: int, frame: object) -> None:
        for other in _NUMBERS:
            signal.signal(other, signal.SIG_IGN)
        os.write(2, announce)  # print may be what was interrupted
        raise Stopped

    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
