"""The planning of batches: no offset is left out, none is read twice, every stop is reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.loaders.planning.plan import (
    PartitionOffsets,
    Range,
    TopicOffsets,
    TopicPartition,
    fair_shares,
    plan,
    replaced,
    unreadable,
)


def view(topic: str = "dc1.a", topic_id: str = "id1", **partitions: tuple[int, int]) -> dict[str, TopicOffsets]:
    """``view(p0=(earliest, stable))``"""
    offsets = {int(name[1:]): PartitionOffsets(*pair) for name, pair in partitions.items()}
    return {topic: TopicOffsets(topic, topic_id, offsets)}


def test_first_batch_starts_at_the_earliest_retained():
    planned = plan([], view(p0=(5, 20), p1=(0, 0)), ["dc1.a"], 100)
    assert planned.ranges == (Range("dc1.a", 0, "id1", 5, 20), Range("dc1.a", 1, "id1", 0, 0))
    assert planned.records == 15


def test_next_batch_starts_at_the_last_end():
    planned = plan([Range("dc1.a", 0, "id1", 5, 20)], view(p0=(10, 33)), ["dc1.a"], 100)
    assert planned.ranges == (Range("dc1.a", 0, "id1", 20, 33),)


def test_positions_of_topics_that_are_not_wanted_are_carried():
    committed = [Range("dc1.a", 0, "id1", 5, 20), Range("dc1.b", 0, "id2", 1, 7)]
    planned = plan(committed, view(p0=(0, 30)), ["dc1.a"], 100)
    assert Range("dc1.b", 0, "id2", 7, 7) in planned.ranges


def test_targets_bound_the_batch_and_leave_new_partitions_for_later():
    committed = [Range("dc1.a", 0, "id1", 0, 10)]
    targets = {TopicPartition("dc1.a", 0): 15}
    planned = plan(committed, view(p0=(0, 99), p1=(0, 50)), ["dc1.a"], 100, targets)
    assert planned.ranges == (Range("dc1.a", 0, "id1", 10, 15), Range("dc1.a", 1, "id1", 0, 0))


def test_a_target_below_the_position_reads_nothing():
    planned = plan([Range("dc1.a", 0, "id1", 0, 10)], view(p0=(0, 99)), ["dc1.a"], 100, {TopicPartition("dc1.a", 0): 4})
    assert planned.records == 0
    assert planned.ranges == (Range("dc1.a", 0, "id1", 10, 10),)


CHANGES = {
    "removed": ({}, "no longer exists"),
    "recreated": (view(topic_id="id2", p0=(0, 50)), "recreated"),
    "recreated and empty": (view(topic_id="id2", p0=(0, 0)), "recreated"),
    "retention overtook": (view(p0=(11, 50)), "records 10 to 10 of partition 0 were removed"),
    "log cut back": (view(p0=(0, 9)), "its log was truncated"),
    "partition gone": (view(p1=(0, 9)), "no longer has partition 0"),
    "new partition already cleaned": (view(p0=(0, 10), p1=(3, 9)), "new partition 1 were removed"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_topic_stops_and_keeps_its_positions_while_others_continue(case):
    views, reason = CHANGES[case]
    committed = [Range("dc1.a", 0, "id1", 0, 10), Range("dc1.b", 0, "idb", 0, 1)]
    planned = plan(committed, {**views, **view("dc1.b", "idb", p0=(0, 5))}, ["dc1.a", "dc1.b"], 100)
    assert planned.ranges == (Range("dc1.a", 0, "id1", 10, 10), Range("dc1.b", 0, "idb", 1, 5))
    (stop,) = planned.stopped
    assert stop.topic == "dc1.a"
    assert reason in stop.reason


def test_what_retention_removed_of_loaded_records_is_no_change():
    planned = plan([Range("dc1.a", 0, "id1", 0, 10)], view(p0=(10, 12)), ["dc1.a"], 100)
    assert not planned.stopped
    assert planned.records == 2


UNREADABLE = {
    "removed": ({}, "no longer exists"),
    "recreated": (view(topic_id="id2", p0=(0, 50)), "recreated"),
    "start removed": (view(p0=(6, 50)), "records 5 to 5"),
    "end not there": (view(p0=(0, 9)), "truncated"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_planned_range_that_cannot_be_read_has_a_reason(case):
    views, reason = UNREADABLE[case]
    assert reason in (unreadable([Range("dc1.a", 0, "id1", 5, 10)], views) or "")


def test_a_planned_range_that_can_be_read():
    ranges = [Range("dc1.a", 0, "id1", 5, 10), Range("dc1.gone", 0, "x", 4, 4)]
    assert unreadable(ranges, view(p0=(5, 10), p1=(7, 9))) is None


def test_replaced_while_it_was_read():
    ranges = [Range("dc1.a", 0, "id1", 5, 10)]
    assert replaced(ranges, {"dc1.a": "id1"}) is None
    assert "recreated" in (replaced(ranges, {"dc1.a": "id2"}) or "")
    assert "removed" in (replaced(ranges, {}) or "")


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(0, 5000))
def test_shares_spend_the_budget_and_are_fair(wants: list[int], budget: int):
    shares = fair_shares(wants, budget)
    assert sum(shares) == min(budget, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    cut = [share for share, want in zip(shares, wants, strict=True) if share < want]
    assert not cut or max(shares) - min(cut) <= 1


@given(st.data())
def test_batches_in_a_row_cover_every_offset_once(data: st.DataObject):
    """While the log grows, batch after batch of any size reaches the targets, without a hole and without an overlap."""
    partitions = data.draw(st.integers(1, 5))
    earliest = [data.draw(st.integers(0, 20)) for _ in range(partitions)]
    ends = [start + data.draw(st.integers(0, 60)) for start in earliest]
    targets = {TopicPartition("dc1.a", p): end for p, end in enumerate(ends)}
    budget = data.draw(st.integers(1, 50))
    covered: list[list[Range]] = [[] for _ in range(partitions)]
    committed: tuple[Range, ...] = ()
    for _ in range(sum(ends) + 1):
        offsets = {p: PartitionOffsets(earliest[p], ends[p]) for p in range(partitions)}
        views = {"dc1.a": TopicOffsets("dc1.a", "id1", offsets)}
        planned = plan(committed, views, ["dc1.a"], budget, targets)
        assert planned.records <= budget
        if not planned.records:
            break
        committed = planned.ranges
        for r in committed:
            covered[r.partition].append(r)
        ends = [end + data.draw(st.integers(0, 5)) for end in ends]
    for p in range(partitions):
        reached = earliest[p]
        for r in covered[p]:
            assert r.start == reached
            reached = r.end
        assert reached == targets[TopicPartition("dc1.a", p)]
