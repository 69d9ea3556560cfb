"""Who a lane is to Kafka: what its fence goes by, and where its records may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Place = tuple[str, int]


class LaneIdentity(NamedTuple):
    """Whose lane it is, to Kafka. ``state``: its partition of the state topic.

    ``may_write``: whether records of the lane may be in a partition, its state's and others; never false for one that
    has some.
    """

    number: int
    transactional_id: str
    state: Place
    may_write: Callable[[str, int], bool]
