"""A topic of two partitions, and loaders that a test starts and kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Topic
from tests.support.loader_process import LoaderProcess, loaders


@pytest.fixture
def start(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Callable[..., LoaderProcess]]:
    """``start(table, topic, …)``: as `loaders` gives them."""
    with loaders(kafka.bootstrap, tmp_path) as begin:
        yield begin


@pytest.fixture
async def topic(kafka: KafkaCluster, topic_name: str) -> Topic:
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create(partitions=2)
    return topic
