"""The entries of a log, from hand-made bytes: whole, cut at each byte, damaged, and of kinds that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.client.hbase.cells import CellBlock
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.wal.entries import LogEnd, LogEntry, end_of_header, entry_at, region_event

from tests.support.hbase_calls import OTHER_REGION, REGION, put
from tests.support.hbase_log import entries_of
from tests.support.hbase_log_files import TRAILER, entry, header, mark

ENTRIES = [
    entry(REGION, 5, [put("a"), put("b", b"\0" * 300)]),
    mark(OTHER_REGION, 2, name=b"orders,m,1700000000001.x."),
    entry(OTHER_REGION, 3, [put("c")]),
    entry(REGION, 9, []),
]
WHOLE = header() + b"".join(ENTRIES) + TRAILER


def read(data: bytes) -> tuple[list[LogEntry], bool]:
    """The entries, and whether the file is complete. Raises ForeignBytes."""
    view = memoryview(data)
    found: list[LogEntry] = []
    at = end_of_header(view)
    while at is not None:
        one = entry_at(view, at)
        if not isinstance(one, LogEntry):
            return found, isinstance(one, LogEnd)
        found.append(one)
        at = one.end
    return found, False


def facts(found: list[LogEntry]) -> list[tuple[str, str, int, int, int]]:
    return [(one.region, one.table, one.sequence_id, one.write_time, one.cell_count) for one in found]


def test_a_whole_file_is_read_to_its_trailer() -> None:
    found, is_complete = read(WHOLE)
    assert is_complete
    assert facts(found) == [
        (REGION, "orders", 5, 1_700_000_000_000, 2),
        (OTHER_REGION, "orders", 2, 1_700_000_000_000, 1),
        (OTHER_REGION, "orders", 3, 1_700_000_000_000, 1),
        (REGION, "orders", 9, 1_700_000_000_000, 0),
    ]
    assert [cell.row for cell in CellBlock(found[0].cells).take(2)] == [b"a", b"b"]


def test_a_file_cut_at_any_byte_has_the_entries_before_the_cut() -> None:
    ends = [len(header())]
    for one in ENTRIES:
        ends.append(ends[-1] + len(one))
    whole, _ = read(WHOLE)
    for size in range(len(WHOLE)):
        found, is_complete = read(WHOLE[:size])
        assert not is_complete, size
        assert facts(found) == facts(whole)[: sum(end <= size for end in ends[1:])], size
        assert [bytes(one.cells) for one in found] == [bytes(one.cells) for one in whole[: len(found)]]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=40))
def test_damage_ends_in_a_refusal_or_after_the_entries_before_it(at: int, damage: bytes) -> None:
    ends = [len(header())]
    for one in ENTRIES:
        ends.append(ends[-1] + len(one))
    before = sum(end <= at for end in ends[1:])
    view = memoryview(WHOLE[:at] + damage)
    found = []
    try:
        place = end_of_header(view)
        while place is not None and isinstance(met := entry_at(view, place), LogEntry):
            found.append(met)
            place = met.end
            list(CellBlock(met.cells).take(met.cell_count))
            region_event(met)
    except ForeignBytes:
        pass
    assert facts(found[:before]) == facts(read(WHOLE)[0][:before])


def test_marks_are_told_from_changes() -> None:
    found, _ = read(header() + mark(REGION, 7, is_close=True, name=b"orders,m,1.x.") + ENTRIES[0] + ENTRIES[2])
    events = [region_event(one) for one in found]
    assert events[1:] == [None, None]
    assert events[0] is not None
    assert (events[0].is_close, events[0].sequence_id, events[0].name) == (True, 7, b"orders,m,1.x.")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (header(encryption_key=b"k"), "encrypted"),
        (header(writer_cls_name=b"org.apache.hadoop.hbase.regionserver.wal.SecureAsyncProtobufLogWriter"), "encrypted"),
        (header(has_compression=True), "hbase.regionserver.wal.enablecompression"),
        (header(has_compression=True, has_value_compression=True), "hbase.regionserver.wal.value.enablecompression"),
        (header(cell_codec_cls_name=b"org.example.IndexedCodec"), "written by .org.example.IndexedCodec"),
        (header(writer_cls_name=b"org.example.Writer"), "written by .org.example.Writer"),
        (b"SEQ\6org.apache", "HBase before 0.96"),
        (b"PWAX", "no log of HBase 2"),
        (header() + bytes(100), "no entry at byte"),
        (header() + b"\xff" * 10, "not a number"),
        (header() + b"\xff\xff\xff\x7f", "says that it has"),
        (header() + b"\x02\x08\x01", "names no region"),
    ],
)
def test_another_kind_of_file_is_refused_by_name(data: bytes, text: str) -> None:
    with pytest.raises(ForeignBytes, match=text):
        read(data)


def test_the_oracle_reads_the_same() -> None:
    assert facts(list(entries_of(WHOLE))) == facts(read(WHOLE)[0])
