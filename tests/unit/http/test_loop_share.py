"""What a caller may send never holds the event loop: work that grows with it is bounded, or done in a thread."""

from __future__ import annotations

import asyncio
import threading

import cramjam
import pytest
from logferry.gateway.api import sources
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.request import decoded_body
from logferry.gateway.reading.assignment import Subscription


@pytest.mark.parametrize(("size", "is_here"), [(0, True), (1 << 14, True), ((1 << 14) + 1, False)])
async def test_large_work_is_done_in_a_thread(size: int, is_here: bool) -> None:
    where = await computed(size, threading.get_ident)
    assert (where == threading.get_ident()) == is_here


async def test_a_small_body_that_unpacks_to_much_is_unpacked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """534 bytes of zstd held the loop for 15 ms."""
    limits: list[int] = []

    def seen(body: bytes, encoding: str, limit: int) -> bytes:
        if threading.current_thread() is threading.main_thread():
            limits.append(limit)
        return decoded_body(body, encoding, limit)

    monkeypatch.setattr("logferry.gateway.api.sources.decoded_body", seen)
    plain = bytes(16 << 20)
    body = bytes(cramjam.zstd.compress(plain))
    assert await sources.decoded(body, "zstd", len(plain)) == plain
    assert max(limits) <= 1 << 17
    with pytest.raises(Problem, match="too-large"):
        await sources.decoded(body, "zstd", len(plain) - 1)
    with pytest.raises(Problem, match="too-large"):
        await asyncio.wait_for(sources.decoded(body, "zstd", 1000), 60)


def test_a_topic_is_compared_with_the_patterns_once_and_its_right_each_time() -> None:
    asked: list[str] = []
    allowed = {"dc1.nginx"}

    def may_read(name: str) -> bool:
        asked.append(name)
        return name in allowed

    wanted = Subscription("c", frozenset(), ("*.nginx", "dc1.a[!b]*"), may_read)
    names = ["dc1.nginx", "dc2.nginx", "dc1.ac", "dc1.ab", "dc1.nginx2"]
    assert wanted.among(names) == {"dc1.nginx"}
    assert asked == ["dc1.nginx", "dc2.nginx", "dc1.ac"]
    allowed.clear()
    assert wanted.among(names) == frozenset()
    assert wanted.among(["dc3.nginx"]) == frozenset()
