"""What each answer means for a source: one table."""

import json
import time
from email.utils import formatdate
from typing import Any

import pytest
from logferry.client.transport.connections import Reply
from logferry.client.transport.source_request import (
    LONGEST_RETRY_AFTER_S,
    NO_ANSWER,
    GatewayAnswer,
    NextStep,
    next_step,
    read_answer,
)


def read(status: int, headers: dict[str, str], body: bytes, opens: bool) -> GatewayAnswer:
    return read_answer(Reply(status, headers, body, time.time()), opens)


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (NO_ANSWER, "", NextStep.AGAIN),
        (200, "", NextStep.ADVANCE),
        (204, "", NextStep.AGAIN),
        (301, "", NextStep.AGAIN),
        (307, "redirect", NextStep.ASK),
        (400, "bad-request", NextStep.REFUSED),
        (401, "unauthenticated", NextStep.REFUSED),
        (403, "forbidden", NextStep.REFUSED),
        (404, "unknown-topic", NextStep.REFUSED),
        (408, "", NextStep.WAIT),
        (409, "gap", NextStep.RECUT),
        (409, "overlap", NextStep.RECUT),
        (409, "superseded", NextStep.REOPEN),
        (409, "out-of-order", NextStep.REFUSED),
        (409, "", NextStep.REFUSED),
        (413, "too-large", NextStep.SMALLER),
        (422, "", NextStep.REFUSED),
        (429, "quota", NextStep.WAIT),
        (500, "outcome-unknown", NextStep.AGAIN),
        (502, "", NextStep.AGAIN),
        (503, "not-owner-yet", NextStep.WAIT),
        (503, "", NextStep.WAIT),
        (504, "", NextStep.AGAIN),
    ],
)
def test_judge(status: Any, kind: str, expected: Any) -> None:
    assert next_step(GatewayAnswer(status, kind)) is expected


def test_a_problem_is_read() -> None:
    body = json.dumps({"type": "https://x/problems/gap", "detail": "why", "recorded_seqno": 5}).encode()
    answer = read(409, {"retry-after": "2"}, body, opens=False)
    assert answer == GatewayAnswer(409, "gap", "why", recorded_seqno=5, retry_after_s=2.0)
    assert read(409, {}, b'{"type": "urn:logferry:overlap"}', opens=False).type == "overlap"
    assert read(503, {}, b"<html>busy", opens=False).detail == "<html>busy"


def test_a_session_is_read() -> None:
    body = b'{"session": 7, "partition": 3, "recorded_seqno": null, "url": "http://w", "source_retention_ms": 9}'
    answer = read(200, {}, body, opens=True)
    assert (answer.session, answer.recorded_seqno, answer.url) == (7, None, "http://w")
    assert answer.source_retention_ms == 9
    for odd in (b"null", b"0", b"-1", b'"9"', b"[]"):
        assert read(200, {}, body.replace(b"9", odd), opens=True).source_retention_ms is None


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b"{}", b'{"session": null, "recorded_seqno": null}', b"\xff"])
def test_a_200_that_is_not_a_gateways_is_no_answer(body: bytes, opens: bool) -> None:
    """A captive portal must not advance a source."""
    assert read(200, {}, body, opens).status == NO_ANSWER


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("3", 3, 3),
        ("0", 0, 0),
        ("99999", LONGEST_RETRY_AFTER_S, LONGEST_RETRY_AFTER_S),
        ("-1", 0, 0),
        ("nan", 0, 0),
        ("soon", 0, 0),
        (formatdate(0, usegmt=True), 0, 0),
        (formatdate(32503680000, usegmt=True), LONGEST_RETRY_AFTER_S, LONGEST_RETRY_AFTER_S),
    ],
)
def test_retry_after(value: Any, least: Any, most: Any) -> None:
    assert least <= read(503, {"retry-after": value}, b"", opens=False).retry_after_s <= most
