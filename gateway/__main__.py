"""``logferry gateway --config FILE``: the workers of one data centre's gateway."""

from __future__ import annotations

import sys

from logferry.gateway.config import load
from logferry.gateway.service.processes import run_service
from logferry.gateway.service.worker import serve


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 2 wrong configuration or weak Kafka, 3 Kafka is not there."""
    text = "Receives chunks over HTTP and records each exactly once in Kafka."
    return run_service("gateway", text, argv, load, serve)


if __name__ == "__main__":
    sys.exit(main())
