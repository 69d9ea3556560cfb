"""All workers of a service on this host, each a process of its own."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.config import ConfigError, ServiceConfig
from logferry.gateway.errors import CannotListen, WeakKafka

WRONG_USE: Final = 2
SERVICE_AWAY: Final = 3
_RESTART_S: Final = 1.0
_REFUSED_S: Final = 4.0

_Config = TypeVar("_Config", bound=ServiceConfig)


def run_service(
    name: str,
    text: str,
    argv: list[str] | None,
    load: Callable[[Path], _Config],
    serve: Callable[[_Config, int, Callable[[], _Config]], Coroutine[Any, Any, None]],
) -> int:
    """The command of a service: runs all workers, or one. ``serve`` gets the configuration, the worker, a reload.

    Exit status: 0 stopped in order, 2 wrong configuration or weak Kafka, 3 Kafka does not answer.
    """
    parser = argparse.ArgumentParser(
        prog=f"logferry {name}",
        description=f"example: logferry {name} --config {name}.toml\n\n{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the TOML configuration")
    parser.add_argument("--worker", type=int, metavar="I", help="run only this worker, in the foreground")
    args = parser.parse_args(argv)

    # Until the worker can reload its configuration; by default SIGHUP would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = load(args.config)
        if args.worker is None:
            return supervise(f"logferry.{name}", args.config, config.workers)
        if not 0 <= args.worker < config.workers:
            raise ConfigError(f"--worker {args.worker}: the configuration has workers 0 to {config.workers - 1}")
        uvloop.run(serve(config, args.worker, partial(load, args.config)))
        return 0
    except (ConfigError, WeakKafka) as error:
        log.event("refused_to_start", reason=str(error))
        return WRONG_USE
    except CannotListen as error:
        log.event("cannot_listen", listen=error.listen, reason=str(error.reason))
        return WRONG_USE
    except (KafkaError, OSError) as error:
        log.event("kafka_away", reason=str(error) or type(error).__name__)
        return SERVICE_AWAY


def supervise(module: str, configuration: Path, workers: int) -> int:
    """Runs all workers. One that dies is restarted after a second.

    One that refuses its first start ends them all. One that refuses later, since Kafka or the configuration changed,
    is tried again: the others serve.
    """
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
    restarted = set[int]()
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
            elif status == WRONG_USE and worker not in restarted:
                worst = status
                stop(0, None)
            else:
                log.event("worker_died", worker=worker, status=status)
                restarted.add(worker)
                time.sleep(_RESTART_S if status != WRONG_USE else _REFUSED_S)
                children[worker] = start(worker)
    return worst
