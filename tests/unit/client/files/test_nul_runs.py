"""Runs of NUL are found with their places; single ones are nobody's business."""

from typing import Any

import pytest
from logferry.client.files.chunking import SMALLEST_HOLE_BYTES, holes

HOLE = b"\0" * SMALLEST_HOLE_BYTES


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a\0b\n", []),
        (HOLE[1:], []),
        (HOLE, [(0, 64)]),
        (b"one\n" + HOLE + b"\0two\n", [(4, 69)]),
        (b"a" + HOLE + b"b" + HOLE[1:] + b"c" + HOLE * 2, [(1, 65), (130, 258)]),
    ],
)
def test_holes(data: Any, expected: Any) -> None:
    assert list(holes(data)) == expected
