"""The first connection to Kafka, when a worker starts."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.kafka.client import Kafka

_CONNECT_DEADLINE_S: Final = 30.0
# What a broker says of a wrong password, which waiting does not mend.
_REFUSED: Final = "Authentication failed"


class _Heard(logging.Handler):
    """The last that a logger said: aiokafka tells why a broker refused it there, and nowhere else."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


async def arrive(kafka: Kafka) -> None:
    """Connects, also to brokers that are only starting. Raises KafkaError: none answers, or one refuses."""
    heard, logger = _Heard(logging.ERROR), logging.getLogger("aiokafka")
    logger.addHandler(heard)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        async with asyncio.timeout(_CONNECT_DEADLINE_S):
            while True:
                try:
                    return await kafka.start()
                except (KafkaError, OSError) as error:
                    if _REFUSED in heard.text:
                        raise KafkaError(f"{kafka.options['bootstrap_servers']}: {heard.text}") from None
                    log.event("warning", "kafka_unreachable", error=heard.text or str(error))
                    await asyncio.sleep(1)
    except TimeoutError:
        servers = kafka.options["bootstrap_servers"]
        reason = f": {heard.text}" if heard.text else ""
        raise KafkaError(f"no broker of {servers} answers within {_CONNECT_DEADLINE_S:g} s{reason}") from None
    finally:
        logger.setLevel(logging.CRITICAL)
        logger.removeHandler(heard)
