"""Splunk's events: its own examples, what refuses a request, acknowledgement ids, and anything at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from logferry.gateway.errors import Problem
from logferry.gateway.receiver_settings import TopicRule
from logferry.gateway.receivers.hec import BadEvent, ack_id, group_events, is_acked, parse_events

# The examples of Splunk's own page: one event, several, with and without anything between them.
EXAMPLES = [
    (b'{"event": "Hello, world!", "sourcetype": "manual"}', 1),
    (b'{"time": 1426279439, "host": "h", "event": {"message": "Something happened", "severity": "INFO"}}', 1),
    (b'{"event":"event 1"}{"event":"event 2"}\n\n{\n"event":"event 3"\n}', 3),
]


@pytest.mark.parametrize(("body", "count"), EXAMPLES)
def test_the_examples_of_splunk(body: bytes, count: int) -> None:
    events = parse_events(body, "main")
    assert len(events) == count
    assert all(b"\n" not in event.line and "event" in json.loads(event.line) for event in events)


def test_index_and_host_of_an_event() -> None:
    events = parse_events(b'{"event":1,"index":"audit","host":"a"} {"event":2,"host":""}', "main")
    assert [(event.index_name, event.host) for event in events] == [("audit", "a"), ("main", None)]


@pytest.mark.parametrize(
    ("body", "code", "number"),
    [
        (b"", 5, None), (b" \n", 5, None), (b"x", 6, 0), (b'{"event":1}[1]', 6, 1), (b'{"event":1}{"a":1}', 12, 1),
        (b'{"event":""}', 13, 0), (b'{"event":1,"index":5}', 7, 0), (b'{"event":1,"host":[]}', 6, 0),
        (b"\xff", 6, None), (b'{"event":NaN}', 6, 0), (b'{"event":' + b"[" * 50_000, 6, 0), (b'{"event":null}', 12, 0),
    ],
)  # fmt: skip
def test_a_bad_event_refuses_the_request(body: bytes, code: int, number: int | None) -> None:
    with pytest.raises(BadEvent) as refused:
        parse_events(body, "main")
    assert (refused.value.code.code, refused.value.number) == (code, number)


def test_a_body_of_tiny_values_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(Problem, match="too-large"):
        parse_events(b'{"event":[' + b"[]," * 1_000_000 + b"[]]}", "main")


PIECES = st.sampled_from(['{"event":', '"', "1", "}", "{", "\\ud800", "[", "]", ",", '"host":"a"', " ", "\n", "é"])


@given(st.lists(PIECES, max_size=30).map("".join).map(str.encode) | st.binary(max_size=40))
def test_anything_is_parsed_or_refused(body: bytes) -> None:
    try:
        events = parse_events(body, "main")
    except BadEvent:
        return
    assert all(json.loads(event.line)["event"] not in (None, "") for event in events)


FIELDS = st.dictionaries(
    st.sampled_from(["event", "index", "host", "time", "fields", "source"]),
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.sampled_from(["\ud800", "a\nb", [], {}, "main"]),
    max_size=4,
)
RULES = [TopicRule(name="m*", topic="main")]


@example([{"event": "a", "host": "\ud800"}], 1)
@given(st.lists(FIELDS, max_size=3), st.sampled_from([None, 1]))
def test_any_fields_are_grouped_or_refused_and_stay_as_they_are(
    events: list[dict[str, Any]], indent: int | None
) -> None:
    body = "\n".join(json.dumps(event, indent=indent) for event in events).encode()
    try:
        found = group_events(body, "main", RULES)
    except BadEvent:
        return
    lines = [line for of_topic, _ in found.values() for line in of_topic]
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == events
    assert not any(b"\n" in line or b"\r" in line for line in lines)


def test_an_event_over_several_lines_keeps_its_numbers() -> None:
    (event,) = parse_events(b'{"event":\r\n 1e400,\n"time": 1426279439.123456789}', "main")
    assert event.line == b'{"event":   1e400, "time": 1426279439.123456789}'


@given(st.integers(0, 2**40), st.text(max_size=20), st.integers(-1, 2**60))
def test_an_acknowledgement_is_true_for_an_id_that_was_given(number: int, channel: str, other: int) -> None:
    given_id = ack_id(channel, number)
    assert 0 <= given_id < 1 << 52
    assert is_acked(channel, given_id)
    assert not is_acked(channel, given_id ^ 1)
    assert is_acked(channel, other) == (0 <= other < 1 << 52 and ack_id(channel, other >> 20) == other)
