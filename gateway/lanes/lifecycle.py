"""How a lane is kept, whatever it carries: opened, served, opened again after each failure, and given away.

* Opened again only when the group confirms that the lane is still this worker's: two who both believe so would fence
  each other in turn for ever.
* What ends it ends it in order: nothing new is taken, `serve` finishes, and the producer is thrown away.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.course import Course
from logferry.gateway.errors import LaneLost
from logferry.gateway.kafka.transactional_producer import NotCommitted, OutcomeUnknown, TransactionalProducer

BACKOFF_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
PASSES: Final = (NotCommitted, OutcomeUnknown, errors.KafkaError, OSError, TimeoutError)


@dataclass(slots=True, eq=False, kw_only=True)
class KeptLane(ABC):
    """A lane as held by this worker. `run` keeps it until `close`, or until the group gives it away."""

    number: int
    confirm_ownership: Callable[[int], Awaitable[None]]
    grace_s: float = 0.0
    course: Course = field(default_factory=Course)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _closing: bool = False
    _doubted: bool = False

    @property
    def state(self) -> str:
        """One of `course.STATES`."""
        return self.course.state

    @property
    def why(self) -> str:
        """The reason of the state, for those who have to wait."""
        return self.course.why

    @property
    def is_open(self) -> bool:
        """Takes what comes, though it may still be opening."""
        return not self._closing

    async def run(self) -> None:
        """Opens and serves, again after each failure, until closed. Whatever waits is answered before it ends."""
        try:
            await asyncio.sleep(self.grace_s)
            failures = 0
            while not (self._closing and self.is_done):
                try:
                    await self.open(first=self.producer is None and failures == 0)
                    failures = 0
                    await self.serve()
                except PASSES as error:
                    # Why in full is for the log: the text may name a topic that whoever asks must not know of.
                    self.course.fail(error)
                    log.event("warning", "lane_failed", lane=self.number, error=repr(error))
                    self.failed(error)
                    await self.drop_producer()
                    if self._closing:
                        return
                    await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                    failures += 1
                    await self._confirm()
        except LaneLost as error:
            self._closing = True
            self.course.enter("closed", str(error))
            log.event("info", "lane_lost", lane=self.number, why=str(error))
        finally:
            self._closing = True
            self.course.enter("closed")
            await self.drop_producer()
            self.ended()

    def close(self) -> None:
        """Stops accepting; `run` ends after the running transaction and what was queued before."""
        self._closing = True
        self.course.enter(self.state, "given away")
        self._wake.set()

    def doubt(self) -> None:
        """Another worker may have had the lane meanwhile: it is opened anew before anything else is written."""
        self._doubted = True
        self._wake.set()

    async def _confirm(self) -> None:
        while True:
            try:
                return await self.confirm_ownership(self.number)
            except (errors.KafkaError, OSError, TimeoutError) as error:
                self.course.enter(self.state, f"the group does not answer: {error!r}")
                await asyncio.sleep(BACKOFF_S[-1])

    # ---- what each kind does in its own way -------------------------------------------------------------------

    @property
    @abstractmethod
    def producer(self) -> TransactionalProducer | None:
        """None: it is not open."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Nothing is left of what was taken before the lane was closed."""

    @abstractmethod
    async def open(self, *, first: bool) -> None:
        """Fences, then replays; nothing where there is a producer already."""

    @abstractmethod
    async def serve(self) -> None:
        """Returns when the lane is closed. Whatever it raises, the producer is thrown away."""

    @abstractmethod
    async def drop_producer(self) -> None: ...

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """To be counted."""

    @abstractmethod
    def ended(self) -> None:
        """To answer what still waits."""
