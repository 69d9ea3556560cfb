"""The window of one source: its batches under way, and the effect of each answer. Pure: no clock, no lock.

It is the write protocol of every client: `SendWindow` uses it for the chunks of a program, the push-client for files.

Invariants, kept here and nowhere else:

* A batch does not change until its outcome is known, and goes again as it was.
* Every chunk names the one before it as ``prev``; the first chunk of a new source may have none. So batches that
  overtake each other are refused as ``gap``, never recorded out of order. Until the session's first acknowledgement one
  request is under way at a time: a new source has nothing that a ``prev`` could be compared with.
* A batch is begun when the one before it has left this machine (`left`), so that they seldom overtake each other. When
  they were begun at once, half of the requests were refused for that, and sent again.
* A batch that was not recorded, or whose outcome is unknown, is sent again alone, before anything behind it. One that
  only overtook another goes again when that one has been sent once more, or is acknowledged.
* A refusal counts when everything before the batch is acknowledged (`refused`): the first error is reported first.
  Nothing behind it can have been recorded.
* A batch is acknowledged when it, or one behind it, is recorded: ``prev`` allows none without those before it.
* After `clear` nothing new is begun before the answers under way are there: so the chunks at a position are never cut
  in two ways at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from logferry.client.transport.cluster import RETRY_S, pause_s
from logferry.client.transport.source_request import FORWARDED_S, NO_ANSWER, GatewayAnswer, NextStep, Outcome, next_step


class Batch(Protocol):
    """The chunks of one request."""

    @property
    def last(self) -> int:
        """The seqno of its last chunk."""


B = TypeVar("B", bound=Batch)


class Slot(Generic[B]):
    """A batch in the window. ``is_sent``: a request is under way; ``is_out``: its body has left.

    ``is_maybe``: the outcome of an attempt is unknown. ``is_alone``: nothing may be under way behind it. ``overtook``:
    the turn in which it was found to have overtaken another. ``refused``: the answer, until it counts. ``session``,
    ``is_first``, ``is_direct``: how the last attempt was sent; first: everything before it was acknowledged.
    """

    def __init__(self, batch: B) -> None:
        self.batch = batch
        self.is_sent = self.is_out = self.is_maybe = self.is_alone = self.is_dropped = False
        self.overtook: int | None = None
        self.refused: GatewayAnswer | None = None
        self.turn = 0
        self.session: int | None = None
        self.is_first = self.is_direct = False


def _shared(url: str | None) -> str | None:
    """The same object for the same URL: thousands of sources have few owners."""
    return url and sys.intern(url)


class RequestWindow(Generic[B]):
    """``session``: of the source; None: none is open. ``url``: the owner, if known. ``recorded``: the last seqno that
    the gateway named. ``under_way``: how many batches have a request under way."""

    # A client has one for each of ten thousand files.
    __slots__ = (
        *("session", "url", "recorded", "slots", "under_way", "not_before", "failures", "asks_for_owner"),
        *("_in_flight", "_is_begun", "_dropped", "_turn", "_failed_turn", "_direct_from"),
    )

    def __init__(self, in_flight: int) -> None:
        self.session: int | None = None
        self.url: str | None = None
        self.recorded: int | None = None
        self.slots: tuple[Slot[B], ...] = ()  # few, and mostly none, which takes no memory
        self.under_way = 0
        self.not_before = 0.0
        self.failures = 0
        self.asks_for_owner = False
        self._in_flight = in_flight
        self._is_begun = False  # the session has had an acknowledgement
        self._dropped = 0  # requests under way whose batches are no longer in the window
        self._turn = self._failed_turn = 0
        self._direct_from = 0.0

    # ---- what goes next --------------------------------------------------------------------------------------

    def next_slot(self, now: float, cut: Callable[[], B | None]) -> Slot[B] | None:
        """The batch to send now, for `leave`; a new one from ``cut`` if everything in the window has left."""
        if self.session is None or now < self.not_before or self._dropped or self.under_way >= self._in_flight:
            return None
        before: Slot[B] | None = None
        for slot in self.slots:
            if before is not None and not self._is_begun:
                return None
            if not slot.is_sent:
                return slot if slot.refused is None and self._may_follow(slot, before) else None
            if slot.is_alone or not slot.is_out:
                return None
            before = slot
        batch = cut() if before is None or self._is_begun else None
        if batch is None:
            return None
        self.slots = (*self.slots, Slot(batch))
        return self.slots[-1]

    def _may_follow(self, slot: Slot[B], before: Slot[B] | None) -> bool:
        if before is None:
            return True
        return not slot.is_alone and (slot.overtook is None or before.turn > slot.overtook)

    def is_direct(self, now: float) -> bool:
        """Whether the gateway may redirect; else it forwards."""
        return now >= self._direct_from

    def leave(self, slot: Slot[B], now: float) -> None:
        """A request with the batch is under way."""
        self._turn += 1
        self.under_way += 1
        slot.turn, slot.overtook = self._turn, None
        slot.is_sent, slot.is_out = True, False
        slot.session, slot.is_first, slot.is_direct = self.session, slot is self.slots[0], self.is_direct(now)

    def left(self, slot: Slot[B]) -> None:
        """The body has left. Calling it again is safe."""
        slot.is_out = True

    # ---- answers ---------------------------------------------------------------------------------------------

    def opened(self, session: int | None, url: str | None, recorded: int | None) -> None:
        """A session is open. The batches in the window stay: `advance` takes out what is recorded."""
        self.session, self.url, self.recorded, self.asks_for_owner = session, _shared(url), recorded, False
        self.begin_again()

    def begin_again(self) -> None:
        """Refusals that were not dealt with no longer count, and the next batch goes alone."""
        self._is_begun = False
        for slot in self.slots:
            slot.refused = slot.overtook = None

    def take(self, slot: Slot[B], outcome: Outcome, now: float) -> list[Slot[B]]:
        """The outcome of a request that left. Returns what is acknowledged now, in order."""
        answer, do = outcome.answer, next_step(outcome.answer)
        self.under_way -= 1
        self._dropped -= slot.is_dropped
        slot.is_sent = False
        if slot not in self.slots:
            return []
        if do is NextStep.ADVANCE and (answer.recorded_seqno or 0) >= slot.batch.last:
            self.url = _shared(outcome.url)
            if slot.session == self.session:
                self._is_begun, self.failures = True, 0
            return self.advance(slot.batch.last)
        if slot.session != self.session:
            slot.is_maybe = slot.is_maybe or do in (NextStep.AGAIN, NextStep.ADVANCE)
        elif do in (NextStep.AGAIN, NextStep.ADVANCE, NextStep.WAIT, NextStep.ASK):
            slot.is_alone = True
            slot.is_maybe = slot.is_maybe or do in (NextStep.AGAIN, NextStep.ADVANCE)
            if slot.turn <= self._failed_turn:
                self.failures = max(self.failures - 1, 0)  # those that were under way together fail once
            self._failed_turn = self._turn
            self.repeat(answer, now, slot.is_direct)
        elif do is NextStep.RECUT and answer.type == "gap" and not slot.is_first:
            slot.overtook = self._turn
        else:
            slot.refused = answer
        return []

    def repeat(self, answer: GatewayAnswer, now: float, was_direct: bool) -> None:
        """The request is to be sent again later, perhaps to another gateway."""
        do = next_step(answer)
        if do is not NextStep.WAIT:
            self.url = None  # the owner may be gone or out of reach: a given URL forwards
        if do is NextStep.ASK or (answer.status == NO_ANSWER and was_direct):
            self._direct_from = now + FORWARDED_S
        self.asks_for_owner = self.asks_for_owner or do is NextStep.ASK
        self.pause(now, RETRY_S, answer.retry_after_s, at_once=do is NextStep.ASK)

    def advance(self, recorded: int) -> list[Slot[B]]:
        """Everything up to ``recorded`` is: takes those batches out and returns them."""
        self.recorded = recorded if self.recorded is None else max(recorded, self.recorded)
        count = 0
        while count < len(self.slots) and self.slots[count].batch.last <= recorded:
            count += 1
        found, self.slots = self.slots[:count], self.slots[count:]
        return list(found)

    @property
    def refused(self) -> GatewayAnswer | None:
        """The refusal of the first batch, which is to be dealt with now."""
        return self.slots[0].refused if self.slots else None

    def replace_first(self, *batches: B) -> None:
        """The first batch in parts; its last attempt was refused."""
        whole, *others = self.slots
        parts = [Slot(batch) for batch in batches]
        for part in parts:
            part.is_maybe = whole.is_maybe
        self.slots = (*parts, *others)

    def clear(self) -> None:
        """Drops all batches. The source resumes where it finds the gateway."""
        for slot in self.slots:
            slot.is_dropped = slot.is_sent
            self._dropped += slot.is_sent
        self.slots = ()
        self._is_begun = False

    def close_session(self) -> None:
        """The next request opens one."""
        self.session = self.url = None

    # ---- pauses ----------------------------------------------------------------------------------------------

    def pause(self, now: float, bounds: tuple[float, float], asked_s: float = 0.0, at_once: bool = False) -> None:
        """``at_once``: the first time without a pause."""
        self.failures += 1
        failures = self.failures - at_once
        self.not_before = now + (pause_s(failures, bounds, asked_s) if failures else 0.0)

    def retry(self, now: float) -> None:
        """The failures were about another data centre, or another token."""
        self.failures, self.not_before, self._direct_from = 0, now, 0.0
