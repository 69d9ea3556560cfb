"""When the stops of a lane that end by themselves are retried."""

from __future__ import annotations

import pytest
from logferry.mirror.copy.partition import StopReason
from logferry.mirror.lanes.stops import REJECTED, RetriedStops

TP = ("dc1.t", 0)


@pytest.mark.parametrize(
    ("altered_ms", "now_ms", "is_due"),
    [
        (None, 69_000, False),
        (None, 70_001, True),
        (10_001, 10_002, True),
        (9_500, 10_001, True),
        (8_999, 10_001, False),
    ],
)
def test_a_rejected_batch_is_tried_again_when_the_settings_were_altered(
    altered_ms: int | None, now_ms: int, is_due: bool
) -> None:
    """Also where the broker learned of them a moment too late; else after a minute."""
    now = 10_000
    stops = RetriedStops(lambda: now)
    stops.add(TP, StopReason(REJECTED, "too large", 10_000))
    now = now_ms
    altered = {} if altered_ms is None else {TP[0]: altered_ms}
    assert list(stops.due(lambda _: True, {"dc1.other": 60_000, **altered})) == ([TP] if is_due else [])
