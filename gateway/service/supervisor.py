"""All workers of a service on this host, each a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.config import ConfigError
from logferry.gateway.errors import CannotListen, WeakKafka

WRONG_USE: Final = 2
SERVICE_AWAY: Final = 3
_RESTART_S: Final = 1.0


def exit_status(run: Callable[[], int]) -> int:
    """Of ``run``, or what its error means: 2 wrong configuration or weak Kafka, 3 Kafka is not there."""
    try:
        return run()
    except (ConfigError, WeakKafka) as error:
        log.event("error", "refused_to_start", reason=str(error))
        return WRONG_USE
    except CannotListen as error:
        log.event("error", "cannot_listen", listen=error.listen, reason=str(error.reason))
        return WRONG_USE
    except (KafkaError, OSError) as error:
        log.event("error", "kafka_away", reason=str(error) or type(error).__name__)
        return SERVICE_AWAY


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
