"""Standard input → spool, byte for byte, until its end.

Standard input cannot be read again: what was read and is not in the spool when the client is killed is lost, and so is
what is in the pipe then. While the spool is full nothing is read, so the writing program waits.
"""

from __future__ import annotations

import os
import select
import threading

from logferry.client.inputs.counters import InputCounters
from logferry.client.inputs.spool import Spool

READ_BYTES = 1 << 16


class StandardInput:
    """``fd``: what is read. ``is_over``: its end was reached, and all of it is in the spool's memory."""

    def __init__(self, spool: Spool, counters: InputCounters, fd: int = 0) -> None:
        self._spool = spool
        self._counters = counters
        self._fd = fd
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=counters.guard(self._work), name="stdin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def reload(self) -> None:
        """Nothing can be read again."""

    def close(self, timeout_s: float) -> None:
        """What is in the pipe is still taken, as far as there is room."""
        os.write(self._end, b"\0")
        self._thread.join(timeout_s)

    def _work(self) -> None:
        spool = self._spool
        if spool.end and not spool.ends_with_newline():
            spool.put_when_room(b"\n")  # the line of an earlier run, which was killed
        while True:
            ready, _, _ = select.select([self._fd, self._ended], [], [])
            if self._fd not in ready:
                return  # the client ends, and the pipe is empty
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                continue
            if not data:
                spool.is_over = True
                return
            if not spool.put_when_room(data):
                return
            self._counters.took(data.count(b"\n"), len(data))
