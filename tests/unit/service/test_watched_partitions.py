"""Which partitions a worker searches for transactions that stay open."""

from __future__ import annotations

from logferry.gateway.service.worker import _looks_at

LANES, PREFIXES = 12, frozenset({"dc1", "dc2", "logferry"})


def test_the_workers_together_look_at_each_partition_once() -> None:
    workers = [range(5), range(5, 9), range(9, 12)]
    looks = [
        sum(_looks_at(held, lambda: LANES, PREFIXES, "dc2.nginx", number) for held in workers) for number in range(500)
    ]
    assert set(looks) == {1}
    shares = [
        sum(_looks_at(held, lambda: LANES, PREFIXES, "dc2.nginx", number) for number in range(500)) for held in workers
    ]
    assert min(shares) > 80


def test_the_topics_of_other_programs_are_left_alone() -> None:
    topics = ("dc1.nginx", "dc2.nginx", "logferry.gateway.dc1.state", "dc3.nginx", "orders", "dc1x.y", "__transactions")
    found = [topic for topic in topics if _looks_at(range(LANES), lambda: LANES, PREFIXES, topic, 0)]
    assert found == ["dc1.nginx", "dc2.nginx", "logferry.gateway.dc1.state"]
