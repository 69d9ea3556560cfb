"""The rows of a stateless read, byte for byte, in each of its formats: programs of others parse them."""

from __future__ import annotations

import msgpack
import pytest
from logferry.gateway.contract.chunk import MSGPACK, NDJSON
from logferry.gateway.reading.formats import PLAIN, Row
from logferry.gateway.reading.page import encoder

FULL: Row = ("dc1", "dc1.t", 3, 7, "wéb", 4096, 1024, 5, 6, {"level": "warn"}, b"one\n")
BARE: Row = ("dc1", "dc1.t", 3, 9, "w", 1 << 40, None, None, 6, {}, b"\xff\n")

GOLDEN = {
    MSGPACK: (
        b"\x9b\xa3dc1\xa5dc1.t\x03\x07\xa4w\xc3\xa9b\xcd\x10\x00\xcd\x04\x00\x05\x06\x81\xa5level\xa4warn\xc4\x04one\n"
        b"\x9b\xa3dc1\xa5dc1.t\x03\x09\xa1w\xcf\x00\x00\x01\x00\x00\x00\x00\x00\xc0\xc0\x06\x80\xc4\x02\xff\n"
    ),
    NDJSON: (
        '{"dc": "dc1", "topic": "dc1.t", "partition": 3, "offset": 7, "source_id": "wéb", "seqno": 4096, "prev": 1024, '
        '"created_ms": 5, "recorded_ms": 6, "attributes": {"level": "warn"}, "data": "one\\n"}\n'
        '{"dc": "dc1", "topic": "dc1.t", "partition": 3, "offset": 9, "source_id": "w", "seqno": 1099511627776, '
        '"prev": null, "created_ms": null, "recorded_ms": 6, "attributes": {}, "data_base64": "/wo="}\n'
    ).encode(),
    PLAIN: b"one\n\xff\n",
}


@pytest.mark.parametrize("media_type", GOLDEN)
def test_rows_byte_for_byte(media_type: str) -> None:
    name, encode = encoder(media_type)
    assert (name, encode([FULL, BARE])) == (media_type, GOLDEN[media_type])


@pytest.mark.parametrize("size", [0, 255, 256, 65_535, 65_536])
def test_any_size_of_data_is_read_by_others(size: int) -> None:
    _, encode = encoder(MSGPACK)
    assert tuple(msgpack.unpackb(encode([(*FULL[:-1], bytes(size))]))) == (*FULL[:-1], bytes(size))
