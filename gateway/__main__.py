"""``logferry gateway --config FILE``: the workers of one data centre's gateway."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop
from logferry.gateway.config import ConfigError, load
from logferry.gateway.service.supervisor import exit_status, supervise
from logferry.gateway.service.worker import serve


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
    return exit_status(lambda: _run(args.config, args.worker))


def _run(file: Path, worker: int | None) -> int:
    config = load(file)
    if worker is None:
        return supervise("logferry.gateway", file, config.workers)
    if not 0 <= worker < config.workers:
        raise ConfigError(f"--worker {worker}: the configuration has the workers 0 to {config.workers - 1}")
    uvloop.run(serve(config, worker, partial(load, file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
