"""What each answer means for a source: one table."""

import json
from email.utils import formatdate

import pytest
from logferry.client.transport.responses import LONGEST_RETRY_AFTER_S, NO_ANSWER, Answer, Do, judge, read_answer


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (NO_ANSWER, "", Do.AGAIN),
        (200, "", Do.ADVANCE),
        (204, "", Do.AGAIN),
        (301, "", Do.AGAIN),
        (307, "redirect", Do.ASK),
        (400, "bad-request", Do.REFUSED),
        (401, "unauthenticated", Do.REFUSED),
        (403, "forbidden", Do.REFUSED),
        (404, "unknown-topic", Do.REFUSED),
        (408, "", Do.WAIT),
        (409, "gap", Do.RECUT),
        (409, "overlap", Do.RECUT),
        (409, "superseded", Do.REOPEN),
        (409, "out-of-order", Do.REFUSED),
        (409, "", Do.REFUSED),
        (413, "too-large", Do.SMALLER),
        (422, "", Do.REFUSED),
        (429, "quota", Do.WAIT),
        (500, "outcome-unknown", Do.AGAIN),
        (502, "", Do.AGAIN),
        (503, "not-owner-yet", Do.WAIT),
        (503, "", Do.WAIT),
        (504, "", Do.AGAIN),
    ],
)
def test_judge(status, kind, expected):
    assert judge(Answer(status, kind)) is expected


def test_a_problem_is_read():
    body = json.dumps({"type": "https://x/problems/gap", "detail": "why", "recorded_seqno": 5}).encode()
    answer = read_answer(409, {"retry-after": "2"}, body, opens=False)
    assert answer == Answer(409, "gap", "why", recorded_seqno=5, retry_after_s=2.0)
    assert read_answer(409, {}, b'{"type": "urn:logferry:overlap"}', opens=False).type == "overlap"
    assert read_answer(503, {}, b"<html>busy", opens=False).detail == "<html>busy"


def test_a_session_is_read():
    body = b'{"session": 7, "partition": 3, "recorded_seqno": null, "url": "http://w"}'
    answer = read_answer(200, {}, body, opens=True)
    assert (answer.session, answer.recorded_seqno, answer.url) == (7, None, "http://w")


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b"{}", b'{"session": null, "recorded_seqno": null}', b"\xff"])
def test_a_200_that_is_not_a_gateways_is_no_answer(body, opens):
    """A captive portal must not advance a source."""
    assert read_answer(200, {}, body, opens).status == NO_ANSWER


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
def test_retry_after(value, least, most):
    assert least <= read_answer(503, {"retry-after": value}, b"", opens=False).retry_after_s <= most
