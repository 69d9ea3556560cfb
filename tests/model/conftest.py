"""What holds for all models."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def searches_take_no_time() -> Iterator[None]:
    """The models have a clock of their own. How long a search really took would make a run another one each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logferry.client.agent.search.SHARE", math.inf)
        patch.setattr("logferry.client.agent.search.HINTED_SHARE", math.inf)
        yield
