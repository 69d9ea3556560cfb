"""Cells: HBase's layout, encoded and decoded, whole, cut and damaged."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.client.hbase.cells import TYPES, CellBlock, HBaseCell, packed
from logferry.client.hbase.messages import ForeignBytes

# As HBase 2.6 writes it: row "r", family "d", qualifier "q", timestamp 7, put, value "value", no tags.
GOLDEN = bytes.fromhex("0000001c0000000f00000005000172016471000000000000000704") + b"value"
CELL = HBaseCell(b"r", b"d", b"q", 7, "put", b"value")
CELLS = st.builds(
    HBaseCell,
    row=st.binary(max_size=40),
    family=st.binary(max_size=20),
    qualifier=st.binary(max_size=40),
    timestamp=st.integers(-(2**63), 2**63 - 1),
    type=st.sampled_from(sorted(TYPES.values())),
    value=st.binary(max_size=80),
    tags=st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=9)), max_size=3).map(tuple),
)


def taken(data: bytes, count: int) -> list[HBaseCell]:
    block = CellBlock(memoryview(data))
    found = list(block.take(count))
    block.check_end()
    return found


def test_the_layout_is_hbases() -> None:
    assert packed(CELL) == GOLDEN
    assert taken(GOLDEN, 1) == [CELL]


@given(st.lists(CELLS, max_size=4))
def test_what_is_packed_is_taken(cells: list[HBaseCell]) -> None:
    assert taken(b"".join(map(packed, cells)), len(cells)) == cells


@pytest.mark.parametrize("size", range(len(GOLDEN)))
def test_a_block_cut_at_any_byte_is_refused(size: int) -> None:
    with pytest.raises(ForeignBytes, match=r"ends at byte|says that it has"):
        taken(GOLDEN[:size], 1)


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_bytes_are_cells_or_refused(data: bytes, count: int) -> None:
    with suppress(ForeignBytes):
        taken(data, count)


@given(CELLS, st.data())
def test_a_damaged_byte_never_breaks_the_decoder(cell: HBaseCell, data: st.DataObject) -> None:
    raw = bytearray(packed(cell))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with suppress(ForeignBytes):
        taken(bytes(raw), 1)


def test_a_cell_that_no_edit_claims_is_refused() -> None:
    with pytest.raises(ForeignBytes, match="32 bytes of cells belong to no entry"):
        taken(GOLDEN * 2, 1)


def test_an_unknown_type_is_named() -> None:
    raw = bytearray(GOLDEN)
    raw[-6] = 99
    with pytest.raises(ForeignBytes, match="type 99"):
        taken(bytes(raw), 1)
