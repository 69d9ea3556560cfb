"""Runs of NUL bytes: what a host that lost its power, or a truncation that the writer did not see, leaves in a file."""

from __future__ import annotations

import re
from collections.abc import Iterator

SMALLEST_HOLE_BYTES = 64
_SIGN = b"\0" * SMALLEST_HOLE_BYTES
_HOLE = re.compile(b"\0{%d,}" % SMALLEST_HOLE_BYTES)


def holes(data: bytes, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of at least `SMALLEST_HOLE_BYTES` in ``data[:end]``."""
    end = len(data) if end is None else end
    first = data.find(_SIGN, 0, end)
    if first >= 0:
        for found in _HOLE.finditer(data, first, end):
            yield found.span()
