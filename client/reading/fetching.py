"""The threads that fetch pages for a reader without a consumer."""

from __future__ import annotations

import time
from contextlib import suppress

from logferry.client.errors import LogferryError, OutOfRange
from logferry.client.reading.link import Link
from logferry.client.reading.partition_scheduler import Ask, Rotation
from logferry.client.reading.requests import Again
from logferry.client.reading.shelf import Shelf
from logferry.client.reading.start_positions import LOOK_INTERVAL_S, grown, page_of, page_path
from logferry.client.reading.subscription import Wanted
from logferry.client.transport.dialer import Dialer


class Fetching:
    """What `Rotation` says is to be asked is asked, and now and then whether there are more partitions."""

    def __init__(self, wanted: Wanted, rotation: Rotation, shelf: Shelf, dialer: Dialer) -> None:
        self._wanted, self._rotation, self._shelf, self._dialer = wanted, rotation, shelf, dialer
        self._look_at = time.monotonic() + LOOK_INTERVAL_S
        shelf.start(self._run, wanted.connections)

    def _run(self) -> None:
        link = Link(self._wanted, self._dialer)
        try:
            with self._shelf.cutting(link.cut):
                while True:
                    with self._shelf.lock:
                        ask, is_look = self._next()
                    if is_look:
                        self._look(link)
                    elif ask is None:
                        return
                    else:
                        self._ask(link, ask)
        finally:
            link.close()

    def _next(self) -> tuple[Ask | None, bool]:
        """A page to ask for, or that it is time to look for partitions; neither: the end."""
        while self._shelf.goes_on and not self._rotation.is_over:
            now = time.monotonic()
            if self._wanted.follow and now >= self._look_at:
                self._look_at = now + LOOK_INTERVAL_S
                return None, True
            ask = self._rotation.next_ask(now)
            if ask is not None:
                return ask, False
            times = [at for at in (self._rotation.due(now), self._look_at if self._wanted.follow else None) if at]
            self._shelf.room.wait(max(min(times) - now, 0.0) if times else None)
        return None, False

    def _ask(self, link: Link, ask: Ask) -> None:
        try:
            chunks, next_offset = page_of(link.ask(page_path(self._wanted, ask), accept=True))
        except Again as again:
            with self._shelf.lock:
                pause_s = again.pause_s(self._rotation.fail(ask))
                self._rotation.hold(ask, time.monotonic() + pause_s)
        except OutOfRange as error:  # the answer does not say of what
            raise OutOfRange(str(error), *ask.partition, error.first, error.next) from None
        else:
            with self._shelf.lock:
                self._rotation.take(ask, chunks, next_offset)
                self._shelf.tell()

    def _look(self, link: Link) -> None:
        """In vain is no harm: it is done again."""
        steps = grown(self._wanted, self._rotation)
        with suppress(StopIteration, LogferryError, Again):
            path = next(steps)
            while True:
                reply = link.ask(path)
                with self._shelf.lock:
                    path = steps.send(reply)
