"""Forced deletion: what a reader needs stays, the oldest goes, by priority, and no more than is wanted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId
from logferry.ops.keeper.planning.deletion_plan import (
    AGES_S,
    Candidate,
    DeletionLimits,
    needs_deletion,
    plan_deletion,
)

from tests.support.keeper import view_of

PLACE = DirId(1, "/a")
LIMITS = DeletionLimits(10, 20, 2, 1 << 40)
_RUNGS = len(AGES_S)


def a_dir(used: int = 950) -> ClusterView:
    return view_of({"1:/a": 1000}, {"x": [("1:/a", used)]})


def candidate(name: str = "x", size: int = 500, **more: Any) -> Candidate:
    """500 records; each age of the ladder is a step of equal width."""
    ages = tuple(500 * (rung + 1) // _RUNGS for rung in range(_RUNGS))
    return Candidate((name, 0), 1, 0, size, 0, 500, ages)._replace(**more)


def deleted(*candidates: Candidate, used: int = 950, **more: Any) -> dict[str, int]:
    plan = plan_deletion(a_dir(used), PLACE, candidates, more.pop("pending", 0), more.pop("limits", LIMITS), **more)
    return {one.tp[0]: one.before for one in plan.ranges}


def test_nothing_goes_while_enough_is_free() -> None:
    assert deleted(candidate(), used=899) == {}


def test_the_oldest_go_until_enough_is_free() -> None:
    assert deleted(candidate()) == {"x": 150}


def test_two_partitions_of_one_priority_give_records_of_the_same_age() -> None:
    young = candidate("young", ages=tuple(0 if age >= 60 else 500 for age in AGES_S))
    assert deleted(candidate("old", ages=(500,) * _RUNGS), young) == {"old": 150}


def test_the_least_number_goes_first() -> None:
    assert deleted(candidate("a", priority=9), candidate("b", priority=1)) == {"b": 150}
    assert deleted(candidate("a", priority=9), candidate("b", priority=1, needed={"r": 100})) == {"a": 50, "b": 100}


def test_what_a_reader_needs_stays_and_the_reader_is_named() -> None:
    plan = plan_deletion(a_dir(), PLACE, [candidate(needed={"consumer c": 30, "mirror m": None})], 0, LIMITS)
    assert plan.ranges == []
    assert (plan.missing_bytes, plan.held_by) == (150, ("consumer c", "mirror m"))
    assert deleted(candidate(needed={"consumer c": 30})) == {"x": 30}


def test_below_the_last_threshold_readers_are_not_waited_for_and_that_is_said() -> None:
    [one] = plan_deletion(a_dir(985), PLACE, [candidate(needed={"consumer c": 30, "d": 499})], 0, LIMITS).ranges
    assert (one.before, one.against) == (185, ("consumer c",))
    never = LIMITS._replace(last_free_percent=0)
    assert deleted(candidate(needed={"consumer c": 30}), used=999, limits=never) == {"x": 30}


def test_young_records_stay_whatever_the_disk() -> None:
    assert deleted(candidate(keep_s=10 * 365 * 86_400), used=999) == {}
    kept = next(rung for rung, age in enumerate(AGES_S) if age < 86_400)
    assert deleted(candidate(keep_s=86_400, size=100), used=999) == {"x": 500 * kept // _RUNGS}


def test_what_is_deleted_and_not_removed_yet_counts() -> None:
    assert needs_deletion(a_dir(), PLACE, 0, LIMITS)
    assert not needs_deletion(a_dir(), PLACE, 50, LIMITS)
    assert deleted(candidate(), pending=30) == {"x": 120}


def test_retention_that_frees_enough_in_time_is_waited_for() -> None:
    assert deleted(candidate(expires_before=400), full_in_s=100) == {}
    assert deleted(candidate(expires_before=100), full_in_s=100) == {"x": 150}
    # Without growth nothing says that it comes in time.
    assert deleted(candidate(expires_before=400)) == {"x": 150}
    assert deleted(candidate(expires_before=400), used=985, full_in_s=100) == {"x": 185}


def test_one_look_deletes_no_more_than_the_bound() -> None:
    assert deleted(candidate(), limits=LIMITS._replace(bytes_at_once=40)) == {"x": 40}


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("used", [905, 950, 979, 981, 1000])
def test_no_range_breaks_an_invariant(used: int, data: Any) -> None:
    candidates = []
    for number in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, 100))
        end = start + data.draw(st.integers(0, 400))
        ages = tuple(sorted(data.draw(st.integers(start, end)) for _ in AGES_S))
        needed = data.draw(st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(0, 600)))
        keep_s = data.draw(st.sampled_from((0, 60, 3600, 10**9)))
        size = data.draw(st.integers(0, 800))
        candidates.append(Candidate((f"t{number}", 0), number % 2, keep_s, size, start, end, ages, needed))
    plan = plan_deletion(a_dir(used), PLACE, candidates, 0, LIMITS)
    known = {one.tp: one for one in candidates}
    is_last = used > 980
    for one in plan.ranges:
        of = known[one.tp]
        assert of.start == one.start < one.before <= of.end
        oldest_kept = [at for age, at in zip(AGES_S, of.ages, strict=True) if age >= of.keep_s]
        assert one.before <= max(oldest_kept)
        needs = [of.start if at is None else at for at in of.needed.values()]
        assert is_last or all(one.before <= at for at in needs)
        assert set(one.against) == {n for n, at in of.needed.items() if at is None or at < one.before}
    wanted = 200 - (1000 - used)
    largest = max((one.record_bytes for one in candidates), default=0)
    assert sum(one.size_bytes for one in plan.ranges) <= wanted + largest + len(candidates)
