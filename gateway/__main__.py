"""``logferry gateway --config FILE``: the workers of one data centre's gateway."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import uvloop
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.config import Config, ConfigError, load
from logferry.gateway.errors import WeakKafka
from logferry.gateway.worker import serve

WRONG_USE: Final = 2
SERVICE_AWAY: Final = 3
_RESTART_S: Final = 1.0


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 2 wrong configuration or weak Kafka, 3 Kafka is not there."""
    parser = argparse.ArgumentParser(
        prog="logferry gateway",
        description="Receives chunks over HTTP and records each exactly once in Kafka.",
        epilog="example: logferry gateway --config gateway.toml",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the TOML configuration")
    parser.add_argument("--worker", type=int, metavar="I", help="run this one worker only, in the foreground")
    args = parser.parse_args(argv)
    # Until there is something that could be taken over anew; by default it would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = load(args.config)
        if args.worker is None:
            return _supervise(config, args.config)
        if not 0 <= args.worker < config.workers:
            raise ConfigError(f"--worker {args.worker}: the configuration has the workers 0 to {config.workers - 1}")
        uvloop.run(serve(config, args.worker, partial(load, args.config)))
    except (ConfigError, WeakKafka) as error:
        log.event("error", "refused_to_start", reason=str(error))
        return WRONG_USE
    except OSError as error:
        log.event("error", "cannot_listen", listen=config.listen, worker=args.worker, reason=str(error))
        return WRONG_USE
    except (KafkaError, TimeoutError) as error:
        log.event("error", "kafka_away", reason=str(error) or type(error).__name__)
        return SERVICE_AWAY
    return 0


def _supervise(config: Config, path: Path) -> int:
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
        command = [sys.executable, "-m", "logferry.gateway", "--config", str(path), "--worker", str(worker)]
        return subprocess.Popen(command)

    children: dict[int, subprocess.Popen[bytes]] = {}
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, reload)
    children.update({worker: start(worker) for worker in range(config.workers)})
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


if __name__ == "__main__":
    sys.exit(main())
