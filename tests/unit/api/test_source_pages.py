"""The list of sources, page by page: complete, in order, and without reading the states behind a page."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.api.sources import SourcesApi, _sort_key, first_rows
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.errors import Problem
from logferry.gateway.lanes import source_index

from tests.unit.lanes.test_lane_draft import serving_lane

ID = b"i" * 16
SIZE = 20


def state(topic_id: bytes = ID) -> SourceState:
    return SourceState(topic_id, 0, None, None, 0, 1)


def lanes_of(names: list[tuple[str, str | None, bytes]]) -> list[Any]:
    lanes = [serving_lane() for _ in range(2)]
    for number, (source_id, key, topic_id) in enumerate(names):
        add(lanes[number % 2], SourceIdentity("dc1.t", key, source_id), state(topic_id))
    return lanes


def add(lane: Any, source: SourceIdentity, found: SourceState | None) -> None:
    lane.table.apply(source.state_key(), None if found is None else found.encode())


async def page_of(lanes: list[Any], after: str, prefix: str = "") -> list[Any]:
    return await first_rows(lanes, "dc1.t", prefix, after, SIZE, lambda _: True, lambda found: found.topic_id == ID)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The state keys that were looked at."""
    looked = list[bytes]()

    def counted(look: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def counting(raw: bytes) -> Any:
            looked.append(raw)
            return look(raw)

        return counting

    monkeypatch.setattr(SourceIdentity, "of_state_key", counted(SourceIdentity.of_state_key))
    monkeypatch.setattr(source_index, "_place", counted(source_index._place))
    return looked


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


IDS = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=6)


@given(st.tuples(IDS, st.none() | IDS), st.tuples(IDS, st.none() | IDS))
def test_sources_are_in_the_order_of_their_sort_keys(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    places = [source_index._place(SourceIdentity("dc1.t", key, name).state_key()) for name, key in (one, other)]
    keys = [source_index.sort_key(*names) for names in (one, other)]
    assert (places[0] < places[1], places[0] == places[1]) == (keys[0] < keys[1], keys[0] == keys[1])
    assert [source_index._start("dc1.t", key) for key in keys] == places


async def test_a_page_costs_what_it_returns(looked_at: list[bytes]) -> None:
    """Once they are in order: however many sources there are, also where some came or went."""
    names = [f"web{number:05}" for number in range(10_000)]
    lanes = lanes_of([(name, None, ID) for name in random.Random(1).sample(names, len(names))])
    for lane in lanes:
        add(lane, SourceIdentity("dc1.other", None, "web00600"), state())
    await page_of(lanes, "")
    for after, prefix, first in (("web00500", "", 501), ("web09990", "", 9991), ("", "web07", 7000), ("zz", "", None)):
        looked_at.clear()
        rows = await page_of(lanes, after, prefix)
        expected = [] if first is None else names[first : first + SIZE]
        assert [row["source_id"] for row in rows] == expected
        assert len(looked_at) < 10 * SIZE
    add(lanes[0], SourceIdentity("dc1.t", None, "web00500a"), state())
    add(lanes[1], SourceIdentity("dc1.t", None, "web00502"), None)
    add(lanes[0], SourceIdentity("dc1.t", None, "web00502"), None)
    for _ in range(2):  # it goes, and comes again
        add(lanes[0], SourceIdentity("dc1.t", None, "web00503x"), state())
        add(lanes[0], SourceIdentity("dc1.t", None, "web00503x"), None)
    add(lanes[0], SourceIdentity("dc1.t", None, "web00503x"), state())
    looked_at.clear()
    found = [row["source_id"] for row in await page_of(lanes, "web00500")]
    assert found[:5] == ["web00500a", "web00501", "web00503", "web00503x", "web00504"]
    assert len(found) == len(set(found)) == SIZE
    assert len(looked_at) < 15 * SIZE


async def test_forgotten_sources_do_not_stay_in_the_order() -> None:
    (lane, _) = lanes = lanes_of([(f"web{number:05}", None, ID) for number in range(10_000)])
    await page_of(lanes, "")
    for number in range(0, 9_990, 2):
        add(lane, SourceIdentity("dc1.t", None, f"web{number:05}"), None)
    rows = await page_of([lane], "")
    assert [row["source_id"] for row in rows] == [f"web{number:05}" for number in range(9_990, 10_000, 2)]
    assert len(lane._order._blocks) == 1


async def test_sources_that_come_while_they_are_put_in_order_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = lanes_of([(f"web{number:05}", None, ID) for number in range(5_000)])
    monkeypatch.setattr("logferry.gateway.turns._TURN_S", 0)
    pages = [asyncio.create_task(page_of(lanes, after)) for after in ("", "web01000", "web02000")]
    await asyncio.sleep(0)
    add(lanes[0], SourceIdentity("dc1.t", None, "web00000a"), state())
    add(lanes[1], SourceIdentity("dc1.t", None, "web01000a"), state())
    await asyncio.gather(*pages)
    assert [row["source_id"] for row in await page_of(lanes, "web00000")][:2] == ["web00000a", "web00001"]
    assert [row["source_id"] for row in await page_of(lanes, "web01000")][:2] == ["web01000a", "web01001"]


async def test_a_source_in_two_lanes_does_not_end_the_list() -> None:
    """As of a lane that moves: its states in the two may differ, and need no order."""
    lanes = lanes_of([("a", None, ID), ("a", None, ID)])
    add(lanes[1], SourceIdentity("dc1.t", None, "a"), state()._replace(recorded=7))
    assert [row["recorded_seqno"] for row in await page_of(lanes, "")] == [None, 7]


# ---- the workers of a page -------------------------------------------------------------------------------------------


async def page_with(*others: dict[str, Any], count: LaneCount | None = None) -> list[str]:
    """The ids in the page of a worker that has lane 0 of two, and of others."""
    [lane, _] = lanes_of([("mine", None, ID)])
    if count is not None:
        lane.table.apply(COUNT_KEY, count.encode())
    worker: Any = Mock(spec=SourcesApi)
    worker.config.dc, worker.topics = "dc1", Mock(facts=AsyncMock(return_value=SimpleNamespace(id=ID)))
    worker.ownership = SimpleNamespace(lanes={0: lane}, number_of_lanes=lambda: 2)
    worker.admission = Mock(read=AsyncMock())
    worker.forwarding = Mock(ask_others=AsyncMock(return_value=others))
    call: Any = Mock(segments=["", "v1", "topics", "t"], query={}, request=SimpleNamespace(headers={}))
    answer: Any = await SourcesApi.list(worker, call)
    return [row["source_id"] for row in json.loads(answer.body)["sources"]]


async def test_a_worker_of_an_older_version_takes_part_in_a_page() -> None:
    assert await page_with({"sources": [], "lanes": [1]}) == ["mine"]


async def test_a_page_is_of_one_number_of_lanes() -> None:
    count = LaneCount(2, 1, 2)
    assert await page_with({"sources": [], "lanes": [1], "epochs": [2]}, count=count) == ["mine"]
    for other in ({"epochs": [1]}, {}):
        with pytest.raises(Problem, match="has just changed"):
            await page_with({"sources": [], "lanes": [1], **other}, count=count)
