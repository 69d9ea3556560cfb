"""All workers of a service on this host, each a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from logferry.gateway import log

WRONG_USE: Final = 2
SERVICE_AWAY: Final = 3
_RESTART_S: Final = 1.0


def supervise(module: str, configuration: Path, workers: int) -> int:
    """Runs all workers; one that dies is started again after a second, one that refuses to start ends them all."""
    stopping = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True
        for child in children.values():
            child.terminate()

    def reload(_number: int, _frame: object) -> None:
        for child in children.values():
            child.send_signal(signal.SIGHUP)

    def start(worker: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, "--config", str(configuration), "--worker", str(worker)]
        return subprocess.Popen(command)

    children: dict[int, subprocess.Popen[bytes]] = {}
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, reload)
    children.update({worker: start(worker) for worker in range(workers)})
    worst = 0
    while children:
        time.sleep(0.1)
        for worker, child in list(children.items()):
            status = child.poll()
            if status is None:
                continue
            del children[worker]
            if stopping:
                worst = max(worst, status if status > 0 else 0)
            elif status == WRONG_USE:
                worst = status
                stop(0, None)
            else:
                log.event("error", "worker_died", worker=worker, status=status)
                time.sleep(_RESTART_S)
                children[worker] = start(worker)
    return worst
