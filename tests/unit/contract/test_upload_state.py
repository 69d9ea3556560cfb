"""The stored bytes of an upload's state, and of its digests."""

from __future__ import annotations

import struct

import pytest
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.contract.upload_state import (
    StagedPiece,
    UploadCommit,
    UploadState,
    first_digest,
    next_digest,
    piece_key,
    upload_key,
)
from logferry.gateway.lanes.dedup import SourceTable

OPEN = UploadState("dc1.t", b"i" * 16, {"host": "ä"}, 1000, "me", (StagedPiece(7, 3, b"d" * 16),))
COMMITTED = OPEN._replace(is_sealed=True, commit=UploadCommit(2, 5_000_001, 990))
HEAD = (
    '{"topic":"dc1.t","topic_id":"69696969696969696969696969696969","attributes":{"host":"ä"},"expires_ms":1000,'
    '"token":"me","is_sealed":true,"commit":[2,5000001,990]}'
).encode()
GOLDEN = b"\x01" + struct.pack(">I", len(HEAD)) + HEAD + bytes(7) + b"\x07" + b"\x00\x00\x00\x03" + b"d" * 16


def test_the_bytes_of_a_state() -> None:
    assert COMMITTED.encode() == GOLDEN
    for upload in (OPEN, COMMITTED, OPEN._replace(pieces=(), is_expired=True)):
        assert UploadState.decode(upload.encode()) == upload


def test_keys_and_digests() -> None:
    assert (upload_key("archive/-/x"), piece_key("archive/-/x", 12)) == (b"uarchive/-/x", b"archive/-/x\x0012")
    first = first_digest("dc1.t", {"host": "web", "file": "a"})
    assert first.hex() == "f075c0409e37c5754e366a7f7f7ea9e3"
    assert next_digest(first, b"data") != next_digest(first_digest("dc1.t", {"host": "b", "file": "a"}), b"data")


@pytest.mark.parametrize("raw", [b"", b"\x02" + GOLDEN[1:], GOLDEN[:-1], GOLDEN[:-28], GOLDEN[:40], GOLDEN[:5] + b"{}"])
def test_what_is_no_state_stops_the_lane(raw: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        UploadState.decode(raw)
    with pytest.raises((ValueError, struct.error)):
        SourceTable().apply(upload_key("archive/-/x"), raw)


def test_an_upload_is_no_source() -> None:
    table = SourceTable()
    table.apply(upload_key("archive/-/x"), OPEN.encode())
    assert (len(table), len(table.uploads), table.uploads.staged.used) == (0, 1, 3)
    table.apply(upload_key("archive/-/x"), COMMITTED.encode())
    assert (len(table.uploads), table.uploads.staged.used, table.receipts.shares.used) == (0, 0, 1)
    table.apply(upload_key("archive/-/x"), None)
    assert table.receipts.shares.used == 0
    assert table.get(SourceIdentity("dc1.t", None, "archive/-/x"), OPEN.topic_id) is None
