"""How a lane fares, on a clock of the test's own."""

from __future__ import annotations

import pytest
from logferry.gateway.course import SLOW_MS, Course, Wait
from logferry.gateway.kafka.transactional_producer import NotCommitted


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1000

    def __call__(self) -> int:
        self.now_ms += 10
        return self.now_ms


def test_a_lane_that_is_taken_over_waits_until_it_serves() -> None:
    course = Course(Clock())
    assert (course.state, course.why, course.since_ms) == ("opening", "taken over", 1010)
    course.enter("fencing")
    course.enter("replaying")
    assert course.wait == Wait("taken over", 1010)
    course.enter("serving", "open")
    assert (course.state, course.why, course.since_ms) == ("serving", "open", 1040)
    assert course.wait == Wait("taken over", 1010, 1040)


def test_the_time_of_a_state_is_that_of_its_beginning() -> None:
    course = Course(Clock())
    course.enter("opening", "the group does not answer")
    assert (course.since_ms, course.why) == (1010, "the group does not answer")
    assert course.wait == Wait("the group does not answer", 1010)


def test_a_failure_is_a_wait_since_its_transaction_began_and_is_kept() -> None:
    clock = Clock()
    course = Course(clock)
    course.enter("serving", "open")
    course.begin()
    began_ms = clock.now_ms
    clock.now_ms += 20_000
    course.fail(NotCommitted(TimeoutError(), "dc1.nginx"))
    assert (course.state, course.why, course.transaction_ms) == ("opening", "it failed (NotCommitted)", None)
    assert course.error == "while serving: NotCommitted: Kafka did not answer in time"
    assert course.wait is not None
    assert (course.wait.began_ms, course.wait.ended_ms) == (began_ms, None)
    course.enter("serving", "open")
    assert course.wait.ended_ms == clock.now_ms
    assert course.error_ms is not None
    assert began_ms < course.error_ms < clock.now_ms


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
    course = Course(Clock())
    course.enter("fencing")
    course.fail(error)
    assert course.error == f"while fencing: {said}"


def test_only_a_long_commit_is_a_wait() -> None:
    clock = Clock()
    course = Course(clock)
    course.enter("serving", "open")
    before = course.wait
    for lasts_ms, waits in ((0, False), (SLOW_MS, True)):
        course.begin()
        began_ms = course.transaction_ms or 0
        clock.now_ms += lasts_ms
        course.commit()
        assert (course.transaction_ms, course.committed_ms) == (None, clock.now_ms)
        assert course.wait == (Wait("a commit took long", began_ms, clock.now_ms) if waits else before)
