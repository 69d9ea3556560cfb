"""What is known of sources, and which of them may have chunks that came by two data centres."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.loaders.batches.dedup import copies
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey, merged, possible_copies, shared_topics
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import SNAPSHOT_EVERY, add_sources, create_side_tables, read_sources

AT = datetime(2026, 11, 21, tzinfo=UTC)


def facts(first: int, last: int, hour: int = 0, event: int | None = None) -> SourceFacts:
    when = None if event is None else AT.replace(hour=event)
    return SourceFacts(first, last, AT.replace(hour=hour), when)


DC1, DC2 = SourceKey("dc1.a", "web1"), SourceKey("dc2.a", "web1")
BOTH = {"dc1.a", "dc2.a"}


def test_topics_of_several_centres():
    assert shared_topics(["dc1.a", "dc2.a", "dc1.b", "dc1.a.x"]) == {"dc1.a", "dc2.a"}


def test_a_source_that_writes_in_one_place_is_never_looked_at():
    batch = {DC1: facts(10, 20), SourceKey("dc2.a", "web2"): facts(10, 20), SourceKey("dc2.b", "web1"): facts(10, 20)}
    assert possible_copies({DC1: facts(1, 9)}, batch, BOTH) == {}


def test_a_source_that_moved_on_is_not_looked_at_either():
    assert possible_copies({DC1: facts(1, 9)}, {DC2: facts(10, 20)}, BOTH) == {}


def test_a_source_that_came_back_is_looked_at_where_it_may_be_twice():
    assert possible_copies({DC1: facts(1, 9), DC2: facts(8, 20)}, {DC1: facts(10, 30)}, BOTH) == {DC1: (10, 20)}


def test_both_copies_in_one_batch():
    assert possible_copies({}, {DC1: facts(1, 9), DC2: facts(5, 20)}, BOTH) == {DC1: (5, 9), DC2: (5, 9)}


SEQNOS = st.sets(st.integers(0, 30), min_size=1, max_size=5)
WRITES = st.dictionaries(st.tuples(st.sampled_from(["dc1.a", "dc2.a", "dc3.a"]), st.sampled_from("xy")), SEQNOS)


@given(WRITES, WRITES)
def test_no_copy_is_overlooked(before: dict[tuple[str, str], set[int]], now: dict[tuple[str, str], set[int]]):
    known, batch = (
        {SourceKey(*key): facts(min(seqnos), max(seqnos)) for key, seqnos in writes.items()} for writes in (before, now)
    )
    asked = possible_copies(known, batch, {"dc1.a", "dc2.a", "dc3.a"})
    for (topic, source), seqnos in now.items():
        for (other, same), others in [*before.items(), *now.items()]:
            if same == source and other != topic:
                low, high = asked.get(SourceKey(topic, source), (1, 0))
                assert all(low <= seqno <= high for seqno in seqnos & others)


def test_facts_of_many_batches_are_kept_in_few_files(tmp_path: Path):
    paths = TablePaths.of(tmp_path / "t")
    create_side_tables(paths)
    path = paths.sources
    for batch in range(2 * SNAPSHOT_EVERY + 3):
        add_sources(path, batch, "run", {DC1: facts(batch, batch + 1, event=batch % 24)})
    add_sources(path, 5, "late", {DC2: facts(1, 2)})
    assert last_batch(open_table(path)) == 2 * SNAPSHOT_EVERY + 2
    assert read_sources(path) == {DC1: facts(0, 2 * SNAPSHOT_EVERY + 3, event=23)}
    table = open_table(path)
    assert table is not None
    assert len(table.file_uris()) == 3, "a whole one and two since"


def test_all_at_once_takes_the_place_of_what_there_was(tmp_path: Path):
    paths = TablePaths.of(tmp_path / "t")
    create_side_tables(paths)
    path = paths.sources
    add_sources(path, 3, "run", {DC1: facts(1, 2)})
    add_sources(path, 7, "run", {DC2: facts(1, 2)}, all_of_it=True)
    assert read_sources(path) == {DC2: facts(1, 2)}
    assert merged(read_sources(path), {DC2: facts(0, 1, hour=3)}) == {DC2: facts(0, 2, hour=3)}


def chunk(topic: str, offset: int, seqno: int, source: str = "web1") -> dict[str, object]:
    return {"topic": topic, "partition": 0, "offset": offset, "source_id": source, "seqno": seqno, "recorded": 0}


COPIES = {
    "nothing": ([chunk("dc1.a", 0, 1)], set(), []),
    "two of one batch": ([chunk("dc2.a", 7, 1), chunk("dc1.a", 3, 1)], set(), [("dc2.a", 7, "dc1.a")]),
    "three of one batch": (
        [chunk("dc2.a", 7, 1), chunk("dc1.a", 3, 1), chunk("dc3.a", 9, 1)],
        set(),
        [("dc2.a", 7, "dc1.a"), ("dc3.a", 9, "dc1.a")],
    ),
    "stored before": ([chunk("dc1.a", 3, 1)], {("dc2.a", "web1", 1)}, [("dc1.a", 3, "dc2.a")]),
    "stored before, and two more": (
        [chunk("dc1.a", 3, 1), chunk("dc3.a", 4, 1)],
        {("dc2.a", "web1", 1)},
        [("dc1.a", 3, "dc2.a"), ("dc3.a", 4, "dc2.a")],
    ),
    "another source, topic, seqno": (
        [chunk("dc1.a", 3, 1)],
        {("dc2.a", "web2", 1), ("dc2.b", "web1", 1), ("dc2.a", "web1", 2)},
        [],
    ),
    "one data centre twice is no copy": ([chunk("dc1.a", 3, 1), chunk("dc1.a", 4, 1)], {("dc1.a", "web1", 1)}, []),
}


@pytest.mark.parametrize("case", COPIES)
def test_which_copies_are_left_out(case: str):
    chunks, stored, left_out = COPIES[case]
    assert [(n.topic, n.offset, n.kept) for n in copies(4, chunks, stored)] == left_out
