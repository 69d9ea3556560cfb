"""Reads Kafka for the audit: every committed record up to an end that was taken before.

The ends are high watermarks, which include open transactions. Reading waits until these are decided (Kafka aborts a
transaction after its timeout). So one topic can be compared with another while the gateway continues to write, if both
are read in the right order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, errors, structs
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.broker_connection import start_or_explain
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.kafka.record_batch import FetchedRecords
from logferry.ops.cli.problems import Unavailable

_FETCH_BYTES: Final = 4 << 20
_WAIT_MS: Final = 500
_DECIDED_WITHIN_S: Final = 90.0


@asynccontextmanager
async def connected(options: dict[str, Any]) -> AsyncIterator[KafkaClient]:
    """``options``: of Kafka's clients. Raises Unavailable when Kafka does not answer, now or later."""
    kafka = KafkaClient(options, "logferry-audit")
    try:
        try:
            await start_or_explain(kafka)
            yield kafka
        finally:
            await kafka.close()
    except (errors.KafkaError, TimeoutError, OSError) as error:
        where = options["bootstrap_servers"]
        raise Unavailable(f"Kafka at {where} cannot be read: {str(error) or type(error).__name__}") from error


async def high_watermarks(kafka: KafkaClient, places: list[TopicPartition]) -> dict[TopicPartition, int]:
    """The ends of partitions, open transactions included."""
    options: dict[str, Any] = kafka.options
    consumer = AIOKafkaConsumer(
        client_id="logferry-audit", isolation_level="read_uncommitted", enable_auto_commit=False, **options
    )
    await consumer.start()
    try:
        found = await consumer.end_offsets([structs.TopicPartition(*place) for place in places]) if places else {}
    finally:
        await consumer.stop()
    return {(place.topic, place.partition): end for place, end in found.items()}


async def committed(
    kafka: KafkaClient, place: TopicPartition, start: int, end: int, overtaken: Callable[[int, int], None]
) -> AsyncIterator[FetchedRecords]:
    """Everything committed in [start, end), and perhaps more at the end of the last fetch.

    ``overtaken`` is called with a range of offsets that retention removed before they could be read.
    Raises Unavailable when a transaction stays open in the range.
    """
    topic, partition = place
    position = start
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _DECIDED_WITHIN_S
    while position < end:
        try:
            fetched = await kafka.fetch(topic, partition, position, max_bytes=_FETCH_BYTES, wait_ms=_WAIT_MS)
        except errors.OffsetOutOfRangeError:
            first = await kafka.offset(topic, partition, EARLIEST)
            if first <= position:
                raise
            overtaken(position, first)
            position = first
            continue
        if fetched.next_offset > position:
            yield fetched
            position = fetched.next_offset
            deadline = loop.time() + _DECIDED_WITHIN_S
        elif fetched.last_stable >= end:
            return
        elif loop.time() > deadline:
            raise Unavailable(
                f"{topic}-{partition}: a transaction at offset {fetched.last_stable} stays open; no record after it "
                "can be read. End it (kafka-transactions.sh find-hanging) and run the audit again"
            )
