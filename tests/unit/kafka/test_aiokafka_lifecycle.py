"""aiokafka's connections to Kafka, where they break at an instant that it does not expect."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.admin import ApiVersionRequest
from logferry.gateway.kafka import aiokafka_internals  # noqa: F401  what it sets holds for aiokafka


async def send_on_a_connection_that_has_just_broken() -> list[object]:
    """Its transport is closed, and nobody has been told yet. Returns why aiokafka closed it."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        closed: list[object] = []
        host, port = server.sockets[0].getsockname()
        connection = AIOKafkaConnection(host, port, on_close=lambda _, reason: closed.append(reason))
        connection._reader, connection._writer = await asyncio.open_connection(host, port)
        connection._read_task = asyncio.create_task(asyncio.sleep(0))
        connection._writer.transport.abort()
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="the handler is closed"):
            connection._writer.write(b"uvloop's own error")
        with pytest.raises(KafkaConnectionError, match="the connection broke"):
            connection.send(ApiVersionRequest())
        return closed


def test_a_connection_that_breaks_as_a_request_is_sent_ends_no_worker() -> None:
    """The loops of a worker that look after Kafka expect Kafka's errors; any other one ends the worker."""
    assert uvloop.run(send_on_a_connection_that_has_just_broken()) == [CloseReason.CONNECTION_BROKEN]
