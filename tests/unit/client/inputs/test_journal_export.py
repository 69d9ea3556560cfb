"""The export format, whole and in pieces, and entries that a program made as bad as it can."""

from __future__ import annotations

import base64
import json
import random
import struct
from typing import Any

import pytest
from logferry.client.inputs.journal_export import LONGEST_RECORD_BYTES, LONGEST_VALUE_BYTES, DamagedExport, ExportParser


def binary(name: str, value: bytes) -> bytes:
    return name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"


def entry(number: int, *fields: bytes) -> bytes:
    return b"__CURSOR=c%d\n__REALTIME_TIMESTAMP=%d\n" % (number, number * 1_000_000 + 5) + b"".join(fields) + b"\n"


def parsed(data: bytes, sizes: random.Random | None = None) -> list[tuple[str, dict[str, Any]]]:
    parser, found = ExportParser(), []
    while data:
        size = len(data) if sizes is None else sizes.choice([1, 1, 7, 100, 5000])
        found += parser.feed(data[:size])
        data = data[size:]
    assert all(line.count(b"\n") == 1 for _, line in found)
    return [(cursor, json.loads(line)) for cursor, line in found]


def test_entries_become_lines() -> None:
    data = entry(1, b"MESSAGE=a=b\n", b"PRIORITY=6\n") + entry(
        0, binary("MESSAGE", b"two\nlines\n"), b"X=1\n", b"X=2\n"
    )
    times = {"time": "1970-01-01T00:00:01.000005Z", "__CURSOR": "c1", "__REALTIME_TIMESTAMP": "1000005"}
    first, second = parsed(data)
    assert first == ("c1", {**times, "MESSAGE": "a=b", "PRIORITY": "6"})
    assert (second[1]["MESSAGE"], second[1]["X"]) == ("two\nlines\n", ["1", "2"])


def test_bytes_that_are_no_text_are_kept_beside_it() -> None:
    ((_, found),) = parsed(entry(1, binary("MESSAGE", b"caf\xe9\0"), b"A=\xc3\xa4\n"))
    assert (found["MESSAGE"], found["A"]) == ("caf\N{REPLACEMENT CHARACTER}\0", "ä")
    assert {name: base64.b64decode(value) for name, value in found["_raw"].items()} == {"MESSAGE": b"caf\xe9\0"}


@pytest.mark.parametrize("shape", ["text", "binary"])
def test_a_long_value_is_cut_and_says_so(shape: str) -> None:
    value = "ä".encode() * LONGEST_VALUE_BYTES
    value = b"x" + value  # the cut is within a character
    field = binary("MESSAGE", value) if shape == "binary" else b"MESSAGE=" + value + b"\n"
    (_, found), (_, after) = parsed(entry(1, field, b"A=1\n") + entry(2, b"A=2\n"))
    assert (found["A"], found["_cut"], after["A"]) == ("1", {"MESSAGE": len(value)}, "2")
    assert value.startswith(found["MESSAGE"].encode())
    assert len(found["MESSAGE"].encode()) >= LONGEST_VALUE_BYTES - 1
    assert "_raw" not in found


def test_the_worst_entry_fits_a_line() -> None:
    many = [binary(f"F{number}", b"\x01" * LONGEST_VALUE_BYTES) for number in range(20)]
    parser = ExportParser()
    for fields in (many, [binary(f"F{number}", b"\xff" * 1000) for number in range(4000)]):
        ((cursor, line),) = parser.feed(entry(1, *fields))
        assert (cursor, len(line) <= LONGEST_RECORD_BYTES) == ("c1", True)
        assert json.loads(line)["_cut"]


def test_what_is_no_export_is_refused() -> None:
    for data in (b"=1\n", b"A=1\n\n", b"\xff=1\n", binary("A", b"xy")[:-1] + b"z", b"x" * (LONGEST_VALUE_BYTES + 2)):
        with pytest.raises(DamagedExport):
            ExportParser().feed(data)


def test_pieces_of_any_size_give_the_same() -> None:
    chance = random.Random(7)
    data = b""
    for number in range(60):
        fields = [b"MESSAGE=" + chance.randbytes(20).hex().encode() + b"\n"]
        fields += [binary("B", chance.randbytes(chance.randrange(300))) for _ in range(chance.randrange(3))]
        data += entry(number, *fields)
    whole = parsed(data)
    assert len(whole) == 60
    for seed in range(20):
        assert parsed(data, random.Random(seed)) == whole
