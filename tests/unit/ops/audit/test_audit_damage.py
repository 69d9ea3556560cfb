"""Damaged chunks are named line by line."""

from __future__ import annotations

import pytest
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.ops.audit.compare.pinpoint import chunk_findings
from logferry.ops.audit.digests.sums import ChunkLine, lines_of, name_damage, whole_record
from logferry.ops.audit.records.batches import StoredRecord
from logferry.ops.audit.tables.rows import ChunkRows

LINES = lines_of(b"zero\none\ntwo\nthree")
ZERO, ONE, TWO, THREE = LINES
PLACE = ("dc1.nginx", 3)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(LINES, [], id="whole"),
        pytest.param([THREE, ONE, ZERO, TWO], [], id="in any order"),
        pytest.param([ZERO, THREE], [("missing-row", "lines 1 to 2 of 4 rows are missing", 2)], id="missing"),
        pytest.param([], [("missing-row", "all 4 rows are missing", 4)], id="all missing"),
        pytest.param([*LINES, ONE, ONE], [("doubled-row", "line 1: more than once in the table", 2)], id="doubled"),
        pytest.param(
            [ZERO, ChunkLine(1, b"onX", True), TWO, THREE],
            [("changed-row", "line 1: differs from the log at byte 2 of 3", 1)],
            id="text",
        ),
        pytest.param(
            [*LINES[:3], ChunkLine(3, b"three", True)],
            [("changed-row", "line 3: newline is true in the table, but not in the log", 1)],
            id="newline",
        ),
        pytest.param(
            [*LINES, ChunkLine(4, b"four", True), ChunkLine(9, b"nine", True)],
            [("row-without-line", "lines 4, 9: in the table, but the chunk has only 4 lines", 2)],
            id="extra",
        ),
        pytest.param(
            [ZERO, ChunkLine(1, b"other", True), ONE, TWO],
            [
                ("missing-row", "line 3 of 4 rows are missing", 1),
                ("doubled-row", "line 1: more than once in the table", 1),
                ("changed-row", "line 1: differs from the log at byte 1 of 3", 1),
            ],
            id="several",
        ),
    ],
)
def test_damage(rows: list[ChunkLine], expected: list[tuple[str, str, int]]):
    assert [(one.kind, one.detail, one.rows) for one in name_damage(LINES, rows)] == expected


def test_many_spans_are_cut_short():
    lines = lines_of(b"x\n" * 40)
    (missing,) = name_damage(lines, lines[1::2])
    assert missing.detail == "lines 0, 2, 4, 6, 8 and 15 more spans of 40 rows are missing"


def rows_of(source_id: str | None, seqno: int | None, lines: list[ChunkLine]) -> ChunkRows:
    return ChunkRows("dc1", *PLACE, 17, source_id, seqno, lines)


def record(value: bytes, headers: list[tuple[str, bytes]]) -> StoredRecord:
    return StoredRecord(17, 1, b"web1", value, headers)


def test_a_finding_says_where():
    (found,) = chunk_findings(PLACE, record(b"a\nb\n", record_headers(Chunk(9, 5, 1, {}, b""))), [])
    assert str(found) == "missing-row: dc1.nginx-3 offset 17 web1: seqno 9, all 2 rows are missing"


def test_rows_of_another_source_at_the_place_of_a_chunk():
    chunk = record(b"a\n", record_headers(Chunk(9, 5, 1, {}, b"")))
    rows = [rows_of("web1", 9, lines_of(b"a\n")), rows_of("web2", 9, lines_of(b"a\n")), rows_of("web1", 8, [ZERO])]
    found = chunk_findings(PLACE, chunk, rows)
    assert [one.kind for one in found] == ["row-of-another-chunk"] * 2


def test_a_record_that_no_gateway_wrote_is_one_row():
    foreign = record(b"a\nb", [])
    assert chunk_findings(PLACE, foreign, [rows_of("web1", None, [whole_record(b"a\nb")])]) == []
    (found,) = chunk_findings(PLACE, foreign, [])
    assert found.kind == "missing-row"
