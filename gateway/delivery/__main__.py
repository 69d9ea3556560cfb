"""``logferry deliver --config FILE``: the workers that push topics to receivers."""

from __future__ import annotations

import sys

from logferry.gateway.delivery.config import load
from logferry.gateway.delivery.worker import serve
from logferry.gateway.service.processes import run_service


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 2 wrong configuration or weak Kafka, 3 Kafka is not there."""
    text = (
        "Sends the chunks of topics to HTTP receivers, in order, until each batch is taken.\n"
        "Subscriptions are made by HTTP at the gateway (PUT /v1/subscriptions/NAME), or in the configuration."
    )
    return run_service("deliver", text, argv, load, serve, module="logferry.gateway.delivery")


if __name__ == "__main__":
    sys.exit(main())
