"""How long to wait before trying again."""

from __future__ import annotations

import random

RETRY_S = (0.1, 10.0)  # first and longest pause


def pause_s(failures: int, bounds: tuple[float, float]) -> float:
    """Exponential with jitter, between half and the whole of the step, so that clients do not come together."""
    first, longest = bounds
    return min(first * 2.0 ** min(failures - 1, 30), longest) * random.uniform(0.5, 1.0)
