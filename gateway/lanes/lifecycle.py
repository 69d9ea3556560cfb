"""The life cycle of a lane, in gateway and mirror: opened, served, opened again after each failure, and closed.

* Opened again only when the group confirms that the lane is still this worker's: two workers that both believe so
  would fence each other in turn permanently.
* Closed in order: no new requests are taken, `serve` finishes, and the producer is discarded.
* No control flow depends on the observable state, which is for status and metrics. A lane *waits* while it does not
  serve, and while a commit takes longer than `SLOW_MS`. Times are Unix ms.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.errors import LaneLost, LaneUnreadable
from logferry.gateway.kafka.hanging_transactions import FencedProducer
from logferry.gateway.kafka.transactional_producer import NotCommitted, OutcomeUnknown, TransactionalProducer
from logferry.gateway.metrics import LaneMetrics
from logferry.gateway.topics.present_lanes import PresentLanes

# State → the states that may follow. opening: before the fence, and between retries after a failure. serving → fencing:
# another worker may have owned the lane meanwhile, or a broker was away. stopped: its state cannot be read; an operator
# must act. closed: revoked, or the worker ends.
TRANSITIONS: Final[dict[str, tuple[str, ...]]] = {
    "opening": ("fencing", "closed"),
    "fencing": ("replaying", "opening", "closed"),
    "replaying": ("serving", "opening", "stopped", "closed"),
    "serving": ("fencing", "opening", "closed"),
    "stopped": ("fencing", "opening", "closed"),
    "closed": (),
}
STATES: Final = tuple(TRANSITIONS)
SLOW_MS: Final = 1000
# A lane that cannot be read is tried again after so long, so that it serves soon after it was mended.
STOPPED_S: Final = 4.0
CHANGING_S: Final = 0.1
BACKOFF_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
RETRIABLE: Final = (NotCommitted, OutcomeUnknown, errors.KafkaError, OSError, TimeoutError)


def now_ms() -> int:
    return int(time.time() * 1000)


@dataclass(slots=True)
class LaneWait:
    """``ended_ms`` None: it still waits."""

    reason: str
    began_ms: int
    ended_ms: int | None = None


@dataclass(slots=True)
class LaneState:
    """Changed by its lane alone.

    ``why`` names no topic, since callers that wait receive it; ``error`` may, and is shown to administrators alone.
    """

    clock_ms: Callable[[], int] = now_ms
    state: str = "opening"
    why: str = "taken over"
    since_ms: int = field(init=False)
    transaction_ms: int | None = None
    committed_ms: int | None = None
    wait: LaneWait | None = field(init=False)
    error: str | None = None
    error_ms: int | None = None

    def __post_init__(self) -> None:
        self.since_ms = self.clock_ms()
        self.wait = LaneWait(self.why, self.since_ms)

    def enter(self, state: str, why: str | None = None) -> None:
        """``why`` None: for the same reason as before. Raises ValueError for a transition that is not in the table."""
        now = self.clock_ms()
        if state != self.state:
            if state not in TRANSITIONS[self.state]:
                raise ValueError(f"a lane that is {self.state} cannot become {state}")
            self.state, self.since_ms = state, now
        if why is not None:
            self.why = why
        if state != "serving":
            if self.wait is None or self.wait.ended_ms is not None:
                self.wait = LaneWait(self.why, now)
            self.wait.reason = self.why
        elif self.wait is not None and self.wait.ended_ms is None:
            self.wait.ended_ms = now

    def fail(self, error: BaseException) -> None:
        """The lane opens again; the error remains until the next one. The wait began with the failed transaction."""
        kind, text, state, began_ms = type(error).__name__, str(error), self.state, self.transaction_ms
        self.transaction_ms = None
        self.enter("opening", f"it failed ({kind})")
        if began_ms is not None and self.wait is not None:
            self.wait.began_ms = min(self.wait.began_ms, began_ms)
        if isinstance(error, TimeoutError) or text == TimeoutError.__name__:
            text = "Kafka did not answer in time"
        # Some errors begin with their name.
        self.error = f"while {state}: " + (text if kind in text else f"{kind}: {text}" if text else kind)
        self.error_ms = self.clock_ms()

    def stop(self, error: BaseException) -> None:
        """The lane cannot be read; the error names the record."""
        self.transaction_ms = None
        self.enter("stopped", "its state topic has a record that cannot be read")
        self.error, self.error_ms = str(error), self.clock_ms()

    def begin(self) -> None:
        self.transaction_ms = self.clock_ms()

    def commit(self, throttled_s: float = 0.0) -> None:
        """The transaction is committed. ``throttled_s``: for so long a quota of Kafka delayed it."""
        began_ms, self.committed_ms = self.transaction_ms, self.clock_ms()
        self.transaction_ms = None
        if began_ms is not None and self.committed_ms - began_ms > SLOW_MS:
            why = f"a quota of Kafka delayed a commit by {throttled_s:.1f} s" if throttled_s else "a commit took long"
            self.wait = LaneWait(why, began_ms, self.committed_ms)


ProducerT = TypeVar("ProducerT", bound=TransactionalProducer)


@dataclass(slots=True, eq=False, kw_only=True)
class LaneLifecycle(ABC, Generic[ProducerT]):
    """A lane of this worker. `run` opens and serves it until `close`, or until the group revokes it."""

    metrics: ClassVar[LaneMetrics]
    number: int
    confirm_ownership: Callable[[int], Awaitable[None]]
    grace_s: float = 0.0
    lane_state: LaneState = field(default_factory=LaneState)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _closing: bool = False
    _invalidated: bool = False
    # None: it is not open.
    _producer: ProducerT | None = None
    # Those of the discarded producer.
    _before: dict[str, FencedProducer] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        return self.lane_state.state

    @property
    def why(self) -> str:
        """The reason of the state, for those who have to wait."""
        return self.lane_state.why

    @property
    def is_open(self) -> bool:
        """Accepts requests, though it may still be opening."""
        return not self._closing

    async def run(self) -> None:
        """Opens and serves, again after each failure, until closed. Whatever waits is answered before it ends."""
        try:
            await asyncio.sleep(self.grace_s)
            failures, stopped = 0, None
            while not (self._closing and self.is_done):
                try:
                    await self.open(first=self._producer is None and failures == 0)
                    failures = 0
                    stopped = None
                    await self.serve()
                except LaneUnreadable as error:
                    if str(error) != stopped:
                        stopped = str(error)
                        log.event("lane_stopped", lane=self.number, why=stopped)
                    await self._stop(error)
                except RETRIABLE as error:
                    # Only the log gets the full error: its text may name a topic that the caller must not know of.
                    self.lane_state.fail(error)
                    log.event("lane_failed", lane=self.number, error=repr(error))
                    self.metrics.failed(self.number, error)
                    self.failed(error)
                    await self.drop_producer()
                    if self._closing:
                        return
                    await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                    failures += 1
                    await self._confirm()
        except LaneLost as error:
            self._closing = True
            self.lane_state.enter("closed", str(error))
            log.event("lane_revoked", lane=self.number, why=str(error))
        finally:
            self._closing = True
            self.lane_state.enter("closed")
            await self.drop_producer()
            self.metrics.closed(self.number)
            self.ended()

    def close(self) -> None:
        """Stops accepting; `run` ends after the running transaction and what was queued before."""
        self._closing = True
        self.lane_state.enter(self.state, "given away")
        self._wake.set()

    def invalidate(self) -> None:
        """Another worker may have owned the lane meanwhile: it is fenced and replayed before the next write."""
        self._invalidated = True
        self._wake.set()

    async def open(self, *, first: bool) -> None:
        """Fences, then replays; nothing where there is a producer already."""
        if self._producer is not None:
            return
        await self.may_open()
        started = time.monotonic()
        self.lane_state.enter("fencing", "another worker may have had it" if self._invalidated else None)
        self._invalidated = False
        self._producer = producer = self.make_producer()
        await producer.fence()
        fenced = time.monotonic()
        self.lane_state.enter("replaying")
        await self.replay(producer)
        self.lane_state.enter("serving", "open")
        replay_s = time.monotonic() - fenced
        facts = self.opened()
        self.metrics.opened(self.number, first=first, replay_s=replay_s)
        fence_ms, replay_ms = round((fenced - started) * 1000), round(replay_s * 1000)
        log.event("lane_open", lane=self.number, **facts, fence_ms=fence_ms, replay_ms=replay_ms)

    async def serve(self) -> None:
        """Returns when the lane is closed. After any exception the producer is discarded."""
        while not (self._closing and self.is_done):
            producer = self._producer
            if self._invalidated or producer is None:
                await self._reopen()
            elif not self.has_work:
                self._wake.clear()
                await self._wake.wait()
            else:
                await producer.settled()
                await self.transact(producer)
                if producer.is_troubled:
                    await self._reopen()

    async def _reopen(self) -> None:
        await self.drop_producer()
        await self.open(first=False)

    async def drop_producer(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            self._before = producer.producers
            await producer.discard()

    async def _stop(self, error: LaneUnreadable) -> None:
        """The lane alone serves nothing until it can be read; returns when that is worth another try."""
        self.lane_state.stop(error)
        await self.drop_producer()
        self.stopped()
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOPPED_S):
                while not self._closing:
                    await self._wake.wait()
                    self._wake.clear()
        await self._confirm()

    async def _confirm(self) -> None:
        while True:
            try:
                return await self.confirm_ownership(self.number)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                self.lane_state.enter(self.state, f"the group does not answer: {error!r}")
                await asyncio.sleep(BACKOFF_S[-1])

    # ---- for each kind of lane -------------------------------------------------------------------

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """No request is left that was accepted before the lane was closed."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """There is something for `transact`."""

    async def may_open(self) -> None:
        """Returns when the lane may be opened, so that nothing is undone by it. Raises KafkaError."""

    async def unchanged(self, lanes: PresentLanes) -> None:
        """Returns when the number of lanes is not being changed: the opening of a lane would undo that."""
        while await lanes.is_changing():
            if self._closing:
                raise LaneLost("the number of lanes was being changed when the lane was given away")
            self.lane_state.enter("opening", "the number of lanes is being changed")
            await asyncio.sleep(CHANGING_S)

    @abstractmethod
    def make_producer(self) -> ProducerT: ...

    @abstractmethod
    async def replay(self, producer: ProducerT) -> None:
        """Reads what the lane recorded, up to the producer's fence."""

    @abstractmethod
    def opened(self) -> dict[str, Any]:
        """The lane serves from now on. Returns the facts for the log."""

    @abstractmethod
    async def transact(self, producer: ProducerT) -> None:
        """Does what is due, in one transaction or none."""

    def failed(self, error: BaseException) -> None:
        """For state that a failure changes."""

    @abstractmethod
    def stopped(self) -> None:
        """Answers the requests that wait: nothing is served until an operator has acted."""

    @abstractmethod
    def ended(self) -> None:
        """Answers the requests that still wait."""
