"""Which data centre's gateway a Kafka belongs to, told by the topics alone."""

from __future__ import annotations

import pytest
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.ops.audit.log.read import only_dc
from logferry.ops.cli.problems import UsageError


def views(*names: str) -> dict[str, TopicMetadata]:
    return {name: TopicMetadata(name, b"i" * 16, False, ()) for name in names}


@pytest.mark.parametrize(
    ("names", "dc"),
    [
        (["l.gateway.dc1.state", "dc1.nginx"], "dc1"),
        (["l.gateway.dc1.state", "l.gateway.dc2.state", "l.mirror.dc1.state"], "dc1"),
        (["l.gateway.dc1.state", "l.gateway.dc2.state", "l.mirror.dc2.state"], "dc2"),
    ],
)
def test_states_that_a_mirror_brought_are_another_data_centres(names: list[str], dc: str) -> None:
    assert only_dc(views(*names), "l") == dc


@pytest.mark.parametrize("names", [[], ["l.gateway.dc1.state", "l.gateway.dc2.state"]])
def test_the_data_centre_must_be_named_where_it_is_not_the_only_one(names: list[str]) -> None:
    with pytest.raises(UsageError):
        only_dc(views(*names), "l")
