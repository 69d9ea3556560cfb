"""What a reader's threads share with its caller: one lock, its end, and the error that ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from logferry.client.errors import LogferryError

_JOIN_S = 1.0


class Shelf:
    """``came``: there is something for the caller; ``room``: it has taken something. Both are of ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.came = threading.Condition(self.lock)
        self.room = threading.Condition(self.lock)
        self.failure: LogferryError | None = None
        self.is_closed = False
        self._cuts: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []

    @property
    def goes_on(self) -> bool:
        return not self.is_closed and self.failure is None

    def start(self, run: Callable[[], None], count: int = 1) -> None:
        """So many threads. What `run` raises is the reader's `failure`."""
        for number in range(count):
            name = f"logferry-reader-{number}"
            thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except LogferryError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  a defect: the caller must hear of it
            self.fail(LogferryError(repr(error)))

    def fail(self, error: LogferryError) -> None:
        """The first one counts; the caller hears of it after what came before."""
        with self.lock:
            self.failure = self.failure or error
            self.tell()

    def tell(self) -> None:
        """Under the lock: everybody looks again."""
        self.came.notify_all()
        self.room.notify_all()

    def pause(self, seconds: float) -> None:
        """Until then, or the end."""
        until = time.monotonic() + seconds
        with self.lock:
            while self.goes_on and time.monotonic() < until:
                self.room.wait(until - time.monotonic())

    @contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `close` calls ``cut``, and what waits for the network ends."""
        with self.lock:
            self._cuts.append(cut)
        try:
            yield
        finally:
            with self.lock:
                self._cuts.remove(cut)

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            self.tell()
            cuts = list(self._cuts)
        for cut in cuts:
            cut()
        for thread in self._threads:
            thread.join(_JOIN_S)
