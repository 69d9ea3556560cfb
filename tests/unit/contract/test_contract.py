"""The bytes that outlive a process: a change of any of them is a change of what users have stored."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.contract.chunk import Chunk, chunk_of_record, pack_chunk, record_headers
from logferry.gateway.contract.names import (
    MAX_SEQNO,
    Cursor,
    Malformed,
    check_attributes,
    check_dc,
    check_source_id,
    check_topic,
    full_topic,
    lane_of,
    partition_of,
    split_topic,
)

FULL = Chunk(4096, 1024, 1_700_000_000_000, {"level": "warn", "host": "wéb1"}, b"line\n")
BARE = Chunk(0, None, None, {}, b"")

# ---- where a source goes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "crc"),
    [
        ("", 0),
        ("123456789", 0xCBF43926),  # the check value of CRC-32
        ("web1/access.log", 0x69C1C3E5),
        ("журнал/ёж.log", 0x3DA256B7),
    ],
)
def test_hash_is_crc32_of_utf8(key: str, crc: int) -> None:
    assert lane_of(key, 1 << 32) == crc


def test_lane_and_partition_are_the_hash_modulo_their_number() -> None:
    assert [lane_of("123456789", lanes) for lanes in (1, 2, 7, 8, 1024)] == [0, 0, 5, 6, 294]
    assert [partition_of("123456789", partitions) for partitions in (1, 3, 12, 10_000)] == [0, 2, 2, 262]


# ---- the Kafka record ------------------------------------------------------------------------------------


def test_record_headers_byte_for_byte() -> None:
    assert record_headers(FULL) == [
        ("seqno", b"\0\0\0\0\0\0\x10\0"),
        ("prev", b"\0\0\0\0\0\0\x04\0"),
        ("created", b"\0\0\x01\x8b\xcf\xe5\x68\0"),
        ("a.level", b"warn"),
        ("a.host", b"w\xc3\xa9b1"),
    ]
    assert record_headers(Chunk(MAX_SEQNO, None, 0, {}, b"x")) == [
        ("seqno", b"\x7f\xff\xff\xff\xff\xff\xff\xff"),
        ("created", b"\0\0\0\0\0\0\0\0"),
    ]


def test_a_record_gives_its_chunk_back() -> None:
    assert chunk_of_record(FULL.data, record_headers(FULL)) == FULL
    assert chunk_of_record(b"", record_headers(BARE)) == BARE._replace(created_ms=0)


def test_headers_of_others_are_passed_over() -> None:
    headers = [("traceparent", b"00-ff"), *record_headers(FULL)]
    assert chunk_of_record(FULL.data, headers) == FULL


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("created", b"\0" * 8)],
        [("seqno", b"\0" * 7)],
        [("seqno", b"")],
        [("seqno", None)],
        [("seqno", b"\0" * 8), ("prev", b"\0" * 9)],
        [("seqno", b"\0" * 8), ("created", b"1")],
        [("seqno", b"\0" * 8), ("a.host", b"\xff")],
    ],
)
def test_a_record_that_no_gateway_wrote_is_malformed(headers: list[tuple[str, bytes]]) -> None:
    with pytest.raises(Malformed):
        chunk_of_record(b"x", headers)


# ---- the wire --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "packed"),
    [
        (BARE, b"\x95\x00\xc0\xc0\xc0\xc4\x00"),
        (Chunk(127, 126, 0, {}, b"a"), b"\x95\x7f\x7e\x00\xc0\xc4\x01a"),
        (
            FULL,
            b"\x95\xcf\0\0\0\0\0\0\x10\0\xcf\0\0\0\0\0\0\x04\0\xcf\0\0\x01\x8b\xcf\xe5\x68\0"
            b"\xde\0\x02\xd9\x05level\xd9\x04warn\xd9\x04host\xd9\x05w\xc3\xa9b1\xc4\x05line\n",
        ),
        (Chunk(1, None, None, {}, b"x" * 256), b"\x95\x01\xc0\xc0\xc0\xc5\x01\x00" + b"x" * 256),
        (Chunk(1, None, None, {}, b"x" * 65536), b"\x95\x01\xc0\xc0\xc0\xc6\x00\x01\x00\x00" + b"x" * 65536),
    ],
)
def test_packed_chunks_byte_for_byte(chunk: Chunk, packed: bytes) -> None:
    assert pack_chunk(chunk) == packed


chunks = st.builds(
    Chunk,
    seqno=st.integers(0, MAX_SEQNO),
    prev=st.none() | st.integers(0, MAX_SEQNO),
    created_ms=st.none() | st.integers(0, MAX_SEQNO),
    attributes=st.dictionaries(st.text(min_size=1, max_size=80), st.text(max_size=300), max_size=20),
    data=st.binary(max_size=300),
)


@given(st.lists(chunks, max_size=5))
def test_what_is_packed_any_messagepack_reader_reads(written: list[Chunk]) -> None:
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(b"".join(map(pack_chunk, written)))
    read = [Chunk(seqno, prev, created, attributes or {}, data) for seqno, prev, created, attributes, data in unpacker]
    assert read == written


# ---- names -----------------------------------------------------------------------------------------------


def test_cursor_is_text_and_back() -> None:
    cursor = Cursor("dc1.nginx", 3, 81234)
    assert str(cursor) == "dc1.nginx:3:81234"
    assert Cursor.parse("dc1.nginx:3:81234") == cursor


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t",
        "t:1",
        "t:1:",
        "t::1",
        "t:-1:0",
        "t:1:1:1",
        "t:١:1",
        "t: 1:1",
        "t:1:0x1",
        f"t:1:{2**63}",
        "t:99999999999:1",
    ],
)
def test_cursor_refuses(text: str) -> None:
    with pytest.raises(Malformed, match="cursor"):
        Cursor.parse(text)


@pytest.mark.parametrize("topic", ["a", "A.b_c-9", "x" * 200, "...", "dc1.nginx"])
def test_topic_takes(topic: str) -> None:
    assert check_topic(topic) == topic


@pytest.mark.parametrize("topic", ["", ".", "..", "x" * 201, "a b", "a/b", "a\n", "é", "a\0"])
def test_topic_refuses(topic: str) -> None:
    with pytest.raises(Malformed, match="topic"):
        check_topic(topic)


@pytest.mark.parametrize("dc", ["", "DC1", "a.b", "a" * 33, "dc_1", "dc1\n"])
def test_dc_refuses(dc: str) -> None:
    with pytest.raises(Malformed, match="dc"):
        check_dc(dc)


def test_a_dc_has_no_dot_so_the_first_one_parts_the_names() -> None:
    assert full_topic("dc-1", "a.b") == "dc-1.a.b"
    assert split_topic("dc-1.a.b") == ("dc-1", "a.b")


@pytest.mark.parametrize("full", ["nginx", "DC.nginx", ".nginx", "dc1.", "dc1.a b"])
def test_full_topic_refuses(full: str) -> None:
    with pytest.raises(Malformed):
        split_topic(full)


@pytest.mark.parametrize("source_id", ["a", "web1/var/log/a b.log", "é" * 256, "...", "%2F", "\u2028"])
def test_source_id_takes(source_id: str) -> None:
    assert check_source_id(source_id) == source_id


@pytest.mark.parametrize(
    "source_id", ["", ".", "..", "x" * 513, "é" * 257, "a\0b", "a\nb", "a\x7f", "a\x85", "\x1b[0m", "\ud800"]
)
def test_source_id_refuses(source_id: str) -> None:
    with pytest.raises(Malformed, match="sourceId"):
        check_source_id(source_id)


@pytest.mark.parametrize(
    "attributes",
    [{"": "x"}, {"A": "x"}, {"a b": "x"}, {"a" * 65: "x"}, {"a": "é" * 2049}, {f"a{n}": "" for n in range(65)}],
)
def test_attributes_refuse(attributes: dict[str, str]) -> None:
    with pytest.raises(Malformed, match="attributes"):
        check_attributes(attributes)


def test_attributes_take_what_is_just_within() -> None:
    attributes = {f"a{n}": "x" for n in range(63)} | {"a" * 64: "é" * 2048}
    assert check_attributes(attributes) == attributes
