"""The list of sources, page by page: complete, in order, and without reading the states behind a page."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from logferry.gateway.api.sources import _sort_key, first_rows
from logferry.gateway.contract.source_state import SourceIdentity, SourceState

ID = b"i" * 16
SIZE = 20


def state(topic_id: bytes = ID) -> SourceState:
    return SourceState(topic_id, 0, None, None, 0, 1)


class FakeLane:
    """A lane's table; ``read`` counts the states that were read."""

    def __init__(self, sources: list[tuple[SourceIdentity, SourceState]]) -> None:
        self._sources, self.read = sources, 0

    async def sources(
        self, _topic: str, wants: Callable[[str], bool]
    ) -> AsyncIterator[tuple[SourceIdentity, SourceState]]:
        for source, found in self._sources:
            if wants(source.source_id):
                self.read += 1
                yield source, found


def lanes_of(names: list[tuple[str, str | None, bytes]]) -> list[Any]:
    lanes = [FakeLane([]), FakeLane([])]
    for number, (source_id, key, topic_id) in enumerate(names):
        lanes[number % 2]._sources.append((SourceIdentity("dc1.t", key, source_id), state(topic_id)))
    return lanes


async def page_of(lanes: list[Any], after: str) -> list[Any]:
    return await first_rows(lanes, "dc1.t", after, SIZE, lambda _: True, lambda found: found.topic_id == ID)


@pytest.mark.parametrize("seed", range(20))
async def test_pages_are_complete_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    ids = [f"web {rng.randrange(60)}/é%" for _ in range(200)]
    names = sorted({(source_id, rng.choice([None, "k", "k/"]), rng.choice([ID, ID, b"o" * 16])) for source_id in ids},
                   key=repr)  # fmt: skip
    rng.shuffle(names)
    names = list({name[:2]: name for name in names}.values())
    lanes = lanes_of(names)
    found: list[tuple[str, str | None]] = []
    after = ""
    while True:
        rows = await page_of(lanes, after)
        if not rows:
            break
        found += [(row["source_id"], row["partition_key"]) for row in rows]
        after = _sort_key(rows[-1])
    expected = [name[:2] for name in names if name[2] == ID]
    assert len(found) == len(expected), seed
    assert set(found) == set(expected), seed


async def test_the_states_behind_a_full_page_are_not_read() -> None:
    lanes = lanes_of([(f"web{number:05}", None, ID) for number in range(10_000)])
    rows = await page_of(lanes, "web00500")
    assert [row["source_id"] for row in rows] == [f"web{number:05}" for number in range(501, 501 + SIZE)]
    assert sum(lane.read for lane in lanes) < 3 * SIZE


async def test_a_source_in_two_lanes_does_not_end_the_list() -> None:
    """As of a lane that moves: its states in the two may differ, and need no order."""
    lanes = lanes_of([("a", None, ID), ("a", None, ID)])
    lanes[1]._sources = [(lanes[1]._sources[0][0], state()._replace(recorded=7))]
    assert [row["recorded_seqno"] for row in await page_of(lanes, "")] == [None, 7]
