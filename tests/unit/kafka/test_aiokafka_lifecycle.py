"""Connections to Kafka that are ended, whatever became of what aiokafka does beside them."""

from __future__ import annotations

import asyncio

from aiokafka.client import AIOKafkaClient
from logferry.gateway.kafka.broker_connection import close_client


class Connection:
    _writer = None

    def __init__(self) -> None:
        self.is_closed = False

    def close(self, reason: object = None) -> asyncio.Future[None]:
        self.is_closed = True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def test_a_client_whose_metadata_task_died_is_ended_all_the_same() -> None:
    """As when its connection broke under it: "unable to perform operation on <TCPTransport closed=True …>"."""

    async def dies() -> None:
        raise RuntimeError("the handler is closed")

    client, connection = AIOKafkaClient(), Connection()
    client._sync_task = asyncio.create_task(dies())
    client._conns = {1: connection}
    await asyncio.wait([client._sync_task])
    await close_client(client)
    assert connection.is_closed
