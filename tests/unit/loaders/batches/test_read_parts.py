"""How a read of Kafka is divided among cores, and what Java's client prints of topics."""

from __future__ import annotations

import pytest
from logferry.loaders.batches.records import offsets_at_once
from logferry.loaders.planning.plan import Range
from logferry.loaders.spark.kafka_access import described_topics


@pytest.mark.parametrize(
    ("sizes", "cores", "at_once"),
    [
        ((1000,), 2, 250),
        ((1000, 10), 2, 253),
        ((250, 250, 250, 250), 2, 250),
        ((1,), 2, 32),
        ((100,), 64, 32),
        ((), 2, 32),
    ],
)
def test_long_ranges_are_read_in_parts(sizes: tuple[int, ...], cores: int, at_once: int):
    """Two at least for each core; short ranges stay whole, as each part has a consumer of its own."""
    assert offsets_at_once([Range("dc1.a", n, "id", 5, 5 + size) for n, size in enumerate(sizes)], cores) == at_once


def test_descriptions_of_topics():
    """As Kafka's clients 3.9 and 4.3 print them."""
    node = "kafka1.example:9092 (id: 1 rack: null)"
    rest = f"leader={node}, replicas={node}, isr={node}, elr=, lastKnownElr="
    some = ", ".join(f"(partition={number}, {rest})" for number in (0, 1, 10))
    answer = (
        f"{{dc1.a-b_c=(name=dc1.a-b_c, internal=false, partitions={some}, authorizedOperations=null), "
        f"dc1.one=(name=dc1.one, internal=false, partitions=(partition=0, {rest}), authorizedOperations=null)}}"
    )
    assert described_topics(answer) == {"dc1.a-b_c": [0, 1, 10], "dc1.one": [0]}
    assert described_topics("{}") == {}
