"""Which records to delete where a disk would fill before retention helps: the oldest, by the priority of topics. Pure.

Invariants:

* Nothing goes from a topic without a policy, from a compacted one, or younger than the policy keeps.
* Nothing goes that a reader still needs, unless the directory is below the last threshold. A reader whose position is
  not known needs everything.
* Nothing goes above the committed end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.gateway.contract.names import TopicPartition
from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId

# Ages at which the offsets of a partition are asked for, in seconds: the oldest records go first, to such a limit.
AGES_S: Final = (
    *(90 * 86_400, 60 * 86_400, 30 * 86_400, 14 * 86_400, 7 * 86_400, 4 * 86_400, 2 * 86_400, 86_400, 12 * 3600),
    *(6 * 3600, 3 * 3600, 2 * 3600, 3600, 1800, 900, 300, 120, 60, 30, 10, 5, 0),
)


class Candidate(NamedTuple):
    """A partition of the directory. ``ages``: for each of `AGES_S` the first offset that is not older, up to the end.

    ``needed``: by reader, its position; None: not known. ``expires_before``: retention will have removed the records
    below this offset by the time at which the disk would be full.
    """

    tp: TopicPartition
    priority: int
    keep_s: float
    size_bytes: int
    start: int
    end: int
    ages: tuple[int, ...]
    needed: Mapping[str, int | None] = {}
    expires_before: int = 0

    @property
    def record_bytes(self) -> float:
        return self.size_bytes / (self.end - self.start) if self.end > self.start else 0.0


class DeletedRange(NamedTuple):
    """Records to delete: [start, before). ``against``: the readers that still need some of them."""

    tp: TopicPartition
    start: int
    before: int
    size_bytes: int
    against: tuple[str, ...] = ()


class DeletionLimits(NamedTuple):
    below_free_percent: float
    until_free_percent: float
    last_free_percent: float
    bytes_at_once: int


@dataclass(slots=True)
class DeletionPlan:
    """``why``: of the directory. ``missing_bytes``: what is not found, with the readers in its way."""

    place: DirId
    why: str = ""
    ranges: list[DeletedRange] = field(default_factory=list)
    missing_bytes: int = 0
    held_by: tuple[str, ...] = ()


def needs_deletion(view: ClusterView, place: DirId, pending_bytes: int, limits: DeletionLimits) -> bool:
    """``pending_bytes``: deleted ones whose files Kafka has not removed yet."""
    state = view.dirs[place]
    if state.error or state.total_bytes <= 0:
        return False
    free = state.usable_bytes + max(0, pending_bytes)
    return 100 * free / state.total_bytes < limits.below_free_percent


def plan_deletion(
    view: ClusterView,
    place: DirId,
    candidates: Sequence[Candidate],
    pending_bytes: int,
    limits: DeletionLimits,
    full_in_s: float | None = None,
) -> DeletionPlan:
    """The records to delete now. None where `needs_deletion` says no, or retention frees enough before it is full."""
    found = DeletionPlan(place)
    if not needs_deletion(view, place, pending_bytes, limits):
        return found
    state = view.dirs[place]
    free_percent = 100 * (state.usable_bytes + pending_bytes) / state.total_bytes
    wanted = int(state.total_bytes * limits.until_free_percent / 100) - state.usable_bytes - pending_bytes
    is_last = free_percent < limits.last_free_percent
    expiring = sum(one.record_bytes * max(0, one.expires_before - one.start) for one in candidates)
    if not is_last and full_in_s is not None and expiring >= wanted:
        found.why = f"retention removes {expiring:.0f} bytes before it is full, in {full_in_s:.0f} s"
        return found
    found.why = f"{free_percent:.1f} % are free, {limits.below_free_percent:g} % are needed"
    if is_last:
        found.why += f"; below {limits.last_free_percent:g} %, where readers are not waited for"
    _choose(found, candidates, min(wanted, limits.bytes_at_once), is_last)
    return found


def _choose(found: DeletionPlan, candidates: Sequence[Candidate], wanted: int, is_last: bool) -> None:
    left = float(wanted)
    held: set[str] = set()
    for priority in sorted({one.priority for one in candidates}):
        group = [one for one in candidates if one.priority == priority]
        befores = {one.tp: one.start for one in group}
        for rung in range(len(AGES_S)):
            if left <= 0:
                break
            for one in sorted(group, key=lambda candidate: candidate.tp):
                limit, holders = _limit(one, rung, is_last)
                held |= holders
                before = befores[one.tp]
                if limit <= before or left <= 0 or one.record_bytes <= 0:
                    continue
                # At least one record; a segment goes once all of it is below the offset.
                step = min(limit - before, max(1, round(left / one.record_bytes)))
                befores[one.tp] = before + step
                left -= step * one.record_bytes
        for one in group:
            if (before := befores[one.tp]) > one.start:
                size = round((before - one.start) * one.record_bytes)
                against = tuple(sorted(n for n, at in one.needed.items() if at is None or at < before))
                found.ranges.append(DeletedRange(one.tp, one.start, before, size, against))
    found.missing_bytes = max(0, round(left))
    found.held_by = tuple(sorted(held)) if found.missing_bytes else ()


def _limit(one: Candidate, rung: int, is_last: bool) -> tuple[int, set[str]]:
    """The offset up to which records of this age may go, and the readers that hold some of them."""
    if AGES_S[rung] < one.keep_s:
        return one.start, set()
    limit = min(one.ages[rung], one.end)
    if is_last:
        return limit, set()
    holders = {name for name, at in one.needed.items() if at is None or at < limit}
    positions = (one.needed[name] for name in holders)
    return min([limit, *(one.start if at is None else at for at in positions)]), holders
