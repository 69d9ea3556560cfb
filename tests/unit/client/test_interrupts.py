"""Ctrl-C arrives while the main thread takes a lock: what is called afterwards, such as `commit`, finds it free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from logferry.client import Reader, Writer

URL = "http://127.0.0.1:9"
FACES: dict[str, Callable[[], Reader | Writer]] = {
    "reader": lambda: Reader(URL, "t"),
    "writer": lambda: Writer(URL, "t", "s"),
}


@pytest.mark.parametrize("face", FACES)
def test_an_interrupt_while_the_lock_is_taken(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code that takes a lock can be interrupted between taking it and the block that gives it back."""
    taken = threading.Condition.__enter__

    def interrupted(condition: threading.Condition) -> bool:
        taken(condition)
        raise KeyboardInterrupt

    opened = FACES[face]()
    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
    with suppress(KeyboardInterrupt):
        opened.close()
    monkeypatch.undo()
    closing = threading.Thread(target=opened.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
