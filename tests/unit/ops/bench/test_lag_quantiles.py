"""A quantile of what a worker's histogram counted between two looks."""

from __future__ import annotations

import pytest
from logferry.ops.bench.harness.usage import Buckets, quantile_ms

BEFORE: Buckets = [(0.001, 100.0), (0.01, 100.0), (0.1, 110.0), (float("inf"), 110.0)]


def after(*more: int) -> Buckets:
    """``more``: how many in each bucket since."""
    counts = [sum(more[: number + 1]) for number in range(len(more))]
    return [(bound, old + new) for (bound, old), new in zip(BEFORE, counts, strict=True)]


@pytest.mark.parametrize(
    ("more", "share", "found_ms"),
    [
        ((100, 0, 0, 0), 0.5, 0.5),
        ((98, 2, 0, 0), 0.99, 5.5),
        ((0, 0, 100, 0), 0.5, 55.0),
        ((0, 0, 0, 10), 0.99, 100.0),
        ((50, 0, 50, 0), 0.5, 1.0),
    ],
)
def test_it_is_interpolated_in_its_bucket(more: tuple[int, ...], share: float, found_ms: float) -> None:
    assert quantile_ms(BEFORE, after(*more), share) == pytest.approx(found_ms)


def test_nothing_counted_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="counted nothing"):
        quantile_ms(BEFORE, after(0, 0, 0, 0), 0.99)
