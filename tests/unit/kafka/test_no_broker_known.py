"""A broker that knows of no broker, as one does for some milliseconds after it was frozen for half a minute.

Real Kafka cannot be held in that moment, so a stand-in answers as it was seen to.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest
from aiokafka.errors import KafkaConnectionError
from logferry.gateway.config import Config
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.group_commit import GroupCommit
from logferry.gateway.topics.catalog import TopicCatalog

_METADATA, _VERSIONS = 3, 18
# No error; of Metadata version 0 to 1. No brokers, no controller, no topics.
_ANSWERS = {_VERSIONS: struct.pack(">hihhh", 0, 1, _METADATA, 0, 1), _METADATA: struct.pack(">iii", 0, -1, 0)}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            key, _version, correlation = struct.unpack(">hhi", (await reader.readexactly(size))[:8])
            body = struct.pack(">i", correlation) + _ANSWERS[key]
            writer.write(struct.pack(">i", len(body)) + body)
    except asyncio.IncompleteReadError:
        writer.close()


@pytest.fixture
async def config() -> AsyncIterator[Config]:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": f"127.0.0.1:{port}"}})


async def test_is_an_error_that_passes_and_not_the_end_of_the_worker(config: Config) -> None:
    kafka = KafkaClient({"bootstrap_servers": config.kafka.bootstrap_servers}, "test")
    producer = GroupCommit(kafka, TopicCatalog(kafka, config), config, 0)
    try:
        with pytest.raises(KafkaConnectionError, match="knows of no broker yet"):
            await kafka.start()
        with pytest.raises(KafkaConnectionError, match="knows of no broker yet"):
            await producer.fence()
    finally:
        await producer.discard()
        await kafka.close()
