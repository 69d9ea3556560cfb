"""Connections to Kafka, begun and ended: what aiokafka leaves open or waits for in vain."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, errors
from aiokafka.client import AIOKafkaClient


async def connect(client: AIOKafkaClient) -> None:
    """Raises KafkaConnectionError when no bootstrap server answers, or the one that does knows of no broker.

    One that was frozen for half a minute does not for some milliseconds, not even of itself. aiokafka would go on, and
    end in an assertion.
    """
    await client.bootstrap()
    if not client.cluster.brokers():
        raise errors.KafkaConnectionError("the broker that answers knows of no broker yet")


async def hang_up(client: AIOKafkaClient) -> None:
    """Breaks the client's connections off; what is under way on them is given up.

    Over TLS a broker that is asked something just before the goodbye never says its own, and asyncio would wait
    30 s for that. Nobody here needs a goodbye: what matters was answered before.
    """
    for connection in list(client._conns.values()):
        if connection._writer is not None:
            connection._writer.transport.abort()
    try:
        await client.close()
    except RuntimeError:
        # Of its task that keeps the metadata, which has ended by it: uvloop refuses to write to a connection that broke
        # this moment by an error that aiokafka does not expect.
        client._sync_task = None
        await client.close()


async def leave(consumer: AIOKafkaConsumer) -> None:
    """Leaves the group and ends the consumer. What it holds is freed even when Kafka does not hear of it."""
    consumer._closed = True
    try:
        if consumer._coordinator is not None:
            await consumer._coordinator.close()
    finally:
        if consumer._fetcher is not None:
            await consumer._fetcher.close()
        await hang_up(consumer._client)
