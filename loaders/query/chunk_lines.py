"""The lines of chunks, in Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa


class ChunkLines(NamedTuple):
    """``data``: binary, without newlines. Each line has the index of its chunk, and its number in it from 0."""

    data: pa.BinaryArray
    chunk: np.ndarray
    number: np.ndarray
    newline: np.ndarray


def lines_of(chunks: Sequence[bytes]) -> ChunkLines:
    """A line is what lies between two newlines; the rest after the last one is a line only if it is not empty."""
    is_open = [bool(data) and not data.endswith(b"\n") for data in chunks]
    joined = b"".join([data + b"\n" if rest else data for data, rest in zip(chunks, is_open, strict=True)])
    ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == ord("\n"))
    size = len(ends)
    offsets = np.zeros(size + 1, dtype=np.int32)
    offsets[1:] = ends - np.arange(size)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined.replace(b"\n", b""))]
    sizes = [len(data) + rest for data, rest in zip(chunks, is_open, strict=True)]
    after = np.searchsorted(ends, np.cumsum(np.array(sizes, dtype=np.int64)))
    counts = np.diff(after, prepend=0)
    newline = np.ones(size, dtype=bool)
    newline[after[np.array(is_open, dtype=bool)] - 1] = False
    return ChunkLines(
        pa.Array.from_buffers(pa.binary(), size, buffers),
        np.repeat(np.arange(len(chunks)), counts),
        np.arange(size) - np.repeat(after - counts, counts),
        newline,
    )
