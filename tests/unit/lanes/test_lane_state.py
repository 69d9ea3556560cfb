"""The state of a lane, on a clock of the test's own."""

from __future__ import annotations

import pytest
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.lanes.lifecycle import SLOW_MS, STATES, TRANSITIONS, LaneState, LaneWait


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1000

    def __call__(self) -> int:
        self.now_ms += 10
        return self.now_ms


def serve(lane_state: LaneState) -> None:
    for state in ("fencing", "replaying"):
        lane_state.enter(state)
    lane_state.enter("serving", "open")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("following", STATES)
def test_a_transition_is_in_the_table_or_a_defect(state: str, following: str) -> None:
    lane_state = LaneState(Clock(), state=state)
    if following == state or following in TRANSITIONS[state]:
        lane_state.enter(following)
        assert lane_state.state == following
    else:
        with pytest.raises(ValueError, match=f"a lane that is {state} cannot become {following}"):
            lane_state.enter(following)


def test_a_lane_that_is_taken_over_waits_until_it_serves() -> None:
    lane_state = LaneState(Clock())
    assert (lane_state.state, lane_state.why, lane_state.since_ms) == ("opening", "taken over", 1010)
    lane_state.enter("fencing")
    lane_state.enter("replaying")
    assert lane_state.wait == LaneWait("taken over", 1010)
    lane_state.enter("serving", "open")
    assert (lane_state.state, lane_state.why, lane_state.since_ms) == ("serving", "open", 1040)
    assert lane_state.wait == LaneWait("taken over", 1010, 1040)


def test_the_time_of_a_state_is_that_of_its_beginning() -> None:
    lane_state = LaneState(Clock())
    lane_state.enter("opening", "the group does not answer")
    assert (lane_state.since_ms, lane_state.why) == (1010, "the group does not answer")
    assert lane_state.wait == LaneWait("the group does not answer", 1010)


def test_a_failure_is_a_wait_since_its_transaction_began_and_is_kept() -> None:
    clock = Clock()
    lane_state = LaneState(clock)
    serve(lane_state)
    lane_state.begin()
    began_ms = clock.now_ms
    clock.now_ms += 20_000
    lane_state.fail(NotCommitted(TimeoutError(), "dc1.nginx"))
    assert (lane_state.state, lane_state.why, lane_state.transaction_ms) == (
        "opening",
        "it failed (NotCommitted)",
        None,
    )
    assert lane_state.error == "while serving: NotCommitted: Kafka did not answer in time"
    assert lane_state.wait is not None
    assert (lane_state.wait.began_ms, lane_state.wait.ended_ms) == (began_ms, None)
    serve(lane_state)
    assert lane_state.wait.ended_ms == clock.now_ms
    assert lane_state.error_ms is not None
    assert began_ms < lane_state.error_ms < clock.now_ms


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "TimeoutError: Kafka did not answer in time"),
        (OSError("cut"), "OSError: cut"),
        (OSError("OSError: cut"), "OSError: cut"),
        (OSError(), "OSError"),
    ],
)
def test_an_error_says_what_the_lane_was_about_and_its_name_once(error: Exception, said: str) -> None:
    lane_state = LaneState(Clock())
    lane_state.enter("fencing")
    lane_state.fail(error)
    assert lane_state.error == f"while fencing: {said}"


def test_only_a_long_commit_is_a_wait() -> None:
    clock = Clock()
    lane_state = LaneState(clock)
    serve(lane_state)
    before = lane_state.wait
    for lasts_ms, waits in ((0, False), (SLOW_MS, True)):
        lane_state.begin()
        began_ms = lane_state.transaction_ms or 0
        clock.now_ms += lasts_ms
        lane_state.commit()
        assert (lane_state.transaction_ms, lane_state.committed_ms) == (None, clock.now_ms)
        assert lane_state.wait == (LaneWait("a commit took long", began_ms, clock.now_ms) if waits else before)
