"""``logferry mirror --config FILE``: the workers that bring other data centres' topics here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop
from logferry.gateway.config import ConfigError
from logferry.gateway.service.supervisor import exit_status, supervise
from logferry.mirror.config import load
from logferry.mirror.resuming import resume
from logferry.mirror.worker import serve


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 2 wrong configuration or weak Kafka, 3 Kafka is not there."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["resume"]:
        return resume(given[1:])
    parser = argparse.ArgumentParser(
        prog="logferry mirror",
        description="Brings the topics of other data centres here: same records, same order, each exactly once. "
        "`logferry mirror resume` lets a partition go on that has stopped.",
        epilog="example: logferry mirror --config mirror.toml",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the TOML configuration")
    parser.add_argument("--worker", type=int, metavar="I", help="run this one worker only, in the foreground")
    args = parser.parse_args(given)
    return exit_status(lambda: _run(args.config, args.worker))


def _run(file: Path, worker: int | None) -> int:
    config = load(file)
    if worker is None:
        return supervise("logferry.mirror", file, config.workers)
    if not 0 <= worker < config.workers:
        raise ConfigError(f"--worker {worker}: the configuration has the workers 0 to {config.workers - 1}")
    uvloop.run(serve(config, worker))
    return 0


if __name__ == "__main__":
    sys.exit(main())
