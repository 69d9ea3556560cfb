"""``logferry mirror --config FILE``: the workers that mirror the topics of other data centres here."""

from __future__ import annotations

import sys

from logferry.gateway.service.processes import run_service
from logferry.mirror.config import load
from logferry.mirror.worker import serve


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 2 wrong configuration or weak Kafka, 3 Kafka is not there."""
    text = (
        "Mirrors the topics of other data centres here: same records, same order, each exactly once.\n"
        "`logferry mirror resume` resumes a partition that has stopped."
    )
    return run_service("mirror", text, argv, load, serve)


if __name__ == "__main__":
    sys.exit(main())
