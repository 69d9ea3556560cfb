"""The audit's own decoder, against fixed bytes of the documented formats and against what the gateway encodes."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.contract.chunk import Chunk, chunk_of_record, record_headers
from logferry.gateway.contract.source_state import FENCE_KEY, Heartbeat, SourceIdentity, SourceState
from logferry.gateway.kafka.record_batch import CODECS, Stamp, batches
from logferry.gateway.kafka.types import Record
from logferry.ops.audit.records.batches import StoredRecord, committed_records
from logferry.ops.audit.records.formats import (
    NotAChunk,
    StoredSource,
    StoredState,
    source_key,
    stored_chunk,
    stored_state,
)

# Two records of producer 9 in a transaction, not compressed: (b"k", b"v1", seqno 5), (null, null).
GOLDEN = bytes.fromhex(
    "0000000000000007" "00000051" "00000000" "02" "6d5ae1a6" "0010" "00000001" "000001a000000000" "000001a000000000"
    "0000000000000009" "0000" "00000000" "00000002"
    "30" "00" "00" "00" "026b" "047631" "02" "0a7365716e6f" "100000000000000005"
    "0c" "00" "00" "02" "01" "01" "00"
)  # fmt: skip


def fixed(raw: bytes) -> bytes:
    """With the checksum that belongs to it."""
    from crc32c import crc32c

    return raw[:17] + struct.pack(">I", crc32c(raw[21:])) + raw[21:]


def batch(records: list[Record], codec: str = "none", base: int = 0, producer: int = 9) -> bytes:
    found = b""
    for part in batches(records, 1 << 20, 1_700_000_000_000, CODECS[codec]):
        raw = b"".join(part.pieces(Stamp(producer, 0, 0)))
        found += struct.pack(">q", base + part.first) + raw[8:]
    return found


def marker(base: int, producer: int, kind: int) -> bytes:
    """A control batch: ``kind`` 0 aborts, 1 commits."""
    record = b"\x00\x00\x00" + b"\x08" + struct.pack(">hh", 0, kind) + b"\x0c" + bytes(6) + b"\x00"
    body = bytes([len(record) << 1]) + record
    tail = struct.pack(">hiqqqhii", 0x30, 0, 0, 0, producer, 0, -1, 1)
    return fixed(struct.pack(">qiibI", base, 49 + len(body), 0, 2, 0) + tail + body)


def test_a_batch_byte_for_byte() -> None:
    raw = fixed(GOLDEN)
    assert len(raw) == 12 + 0x51
    records, after, damage = committed_records(raw, [], 0)
    first = StoredRecord(7, 0x1A000000000, b"k", b"v1", [("seqno", b"\0\0\0\0\0\0\0\5")])
    assert (records, after, damage) == ([first, StoredRecord(8, 0x1A000000000, None, None, [])], 9, None)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_what_the_gateway_encodes_is_decoded(codec: str, data: st.DataObject) -> None:
    header = st.tuples(st.text(max_size=90), st.binary(max_size=90))
    record = st.tuples(st.binary(max_size=80), st.none() | st.binary(max_size=700), st.lists(header, max_size=4))
    written = data.draw(st.lists(record, min_size=1, max_size=5))
    base = data.draw(st.integers(0, 1 << 40))
    found, after, damage = committed_records(batch(written, codec, base), [], base)
    assert damage is None
    assert after == base + len(written)
    assert [one.offset for one in found] == list(range(base, after))
    assert [(one.key, one.value, one.headers) for one in found] == written
    assert {one.timestamp_ms for one in found} == {1_700_000_000_000}


def test_aborted_transactions_and_control_batches_are_passed() -> None:
    one: Record = (b"k", b"v", [])
    raw = batch([one], base=0, producer=1) + batch([one], base=1, producer=2) + marker(2, 1, 0)
    raw += batch([one], base=3, producer=1) + marker(4, 2, 1) + marker(5, 1, 1)
    records, after, _ = committed_records(raw, [(1, 0)], 0)
    assert [record.offset for record in records] == [1, 3]
    assert after == 6


def test_a_batch_is_entered_in_its_middle_and_a_cut_one_is_left() -> None:
    whole = batch([(b"k", b"%d" % n, []) for n in range(4)])
    records, after, damage = committed_records(whole + batch([(b"k", b"v", [])], base=4)[:-1], [], 2)
    assert ([record.offset for record in records], after, damage) == ([2, 3], 4, None)


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_bit_is_damage_and_never_a_record(seed: int) -> None:
    """Of the part that the checksum covers; what stood before it is returned."""
    one = batch([(b"k", b"some text", [("seqno", bytes(8))])])
    other = bytearray(batch([(b"k", b"some text", [])], "zstd", base=1))
    bit = random.Random(seed).randrange(21 * 8, len(other) * 8)
    other[bit // 8] ^= 1 << bit % 8
    # A changed number of records or a changed attribute is damage, too; a control batch holds no records.
    records, after, damage = committed_records(one + bytes(other), [], 0)
    assert [record.offset for record in records] == [0]
    assert damage is not None or (other[22] & 0x20 and after >= 1)


def test_a_first_batch_that_claims_more_than_was_fetched_is_damage() -> None:
    raw = batch([(b"k", b"v", [])])
    records, after, damage = committed_records(raw[:8] + struct.pack(">i", 1 << 20) + raw[12:], [], 0)
    assert (records, after) == ([], 0)
    assert damage is not None


# ---- chunks and states -------------------------------------------------------------------------------------------

seqnos = st.integers(0, (1 << 63) - 1)
names = st.text("abcz019._-", min_size=1, max_size=8)
chunks = st.builds(
    Chunk,
    seqnos,
    st.none() | seqnos,
    st.none() | st.integers(0, 1 << 62),
    st.dictionaries(names, st.text(max_size=20), max_size=4),
    st.binary(max_size=40),
)


@given(chunk=chunks, source=st.text(min_size=1, max_size=30), now=st.integers(0, 1 << 42))
def test_a_chunk_of_the_gateway_is_decoded(chunk: Chunk, source: str, now: int) -> None:
    found = stored_chunk(StoredRecord(3, now, source.encode(), chunk.data, record_headers(chunk, now)))
    created = now if chunk.created_ms is None else chunk.created_ms
    assert found.created_us == (created * 1000 if created <= 253_402_300_799_999 else None)
    assert found[:3] == (source, chunk.seqno, chunk.prev)
    assert found[4:] == (now * 1000, tuple(sorted(chunk.attributes.items())), chunk.data)
    assert chunk_of_record(chunk.data, record_headers(chunk, now))[:2] == found[1:3]


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        (None, b"v", [("seqno", bytes(8))]),
        (b"k", None, [("seqno", bytes(8))]),
        (b"\xff", b"v", [("seqno", bytes(8))]),
        (b"k", b"v", []),
        (b"k", b"v", [("seqno", bytes(7))]),
        (b"k", b"v", [("seqno", bytes(8)), ("seqno", None)]),
        (b"k", b"v", [("seqno", b"\xff" * 8)]),
        (b"k", b"v", [("seqno", bytes(8)), ("prev", b"\xff" * 8)]),
        (b"k", b"v", [("seqno", bytes(8)), ("created", b"1")]),
        (b"k", b"v", [("seqno", bytes(8)), ("a.host", b"\xff")]),
        (b"k", b"v", [("seqno", bytes(8)), ("a.host", None)]),
    ],
)
def test_a_record_of_another_program_is_no_chunk(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    with pytest.raises(NotAChunk):
        stored_chunk(StoredRecord(0, 0, key, value, headers))


def test_the_last_header_of_a_name_counts() -> None:
    headers = [("seqno", b"x"), ("a.h", b"1"), ("a.h", b"2"), ("seqno", bytes(7) + b"\x07")]
    found = stored_chunk(StoredRecord(0, 0, b"k", b"", headers))
    assert (found.seqno, found.attributes) == (7, (("h", "2"),))


beats = st.builds(Heartbeat, st.integers(1, 1 << 42), st.none() | seqnos, st.none() | seqnos, st.none(), st.booleans())
states = st.builds(
    SourceState,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 10_000),
    *(st.none() | seqnos, st.none() | seqnos, seqnos, seqnos),
    st.none() | beats,
    st.none() | st.text(min_size=1, max_size=8),
    st.booleans(),
    seqnos,
)


@given(state=states)
def test_a_state_of_the_gateway_is_decoded(state: SourceState) -> None:
    assert stored_state(state.encode()) == StoredState(*state[:4])


@given(topic=names, key=st.none() | names, source=names, lanes=st.integers(1, 64))
def test_the_key_of_a_state_is_decoded(topic: str, key: str | None, source: str, lanes: int) -> None:
    from logferry.gateway.contract.names import lane_of

    written = SourceIdentity(topic, key, source)
    found = source_key(written.state_key())
    assert found == StoredSource(topic, key, source)
    assert found is not None
    assert found.lane(lanes) == lane_of(written.key, lanes)
    assert source_key(FENCE_KEY) is None


@pytest.mark.parametrize("raw", [b"", b"\x02" + bytes(53), bytes(54), b"\x01\x10" + bytes(52), b"\x01\x04" + bytes(52)])
def test_a_state_of_unknown_bytes_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="state of"):
        stored_state(raw)
