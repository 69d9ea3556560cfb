"""One gateway serves all of these tests, so they share its event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.served_gateway import Gateway


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def gateway(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Two workers; small limits for what a session holds."""
    folder = tmp_path_factory.mktemp("gateway")
    async with Gateway(folder, kafka.bootstrap, 2, "[limits]\nsession_bytes = 1048576\n") as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def admin(kafka: KafkaCluster) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await client.start()
    yield client
    await client.close()
