"""MessagePack of HBase's changes as lines: the same as the connector writes in JSON."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.client.hbase.cells import TYPES, HBaseCell
from logferry.client.hbase.changes import line_of, map_of
from logferry.loaders.parsing.hbase_events import json_lines

_names = st.one_of(st.binary(max_size=6), st.text(max_size=6).map(str.encode))
_tags = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=4)), max_size=2).map(tuple)
_cells = st.builds(
    HBaseCell, _names, _names, _names, st.integers(0, 2**63 - 1), st.sampled_from([*TYPES.values()]), _names, _tags
)


@given(st.lists(_cells, max_size=5), st.integers(0, 2**63 - 1))
def test_the_lines_are_those_of_the_other_format(cells: list[HBaseCell], sequence_id: int):
    event = ("ns:t", "f" * 32, sequence_id, 1_700_000_000_000)
    assert json_lines(b"".join(map_of(cell, *event) for cell in cells)) == b"".join(
        line_of(cell, *event) for cell in cells
    )


_CHANGE = map_of(HBaseCell(b"x", b"d", b"q", 1, "put", b"v"), "t", "r", 1, 1)


@pytest.mark.parametrize(
    "data",
    [
        *(b'{"table":"t"}\n', b"\xc1", _CHANGE + b"\xc1", _CHANGE[:-1], _CHANGE + b"\x81"),
        *(msgpack.packb([1]), msgpack.packb({"row": "text"}), msgpack.packb({"tags": [{}]}), msgpack.packb({1: 2})),
        msgpack.packb({"region": b"bytes"}),
    ],
)
def test_other_bytes_stay_as_they_are(data: bytes):
    assert json_lines(data) == data


def test_no_bytes():
    assert (json_lines(None), json_lines(b"")) == (None, b"")
