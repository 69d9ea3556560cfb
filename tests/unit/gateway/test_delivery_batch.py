"""Batches of push delivery: where they end, their bytes and headers, and what the answers of receivers mean."""

from __future__ import annotations

import ast
import gzip
import hashlib
import hmac
import json
import re
from pathlib import Path

import cramjam
import msgpack
import pytest
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.delivery import progress
from logferry.gateway.delivery.batch import BatchShape, DeliveryBatch, cut, headers
from logferry.gateway.delivery.sender import backoff_s, judged
from logferry.gateway.reading.formats import Row, pieces
from logferry.gateway.subscriptions import AllowedAddresses, Filters, PushSubscription, Replay
from pydantic import ValidationError

KEY = UnitKey("s", "dc1.nginx", 3)


def row(offset: int, source: str = "web1/a", data: bytes = b"x\n", **attributes: str) -> Row:
    return (
        "dc1",
        "dc1.nginx",
        3,
        offset,
        source,
        offset * 10,
        None,
        1_700_000_000_123,
        1_700_000_000_456,
        attributes,
        data,
    )


def shape(shard: int = 0, **settings: object) -> BatchShape:
    given = PushSubscription.model_validate({"topics": ["*.nginx"], "url": "https://example.org/", **settings})
    return BatchShape(given.shape, shard)


@pytest.mark.parametrize(
    ("sizes", "limit", "end"),
    [
        ([10, 10, 10], 1000, None),
        ([500, 500, 500], 1000, 1),
        ([5000, 10], 1000, 1),
        ([10, 5000], 1000, 1),
        ([900, 10], 1000, 1),
    ],
)
def test_a_batch_ends_before_it_grows_over_its_limit_and_has_one_chunk_at_least(
    sizes: list[int], limit: int, end: int | None
) -> None:
    assert cut([row(offset, data=b"x" * size) for offset, size in enumerate(sizes)], limit)[1] == end


def test_bytes_of_each_format_are_those_that_were_written_down() -> None:
    """Golden bytes: a receiver compares them with what it took before an upgrade."""
    rows = [row(7, data=b"hello\n", level="info"), row(9, data=b"\xff")]
    assert b"".join(shape().pieces(rows)) == (
        b'{"dc": "dc1", "topic": "dc1.nginx", "partition": 3, "offset": 7, "source_id": "web1/a", "seqno": 70, '
        b'"prev": null, "created_ms": 1700000000123, "recorded_ms": 1700000000456, "attributes": {"level": "info"}, '
        b'"data": "hello\\n"}\n'
        b'{"dc": "dc1", "topic": "dc1.nginx", "partition": 3, "offset": 9, "source_id": "web1/a", "seqno": 90, '
        b'"prev": null, "created_ms": 1700000000123, "recorded_ms": 1700000000456, "attributes": {}, '
        b'"data_base64": "/w=="}\n'
    )
    assert b"".join(shape(format="text").pieces(rows)) == b"hello\n\xff"
    packed = b"".join(shape(format="msgpack").pieces(rows))
    assert _unpacked(packed) == [list(one) for one in rows]
    assert packed.startswith(b"\x9b\xa3dc1\xa9dc1.nginx\x03\x07\xa6web1/a\x46\xc0\xcf\x00\x00\x01\x8b\xcf\xe5\x68\x7b")
    events = json.loads(b"".join(shape(format="cloudevents").pieces(rows)))
    assert events[0] == {
        "specversion": "1.0",
        "type": "logferry.chunk",
        "source": "/dc1.nginx/web1/a",
        "id": "70",
        "time": "2023-11-14T22:13:20.123Z",
        "dc": "dc1",
        "partition": 3,
        "offset": "7",
        "recordedms": "1700000000456",
        "attributes": '{"level": "info"}',
        "datacontenttype": "text/plain; charset=utf-8",
        "data": "hello\n",
    }
    assert events[1]["data_base64"] == "/w=="


def _unpacked(body: bytes) -> list[list[object]]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(body)
    return list(unpacker)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1023, 1024, 65_535, 65_536, 200_000])
def test_large_rows_are_packed_as_the_library_packs_them(size: int) -> None:
    """Older workers packed all of them so; the same token must have the same bytes."""
    rows = [row(7, data=b"x" * size, level="info"), row(8), row(9, data=b"y" * size)]
    assert b"".join(shape(format="msgpack").pieces(rows)) == b"".join(msgpack.packb(one) for one in rows)


def test_headers_name_the_batch_and_are_signed_with_each_key() -> None:
    batch = DeliveryBatch(5, 12, [row(7), row(9)], [b"body"])
    found = headers(KEY, batch, shape(compression="gzip"), epoch=4, replay=1, secrets=[b"new", b"old"], now_s=99)
    assert found["X-Logferry-Subscription"] == "s"
    assert found["X-Logferry-Token"] == "dc1.nginx/3/7-9"
    assert (found["X-Logferry-Epoch"], found["X-Logferry-Replay"], found["X-Logferry-Shard"]) == ("4", "1", "0")
    assert found["X-Logferry-Source"] == "web1/a 70-90"
    assert found["Content-Encoding"] == "gzip"
    good = [hmac.new(key, b"99.body", hashlib.sha256).hexdigest() for key in (b"new", b"old")]
    assert found["X-Logferry-Signature"] == f"t=99,v1={good[0]},v1={good[1]}"
    two = headers(
        KEY, DeliveryBatch(5, 12, [row(7), row(9, "other")], []), shape(), epoch=1, replay=0, secrets=[], now_s=0
    )
    assert "X-Logferry-Source" not in two
    assert "X-Logferry-Signature" not in two


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("traces", "sent"),
    [
        ([], None),
        ([TRACE, TRACE], TRACE),
        ([TRACE, ""], TRACE),  # of some of the chunks
        ([TRACE, TRACE.replace("7-01", "8-01")], None),
        # An attribute holds what its writer likes, a header does not.
        (["x\r\nX-Owned: 1"], None),
        ([TRACE + "\n"], None),
    ],
)
def test_a_batch_of_one_trace_names_it(traces: list[str], sent: str | None) -> None:
    rows = [row(7), *(row(8, traceparent=trace) if trace else row(8) for trace in traces)]
    found = headers(KEY, DeliveryBatch(5, 12, rows, []), shape(), epoch=1, replay=0, secrets=[], now_s=0)
    assert found.get("traceparent") == sent


def test_compression_gives_the_same_bytes_each_time() -> None:
    packed = shape(compression="gzip")
    assert packed.compressed(b"x" * 100) == packed.compressed(b"x" * 100)
    assert gzip.decompress(packed.compressed(b"x" * 100)) == b"x" * 100
    assert bytes(cramjam.zstd.decompress(shape(compression="zstd").compressed(b"x" * 100))) == b"x" * 100


def test_filters_and_shards_decide_which_chunks_are_in_a_batch() -> None:
    filters = Filters(source_prefix="web", attributes={"level": "info"}, pattern="ERR(OR)?")
    takes = shape(filters=filters.model_dump()).takes
    assert takes(row(1, "web1", b"an ERROR", level="info", more="x"))
    assert not takes(row(1, "db1", b"an ERROR", level="info"))
    assert not takes(row(1, "web1", b"an ERROR", level="warn"))
    assert not takes(row(1, "web1", b"an error", level="info"))
    shards = [shape(shard, order="source") for shard in range(4)]
    for number in range(50):
        assert sum(one.takes(row(1, f"web{number}")) for one in shards) == 1


@pytest.mark.parametrize(
    ("status", "after", "kind", "wait_s"),
    [
        (200, None, "done", None),
        (204, None, "done", None),
        (429, "7", "again", 7.0),
        (503, "Wed, 21 Oct 2015 07:28:10 GMT", "again", 10.0),
        (500, "soon", "again", None),
        (408, None, "again", None),
        (425, None, "again", None),
        (503, "99999999999999999999", "again", 3600.0),
        (301, None, "rejected", None),
        (400, None, "rejected", None),
        (422, "5", "rejected", None),
    ],
)
def test_what_an_answer_means(status: int, after: str | None, kind: str, wait_s: float | None) -> None:
    found = judged(status, after, b"because", 1_445_412_480.0)
    assert (found.kind, found.after_s) == (kind, wait_s)
    assert kind == "done" or f"status {status}: because" in found.detail


def test_waits_grow_and_do_not_end_before_the_receiver_says() -> None:
    assert 0.25 <= backoff_s(1, None) <= 0.5
    assert 30 <= backoff_s(1000, None) <= 60
    assert backoff_s(1, 100.0) == 100.0


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1"),
        *("64:ff9b::a00:1", "2002:0a00:0001::", "192.0.2.1"),
    ],
)
def test_addresses_that_are_not_public_are_refused_unless_named(address: str) -> None:
    assert address not in AllowedAddresses([])
    assert "8.8.8.8" in AllowedAddresses([])
    assert "10.1.2.3" in AllowedAddresses(["10.0.0.0/8"])
    assert "::ffff:10.1.2.3" in AllowedAddresses(["10.0.0.0/8"])
    assert "2606:4700::1111" in AllowedAddresses([])


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://example.org"},
        {"url": "http://user:pass@example.org"},
        {"url": "http:///x"},
        {"url": "http://example.org/a b"},
        {"filters": {"pattern": "(?=x)"}},
        {"filters": {"pattern": "("}},
        {"on_rejection": "dead-letter"},
        {"dead_letter_topic": "dead"},
        {"secret_file": "../etc/passwd"},
        {"secret_file": ".hidden"},
        {"old_secret_file": "old"},
        {"ca_file": "ca", "url": "http://example.org"},
        {"unknown": 1},
        {"topics": []},
        {"url": "http://example.org:99999"},
        {"url": "http://[::1"},
        {"topics": ["dc1." + "a" * 300]},
        {"topics": ["dc1.a"] * 101},
        {"filters": {"pattern": "x" * 1001}},
        {"filters": {"pattern": "((x{1000}){1000}){1000}"}},
        {"filters": {"attributes": {"a": "x" * 17_000}}},
        {"filters": {"attributes": {"a": "\0" * 3000}}},
    ],
)
def test_a_wrong_subscription_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PushSubscription.model_validate({"topics": ["dc1.a"], "url": "https://example.org", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"offset": 1, "time_ms": 2},
        {"offset": 1},
        {"partition": 1, "time_ms": 1},
        {"cursor": "dc1.a:0:1", "topic": "dc1.a"},
    ],
)
def test_a_wrong_replay_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Replay.model_validate(wrong)


def test_a_state_is_stored_as_it_was_written_down() -> None:
    """Golden bytes: newer workers read the states of older ones."""
    raw = (
        b'{"version":1,"subscription_id":"id","topic_id":"00112233445566778899aabbccddeeff","epoch":4,"position":70,'
        b'"ends":[80,90],"shape":"{}","replay":2,"resumed":1,"stop":{"kind":"rejected","detail":"422","at_ms":5},'
        b'"error":{"detail":"500","at_ms":6,"attempts":3}}'
    )
    state = DeliveryState.decode(raw)
    assert state.encode() == raw
    assert (state.position, state.ends, state.stop is not None) == (70, (80, 90), True)
    for wrong in (b"", b"{}", b"[]", raw.replace(b'"version":1', b'"version":2'), raw.replace(b'"epoch":4,', b"")):
        with pytest.raises(ValueError, match=r"."):
            DeliveryState.decode(wrong)
    assert UnitKey.decode(KEY.encode()) == KEY


STATE = DeliveryState("id", b"t" * 16, 5, 10, (20, 30), "A")


@pytest.mark.parametrize(
    ("committed", "is_sendable"),
    [
        (STATE, True),
        (STATE._replace(position=0, ends=(10, 20, 30)), True),  # the log does not know yet that [0, 10) is done
        (STATE._replace(ends=(30,)), False),  # another cut
        (STATE._replace(ends=()), False),  # not planned
        (STATE._replace(epoch=4), False),  # of the worker before
        (STATE._replace(shape="B"), False),
        (STATE._replace(replay=1), False),
        (STATE._replace(topic_id=b"u" * 16), False),
        (STATE._replace(position=0, ends=(15, 20)), False),
    ],
)
def test_a_batch_is_sent_only_when_its_plan_is_in_the_log(committed: DeliveryState, is_sendable: bool) -> None:
    assert progress.is_sendable(STATE, committed) is is_sendable


AHEAD = DeliveryState("id", b"t" * 16, 5, 0, tuple(range(10, 90, 10)), "A")


@pytest.mark.parametrize(
    ("wanted", "committed", "may_wait"),
    [
        (AHEAD, AHEAD, True),
        (progress.delivered(AHEAD), AHEAD, True),  # only the position is new
        (progress.planned(AHEAD, 90, "A"), AHEAD, True),  # and a plan, while 8 batches can be sent
        (progress.planned(STATE, 40, "A"), STATE, True),  # 2 of 3
        (progress.planned(STATE, 40, "A"), STATE._replace(ends=(20,)), False),  # 1 of 3
        (STATE, STATE._replace(ends=(20,)), False),  # 1 of 2: the next one is to be ready
        (STATE, STATE._replace(ends=()), False),
        (progress.halved(AHEAD, 5), AHEAD, False),  # the first one cannot be sent
        (progress.stopped(AHEAD, "rejected", "422", 1), AHEAD, False),
        (progress.taken_over(AHEAD), AHEAD, False),
        (progress.replayed(AHEAD, 1, b"t" * 16, 3), AHEAD, False),
        (progress.resumed(AHEAD, 1), AHEAD, False),
        (progress.failed(AHEAD, "500", 1), AHEAD, True),
    ],
)
def test_a_commit_waits_for_others_while_enough_can_be_sent(
    wanted: DeliveryState, committed: DeliveryState, may_wait: bool
) -> None:
    assert progress.may_wait(wanted, committed) is may_wait


@pytest.mark.parametrize(
    ("ends", "may_wait"), [((20,), True), ((20, 30, 40, 50, 60), True), ((20, 30, 40, 50, 60, 70), False)]
)
def test_plans_that_follow_at_once_share_a_commit(ends: tuple[int, ...], may_wait: bool) -> None:
    committed = STATE._replace(ends=())
    wanted = STATE._replace(ends=ends)
    assert progress.may_wait(wanted, committed, is_planning=True) is may_wait
    assert not progress.may_wait(wanted, committed)
    assert not progress.may_wait(progress.stopped(wanted, "rejected", "", 1), committed, is_planning=True)


def test_the_partitions_of_a_topic_are_spread_over_the_lanes() -> None:
    """By a hash of each, some worker has twice the load of another."""
    for name in map(str, range(20)):
        assert {UnitKey(name, "dc1.app", number).lane(8) for number in range(8)} == set(range(8))
    assert UnitKey("orders", "dc1.app", 3, 1).lane(8) == 6


def test_large_parts_are_pieces_of_their_own_and_small_ones_are_put_together() -> None:
    large = b"x" * (1 << 14)
    assert pieces(iter([b"a", b"b", large, large, b"c"])) == [b"ab", large, large, b"c"]
    assert pieces(iter([large]))[0] is large
    assert pieces(iter([])) == []


def test_new_plans_are_seen_though_as_many_batches_are_done() -> None:
    """Their topic's id is asked for before they are committed."""
    assert not progress.new_plans(progress.delivered(AHEAD), AHEAD)
    assert progress.new_plans(progress.planned(progress.delivered(AHEAD), 90, "A"), AHEAD)


def test_another_shape_waits_for_what_was_planned_before() -> None:
    """Otherwise a batch that was sent would come again with other bytes under its token."""
    assert progress.may_plan(STATE, "A")
    assert not progress.may_plan(STATE, "B")
    with pytest.raises(ValueError, match="cannot be planned"):
        progress.planned(STATE, 40, "B")
    done = progress.delivered(progress.delivered(STATE))
    assert progress.planned(done, 40, "B").shape == "B"


def test_a_stop_holds_until_an_operator_acts() -> None:
    stopped = progress.stopped(STATE, "rejected", "422", 1)
    assert not progress.is_sendable(stopped, stopped)
    assert not progress.may_plan(stopped, "A")
    assert progress.resumed(stopped, 0).stop is not None
    assert progress.resumed(stopped, 1).stop is None
    replayed = progress.replayed(stopped, 1, b"t" * 16, 3)
    assert (replayed.stop, replayed.position, replayed.ends, replayed.epoch) == (None, 3, (), 6)


def test_each_kind_of_stop_is_raised_and_the_runbook_has_it() -> None:
    """Kinds are texts of the code that stops a unit."""
    root = Path(progress.__file__).parents[2]
    said: set[str] = set()
    for module in ("unit.py", "lane.py"):
        tree = ast.parse((root / "gateway" / "delivery" / module).read_text(encoding="utf-8"))
        said |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(progress.STOPS) <= said
    page = (root / "ops/docs/operations/runbook.md").read_text(encoding="utf-8").partition("## Push delivery\n")[2]
    assert set(re.findall(r"TOPIC-N stopped: ([\w-]+)`", page.partition("\n## ")[0])) == set(progress.STOPS)
