"""An allowance over time: the average is kept, whatever one thing costs."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from logferry.client.agent.schedule import Throttle


def test_it_may_be_overdrawn_once_and_is_then_waited_for() -> None:
    pace = Throttle(100, now=0.0)
    assert pace.is_open(0.0)
    pace.spend(350)
    assert not pace.is_open(2.4)
    assert pace.is_open(2.6)


def test_a_pause_earns_a_second() -> None:
    pace = Throttle(100, now=0.0)
    assert pace.is_open(1000.0)
    pace.spend(100)
    assert not pace.is_open(1000.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 500)), max_size=50), st.integers(1, 1000))
def test_the_average_is_kept(steps: Any, a_second: Any) -> None:
    pace, now, spent, largest = Throttle(a_second, 0.0), 0.0, 0, 0
    for later_s, amount in steps:
        now += later_s
        if pace.is_open(now):
            pace.spend(amount)
            spent, largest = spent + amount, max(largest, amount)
        assert spent <= a_second * (now + 1) + largest + 1e-6
