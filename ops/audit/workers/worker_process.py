"""The main program of a worker of the audit: takes work and its jobs from a socket, and answers on it.

It ends with the process that started it, whichever way that ends. Ctrl-C is that process's to handle.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, Final

from logferry.ops.cli.problems import CommandError

# Kinds of answers.
PROGRESS: Final = "progress"
DONE: Final = "done"
REFUSED: Final = "refused"
BROKEN: Final = "broken"
_PDEATHSIG: Final = 1
_PROGRESS_S: Final = 0.2


async def serve(connection: Connection) -> None:
    """Until the other side closes the connection."""
    while True:
        try:
            work, handles = connection.recv()
            work.adopt([recv_handle(connection) for _ in range(handles)])
        except EOFError:
            return
        try:
            async with work:
                while (job := connection.recv()) is not None:
                    connection.send((DONE, await work.do(job, _Progress(connection))))
        except EOFError:
            return
        except CommandError as error:
            connection.send((REFUSED, error))
        except Exception:  # noqa: BLE001 - the other side raises it
            connection.send((BROKEN, traceback.format_exc()))


class _Progress:
    def __init__(self, connection: Connection) -> None:
        self._connection, self._sent = connection, time.monotonic()

    def __call__(self, done: Any) -> None:
        now = time.monotonic()
        if now - self._sent >= _PROGRESS_S:
            self._sent = now
            self._connection.send((PROGRESS, done))


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Failures of the Kafka client are reported once, as an error of the command.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    ctypes.CDLL(None, use_errno=True).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    asyncio.run(serve(Connection(descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
