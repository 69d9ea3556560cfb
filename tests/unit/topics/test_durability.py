"""Which topics are too weak to acknowledge anything in."""

from __future__ import annotations

import pytest
from logferry.gateway.kafka.requests import PartitionMetadata, TopicMetadata
from logferry.gateway.topics.health import replication, weakness

SETTINGS = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}


def topic(*replicas: int) -> TopicMetadata:
    """With so many replicas of each partition."""
    views = (
        PartitionMetadata(number, 1, 0, (*range(count),), (*range(count),)) for number, count in enumerate(replicas)
    )
    return TopicMetadata("dc1.t", bytes(16), False, tuple(views))


@pytest.mark.parametrize(
    ("found", "changes", "name"),
    [
        (topic(3, 3), {}, None),
        (topic(4, 3), {"min.insync.replicas": "3"}, None),
        (topic(3, 2), {}, "replication"),
        (topic(3), {"min.insync.replicas": "1"}, "min-isr"),
        (topic(3), {"unclean.leader.election.enable": "true"}, "unclean-election"),
    ],
)
def test_a_weak_topic_is_refused_by_name_unless_it_is_accepted(
    found: TopicMetadata, changes: dict[str, str], name: str | None
) -> None:
    said = weakness(found, SETTINGS | changes, ["another"])
    if name is None:
        assert said is None
        return
    assert f"dc1.t is too weak for exactly-once delivery: {name} (" in str(said)
    assert f'accept_weak_kafka = ["{name}"]' in str(said)
    assert weakness(found, SETTINGS | changes, [name]) is None


def test_a_topic_is_created_weaker_only_where_that_is_accepted() -> None:
    assert replication([], 1) == (3, 2)
    assert replication(["replication"], 1) == (1, 1)
    assert replication(["replication", "min-isr"], 2) == (2, 1)
