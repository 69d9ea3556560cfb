"""What a unit may do next, as transitions of its state. Pure.

Invariants:

* A batch is sent only when the state that plans it is committed in the present term (`is_sendable`), so the worker
  after this one cuts the log in the same place.
* The shape of planned batches does not change: another one holds from the first batch that was not planned before.
* ``position`` moves to the end of the first planned batch when that is delivered or set aside, over records without
  chunks for it while nothing is planned, and by a replay. Nothing else moves it.
* A stopped unit plans and sends nothing until it is resumed or replayed.

What a worker does not commit at once (`may_wait`) is only what it would find again: a batch that is done is sent once
more, the same, and a batch that was planned ahead was never sent.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from logferry.gateway.contract.delivery_state import DeliveryError, DeliveryState, DeliveryStop

# So many batches are planned: one under way, and those of which the plan is committed meanwhile.
DEPTH: Final = 12
# Plans wait for each other, and share a commit, while so many batches, or half of those planned, can be sent without
# it, and two at least: when the first one is done, the next one is to be ready.
_READY: Final = 4
_LEAST_READY: Final = 2
# As long as more are planned without a wait for data, they share it up to so many.
_TOGETHER: Final = 6
_DETAIL: Final = 500

# Kind → what an operator does.
STOPS: Final[dict[str, str]] = {
    "rejected": "correct the receiver, then resume; or skip the batch by a replay from behind it",
    "records-removed": "retention removed records before they were delivered; replay from earliest to continue",
    "topic-recreated": "the topic was deleted and recreated; replay from earliest to deliver the new one",
    "out-of-range": "the position lies behind the end: the log was cut back; replay from where to continue",
}


def begun(
    subscription_id: str, topic_id: bytes, position: int, *, now_ms: int, created_ms: int, resumed: int
) -> DeliveryState:
    """The first state of a unit. Replays of its subscription are followed; resumptions before it mean others.

    Its epoch is the time: above that of any unit of this name that was removed or forgotten before.
    """
    return DeliveryState(subscription_id, topic_id, now_ms, position, replay=created_ms, resumed=resumed)


def taken_over(state: DeliveryState) -> DeliveryState:
    return state._replace(epoch=state.epoch + 1)


def next_start(state: DeliveryState) -> int:
    """Where the next batch to plan begins."""
    return state.ends[-1] if state.ends else state.position


def may_plan(state: DeliveryState, shape: str) -> bool:
    """A changed shape waits until what was planned before is done."""
    return state.stop is None and len(state.ends) < DEPTH and (not state.ends or state.shape == shape)


def planned(state: DeliveryState, end: int, shape: str) -> DeliveryState:
    """Raises ValueError for a batch that may not be planned."""
    if not may_plan(state, shape) or end <= next_start(state):
        raise ValueError(f"a batch up to {end} cannot be planned behind {state}")
    return state._replace(ends=(*state.ends, end), shape=shape)


def unplanned(state: DeliveryState, committed: DeliveryState) -> DeliveryState:
    """Without the batches that the log does not know."""
    return state._replace(ends=tuple(end for end in state.ends if end in committed.ends))


def sendable(wanted: DeliveryState, committed: DeliveryState) -> int:
    """How many of the planned batches, from the first on, are planned in the log, by this term, under this replay."""
    if wanted.stop is not None:
        return 0
    same = (committed.epoch, committed.replay, committed.topic_id) == (wanted.epoch, wanted.replay, wanted.topic_id)
    # The log may not know yet that earlier batches are done: their ends stand before this one's.
    cuts = (committed.position, *committed.ends)
    if not same or committed.shape != wanted.shape or wanted.position not in cuts:
        return 0
    known = zip(wanted.ends, cuts[cuts.index(wanted.position) + 1 :], strict=False)
    return sum(1 for _ in takewhile(lambda ends: ends[0] == ends[1], known))


def is_sendable(wanted: DeliveryState, committed: DeliveryState) -> bool:
    """Whether the first planned batch may be sent."""
    return sendable(wanted, committed) > 0


def new_plans(wanted: DeliveryState, committed: DeliveryState) -> bool:
    """Whether batches are planned that the log does not know."""
    return not set(wanted.ends) <= set(committed.ends)


def may_wait(wanted: DeliveryState, committed: DeliveryState, *, is_planning: bool = False) -> bool:
    """Whether the commit may wait for others: only positions, errors and plans are new, and enough can be sent, or
    more plans follow at once: while planning takes the time, a commit for each would only add to it."""
    progressed = committed._replace(position=wanted.position, ends=wanted.ends, error=wanted.error)
    if wanted != progressed:
        return False
    ready, ahead = sendable(wanted, committed), len(wanted.ends)
    if ready == ahead or (is_planning and ahead < _TOGETHER):
        return True
    return ready >= min(_READY, max(_LEAST_READY, ahead // 2))


def delivered(state: DeliveryState) -> DeliveryState:
    """The first planned batch is done."""
    return state._replace(position=state.ends[0], ends=state.ends[1:], error=None)


def passed(state: DeliveryState, position: int) -> DeliveryState:
    """Nothing for this unit lies before the position."""
    return state._replace(position=position) if not state.ends and position > state.position else state


def halved(state: DeliveryState, middle: int) -> DeliveryState:
    """The first batch becomes two. Raises ValueError for a place outside of it."""
    if not state.ends or not state.position < middle < state.ends[0]:
        raise ValueError(f"{middle} is not inside the first batch of {state}")
    return state._replace(ends=(middle, *state.ends), error=None)


def stopped(state: DeliveryState, kind: str, detail: str, now_ms: int) -> DeliveryState:
    return state._replace(stop=DeliveryStop(kind, detail[:_DETAIL], now_ms))


def failed(state: DeliveryState, detail: str, now_ms: int) -> DeliveryState:
    attempts = state.error.attempts + 1 if state.error is not None else 1
    return state._replace(error=DeliveryError(detail[:_DETAIL], now_ms, attempts))


def resumed(state: DeliveryState, number: int) -> DeliveryState:
    """After a resumption of the subscription with this number."""
    return state._replace(stop=None, error=None, resumed=number) if number > state.resumed else state


def replayed(state: DeliveryState, number: int, topic_id: bytes, position: int) -> DeliveryState:
    """The position is set by an operator; what was planned before is not sent any more."""
    fresh = state._replace(topic_id=topic_id, position=position, ends=(), replay=number, stop=None, error=None)
    return fresh._replace(epoch=state.epoch + 1)
