"""Bodies of lines, and the credentials of other agents."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.contract.names import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import presented_token
from logferry.gateway.receivers.append import idempotency_key
from logferry.gateway.receivers.lines import cut_lines


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=20), st.integers(31, 200))
def test_lines_are_cut_between_lines(lines: list[bytes], limit: int) -> None:
    body = b"\n".join(lines)
    pieces, count = cut_lines(body, limit)
    assert b"".join(pieces) == body + b"\n" * (body != b"" and not body.endswith(b"\n"))
    assert all(piece.endswith(b"\n") and len(piece) <= limit for piece in pieces)
    assert count == b"".join(pieces).count(b"\n")


@pytest.mark.parametrize("body", [b"x" * 100, b"a\n" + b"x" * 40 + b"\nb\n", b"a\n" + b"x" * 40])
def test_a_line_over_the_limit_is_refused(body: bytes) -> None:
    with pytest.raises(Problem, match="too-large: a line has"):
        cut_lines(body, 32)


def basic(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("Splunk abc", "abc"),
        (f"ApiKey {basic('name:abc')}", "abc"),
        (f"Basic {basic('anybody:a:b')}", "a:b"),
    ],
)
def test_the_token_of_an_agent(header: str, token: str) -> None:
    assert presented_token(header) == token
    if not header.startswith("Bearer"):
        # A browser that sends what it remembers must not become a caller of other routes.
        with pytest.raises(Problem, match="must have the form Bearer"):
            presented_token(header, ("bearer",))


@pytest.mark.parametrize("header", [None, "", "Digest x", "Basic %%%", "ApiKey AAA", f"Basic {basic('x')[:-1]}!"])
def test_credentials_that_are_none(header: str | None) -> None:
    with pytest.raises(Problem, match="unauthenticated"):
        presented_token(header)


def test_an_idempotency_key_is_printable() -> None:
    assert idempotency_key({}) is None
    assert idempotency_key({"Idempotency-Key": ' "a b" '}) == '"a b"'
    for key in ("", " ", "x" * 256, "ä", "a\tb"):
        with pytest.raises(Malformed, match="Idempotency-Key"):
            idempotency_key({"Idempotency-Key": key})
