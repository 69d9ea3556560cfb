r"""The lines of a chunk, and the digest that they are compared by. Pure.

A line ends with ``\n``; what stands before it (a ``\r`` too) is its text. The last one may lack the ``\n``; an
empty chunk has no lines. This is how the loader makes rows, numbered from `FIRST_LINE`.

The digest of a chunk is the sum of its lines' digests modulo 2^128, each over the line's number, text and ending.
So rows can be added up in whatever order a table gives them, a row twice does not cancel out, and two different
sets of rows have the same sum by an accident of one in 2^128 (BLAKE2b; the construction is Bellare and Micciancio,
"A New Paradigm for Collision-free Hashing", 1997; it is not meant to withstand an attacker).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

FIRST_LINE: Final = 0
# A record that no gateway wrote is no lines: the loader puts it aside whole, as this line of no source.
WHOLE_RECORD: Final = -1
# A table of whole chunks has one row for each, of whatever bytes.
WHOLE_CHUNK: Final = -2
NO_IDENTITY: Final = 0
MODULUS: Final = 1 << 128
_HEAD = struct.Struct("<q?")


class Line(NamedTuple):
    """``newline``: it ended with one."""

    number: int
    text: bytes
    newline: bool


class Sum(NamedTuple):
    """How many lines, and their digest."""

    lines: int
    digest: int


def count_lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


def lines_of(data: bytes) -> list[Line]:
    parts = data.split(b"\n")
    last = parts.pop()
    found = [Line(number, text, True) for number, text in enumerate(parts, FIRST_LINE)]
    if last:
        found.append(Line(FIRST_LINE + len(parts), last, False))
    return found


def whole_record(value: bytes) -> Line:
    return Line(WHOLE_RECORD, value, False)


def rows_of(data: bytes, whole_chunks: bool) -> list[Line]:
    """What a table must hold of a chunk: its lines, or the chunk as one row."""
    return [Line(WHOLE_CHUNK, data, False)] if whole_chunks else lines_of(data)


def sum_of(lines: Iterable[tuple[int, bytes, bool]]) -> Sum:
    """The sum of any lines, in any order."""
    head, from_bytes = _HEAD.pack, int.from_bytes
    count = total = 0
    for number, text, newline in lines:
        total += from_bytes(blake2b(head(number, newline) + text, digest_size=16).digest(), "little")
        count += 1
    return Sum(count, total % MODULUS)


def identity_of(source_id: str, seqno: int) -> int:
    """64 bits that stand for (source, seqno) where a million of them are kept."""
    raw = seqno.to_bytes(8, "big") + source_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


def first_difference(one: bytes, other: bytes) -> int:
    """The first position at which they differ; the shorter one's length where one begins with the other."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
