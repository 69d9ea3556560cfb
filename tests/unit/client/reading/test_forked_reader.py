"""A reader in a process that was forked from its own."""

from __future__ import annotations

import os
from collections.abc import Callable

from logferry.client import Closed, Reader


def test_a_forked_process_cannot_use_it() -> None:
    reader = Reader("http://127.0.0.1:9", "dc1.t", max_chunks=0)
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: reader.open(0.1),
        "read": lambda: reader.read(0.1),
        "lines": lambda: next(reader.lines(), None),
        "position": lambda: reader.position,
        "cursors": lambda: reader.cursors(0.1),
        "translate": lambda: reader.translate("dc1.t", 0, 1, "dc1", "dc2", 0.1),
        "is_over": lambda: reader.is_over,
        "commit": lambda: reader.commit(0.1),
    }
    for call in calls.values():
        end, pipe = os.pipe()
        child = os.fork()
        if child == 0:  # nothing may be waited for here
            try:
                call()
            except Closed:
                reader.close()
                os.write(pipe, b"told")
            finally:
                os._exit(0)
        os.close(pipe)
        with os.fdopen(end, "rb") as told:
            assert told.read() == b"told"
        os.waitpid(child, 0)
    reader.close()
