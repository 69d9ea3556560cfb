"""Positions of one data centre as those of another: the refused, the delayed and the abandoned ones."""

from __future__ import annotations

import pytest
from logferry.loaders.planning.ledger_entry import MOVE, OriginOffset
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicOffsets, TopicPartition
from logferry.loaders.planning.position_plan import (
    PositionAnswer,
    answer_at_origin,
    known_originals,
    plan_move,
)
from logferry.loaders.storage.ledger import new_entry


def at(topic: str, partition: int, offset: int, topic_id: str = "id") -> Range:
    return Range(topic, partition, topic_id, offset, offset)


def view(topic: str, *offsets: tuple[int, int], topic_id: str = "new") -> TopicOffsets:
    return TopicOffsets(topic, topic_id, {number: PartitionOffsets(*pair) for number, pair in enumerate(offsets)})


POSITIONS = [at("dc1.a", 0, 10), at("dc1.a", 1, 20), at("dc2.a", 0, 30)]
VIEWS = {"dc1.a": view("dc1.a", (0, 100), (0, 100)), "dc2.a": view("dc2.a", (0, 100))}
TOLD = {
    TopicPartition("dc1.a", 0): PositionAnswer(7, "new"),
    TopicPartition("dc1.a", 1): PositionAnswer(14, "new"),
    TopicPartition("dc2.a", 0): PositionAnswer(33, "new"),
}


def test_all_positions_are_those_of_the_new_data_centre():
    found = plan_move(POSITIONS, TOLD, VIEWS, {}, (), "dc2")
    assert found.ranges == (at("dc1.a", 0, 7, "new"), at("dc1.a", 1, 14, "new"), at("dc2.a", 0, 33, "new"))
    assert [(move.before, move.after) for move in found.moves] == [(10, 7), (20, 14), (30, 33)]
    assert (found.refused, found.behind) == ((), ())


@pytest.mark.parametrize(
    ("told", "views", "why"),
    [
        ({}, {}, "there is no such topic"),
        ({}, {"dc1.a": view("dc1.a", (0, 100))}, "there is no partition 1"),
        ({}, {"dc1.a": view("dc1.a", (0, 100), (15, 100))}, "the records 14 to 14 of partition 1 were removed there"),
        ({TopicPartition("dc1.a", 1): PositionAnswer(14, "old")}, {}, "the copy was recreated"),
        ({TopicPartition("dc1.a", 1): PositionAnswer(None, why="it is another one")}, {}, "dc1.a: it is another one"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    told: dict[TopicPartition, PositionAnswer], views: dict[str, TopicOffsets], why: str
):
    seen = {**VIEWS, **views} if views or told else {"dc2.a": VIEWS["dc2.a"]}
    found = plan_move(POSITIONS, {**TOLD, **told}, seen, {}, (), "dc2")
    assert len(found.refused) == 1
    assert why in found.refused[0]
    assert "dc1.a" in found.refused[0]


def test_a_partition_without_an_answer_is_refused():
    found = plan_move(POSITIONS[:1], {}, VIEWS, {}, (), "dc2")
    assert found.refused == ("dc1.a: not mirrored",)


@pytest.mark.parametrize("told", [PositionAnswer(None, behind=True, why="up to 5"), PositionAnswer(101, "new")])
def test_a_position_that_is_not_mirrored_yet_is_waited_for(told: PositionAnswer):
    found = plan_move(POSITIONS[:1], {TopicPartition("dc1.a", 0): told}, VIEWS, {}, (), "dc2")
    assert (found.refused, len(found.behind)) == ((), 1)
    assert found.behind[0].startswith("dc1.a 0: ")


def test_topics_are_abandoned_or_begin_elsewhere_by_name_only():
    given = {TopicPartition("dc1.a", n): at("dc1.a", n, 100, "new") for n in range(2)}
    found = plan_move(POSITIONS, {}, VIEWS, given, {"dc2.a"}, "dc2")
    assert found.ranges == tuple(given.values())
    assert found.refused == ()
    assert [(move.topic, move.after) for move in found.moves] == [("dc1.a", 100), ("dc1.a", 100), ("dc2.a", None)]


def test_a_topic_that_is_at_home_in_the_new_place():
    original = OriginOffset("dc2.a", 0, "new", 33)
    assert answer_at_origin(original, VIEWS["dc2.a"]) == PositionAnswer(33, "new")
    assert answer_at_origin(original._replace(topic_id="old"), VIEWS["dc2.a"]).offset is None
    assert answer_at_origin(original, None).offset is None


def test_the_ledger_has_originals_for_exactly_the_noted_position():
    original = OriginOffset("dc2.a", 0, "home", 33)
    entries = [
        new_entry(0, "dc1", "p", "run", POSITIONS, originals=[original]),
        new_entry(1, "dc1", "p", "run", [at("dc2.a", 0, 31)]),
        new_entry(2, "dc9", "p", "run", [at("dc2.a", 0, 40)], originals=[original._replace(offset=1)]),
    ]
    asked = [at("dc2.a", 0, 31), at("dc2.a", 0, 30, "another"), at("dc2.a", 0, 40), at("dc3.a", 0, 1)]
    assert known_originals([*POSITIONS[2:], *asked], "dc1", entries) == ([original], asked)
    # What is at home needs no note.
    assert known_originals(POSITIONS[:2], "dc1", []) == (
        [OriginOffset("dc1.a", 0, "id", 10), OriginOffset("dc1.a", 1, "id", 20)],
        [],
    )


def test_a_move_reads_nothing_whatever_its_ranges_say():
    entry = new_entry(3, "dc2", "p", "run", [Range("dc1.a", 0, "new", 3, 7)], kind=MOVE)
    assert entry.reads == ()
