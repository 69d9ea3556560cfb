"""Metadata of many partitions: decoded whole, and not by the event loop."""

from __future__ import annotations

import gc
import time
from io import BytesIO
from typing import Any

import pytest
from logferry.gateway.kafka.requests import _METADATA, MetadataRequest, PartitionMetadata, read_answer, read_metadata

ID = bytes(range(16))
UNKNOWN = 3


def answer(topics: int, partitions: int) -> bytes:
    """As a broker sends it, behind the header."""
    brokers: list[Any] = [(node, f"kafka{node}", 9092, None, {}) for node in (1, 2, 3)]
    parts: list[Any] = [(0, number, number % 3 + 1, 5, [1, 2, 3], [1, 2], [], {}) for number in range(partitions)]
    known: list[Any] = [(0, f"dc1.topic-{number}", ID, False, parts, 0, {}) for number in range(topics)]
    gone: Any = (UNKNOWN, "dc1.gone", bytes(16), False, [], 0, {})
    return bytes(_METADATA.encode((0, brokers, "cluster", 1, [*known, gone], {})))


@pytest.mark.parametrize(("topics", "partitions"), [(1, 3), (1, 10_000), (1000, 10)])
async def test_the_loop_is_not_held_by_metadata(topics: int, partitions: int) -> None:
    """In CPU time of the loop's thread; decoded by the loop, ten thousand partitions are some 50 ms."""
    raw = answer(topics, partitions)
    # What aiokafka does with it, in the event loop.
    response_type = MetadataRequest(None).prepare({3: (0, 13)}).RESPONSE_TYPE
    gc.collect()  # what other tests left would be collected meanwhile
    began = time.thread_time()
    view = await read_answer(response_type.decode(BytesIO(raw)), read_metadata)
    held_s = time.thread_time() - began
    assert (view.cluster_id, view.brokers[2], view.errors) == ("cluster", ("kafka2", 9092), {"dc1.gone": UNKNOWN})
    assert len(view.topics) == topics
    for topic in view.topics.values():
        assert (topic.id, len(topic.partitions)) == (ID, partitions)
        assert topic.partitions[2] == PartitionMetadata(2, 3, 5, (1, 2, 3), (1, 2))
    assert held_s < 0.01
