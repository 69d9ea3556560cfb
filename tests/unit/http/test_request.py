"""From the bytes of a request to chunks: whatever is sent, it is either understood or refused by name."""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from functools import partial
from urllib.parse import unquote_to_bytes

import cramjam
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.gateway.contract.chunk import Chunk, pack_chunk
from logferry.gateway.contract.names import MAX_ATTRIBUTES, MAX_SEQNO, Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.http.request import (
    ChunkLimits,
    checked,
    decoded_body,
    header_attributes,
    iter_chunks,
    number,
    percent_decoded,
    trace_of,
    traced,
    validated,
)
from multidict import CIMultiDict
from pydantic import BaseModel, ConfigDict

LIMIT = 1000
LIMITS = ChunkLimits(data_bytes=LIMIT, record_bytes=300_000, chunks=10)
# Without the time, which would be in the names of the tests.
_gzip = partial(gzip.compress, mtime=0)

# ---- numbers and names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("007", 7), (str(MAX_SEQNO), MAX_SEQNO)])
def test_numbers_are_decimal_digits(text: str, value: int) -> None:
    assert number(text, "seqno") == value


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", " 1", "1 ", "1\n", "1.0", "1e3", "0x10", "1_000", "٣", str(2**63), "9" * 20, "9" * 5000]
)
def test_anything_else_is_not_a_number(text: str) -> None:
    with pytest.raises(Malformed, match="seqno"):
        number(text, "seqno")


def test_a_number_over_its_own_limit_is_refused() -> None:
    assert number("7", "partition", 7) == 7
    with pytest.raises(Malformed, match="from 0 to 7"):
        number("8", "partition", 7)


@pytest.mark.parametrize(
    ("text", "value"), [("", ""), ("a/b", "a/b"), ("a%2Fb", "a/b"), ("%d1%91", "ё"), ("%252F", "%2F"), ("a+b", "a+b")]
)
def test_escapes_are_undone_once(text: str, value: str) -> None:
    assert percent_decoded(text, "sourceId") == value


@pytest.mark.parametrize("text", ["%", "a%2", "%zz", "%-1", "%ff", "%d1", "%ed%a0%80", "\udcff", "100%"])
def test_broken_escapes_and_what_is_not_utf8_are_refused(text: str) -> None:
    with pytest.raises(Malformed, match="sourceId"):
        percent_decoded(text, "sourceId")


def test_attributes_from_headers() -> None:
    headers = [("Host", "x"), ("X-Attr-Level", "warn"), ("x-attr-host", "w%C3%A9b"), ("X-Attr-a.b_c-d", "")]
    assert header_attributes(headers) == {"level": "warn", "host": "wéb", "a.b_c-d": ""}


def test_an_attribute_that_is_given_twice_is_refused() -> None:
    with pytest.raises(Malformed, match="LEVEL"):
        header_attributes([("X-Attr-Level", "warn"), ("X-Attr-LEVEL", "error")])


def test_an_attribute_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(Malformed, match="X-Attr-a"):
        header_attributes([("X-Attr-a", "%ff")])


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([TRACE], TRACE),
        # A later version has the fields of this one first.
        (["cc" + TRACE[2:]], TRACE),
        (["cc" + TRACE[2:] + "-what-comes"], TRACE),
        # Not valid, so ignored.
        ([], None),
        ([""], None),
        ([TRACE + "-more"], None),
        (["cc" + TRACE[2:] + ".more"], None),
        (["ff" + TRACE[2:]], None),
        ([TRACE.upper()], None),
        ([TRACE[:-1]], None),
        ([f"00-{'0' * 32}-00f067aa0ba902b7-01"], None),
        ([f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"], None),
        ([TRACE + "\n"], None),
        ([TRACE, TRACE], None),
    ],
)
def test_a_trace_context_is_taken_or_ignored(given: list[str], found: str | None) -> None:
    """The rules of W3C Trace Context, section 3.2."""
    assert trace_of(CIMultiDict([("Traceparent", text) for text in given])) == found


def test_a_chunk_has_one_trace_and_no_attribute_too_many() -> None:
    plain = Chunk(1, None, None, {"a": "b"}, b"x")
    assert traced(plain, None) is plain
    assert traced(plain, TRACE) == plain._replace(attributes={"a": "b", "traceparent": TRACE})
    own = plain._replace(attributes={"traceparent": "its own"})
    assert traced(own, TRACE) is own
    full = plain._replace(attributes={f"a{n}": "" for n in range(MAX_ATTRIBUTES)})
    assert traced(full, TRACE) is full


# ---- encodings of the body ---------------------------------------------------------------------------------

BODY = b"some log line\n" * 50


@pytest.mark.parametrize(
    ("encoded", "encoding"),
    [
        (BODY, ""),
        (BODY, "identity"),
        (_gzip(BODY), "gzip"),
        (_gzip(BODY), " X-GZIP "),
        (_gzip(BODY[:100]) + _gzip(BODY[100:]), "gzip"),
        (bytes(cramjam.zstd.compress(BODY)), "zstd"),
        (bytes(cramjam.zstd.compress(BODY[:100])) + bytes(cramjam.zstd.compress(BODY[100:])), "zstd"),
    ],
)
def test_content_encoding_is_undone(encoded: bytes, encoding: str) -> None:
    assert decoded_body(encoded, encoding, LIMIT) == BODY


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("size", [0, 1, LIMIT])
def test_up_to_the_limit(encoding: str, size: int) -> None:
    body = b"x" * size
    encoded = _gzip(body) if encoding == "gzip" else bytes(cramjam.zstd.compress(body))
    assert decoded_body(encoded, encoding, LIMIT) == body


BAD_BODIES = [
    (_gzip(b"\0" * (LIMIT + 1)), "gzip", "too-large"),
    (_gzip(b"\0" * 50_000_000), "gzip", "too-large"),
    (_gzip(b"\0" * 600) * 2, "gzip", "too-large"),
    (bytes(cramjam.zstd.compress(b"\0" * (LIMIT + 1))), "zstd", "too-large"),
    (bytes(cramjam.zstd.compress(b"\0" * 50_000_000)), "zstd", "too-large"),
    (b"", "gzip", "bad-request"),
    (b"", "zstd", "bad-request"),
    (BODY, "gzip", "bad-request"),
    (BODY, "zstd", "bad-request"),
    (zlib.compress(BODY), "gzip", "bad-request"),
    (_gzip(BODY)[:-1], "gzip", "bad-request"),
    (_gzip(BODY)[:5], "gzip", "bad-request"),
    (_gzip(BODY) + b"rest", "gzip", "bad-request"),
    (_gzip(BODY)[:-8] + bytes(8), "gzip", "bad-request"),
    (bytes(cramjam.zstd.compress(BODY))[:-1], "zstd", "bad-request"),
    (bytes(cramjam.zstd.compress(BODY)) + b"rest", "zstd", "bad-request"),
    (BODY, "br", "unsupported-media-type"),
    (BODY, "deflate", "unsupported-media-type"),
    (_gzip(_gzip(BODY)), "gzip, gzip", "unsupported-media-type"),
    (BODY, "x" * 5000, "unsupported-media-type"),
]


@pytest.mark.parametrize(("body", "encoding", "kind"), BAD_BODIES)
def test_a_body_that_cannot_be_undone_within_the_limit(body: bytes, encoding: str, kind: str) -> None:
    with pytest.raises(Problem) as caught:
        decoded_body(body, encoding, LIMIT)
    assert caught.value.kind == kind
    if kind == "too-large":
        assert caught.value.extra["limit_bytes"] == LIMIT


@pytest.mark.parametrize("size", [1 << 20, 16 << 20])
def test_a_body_of_empty_members_is_refused_at_once(size: int) -> None:
    """Each would have copied all that follows it: 16 MiB took minutes."""
    member = _gzip(b"")
    with pytest.raises(Problem, match="more than 1024 gzip members"):
        decoded_body(member * (size // len(member)), "gzip", 16 << 20)


@pytest.mark.parametrize("members", [1, 2, 1023, 1024])
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_members_of_any_size_are_one_body(members: int, size: int) -> None:
    part = random.Random(size).randbytes(size)
    assert decoded_body(_gzip(part) * members, "gzip", 16 << 20) == part * members


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=300_000), st.integers(0, 300_000))
def test_a_body_in_two_members_is_that_body(data: bytes, cut: int) -> None:
    packed_body = _gzip(data[:cut], 1) + _gzip(data[cut:], 1)
    assert decoded_body(packed_body, "gzip", 1 << 20) == data


def test_a_packed_body_takes_no_more_room_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []
    undo = cramjam.zstd.decompress_into

    def noted(body: bytes, out: bytearray) -> int:
        rooms.append(len(out))
        return int(undo(body, out))

    monkeypatch.setattr(cramjam.zstd, "decompress_into", noted)
    assert decoded_body(bytes(cramjam.zstd.compress(BODY)), "zstd", 16 << 20) == BODY
    assert rooms[0] < 1 << 17
    bomb = bytes(cramjam.zstd.compress(b"x" * (8 << 20)))
    assert len(decoded_body(bomb, "zstd", 16 << 20)) == 8 << 20


class _Known(BaseModel):
    model_config = ConfigDict(extra="forbid")
    position: int | None = None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{" + b",".join(b'"k%d":1' % n for n in range(33)) + b"}", "33 keys"),
        (b'{"position": {' + b",".join(b'"k%d":1' % n for n in range(5000)) + b"}}", "5000 keys"),
        (b"{" + b",".join(b'"k%d":1' % n for n in range(30)) + b"}", "Extra inputs"),
        (b"[" * 90_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_a_json_body_that_is_not_what_is_asked_for(body: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said) as caught:
        validated(_Known, body)
    assert len(str(caught.value)) < 2000


# ---- many chunks -------------------------------------------------------------------------------------------


def packed(*items: object) -> bytes:
    return b"".join(msgpack.packb(item) for item in items)


def test_chunks_of_any_packer_are_read() -> None:
    body = packed([1, None, None, None, b"a"], [2, 1, 5, {"level": "warn"}, b""], [MAX_SEQNO, 2, 0, {}, b"x" * LIMIT])
    assert list(iter_chunks(body, LIMITS)) == [
        Chunk(1, None, None, {}, b"a"),
        Chunk(2, 1, 5, {"level": "warn"}, b""),
        Chunk(MAX_SEQNO, 2, 0, {}, b"x" * LIMIT),
    ]


chunks = st.builds(
    Chunk,
    seqno=st.integers(1, MAX_SEQNO),
    prev=st.none() | st.just(0),
    created_ms=st.none() | st.integers(0, MAX_SEQNO),
    attributes=st.dictionaries(st.from_regex(r"[a-z0-9._-]{1,64}", fullmatch=True), st.text(max_size=300), max_size=20),
    data=st.binary(max_size=300),
)


@given(st.lists(chunks, min_size=1, max_size=6))
def test_what_the_client_packs_is_read(sent: list[Chunk]) -> None:
    assert list(iter_chunks(b"".join(map(pack_chunk, sent)), LIMITS)) == sent


@given(st.lists(chunks, min_size=1, max_size=3), st.data())
def test_a_stream_cut_anywhere_is_refused_or_whole_chunks(sent: list[Chunk], data: st.DataObject) -> None:
    """A body that ends inside a chunk must not pass for the chunks before it."""
    parts = [pack_chunk(chunk) for chunk in sent]
    boundaries = {sum(map(len, parts[:n])) for n in range(1, len(parts) + 1)}
    body = b"".join(parts)
    cut = data.draw(st.integers(0, len(body) - 1).filter(lambda at: at not in boundaries))
    with pytest.raises(Malformed):
        list(iter_chunks(body[:cut], LIMITS))


@given(st.binary(max_size=200))
def test_any_bytes_are_chunks_or_refused(body: bytes) -> None:
    try:
        found = list(iter_chunks(body, LIMITS))
    except (Malformed, Problem):
        return
    assert found


BAD_CHUNKS = [
    (b"", "no chunk"),
    (packed(7), "chunk 0"),
    (packed([1, None, None, None, b"a"], "x"), "chunk 1"),
    (packed({}), "chunk 0"),
    (packed([]), "chunk 0"),
    (packed([1, None, None, b"a"]), "chunk 0"),
    (packed([1, None, None, None, b"a", 6]), "chunk 0"),
    (packed([None, None, None, None, b"a"]), "seqno"),
    (packed(["1", None, None, None, b"a"]), "seqno"),
    (packed([1.0, None, None, None, b"a"]), "seqno"),
    (packed([True, None, None, None, b"a"]), "seqno"),
    (packed([-1, None, None, None, b"a"]), "seqno"),
    (packed([2**63, None, None, None, b"a"]), "seqno"),
    (packed([1, -1, None, None, b"a"]), "prev"),
    (packed([1, "0", None, None, b"a"]), "prev"),
    (packed([1, 1, None, None, b"a"]), "prev"),
    (packed([1, 2, None, None, b"a"]), "prev"),
    (packed([1, 2**63, None, None, b"a"]), "prev"),
    (packed([1, 0, -5, None, b"a"]), "created_ms"),
    (packed([1, 0, 2**63, None, b"a"]), "created_ms"),
    (packed([1, 0, 5.5, None, b"a"]), "created_ms"),
    (packed([1, 0, 5, [], b"a"]), "attributes"),
    (packed([1, 0, 5, "a=b", b"a"]), "attributes"),
    (packed([1, 0, 5, {"A": "b"}, b"a"]), "attributes"),
    (packed([1, 0, 5, {"a": 1}, b"a"]), "attributes"),
    (packed([1, 0, 5, {"a": b"b"}, b"a"]), "attributes"),
    (packed([1, 0, 5, {b"a": "b"}, b"a"]), "attributes"),
    (packed([1, 0, 5, {1: "b"}, b"a"]), "chunk 0"),
    (packed([1, 0, 5, {"a": "x" * 4097}, b"a"]), "attributes"),
    (packed([1, 0, 5, {f"a{n}": "" for n in range(65)}, b"a"]), "attributes"),
    (packed([1, 0, 5, {f"a{n}": "" for n in range(5000)}, b"a"]), "chunk 0"),
    (packed([1, 0, 5, None, "text"]), "data"),
    (packed([1, 0, 5, None, None]), "data"),
    (packed([1, 0, 5, None, [b"a"]]), "data"),
    (packed([1, 0, 5, None, msgpack.ExtType(5, b"a")]), "data"),
    (packed(msgpack.ExtType(5, b"a" * 5)), "chunk 0"),
    (packed([1, 0, 5, {"a": "b"}, b"a"]).replace(b"\xa1b", b"\xa1\xff"), "chunk 0"),
    (b"\xdd\xff\xff\xff\xff" + packed(1, 2), "chunk 0"),
    (b"\xdf\xff\xff\xff\xff" + packed(1, 2), "chunk 0"),
    (b"\x95\x01\xc0\xc0\xc0\xc6\xff\xff\xff\xff", "chunk 0"),
    (b"\x91" * 100_000, "chunk 0"),
    (packed([[]] * 5), "chunk 0"),
    (packed([[1, None, None, None, b"a"]] * 5), "chunk 0"),
    (packed([1, 0, 5, {"a": {}}, b"a"]), "attributes"),
    (packed([1, 0, 5, {"a": [1, 0, 5, None, b"a"]}, b"a"]), "attributes"),
    (b"\xc1", "chunk 0"),
    (packed([1, None, None, None, b"a"]) + b"\x95", "cut off"),
    (packed([1, None, None, None, b"a"], [2, None, None, None, b"bcd"])[:-1], "chunk 1"),
]


@pytest.mark.parametrize(("body", "named"), BAD_CHUNKS)
def test_bad_chunks_say_which_and_what(body: bytes, named: str) -> None:
    with pytest.raises(Malformed, match=named):
        list(iter_chunks(body, LIMITS))


def test_a_chunk_over_its_limit_says_the_limit() -> None:
    with pytest.raises(Problem) as caught:
        list(iter_chunks(packed([1, None, None, None, b"a"], [2, None, None, None, b"x" * (LIMIT + 1)]), LIMITS))
    assert (caught.value.kind, caught.value.extra) == ("too-large", {"limit_bytes": LIMIT})
    assert "chunk 1" in caught.value.detail


def test_more_chunks_than_allowed_say_how_many_are() -> None:
    body = packed(*([seqno, None, None, None, b""] for seqno in range(11)))
    assert len(list(iter_chunks(body, LIMITS._replace(chunks=11)))) == 11
    with pytest.raises(Problem) as caught:
        list(iter_chunks(body, LIMITS))
    assert (caught.value.kind, caught.value.extra) == ("too-large", {"limit_chunks": 10})


def test_arrays_in_arrays_end_at_the_first() -> None:
    """Sixteen million empty arrays would take a gigabyte before anything is looked at."""
    tree: object = None
    for _ in range(6):
        tree = [tree] * 5
    with pytest.raises(Malformed, match="seqno"):
        list(iter_chunks(packed(tree), LIMITS))
    with pytest.raises(Malformed, match="max_array_len"):
        list(iter_chunks(b"\xdd\x00\xff\xff\xff" + b"\x90" * 1000, LIMITS))


def test_attributes_take_room_in_the_record_too() -> None:
    """Else Kafka would refuse it in the middle of a transaction, with everybody else's chunks in it."""
    limits = ChunkLimits(data_bytes=100, record_bytes=200, chunks=1)
    fits = Chunk(1, None, None, {"a": "x" * 49, "b": "é" * 24 + "x"}, b"x" * 100)
    assert checked(fits, "chunk", limits) == fits
    with pytest.raises(Problem) as caught:
        checked(fits._replace(attributes={"a": "x" * 49, "b": "é" * 25}), "chunk", limits)
    assert (caught.value.kind, caught.value.extra) == ("too-large", {"limit_bytes": 200})
    with pytest.raises(Problem) as caught:
        checked(fits._replace(data=b"x" * 101, attributes={}), "chunk", limits)
    assert caught.value.extra == {"limit_bytes": 100}


@pytest.mark.parametrize("prev", [7, 8, MAX_SEQNO])
def test_prev_lies_below_seqno(prev: int) -> None:
    with pytest.raises(Malformed, match="prev"):
        checked(Chunk(7, prev, None, {}, b""), "query", LIMITS)
    assert checked(Chunk(7, 6, None, {}, b""), "query", LIMITS).prev == 6


# ---- bounded work ------------------------------------------------------------------------------------------


@given(st.text(st.sampled_from("%=aA04fFgé\n\r_ \udcff"), max_size=20))
def test_escapes_are_undone_as_the_standard_library_undoes_them(text: str) -> None:
    broken = re.search(r"%(?![0-9a-fA-F]{2})", text)
    try:
        expected = unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        expected = None
    if "%" not in text and text.isascii():
        assert percent_decoded(text, "query") == text
    elif broken or expected is None or "\n" in text or "\r" in text:
        with pytest.raises(Malformed, match="query"):
            percent_decoded(text, "query")
    else:
        assert percent_decoded(text, "query") == expected


@pytest.mark.parametrize("frame", [bytes(cramjam.zstd.compress(b"")), b"\x50\x2a\x4d\x18\0\0\0\0"])
def test_a_body_of_empty_frames_is_refused_at_once(frame: bytes) -> None:
    with pytest.raises(Problem, match="more than 1024 zstd frames"):
        decoded_body(frame * 2000, "zstd", 16 << 20)


@pytest.mark.parametrize("attributes", [{"a" * 9000: ""}, {"a": "é" * 9000}, {f"a{n}": "" for n in range(200)}])
def test_attributes_far_over_their_limits_end_before_they_are_decoded(attributes: dict[str, str]) -> None:
    """A map of 16 MiB of text took 30 ms before its first name was looked at."""
    with pytest.raises(Malformed, match=r"max_(str|map)_len"):
        list(iter_chunks(packed([1, None, None, attributes, b""]), LIMITS))


@pytest.mark.parametrize("body", [b"[" + b"1," * 500_000 + b"1]", b"[" + b"{}," * 300_000 + b"{}]", b"[" * 200_000])
def test_json_of_many_values_is_refused_before_it_is_parsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(Malformed, match="more than 100000 values"):
        validated(_Known, body)
