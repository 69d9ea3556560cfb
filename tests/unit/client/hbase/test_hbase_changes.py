"""From a call of HBase to chunks: sources, seqnos, lines, filters, parts, and calls that are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from logferry.client.hbase import changes, messages
from logferry.client.hbase.cells import BULK_LOAD, MARK_FAMILY, HBaseCell
from logferry.client.hbase.changes import (
    CLOCKS_MS,
    CellFilter,
    RegionChunk,
    RegionHistory,
    SequenceRestarted,
    ShippedEdits,
    WrongCluster,
)
from logferry.client.hbase.messages import ForeignBytes

from tests.support.hbase_calls import CLUSTER, ORDERS, OTHER_CLUSTER, OTHER_REGION, REGION, Edit, put, shipped


def edits_of(edits: Sequence[Edit], definition: Any = ORDERS, **options: Any) -> ShippedEdits:
    request, block = shipped(edits, **options)
    data = memoryview(request.SerializeToString())
    return ShippedEdits(data, memoryview(block), CLUSTER, CellFilter(definition), encoding=definition.encoding)


def lines(chunks: list[RegionChunk]) -> list[dict[str, Any]]:
    return [json.loads(line) for one in chunks for line in one.chunk.data.splitlines()]


def test_an_edit_is_a_chunk_of_its_region() -> None:
    found = list(edits_of([(REGION, 5, [put("a"), put("b")]), (OTHER_REGION, 3, [put("c")]), (REGION, 9, [put("a")])]))
    assert [(one.table, one.source_id, one.chunk.seqno, one.chunk.prev) for one in found] == [
        ("orders", REGION, 5, None),
        ("orders", OTHER_REGION, 3, None),
        ("orders", REGION, 9, None),
    ]
    assert [one.chunk.attributes for one in found] == [{"table": "orders"}] * 3
    assert [one.chunk.created_ms for one in found] == [1_700_000_000_000] * 3
    assert [line["row"] for line in lines(found)] == ["a", "b", "c", "a"]


def test_a_line_holds_the_whole_change() -> None:
    cell = HBaseCell("ä".encode(), b"d", b"\xff", 7, "put", b"\x00\xfe", ((4, b"ttl"),))
    assert lines(list(edits_of([(REGION, 5, [cell])]))) == [
        {
            "table": "orders", "row": "ä", "family": "d", "qualifier_base64": "/w==", "type": "put", "timestamp": 7,
            "value_base64": "AP4=", "tags": [{"type": 4, "data_base64": "dHRs"}],
            "sequence_id": 5, "write_time": 1_700_000_000_000, "region": REGION,
        }
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["delete", "delete_column", "delete_family", "delete_family_version"])
def test_a_delete_has_no_value(kind: str) -> None:
    (line,) = lines(list(edits_of([(REGION, 5, [put("a")._replace(type=kind, value=b"")])])))
    assert (line["type"], "value" in line) == (kind, False)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ({"families": ("e",)}, ["2"]),
        ({"qualifiers": ("p",)}, ["3", "deleted"]),
        ({"row_prefixes": ("1", "3")}, ["1", "3"]),
        ({"row_pattern": "^[23]$"}, ["2", "3"]),
        ({"row_prefixes": ("1", "2"), "families": ("d",)}, ["1"]),
        ({"tables": ("items",)}, []),
        ({}, ["1", "2", "3", "deleted"]),
    ],
)
def test_a_filter_leaves_out_what_is_not_wanted(condition: dict[str, Any], rows: list[str]) -> None:
    deleted = put("deleted", b"", qualifier="")._replace(type="delete_family")
    cells = [put("1"), put("2", family="e"), put("3", qualifier="p"), deleted]
    found = list(edits_of([(REGION, 5, cells)], ORDERS._replace(**condition)))
    assert [line["row"] for line in lines(found)] == rows
    assert len(found) == (1 if rows else 0), "an edit of which nothing is wanted is no chunk"


def test_a_large_edit_is_cut_into_parts_that_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PART_BYTES", 1000)
    edits = [(REGION, 5, [put(f"{n:03d}") for n in range(20)]), (REGION, 6, [put("next")])]
    found = list(edits_of(edits))
    assert len(found) > 3
    parts = [REGION, *(f"{REGION}/{number}" for number in range(2, len(found)))]
    assert [(one.source_id, one.chunk.seqno) for one in found] == [*((part, 5) for part in parts), (REGION, 6)]
    assert all(len(one.chunk.data) <= 1000 for one in found)
    assert [line["row"] for line in lines(found)] == [*(f"{n:03d}" for n in range(20)), "next"]
    assert list(edits_of(edits)) == found


def test_the_size_of_a_part_never_changes() -> None:
    """An edit of which a part is recorded has to be cut again as it was."""
    assert changes.PART_BYTES == 1_048_576


def test_marks_of_hbase_are_left_out_and_bulk_loads_are_counted() -> None:
    marks = [HBaseCell(b"a", MARK_FAMILY, name, 7, "put", b"") for name in (b"HBASE::FLUSH", BULK_LOAD)]
    edits = edits_of([(REGION, 5, marks), (REGION, 6, [put("a")])])
    assert [one.chunk.seqno for one in edits] == [6]
    assert edits.bulk_loads == {"orders": 1}


def test_another_cluster_is_refused() -> None:
    with pytest.raises(WrongCluster, match=f"of the cluster {OTHER_CLUSTER}, and"):
        list(edits_of([(REGION, 5, [put("a")])], cluster=OTHER_CLUSTER))


def test_a_cluster_that_is_not_named_is_refused() -> None:
    request, block = shipped([(REGION, 5, [put("a")])])
    request.entry[0].key.ClearField("cluster_ids")
    data = memoryview(request.SerializeToString())
    with pytest.raises(WrongCluster, match="not named"):
        list(ShippedEdits(data, memoryview(block), CLUSTER, CellFilter(ORDERS)))


def test_an_edit_that_came_through_another_cluster_is_taken() -> None:
    request, block = shipped([(REGION, 5, [put("a")])])
    request.entry[0].key.cluster_ids.insert(0, messages.new("UUID", most_sig_bits=1, least_sig_bits=1))
    data = memoryview(request.SerializeToString())
    assert len(list(ShippedEdits(data, memoryview(block), CLUSTER, CellFilter(ORDERS)))) == 1


@pytest.mark.parametrize("second", [5, 4])
def test_a_sequence_id_that_does_not_rise_is_refused(second: int) -> None:
    """As of a peer that is not serial."""
    with pytest.raises(ForeignBytes, match=f"edit {second} of {REGION} comes after 5"):
        list(edits_of([(REGION, 5, [put("a")]), (REGION, second, [put("b")])]))


def test_an_edit_that_comes_twice_in_a_call_is_written_once() -> None:
    """A region server whose log breaks writes what was not acknowledged into the next one, too."""
    edits = [(REGION, n, [put(f"row-{n}")]) for n in (5, 6, 7, 6, 7, 8, 9, 9, 8)]
    found = list(edits_of(edits))
    assert [one.chunk.seqno for one in found] == [5, 6, 7, 8, 9]
    assert [line["row"] for line in lines(found)] == [f"row-{n}" for n in range(5, 10)]


def test_an_edit_that_comes_twice_with_other_cells_is_refused() -> None:
    edits = [(REGION, 5, [put("a")]), (REGION, 6, [put("b")]), (REGION, 5, [put("a")]), (REGION, 5, [put("c")])]
    with pytest.raises(ForeignBytes, match=f"edit 5 of {REGION} comes after 6"):
        list(edits_of(edits))


def test_an_edit_that_comes_late_after_one_that_came_twice_is_refused() -> None:
    edits = [(REGION, n, [put("a")]) for n in (5, 6, 5, 4)]
    with pytest.raises(ForeignBytes, match=f"edit 4 of {REGION} comes after 6"):
        list(edits_of(edits))


def test_sequence_ids_that_begin_again_are_refused() -> None:
    """As after HBase's `truncate_region`: the gateway would take the rest for duplicates."""
    history = RegionHistory()
    history.check(REGION, 500, 1_000_000)
    history.check(REGION, 2, 1_000_000 + CLOCKS_MS)  # it may have come again from a server with another clock
    history.check(OTHER_REGION, 2, 9_000_000)
    with pytest.raises(
        SequenceRestarted, match=f"edit 3 of {REGION} was written 120 s after edit 500.*truncate_region"
    ):
        history.check(REGION, 3, 1_000_001 + CLOCKS_MS)
    history.check(REGION, 501, 1_000_000)
    history.check(REGION, 499, 999_000)


def test_edits_of_other_tables_are_passed_over_whatever_their_ids() -> None:
    """HBase's marks of replication are of one region at all servers, each of which counts for itself."""
    history = RegionHistory()
    history.check(REGION, 500, 1)
    marks = [(REGION, n, [put("a")]) for n in (7, 3)]
    request, block = shipped(marks, table="REPLICATION.WALEVENTTRACKER")
    wanted, more = shipped([(OTHER_REGION, 4, [put("b")])])
    request.entry.extend(wanted.entry)
    data = memoryview(request.SerializeToString())
    found = list(ShippedEdits(data, memoryview(block + more), CLUSTER, CellFilter(ORDERS), history))
    assert [(one.source_id, one.chunk.seqno) for one in found] == [(OTHER_REGION, 4)]


def test_a_call_whose_sequence_ids_begin_again_writes_nothing() -> None:
    history = RegionHistory()
    history.check(REGION, 500, 1)
    request, block = shipped([(REGION, 3, [put("a")])])
    data = memoryview(request.SerializeToString())
    with pytest.raises(SequenceRestarted):
        list(ShippedEdits(data, memoryview(block), CLUSTER, CellFilter(ORDERS), history))


@pytest.mark.parametrize("region", ["", "..", "A" * 32, "0" * 31])
def test_a_region_with_another_name_is_refused(region: str) -> None:
    with pytest.raises(ForeignBytes, match="has the region"):
        list(edits_of([(region, 5, [put("a")])]))


def test_a_sequence_id_beyond_the_gateways_is_refused() -> None:
    with pytest.raises(ForeignBytes, match="sequence id 9223372036854775808"):
        list(edits_of([(REGION, 1 << 63, [put("a")])]))


def test_an_edit_that_claims_more_cells_than_there_are_is_refused() -> None:
    request, block = shipped([(REGION, 5, [put("a")])])
    request.entry[0].associated_cell_count = 2_000_000_000
    data = memoryview(request.SerializeToString())
    with pytest.raises(ForeignBytes, match="ends at byte"):
        list(ShippedEdits(data, memoryview(block), CLUSTER, CellFilter(ORDERS)))


def test_messagepack_holds_bytes_as_bytes() -> None:
    cell = HBaseCell("ä".encode(), b"d", b"\xff", 7, "put", b"\x00\xfe", ((4, b"ttl"),))
    packed = ORDERS._replace(encoding="msgpack")
    deletes = [put("a")._replace(type=kind, value=b"") for kind in ("delete", "delete_family")]
    (found,) = edits_of([(REGION, 5, [cell, *deletes])], packed)
    assert found.chunk.attributes == {"table": "orders", "format": "msgpack"}
    maps = list(msgpack.Unpacker(io.BytesIO(found.chunk.data)))
    assert maps[0] == {
        "table": "orders", "row": "ä".encode(), "family": b"d", "qualifier": b"\xff", "type": "put", "timestamp": 7,
        "value": b"\x00\xfe", "tags": [{"type": 4, "data": b"ttl"}],
        "sequence_id": 5, "write_time": 1_700_000_000_000, "region": REGION,
    }  # fmt: skip
    assert [("value" in one, one["type"]) for one in maps[1:]] == [(False, "delete"), (False, "delete_family")]


def test_messagepack_is_cut_like_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PART_BYTES", 400)
    edits = [(REGION, 5, [put(f"row-{number}", b"\xff" * 100) for number in range(9)])]
    found = list(edits_of(edits, ORDERS._replace(encoding="msgpack")))
    assert [one.source_id for one in found] == [REGION, *(f"{REGION}/{part}" for part in range(2, len(found) + 1))]
    assert len(found) > 2
    rows = [one["row"] for part in found for one in msgpack.Unpacker(io.BytesIO(part.chunk.data))]
    assert rows == [b"row-%d" % number for number in range(9)]
