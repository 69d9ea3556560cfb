"""``logferry gateway --config FILE``: the workers of one data centre's gateway."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.config import ConfigError, load
from logferry.gateway.errors import WeakKafka
from logferry.gateway.supervising import SERVICE_AWAY, WRONG_USE, supervise
from logferry.gateway.worker import serve


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
            return supervise("logferry.gateway", args.config, config.workers)
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


if __name__ == "__main__":
    sys.exit(main())
