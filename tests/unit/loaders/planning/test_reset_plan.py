"""Positions that an operator sets: the result, its report, and the refused targets."""

from __future__ import annotations

import pytest
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicOffsets, plan
from logferry.loaders.planning.position_plan import ResetTarget, abandoned_topics, plan_reset

COMMITTED = [Range("dc1.a", 0, "id1", 10, 20), Range("dc1.a", 1, "id1", 5, 5), Range("dc1.b", 0, "id2", 0, 7)]


def view(topic: str = "dc1.a", topic_id: str = "id1", *partitions: tuple[int, int]) -> dict[str, TopicOffsets]:
    return {topic: TopicOffsets(topic, topic_id, {i: PartitionOffsets(*p) for i, p in enumerate(partitions)})}


A = view("dc1.a", "id1", (8, 40), (0, 9), (2, 3))
RECREATED = view("dc1.a", "id9", (0, 4), (0, 5))


def moved(targets: list[str], views: dict[str, TopicOffsets]) -> tuple[dict[str, int], list[str]]:
    found = plan_reset(COMMITTED, views, [ResetTarget.parse(text) for text in targets])
    assert all(r.start == r.end for r in found.ranges), "nothing is read by a reset"
    return {f"{r.topic}:{r.partition}:{r.topic_id}": r.end for r in found.ranges}, [move.means for move in found.moves]


CASES: dict[str, tuple[list[str], dict[str, TopicOffsets], dict[str, int], list[str]]] = {
    "all to the end": (
        ["dc1.a=latest"],
        A,
        {"dc1.a:0:id1": 40, "dc1.a:1:id1": 9, "dc1.a:2:id1": 3, "dc1.b:0:id2": 7},
        ["20 offsets will never be loaded", "4 offsets will never be loaded", "1 offsets will never be loaded"],
    ),
    "one back": (
        ["dc1.a:0=12"],
        A,
        {"dc1.a:0:id1": 12, "dc1.a:1:id1": 5, "dc1.b:0:id2": 7},
        ["8 offsets will be loaded again: remove their rows first, or they will be duplicated"],
    ),
    "where it is": (
        ["dc1.a:1=5"],
        A,
        {"dc1.a:0:id1": 20, "dc1.a:1:id1": 5, "dc1.b:0:id2": 7},
        ["unchanged"],
    ),
    "recreated": (
        ["dc1.a=earliest"],
        RECREATED,
        {"dc1.a:0:id9": 0, "dc1.a:1:id9": 0, "dc1.b:0:id2": 7},
        ["another topic of that name: the rest of the older one will never be loaded"] * 2,
    ),
    "forgotten": (
        ["dc1.b=forget", "dc1.a:0=earliest"],
        A,
        {"dc1.a:0:id1": 8, "dc1.a:1:id1": 5},
        [
            "its position is removed",
            "12 offsets will be loaded again: remove their rows first, or they will be duplicated",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_positions_and_what_they_mean(case: str):
    targets, views, positions, means = CASES[case]
    assert moved(targets, views) == (positions, means)


def test_a_load_continues_from_there():
    after = plan_reset(COMMITTED, RECREATED, [ResetTarget.parse("dc1.a=earliest"), ResetTarget.parse("dc1.b=forget")])
    planned = plan(after.ranges, RECREATED, ["dc1.a"], 100)
    assert planned.stopped == ()
    assert planned.records == 9


WRONG = {
    "dc1.a": "TOPIC=earliest|latest|forget, or TOPIC:PARTITION=",
    "dc1.a=7": "an offset needs a partition",
    "dc1.a:0=forget": "a topic can be forgotten, a partition cannot",
    "dc1.a:9=1": "dc1.a has no partition 9; name one that it has: 0 to 2",
    "dc1.a:0=7": "Kafka holds 8 to 40",
    "dc1.a:0=41": "Kafka holds 8 to 40",
    "dc1.c=latest": "dc1.c does not exist",
    "dc1.c=forget": "no committed position in this table",
}


@pytest.mark.parametrize("text", WRONG)
def test_targets_that_cannot_be_parsed(text: str):
    with pytest.raises(LoaderConfigError) as error:
        moved([text], A)
    assert WRONG[text] in str(error.value)


def test_one_partition_of_a_recreated_topic():
    with pytest.raises(LoaderConfigError, match="reset all of its partitions, not one"):
        moved(["dc1.a:0=earliest"], RECREATED)


def test_only_named_topics_that_cannot_be_read_are_abandoned():
    views = {**RECREATED, **view("dc1.b", "id2", (0, 7))}
    targets = [ResetTarget.parse("dc1.a=earliest"), ResetTarget.parse("dc1.b=latest")]
    assert abandoned_topics(COMMITTED, views, targets) == {"dc1.a"}
    assert abandoned_topics(COMMITTED, views, [targets[1]]) == set()
    assert abandoned_topics(COMMITTED, A, targets) == {"dc1.b"}, "it is not there any more"
