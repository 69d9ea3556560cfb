"""The ledger of a table: what cannot be true of it is found, and what it covers is taken from it exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.contract.names import printed_topic_id
from logferry.loaders.planning.ledger_entry import LedgerEntry
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import new_entry
from logferry.ops.audit.digests.findings import Findings
from logferry.ops.audit.digests.sums import Ranges
from logferry.ops.audit.tables.rows import LoadedRanges, beyond_the_log, check_ledger

TOPIC = "dc1.nginx"
PLACE = (TOPIC, 0)


def entry(
    batch: int, start: int, end: int, *, dc: str = "dc1", topic_id: str = "id", partition: int = 0
) -> LedgerEntry:
    return new_entry(batch, dc, "lines/1", "run", [Range(TOPIC, partition, topic_id, start, end)])


def check(entries: Sequence[LedgerEntry], last: int, last_now: int | None = None) -> tuple[LoadedRanges, Findings]:
    findings = Findings()
    now = last if last_now is None else last_now
    return check_ledger("t_ledger", entries, last, now, "dc1", {TOPIC: "id"}, findings), findings


@pytest.mark.parametrize(
    ("entries", "last", "expected"),
    [
        pytest.param([entry(0, 0, 5), entry(1, 5, 9)], 1, [], id="whole"),
        pytest.param([entry(0, 3, 5), entry(1, 5, 5), entry(2, 5, 9)], 2, [], id="from the middle, and one at rest"),
        pytest.param([entry(0, 0, 5), entry(1, 5, 9)], 0, [], id="one planned"),
        pytest.param([], -1, [], id="nothing loaded yet"),
        pytest.param([entry(0, 0, 5), entry(1, 7, 9)], 1, ["ledger-gap"], id="gap"),
        pytest.param([entry(0, 0, 5), entry(1, 4, 9)], 1, ["ledger-overlap"], id="overlap"),
        pytest.param([entry(0, 0, 5), entry(1, 7, 9)], 0, ["ledger-gap"], id="a plan that leaves a gap"),
        pytest.param([entry(0, 0, 5), entry(2, 5, 9)], 2, ["ledger-missing"], id="an entry is missing"),
        pytest.param([entry(0, 0, 5)], 1, ["ledger-missing"], id="the last entry is missing"),
        pytest.param([entry(0, 0, 5), entry(1, 5, 6), entry(2, 6, 7)], 0, ["ledger-ahead"], id="table put back"),
        pytest.param([entry(0, 5, 3)], 0, ["ledger-overlap"], id="a range backwards"),
        pytest.param([entry(0, 0, 5), entry(1, 0, 5, partition=1)], 1, [], id="another partition"),
        pytest.param([entry(0, 0, 5), entry(1, 9, 12, dc="dc2")], 1, [], id="another data centre's offsets"),
        pytest.param([entry(0, 0, 5, topic_id="old"), entry(1, 0, 2)], 1, ["loaded-from-older-topic"], id="recreated"),
    ],
)
def test_ledger(entries: list[LedgerEntry], last: int, expected: list[str]):
    _, findings = check(entries, last)
    assert [one.kind for one in findings] == expected


def test_a_gap_names_the_offsets():
    _, findings = check([entry(0, 0, 5), entry(1, 7, 9)], 1)
    (gap,) = findings
    assert (gap.where, gap.first, gap.last) == ("dc1.nginx-0", 5, 6)


def test_the_ledger_may_grow_while_it_is_read():
    _, findings = check([entry(0, 0, 5), entry(1, 5, 6), entry(2, 6, 7)], last=0, last_now=1)
    assert not len(findings)


def test_what_is_committed_and_what_is_planned():
    loaded, _ = check([entry(0, 2, 5), entry(1, 5, 9), entry(2, 9, 12)], 1)
    assert [offset for offset in range(15) if offset in loaded.covers(PLACE)] == list(range(2, 9))
    assert [offset for offset in range(15) if offset in loaded.planned[PLACE]] == list(range(9, 12))
    assert 0 not in loaded.covers((TOPIC, 9))


def test_an_older_incarnation_is_not_compared():
    loaded, findings = check([entry(0, 0, 5, topic_id="old")], 0)
    assert loaded.strange == {TOPIC}
    assert not loaded.committed
    assert not findings.refuting


def test_a_log_that_was_cut_back():
    loaded, findings = check([entry(0, 0, 9)], 0)
    beyond_the_log(loaded, {PLACE: 9}, findings)
    assert not len(findings)
    beyond_the_log(loaded, {PLACE: 7}, findings)
    assert [(one.kind, one.first, one.last) for one in findings] == [("ledger-beyond-log", 7, 8)]


def test_topic_ids_are_printed_as_kafka_prints_them():
    assert printed_topic_id(bytes.fromhex("c7b2acd7da8a4031b3f494cd429f4c8a")) == "x7Ks19qKQDGz9JTNQp9Mig"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_ranges_are_the_set_of_their_offsets(pairs: list[tuple[int, int]]):
    ranges, offsets = Ranges(), set[int]()
    for start, end in pairs:
        ranges.add(start, end)
        offsets.update(range(start, end))
    assert {offset for offset in range(-1, 32) if offset in ranges} == offsets
    assert ranges.end == (max(offsets) + 1 if offsets else 0)
    assert bool(ranges) == bool(offsets)
