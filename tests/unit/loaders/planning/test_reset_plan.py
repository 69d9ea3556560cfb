"""Other positions by command: what they become, what is said of it, what is refused."""

from __future__ import annotations

import pytest
from logferry.loaders.errors import ConfigError
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicView, plan
from logferry.loaders.planning.reset_plan import Target, given_up, reset

COMMITTED = [Range("dc1.a", 0, "id1", 10, 20), Range("dc1.a", 1, "id1", 5, 5), Range("dc1.b", 0, "id2", 0, 7)]


def view(topic: str = "dc1.a", topic_id: str = "id1", *partitions: tuple[int, int]) -> dict[str, TopicView]:
    return {topic: TopicView(topic, topic_id, {i: PartitionOffsets(*p) for i, p in enumerate(partitions)})}


A = view("dc1.a", "id1", (8, 40), (0, 9), (2, 3))
ANEW = view("dc1.a", "id9", (0, 4), (0, 5))


def moved(targets: list[str], views: dict[str, TopicView]) -> tuple[dict[str, int], list[str]]:
    found = reset(COMMITTED, views, [Target.parse(text) for text in targets])
    assert all(r.start == r.end for r in found.ranges), "nothing is read by a reset"
    return {f"{r.topic}:{r.partition}:{r.topic_id}": r.end for r in found.ranges}, [move.means for move in found.moves]


CASES: dict[str, tuple[list[str], dict[str, TopicView], dict[str, int], list[str]]] = {
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
        ["8 offsets will be loaded again: remove their rows, or they stand twice"],
    ),
    "where it is": (
        ["dc1.a:1=5"],
        A,
        {"dc1.a:0:id1": 20, "dc1.a:1:id1": 5, "dc1.b:0:id2": 7},
        ["stays where it is"],
    ),
    "created anew": (
        ["dc1.a=earliest"],
        ANEW,
        {"dc1.a:0:id9": 0, "dc1.a:1:id9": 0, "dc1.b:0:id2": 7},
        ["another topic of that name: what was left of the older one is never loaded"] * 2,
    ),
    "forgotten": (
        ["dc1.b=forget", "dc1.a:0=earliest"],
        A,
        {"dc1.a:0:id1": 8, "dc1.a:1:id1": 5},
        ["no position is kept of it", "12 offsets will be loaded again: remove their rows, or they stand twice"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_positions_and_what_they_mean(case: str):
    targets, views, positions, means = CASES[case]
    assert moved(targets, views) == (positions, means)


def test_a_load_goes_on_from_there():
    after = reset(COMMITTED, ANEW, [Target.parse("dc1.a=earliest"), Target.parse("dc1.b=forget")])
    planned = plan(after.ranges, ANEW, ["dc1.a"], 100)
    assert planned.stopped == ()
    assert planned.records == 9


WRONG = {
    "dc1.a": "TOPIC=earliest|latest|forget, or TOPIC:PARTITION=",
    "dc1.a=7": "an offset is one of a partition",
    "dc1.a:0=forget": "a topic can be forgotten, a partition cannot",
    "dc1.a:9=1": "dc1.a has no partition 9",
    "dc1.a:0=7": "Kafka holds 8 to 40",
    "dc1.a:0=41": "Kafka holds 8 to 40",
    "dc1.c=latest": "dc1.c does not exist",
    "dc1.c=forget": "no positions of it",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be(text: str):
    with pytest.raises(ConfigError) as error:
        moved([text], A)
    assert WRONG[text] in str(error.value)


def test_one_partition_of_a_topic_created_anew():
    with pytest.raises(ConfigError, match="all of its partitions can be reset, not one"):
        moved(["dc1.a:0=earliest"], ANEW)


def test_only_what_is_named_and_cannot_be_read_is_given_up():
    views = {**ANEW, **view("dc1.b", "id2", (0, 7))}
    targets = [Target.parse("dc1.a=earliest"), Target.parse("dc1.b=latest")]
    assert given_up(COMMITTED, views, targets) == {"dc1.a"}
    assert given_up(COMMITTED, views, [targets[1]]) == set()
    assert given_up(COMMITTED, A, targets) == {"dc1.b"}, "it is not there any more"
