"""Bytes of chunks through Spark's parser, against plain Python: every line once, byte for byte, in the right place."""

from __future__ import annotations

import random
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.contract.chunk import Chunk, Headers, record_headers
from logferry.loaders.parsing import rows as parsing_rows
from pyspark.sql import SparkSession

from tests.support.loader import Line, Sent, chunks_of, rows_of
from tests.support.table_rows import RECORDED, Parser

pytestmark = pytest.mark.spark


CASES = {
    "lines": b"one\ntwo\n",
    "no newline at the end": b"one\ntwo",
    "empty": b"",
    "one newline": b"\n",
    "empty lines": b"\n\n\nx\n\n",
    "carriage returns": b"a\r\nb\r\n\r\n\rc\r",
    "NUL": b"a\x00b\n\x00\n\x00",
    "what else parts lines": "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1e\n".encode(),
    "beyond ASCII": "Zürich €5 😀 漢字\nüber\n".encode(),
    "noncharacters and a byte order mark": "\ufeff\ufffe\uffff\U0010ffff\n".encode(),
    "composed and decomposed": "é e\u0301\n".encode(),
    "replacement character is a character": "\ufffd\n".encode(),
    "pattern characters": b"a.b|c\\n[d]$\n^*+?\n",
    "spaces": b"  a \t\n \n\t",
    "not UTF-8 at all": b"\xff\xfe\n\x80\n",
    "one bad line among good ones": "gut ä\n".encode() + b"bad \xc3\n" + "ok €\n".encode(),
    "overlong, surrogate, too high": b"\xc0\x80\n\xed\xa0\x80\n\xf4\x90\x80\x80\n",
    "cut in a character": "ä€😀".encode()[:-1],
    "bad line without newline": b"ok\n\xff",
    "carriage return in a bad line": b"\xff\r\nok\r\n",
    "every byte": bytes(range(256)) * 2,
    "a long line": b"x" * 3_000_000 + b"\n" + b"y" * 10,
    "a long bad line": b"x" * 1_000_000 + b"\xff" + b"\n",
    "many lines": b"".join(b"%d\n" % i for i in range(20_000)),
}


@pytest.fixture
def parser(spark: SparkSession, tmp_path: Path) -> Parser:
    return Parser(spark, tmp_path)


def check_lines(parser: Parser, sent: list[Sent]) -> None:
    rows, bad = parser.parsed([(s.source_id.encode(), s.chunk.data, record_headers(s.chunk)) for s in sent])
    want_rows, want_bad = rows_of(sent)
    have_rows = [_line(row, row["text"].encode()) for row in rows]
    have_bad = [_line(row, row["bytes"]) for row in bad]
    assert sorted(have_rows) == sorted(want_rows)
    assert sorted(have_bad) == sorted(want_bad)
    assert {row["reason"] for row in bad} <= {parsing_rows.NOT_UTF8}
    by_chunk: dict[tuple[Any, Any], list[Line]] = {}
    for line in have_rows + have_bad:
        by_chunk.setdefault((line.source_id, line.seqno), []).append(line)
    for source_id, chunk in sent:
        lines = sorted(by_chunk.get((source_id, chunk.seqno), []), key=lambda line: line.line or 0)
        assert b"".join(line.data + b"\n" * bool(line.newline) for line in lines) == chunk.data


def _line(row: dict[str, Any], data: bytes) -> Line:
    return Line(row["source_id"], row["seqno"], row["line"], data, row["newline"])


def test_every_case_of_bytes(parser: Parser):
    check_lines(parser, [sent for case, data in CASES.items() for sent in chunks_of(case, data)])


def test_random_bytes(parser: Parser):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    alphabet = [b"\n", b"\r", b"\x00", b"a", b" ", "ü".encode(), "😀".encode(), "\u2028".encode(), b"\xff", b"\xc3"]
    weights = [6, 2, 1, 8, 2, 3, 2, 1, 0.2, 0.2]
    parts = [b"".join(generator.choices(alphabet, weights, k=generator.randrange(60))) for _ in range(800)]
    check_lines(parser, chunks_of("random", *parts))


def test_the_columns_of_a_row(parser: Parser):
    chunk = Chunk(2**63 - 1, 2**62, 1_700_000_000_123, {"host": "web1", "path": "/väär/log", "empty": ""}, b"x\n")
    rows, bad = parser.parsed([("web1:/väär/log".encode(), chunk.data, record_headers(chunk))])
    assert bad == []
    assert rows == [
        {
            "topic": "dc1.a",
            "source_id": "web1:/väär/log",
            "seqno": 2**63 - 1,
            "line": 0,
            "prev": 2**62,
            "dc": "dc2",
            "partition": 3,
            "offset": 100,
            "created": datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC),
            "recorded": RECORDED,
            "attributes": {"host": "web1", "path": "/väär/log", "empty": ""},
            "text": "x",
            "newline": True,
        }
    ]


def number(value: int) -> bytes:
    return struct.pack(">q", value)


SEQNO = ("seqno", number(7))
CREATED = ("created", number(1000))

HEADERS_THAT_DO: dict[str, tuple[Headers, dict[str, Any]]] = {
    "no prev, no attributes": ([SEQNO, CREATED], {"seqno": 7, "prev": None, "attributes": {}}),
    "seqno and prev zero": ([("seqno", number(0)), ("prev", number(0)), CREATED], {"seqno": 0, "prev": 0}),
    "no created": ([SEQNO], {"created": None}),
    "created beyond every calendar": ([SEQNO, ("created", number(2**62))], {"created": None}),
    "created before 1970": ([SEQNO, ("created", number(-1))], {"created": None}),
    "the last of one name": (
        [("seqno", number(1)), SEQNO, ("a.x", b"1"), ("a.x", b"2")],
        {"seqno": 7, "attributes": {"x": "2"}},
    ),
    "headers of others": ([("trace", b"\xff"), SEQNO, ("b.x", b"1")], {"attributes": {}}),
}


def test_headers_that_do(parser: Parser):
    rows, bad = parser.parsed([(b"src", b"x", headers) for headers, _ in HEADERS_THAT_DO.values()])
    assert bad == []
    assert len(rows) == len(HEADERS_THAT_DO)
    for row, (case, (_, want)) in zip(
        sorted(rows, key=lambda row: row["offset"]), HEADERS_THAT_DO.items(), strict=True
    ):
        assert {name: row[name] for name in want} == want, case


FLAWS: dict[str, tuple[bytes | None, bytes | None, Headers | None, str]] = {
    "no headers": (b"src", b"x\ny", None, "no seqno header"),
    "other headers": (b"src", b"x\ny", [("trace", b"1")], "no seqno header"),
    "short seqno": (b"src", b"x\ny", [("seqno", b"\x07")], "the seqno header"),
    "long seqno": (b"src", b"x\ny", [("seqno", b"\x00" * 9)], "the seqno header"),
    "negative seqno": (b"src", b"x\ny", [("seqno", number(-1))], "the seqno header"),
    "empty seqno": (b"src", b"x\ny", [("seqno", b"")], "the seqno header"),
    "short prev": (b"src", b"x\ny", [SEQNO, ("prev", b"1")], "the prev header"),
    "short created": (b"src", b"x\ny", [SEQNO, ("created", b"")], "the created header"),
    "attribute not UTF-8": (b"src", b"x\ny", [SEQNO, ("a.x", b"\xff")], "an attribute"),
    "no key": (None, b"x\ny", [SEQNO, CREATED], "no key"),
    "key not UTF-8": (b"\xff", b"x\ny", [SEQNO, CREATED], "the key is not UTF-8"),
    "no value": (b"src", None, [SEQNO, CREATED], "no value"),
    "nothing at all": (None, None, None, "no seqno header"),
}


def test_records_that_no_gateway_wrote_are_quarantined_whole(parser: Parser):
    good = chunks_of("src", b"good\n")[0].chunk
    records = [(key, value, headers) for key, value, headers, _ in FLAWS.values()]
    rows, bad = parser.parsed([*records, (b"src", good.data, record_headers(good))])
    assert [row["text"] for row in rows] == ["good"]
    assert len(bad) == len(FLAWS)
    for row, (case, (key, value, headers, reason)) in zip(
        sorted(bad, key=lambda row: row["offset"]), FLAWS.items(), strict=True
    ):
        assert reason in row["reason"], case
        assert (row["line"], row["newline"], row["attributes"]) == (None, None, None), case
        assert (row["key"], row["bytes"]) == (key, value), case
        want = None if headers is None else [{"key": k, "value": v} for k, v in headers]
        assert row["headers"] == want, case
        assert (row["topic"], row["partition"]) == ("dc1.a", 3)


def test_a_quarantined_line_has_all_that_a_row_has(parser: Parser):
    chunk = Chunk(9, 4, 1000, {"host": "web1"}, b"ok\n\xff\n")
    rows, bad = parser.parsed([(b"src", chunk.data, record_headers(chunk))])
    (row,) = rows
    (quarantined,) = bad
    shared = [name for name in parsing_rows.row_schema().fieldNames() if name not in ("text", "line")]
    assert {name: quarantined[name] for name in shared} == {name: row[name] for name in shared}
    assert (quarantined["line"], quarantined["bytes"]) == (1, b"\xff")
    assert (quarantined["key"], quarantined["headers"]) == (None, None)
