"""Elasticsearch's bulk bodies: its own examples, what is refused alone, and anything at all."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from logferry.gateway.contract.names import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.receiver_settings import TopicRule
from logferry.gateway.receivers.bulk import Bulk, answer_of, parse_bulk
from logferry.gateway.receivers.elasticsearch import problem_answer

RULES = [TopicRule(name="logs-*", topic="logs"), TopicRule(name="test", topic="test")]
# The example of Elasticsearch's own page.
EXAMPLE = b"""{ "index" : { "_index" : "test", "_id" : "1" } }
{ "field1" : "value1" }
{ "delete" : { "_index" : "test", "_id" : "2" } }
{ "create" : { "_index" : "test", "_id" : "3" } }
{ "field1" : "value3" }
{ "update" : {"_id" : "1", "_index" : "test"} }
{ "doc" : {"field2" : "value2"} }
"""


def parsed(body: bytes, index: str | None = None) -> Bulk:
    return parse_bulk(body, index, RULES, 1000)


def test_the_example_of_elasticsearch() -> None:
    found = parsed(EXAMPLE)
    assert [(item.action, item.status) for item in found.items] == [
        ("index", 201), ("delete", 400), ("create", 201), ("update", 400),
    ]  # fmt: skip
    assert found.fitting("test", 1000) == [b'{ "field1" : "value1" }', b'{ "field1" : "value3" }']
    # The same documents under the same ids are the same request.
    assert found.key("test") == parsed(EXAMPLE).key("test") != parsed(EXAMPLE.replace(b'"3"', b'"4"')).key("test")
    assert parsed(EXAMPLE.replace(b', "_id" : "3"', b"")).key("test") is None


def test_each_item_has_its_own_answer() -> None:
    body = b'{"index":{}}\n{"a":1}\n{"create":{"_index":"logs-1"}}\n[1]\n{"create":{"_index":"none"}}\n{"a":2}\n'
    found = parsed(body, "logs-x")
    items = json.loads(answer_of(found.items, {}, 3))
    assert (items["took"], items["errors"]) == (3, True)
    outcomes = [(status["_index"], status["status"]) for item in items["items"] for status in item.values()]
    assert outcomes == [("logs-x", 201), ("logs-1", 400), ("none", 404)]
    refused = json.loads(answer_of(found.items, {"logs": (503, "overloaded_exception", "later")}, 0))
    assert refused["items"][0]["index"]["status"] == 503


def test_a_request_of_which_nothing_is_recorded_may_be_repeated_as_a_whole() -> None:
    found = parsed(b'{"index":{"_index":"test"}}\n{}\n{"index":{"_index":"logs-1"}}\n{}\n{"delete":{"_id":"1"}}\n', "x")
    assert [found.has_recorded(failed) for failed in ([], ["test"], ["logs"], ["test", "logs"])] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("kind", "status"), [("overloaded", 503), ("outcome-unknown", 503), ("quota", 429)])
def test_what_is_worth_another_attempt_is_no_json(kind: str, status: int) -> None:
    """rsyslog drops the lines of a request that is answered by JSON without the items of a success."""
    answer = problem_answer(Problem(kind, "later"), "")
    assert (answer.status, answer.content_type) == (status, "text/plain")
    assert problem_answer(Problem("forbidden", "no"), "").content_type == "application/json"


def test_a_long_document_is_refused_alone() -> None:
    found = parsed(b'{"index":{"_index":"test"}}\n{"a":"' + b"x" * 100 + b'"}\n{"index":{"_index":"test"}}\n{}\n')
    assert found.fitting("test", 50) == [b"{}"]
    assert [item.status for item in found.items] == [413, 201]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\n\n", b'{"index":{}}', b'{"index":{}}\n', b"x\n{}\n", b'{"index":1}\n{}\n', b"[]\n{}\n",
        b'{"index":{},"create":{}}\n{}\n', b'{"index":{"_index":7}}\n{}\n', b'{"index":{"_id":{}}}\n{}\n',
        b'{"index":{"_index":"\xff"}}\n{}\n', b"[" * 3000 + b"\n{}\n", b" " * 5000 + b'{"index":{}}\n{}\n',
        b'{"index":{}}\n{}\n' * 1001,
    ],
)  # fmt: skip
def test_what_makes_the_rest_unreadable_refuses_the_request(body: bytes) -> None:
    if body == b'{"index":{}}\n':
        body += b""
    with pytest.raises(Malformed, match="_bulk"):
        parsed(body, "test")


PIECES = st.sampled_from(
    [b'{"index":{}}', b'{"create":{"_index":"test"}}', b'{"delete":{"_id":"1"}}', b"{}", b"\n", b'{"a":"b"}', b" ",
     b'{"update":{}}', b'{"index":{"_id":1}}', b"\r\n", b"\xff", b'{"index":', b"[", b'"_index"']
)  # fmt: skip


@given(st.lists(PIECES | st.binary(max_size=8), max_size=40).map(b"".join))
def test_anything_is_parsed_or_malformed(body: bytes) -> None:
    try:
        found = parsed(body, "test")
    except Malformed:
        return
    taken = [item for item in found.items if item.topic is not None]
    assert sum(len(lines) for lines in found.lines.values()) == len(taken)
    assert len(json.loads(answer_of(found.items, {}, 0))["items"]) == len(found.items)


META = st.dictionaries(
    st.sampled_from(["_index", "_id", "routing", "require_alias"]),
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(["test", "\ud800", [], {}]),
    max_size=3,
)
ACTIONS = st.tuples(st.sampled_from(["index", "create", "update", "delete", "Index", ""]), META)


@example([("index", {"_index": "test", "_id": "\ud800"})])
@given(st.lists(ACTIONS, max_size=4))
def test_any_metadata_is_answered_or_malformed(actions: list[tuple[str, Any]]) -> None:
    body = "".join(json.dumps({name: meta}) + "\n" + "{}\n" * (name != "delete") for name, meta in actions).encode()
    try:
        found = parsed(body)
    except Malformed:
        return
    items = json.loads(answer_of(found.items, {}, 0))["items"]
    assert [[*item] for item in items] == [[name] for name, _ in actions]
    taken = [meta.get("_id") for item, (_, meta) in zip(found.items, actions, strict=True) if item.topic is not None]
    assert not taken or (found.key("test") is None) == (None in taken)


def test_blanks_in_an_action_cost_no_more_than_their_number() -> None:
    """No pattern that goes back over them again and again."""
    began = time.process_time()
    with pytest.raises(Malformed):
        parsed(b'{ "index" :' + b" " * 2000 + b"{" + b" " * 2000 + b"x\n{}\n", "test")
    assert time.process_time() - began < 1
