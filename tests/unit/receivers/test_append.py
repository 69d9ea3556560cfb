"""When a part is sent again: with a key whatever is known of it, without one only if nothing was recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from logferry.gateway.access.rights import ANYBODY
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.errors import LaneMoved, Problem
from logferry.gateway.receivers.append import Appender, Part, digest_of

CONFIG = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:1"}})
MOVED = LaneMoved("not-owner-yet", "moving")
UNKNOWN = LaneMoved("outcome-unknown", "the owner is gone")
BUSY = Problem("overloaded", "full")
DONE = {"written": 1}


@pytest.mark.parametrize(
    ("key", "outcomes", "ends_with"),
    [
        ("k", [MOVED, UNKNOWN, MOVED, DONE], DONE),
        (None, [MOVED, MOVED, DONE], DONE),
        (None, [MOVED, UNKNOWN, DONE], UNKNOWN),
        (None, [BUSY, DONE], BUSY),
        # Where it may be recorded, a later 503 must not say that it is not.
        ("k", [UNKNOWN, BUSY, DONE], DONE),
        ("k", [UNKNOWN, Problem("forbidden", "no"), DONE], "forbidden"),
    ],
)
async def test_a_part_is_repeated_only_where_that_is_safe(
    monkeypatch: pytest.MonkeyPatch, key: str | None, outcomes: list[Any], ends_with: Any
) -> None:
    left = list(outcomes)

    async def once(*_: object) -> Any:
        outcome = left.pop(0)
        if isinstance(outcome, Problem):
            raise outcome
        return outcome

    async def news() -> None:
        return

    nothing = cast(Any, SimpleNamespace(wait_for_news=news, number_of_lanes=lambda: 8))
    monkeypatch.setattr(Appender, "_append_once", once)
    appender = Appender(CONFIG, nothing, nothing, nothing, nothing, nothing)
    part = Part(SourceIdentity("dc1.t", None, "s"), [], key, 1)
    found: Any
    try:
        found = await appender.append(ANYBODY, None, part)
    except Problem as problem:
        found = problem
    assert ends_with in (found, getattr(found, "kind", None))
    if ends_with in outcomes:
        assert outcomes.index(ends_with) + 1 + len(left) == len(outcomes)


def test_the_digest_tells_contents_apart() -> None:
    def digest(*chunks: tuple[bytes, dict[str, str]]) -> bytes:
        return digest_of(Chunk(0, None, None, attributes, data) for data, attributes in chunks)

    one = digest((b"ab", {}), (b"c", {}))
    assert one == digest((b"ab", {}), (b"c", {}))
    others = [digest((b"a", {}), (b"bc", {})), digest((b"abc", {})), digest((b"ab", {"x": "y"}), (b"c", {}))]
    assert len({one, *others}) == 4


def test_the_same_request_in_another_trace_has_the_same_digest() -> None:
    found = {
        digest_of([Chunk(0, None, None, {"x": "y", **trace}, b"ab")])
        for trace in ({}, {"traceparent": "one"}, {"traceparent": "another"})
    }
    assert len(found) == 1
