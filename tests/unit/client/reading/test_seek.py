"""A reader that is set elsewhere, or pauses, while pages are under way and wait."""

from __future__ import annotations

import random

import pytest
from logferry.client.reading.prefetch import PageRequest, PartitionScheduler
from logferry.client.reading.requests import RetryLater
from logferry.client.reading.subscription import ReadOffset

from tests.unit.client.reading.test_library_reading import A, B, Served, handed_out, rotation


def take(turns: PartitionScheduler, served: Served, now: float = 0.0) -> PageRequest:
    ask = turns.next_request(now)
    assert ask is not None
    turns.take(ask, *served.page(ask))
    return ask


def test_what_was_fetched_ahead_is_dropped_and_what_is_under_way_does_not_count() -> None:
    served, turns = Served(20), rotation(4, None)
    take(turns, served)
    late = turns.next_request(0.0)
    assert late is not None
    turns.move(A, ReadOffset(10))
    take(turns, served)
    turns.take(late, *served.page(late))
    assert handed_out(turns) == [(0, 10), (0, 12), (0, 14)]
    assert turns.position == {A: ReadOffset(16)}


def test_a_failure_from_before_delays_nothing() -> None:
    served, turns = Served(20), rotation(4, None)
    late = turns.next_request(0.0)
    assert late is not None
    turns.move(A, ReadOffset(4))
    turns.fail(late, RetryLater("away"), 0.0)
    take(turns, served)
    assert handed_out(turns)[0] == (0, 4)


def test_a_paused_partition_leaves_its_room_to_the_others() -> None:
    served, turns = Served(20, 20), rotation(2, None, None)
    take(turns, served)
    take(turns, served)
    turns.pause(A, True)
    assert turns.freed == 1
    assert handed_out(turns) == [(1, 0), (1, 2), (1, 4)]
    assert take(turns, served).partition == B
    assert turns.position[A] == ReadOffset(0)
    turns.pause(A, False)
    assert take(turns, served).partition == A
    assert handed_out(turns)[-3:] == [(0, 0), (0, 2), (0, 4)]


@pytest.mark.parametrize("seed", range(100))
def test_each_delivery_continues_where_the_last_one_or_the_move_left(seed: int) -> None:
    rng = random.Random(seed)
    served, turns = Served(15, 15), rotation(rng.randint(1, 4), None, None)
    paused: set[tuple[str, int]] = set()
    wanted, flying, seen = {A: 0, B: 0}, [], 0
    for step in range(600):
        ask = turns.next_request(float(step))
        if ask is not None:
            assert ask.partition not in paused
            flying.append(ask)
        if flying and rng.random() < 0.6:
            ask = flying.pop(rng.randrange(len(flying)))
            if rng.random() < 0.3:
                turns.fail(ask, RetryLater("away"), float(step))
            else:
                turns.take(ask, *served.page(ask))
        chunk = turns.next_chunk() if rng.random() < 0.5 else None
        if chunk is not None:
            partition = chunk.topic, chunk.partition
            assert partition not in paused
            assert chunk.offset == wanted[partition]
            turns.reach(chunk, ReadOffset(chunk.offset + 1))
            wanted[partition] = chunk.offset + 2
            seen += 1
        if rng.random() < 0.03:
            partition = rng.choice((A, B))
            wanted[partition] = 2 * rng.randint(0, 14)
            turns.move(partition, ReadOffset(wanted[partition]))
        if rng.random() < 0.05:
            partition = rng.choice((A, B))
            paused ^= {partition}
            turns.pause(partition, partition in paused)
    assert seen > 10
