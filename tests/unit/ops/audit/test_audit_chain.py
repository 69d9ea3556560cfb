"""The rule of one source's log: each kind of break is seen, once, and what is whole is never blamed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.ops.audit.log.chain import Chain, ForgottenSource

Records = list[tuple[int, int | None]]


def breaks(records: Records) -> list[str]:
    """The kinds of breaks in these (seqno, prev), in order."""
    (seqno, prev), *rest = records
    chain = Chain.begin(0, seqno, prev)
    judged = [chain.follow(offset, seqno, prev) for offset, (seqno, prev) in enumerate(rest, 1)]
    found = [broken.kind for broken in judged if broken is not None]
    assert sum(chain.breaks.values()) == len(found)
    return found


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param([(10, 0), (20, 10), (30, 20)], [], id="whole"),
        pytest.param([(10, None), (12, None), (90, None)], [], id="whole without prev"),
        pytest.param([(30, 20), (40, 30)], [], id="any base is taken"),
        pytest.param([(10, 0), (10, 0), (20, 10)], ["double"], id="the same again"),
        pytest.param([(10, 0), (20, 10), (30, 20), (10, 0), (20, 10), (40, 30)], ["double", "double"], id="a replay"),
        pytest.param([(1, None), (3, None), (2, None)], ["double"], id="falls without prev"),
        pytest.param([(10, 0), (30, 20), (40, 30)], ["gap"], id="one is missing"),
        pytest.param([(10, 0), (30, 20), (20, 10), (40, 30)], ["gap", "out-of-order"], id="one comes later"),
        pytest.param([(10, 0), (30, 20), (20, 10), (20, 10)], ["gap", "out-of-order", "double"], id="later and again"),
        pytest.param(
            [(10, 0), (50, 40), (20, 10), (40, 20), (30, 20)],
            ["gap", "out-of-order", "out-of-order", "double"],
            id="a gap that is filled in two steps",
        ),
        pytest.param([(20, 10), (10, 0)], ["out-of-order"], id="the head comes later"),
        pytest.param([(10, 0), (20, 10), (30, 15)], ["overlap"], id="cut again"),
        pytest.param([(10, 0), (30, 20), (50, 40)], ["gap", "gap"], id="two gaps"),
    ],
)
def test_breaks(records: Records, expected: list[str]):
    assert breaks(records) == expected


def test_a_break_names_the_seqnos():
    broken = Chain.begin(7, 10, 0).follow(8, 30, 20)
    assert broken is not None
    assert "prev is 20" in broken.detail
    assert "reached 10" in broken.detail


def test_a_gap_where_the_log_was_removed_meanwhile_means_nothing():
    chain = Chain.begin(0, 10, 0)
    chain.cut = True
    assert chain.follow(5, 40, 30) is None
    assert chain.follow(6, 60, 50) is not None, "only the first one after the cut"


def test_what_the_states_are_compared_with():
    chain = Chain.begin(0, 10, 0)
    chain.note(10, is_settled=True)
    for seqno in (20, 30):
        chain.follow(seqno, seqno, seqno - 10)
        chain.note(seqno, is_settled=False)
    assert (chain.settled, chain.later) == (10, [20, 30])


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        # killed by a wrong seqno, forgotten by the administrator, continues
        pytest.param([(10, 0), (9000, 10), (20, 10), (30, 20)], ["chain-restarted"], id="healed"),
        pytest.param([(10, 0), (60, 50), (70, 60)], ["gap"], id="another base is a gap"),
        pytest.param([(10, 0), (20, 10), (20, 10), (30, 20)], ["double"], id="starts again with a recorded chunk"),
        pytest.param([(10, 0), (20, 10), (15, 10), (25, 15)], ["double", "double"], id="the same, cut again"),
        pytest.param([(10, 0), (20, 10), (30, 20)], [], id="continues as before"),
        pytest.param([(10, 0), (9000, 10), (20, 10), (9900, 10)], ["chain-restarted", "overlap"], id="only once"),
    ],
)
def test_a_source_that_was_forgotten(records: Records, expected: list[str]):
    """It may start again after 10. A chunk that it records again is a double nevertheless."""
    (seqno, prev), *rest = records
    chain = Chain.begin(0, seqno, prev, 10, ForgottenSource([10]))
    judged = [chain.follow(offset, seqno, prev, 10) for offset, (seqno, prev) in enumerate(rest, 1)]
    assert [broken.kind for broken in judged if broken is not None] == expected
    assert "chain-restarted" not in chain.breaks


def test_a_source_that_starts_again_without_prev():
    chain = Chain.begin(0, 5, None, 10, ForgottenSource([None]))
    kinds = [chain.follow(offset, seqno, None, 10) for offset, seqno in enumerate((9000, 6, 7, 6), 1)]
    assert [broken.kind if broken else None for broken in kinds] == [None, "chain-restarted", None, "double"]
    assert chain.last == 7


wholes = st.lists(st.integers(1, 1000), min_size=3, max_size=30).map(
    lambda steps: [(sum(steps[: i + 1]), sum(steps[:i])) for i in range(len(steps))]
)


@given(wholes)
def test_a_whole_chain_is_never_blamed(records: Records):
    assert breaks(records) == []


@given(wholes, st.data())
def test_damage_is_always_found(records: Records, data: st.DataObject):
    """Any inner record left out, said twice, or swapped with the next one."""
    at = data.draw(st.integers(1, len(records) - 2))
    how = data.draw(st.sampled_from(["left out", "twice", "swapped"]))
    if how == "left out":
        assert breaks(records[:at] + records[at + 1 :]) == ["gap"]
    elif how == "twice":
        assert breaks(records[: at + 1] + records[at:]) == ["double"]
    else:
        swapped = [*records[:at], records[at + 1], records[at], *records[at + 2 :]]
        assert breaks(swapped) == ["gap", "out-of-order"]


@given(wholes, st.data())
def test_damage_is_found_without_prev_too(records: Records, data: st.DataObject):
    """A gap cannot be seen, but what stands twice or falls can."""
    bare: Records = [(seqno, None) for seqno, _ in records]
    at = data.draw(st.integers(0, len(bare) - 2))
    assert breaks(bare[: at + 1] + bare[at:]) == ["double"]
    assert breaks([*bare[:at], bare[at + 1], bare[at], *bare[at + 2 :]]) == ["double"]
