"""How much of the staging topic one fetch decodes for an upload: its own pieces, not those of uploads beside it."""

from __future__ import annotations

import pytest
from logferry.gateway.contract.upload_state import StagedPiece
from logferry.gateway.lanes.staging_topic import _size_of_run


@pytest.mark.parametrize(
    ("offsets", "size"),
    [([5], 10), ([5, 6, 7], 30), ([5, 7, 8], 10), ([5, 6, 9], 20), ([5, 5, 6], 30)],
    ids=["one", "all", "another upload's is second", "another upload's is third", "two in a transaction"],
)
def test_a_fetch_decodes_the_pieces_that_stand_together(offsets: list[int], size: int) -> None:
    assert _size_of_run([StagedPiece(offset, 10, b"") for offset in offsets]) == size
