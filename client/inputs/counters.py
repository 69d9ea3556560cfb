"""What an input took and refused, and why it is in trouble: for status and metrics."""

from __future__ import annotations

import threading
from typing import Any, Callable

from logferry.client.inputs.spool import Spool


class InputCounters:
    """``dropped``: messages for which the spool had no room, of senders that cannot wait. ``refused``: messages that
    are too long, and connections beyond the limit. ``error``: why nothing comes; empty: all is well."""

    def __init__(self, name: str, kind: str, spool: Spool) -> None:
        self.name = name
        self.kind = kind
        self.messages = self.bytes = self.dropped = self.refused = 0
        self.error = ""
        self.defect: BaseException | None = None  # ended its thread
        self._spool = spool
        self._lock = threading.Lock()

    def took(self, messages: int, size: int) -> None:
        with self._lock:
            self.messages += messages
            self.bytes += size

    def status(self) -> dict[str, Any]:
        used = {"spool_bytes": self._spool.used_bytes, "spool_limit_bytes": self._spool.limit}
        counts = {"messages": self.messages, "bytes": self.bytes, "dropped": self.dropped, "refused": self.refused}
        return {"name": self.name, "type": self.kind, **counts, **used, "error": self._spool.error or self.error}

    def guard(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work``, for a thread: what ends it is raised by the main thread."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (a defect: the main thread raises it)
                self.defect = error

        return run
