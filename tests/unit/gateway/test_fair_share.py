"""A shared limit: whatever tokens take, another one finds room, and nothing is ever over the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.limits import FairShare


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), max_size=60))
def test_another_token_always_finds_room(wanted: list[tuple[str, int]]) -> None:
    share = FairShare(1000)
    for number, (token, amount) in enumerate(wanted):
        if share.of_token(token) and amount <= share.room(token):
            share.take(token, amount)
        elif number < 3 and share.of_token(token) == 0:
            share.take(token, 1)
        assert share.used <= 1000
        assert share.room("another") >= 1000 // 5**3 - 3  # each of the others left a fifth, less what it took first
    for token in "abc":
        share.give(token, share.of_token(token))
    assert (share.used, share.free) == (0, 1000)


def test_the_only_one_takes_all_and_nobody_is_told_apart_without_tokens() -> None:
    share = FairShare(1000)
    assert share.room("a") == 1000
    share.take("a", 900)
    assert share.room("a", own=900) == 100
    assert share.room("a") < 0
    share.give("a", 900)
    share.take(None, 999)
    assert share.room(None) == 1


@pytest.mark.parametrize(("token", "sessions"), [("a", 800), (None, 1000)])
def test_how_many_of_a_thousand_sessions_one_token_holds(token: str | None, sessions: int) -> None:
    share = FairShare(1000)
    while share.room(token) >= 1:
        share.take(token, 1)
    assert share.used == sessions
