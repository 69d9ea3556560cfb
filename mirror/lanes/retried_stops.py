"""The stops of one lane that end by themselves: each is retried after a while, or when its cause is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from logferry.gateway.contract.names import TopicPartition
from logferry.mirror.copy.partition import StopReason

REJECTED: Final = "write-rejected"
# Stop kind → seconds until the lane retries.
RETRY_AFTER_S: Final = {
    REJECTED: 60.0,
    "target-unreadable": 60.0,
    "origin-unknown": 5.0,
    "fetch-rejected": 5.0,
}
# A broker knows of altered settings so soon.
_KNOWN_MS: Final = 1000
# Retried when Kafka here takes records of the partition again (`PartitionHealth`).
UNAVAILABLE: Final = "target-unavailable"


@dataclass(slots=True)
class RetriedStops:
    """By partition. They outlive a failure of the lane.

    ``tried``: those that ended by a retry, until something is committed. The same stop again is the same: it keeps its
    time, and is not logged.
    """

    clock_ms: Callable[[], int]
    present: dict[TopicPartition, StopReason] = field(default_factory=dict)
    _since_ms: dict[TopicPartition, int] = field(default_factory=dict)
    tried: dict[TopicPartition, StopReason] = field(default_factory=dict)

    def add(self, tp: TopicPartition, stop: StopReason) -> StopReason:
        """Returns it; with its first time if it continues one that was retried."""
        before = self.tried.pop(tp, None)
        if not (stop.kind == UNAVAILABLE or stop.kind in RETRY_AFTER_S):
            self.present.pop(tp, None)
            return stop
        self._since_ms[tp] = stop.since_ms
        is_same = before is not None and before.kind == stop.kind
        found = replace(stop, since_ms=before.since_ms) if is_same and before is not None else stop
        self.present[tp] = found
        return found

    def forget(self, tp: TopicPartition) -> None:
        """An operator resumed it."""
        self.present.pop(tp, None)
        self.tried.pop(tp, None)

    def due(
        self, is_available: Callable[[TopicPartition], bool], altered_ms: Mapping[str, int]
    ) -> Iterator[TopicPartition]:
        """Removes those to retry now. ``altered_ms``: when the settings of a topic here were altered."""
        for tp, stop in list(self.present.items()):
            waited_ms = self.clock_ms() - self._since_ms[tp]
            is_due = is_available(tp) if stop.kind == UNAVAILABLE else waited_ms > RETRY_AFTER_S[stop.kind] * 1000
            if stop.kind == REJECTED and altered_ms.get(tp[0], 0) + _KNOWN_MS > self._since_ms[tp]:
                is_due = True
            if is_due:
                self.tried[tp] = self.present.pop(tp)
                yield tp

    def committed(self, tp: TopicPartition) -> None:
        """Records of it are committed: a later stop is a new one."""
        self.tried.pop(tp, None)
