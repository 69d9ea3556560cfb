"""Each format against what plain Python makes of the same lines: columns, types, times, and what is quarantined."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.contract.chunk import record_headers
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.parsing import formats
from logferry.loaders.parsing import rows as parsing_rows
from logferry.loaders.parsing.columns import access_columns
from logferry.loaders.parsing.settings import ACCESS, ParserSettings
from pyspark.sql import SparkSession

from tests.support.loader import chunks_of
from tests.support.table_rows import Parser

pytestmark = pytest.mark.spark


def columns(row: dict[str, Any], *names: str) -> tuple[Any, ...]:
    assert isinstance(row, dict), row
    return tuple(row[name] for name in names)


JSON = {
    "user": "string",
    "n": "int",
    "ok": "boolean",
    "at": "string",
    "tags": "array<string>",
    "in": "struct<a:double>",
}


def test_json(read: Callable[..., dict[str, Any]]):
    good = {"user": "ä€😀", "n": 7, "ok": True, "at": "2026-11-20T10:41:00.250Z", "tags": ["a", "b"], "in": {"a": 1.5}}
    less = {"at": "2026-11-20T10:41:00+01:00", "more": [1, {}]}
    lines = {json.dumps(good): None, json.dumps(good, ensure_ascii=False): None, json.dumps(less): None}
    wrong = {
        "": formats.NOT_JSON,
        "{": formats.NOT_JSON,
        "no json": formats.NOT_JSON,
        '{"at": "2026-11-20T10:41:00Z"} x': formats.NOT_OBJECT,
        "[]": formats.NOT_OBJECT,
        json.dumps([good]): formats.NOT_OBJECT,
        "7": formats.NOT_OBJECT,
        json.dumps({**good, "n": "many"}): formats.NOT_OBJECT,
        json.dumps({**good, "n": 2**40}): formats.NOT_OBJECT,
        json.dumps({**good, "in": 5}): formats.NOT_OBJECT,
        json.dumps({**good, "at": "yesterday"}): parsing_rows.NO_TIME,
        json.dumps({"user": "x"}): parsing_rows.NO_TIME,
    }
    found = read(
        [line.encode() for line in (*lines, *wrong)] + [b'{"at": "\xff"}'],
        format="json",
        columns=JSON,
        event_time={"column": "at", "formats": ["iso"]},
    )
    for line in list(lines)[:2]:
        at = datetime(2026, 11, 20, 10, 41, 0, 250_000, tzinfo=UTC)
        assert columns(found[line], *JSON, "event_time") == (*(good[name] for name in JSON), at)
    assert columns(found[json.dumps(less)], "user", "n", "tags", "event_time") == (
        None,
        None,
        None,
        datetime(2026, 11, 20, 9, 41, tzinfo=UTC),
    )
    assert {line: found[line] for line in wrong} == wrong
    assert found['{"at": "\ufffd"}'] == parsing_rows.NOT_UTF8


COMBINED = (
    '2001:db8::1 - frank [10/Oct/2000:13:55:36 -0700] "GET /a%20b?x=\\"1\\" HTTP/1.1" 200 2326 '
    '"http://example.org/?q=\\"" "Mozilla/5.0 (\\"x\\")"'
)
COMMON = '10.0.0.1 - - [10/Oct/2000:13:55:36 +0000] "POST /in HTTP/2" 304 -'
TLS = '10.0.0.1 - - [10/Oct/2000:13:55:36 +0000] "\\x16\\x03\\x01" 400 150 "-" "-"'
ACCESS_WRONG = {
    "": formats.NO_FIT,
    "10.0.0.1 - - [10/Oct/2000:13:55:36 +0000] GET / 200 1": formats.NO_FIT,
    COMBINED + " more": formats.NO_FIT,
    COMMON.replace("Oct", "Okt"): parsing_rows.NO_TIME,
    COMMON.replace("10.0.0.1", "10.0.\x01.1"): formats.MARKED,
    COMMON[:-1] + "9" * 23: "body_bytes is not of the type bigint",
}


def test_access(read: Callable[..., dict[str, Any]]):
    lines = [COMBINED, COMMON, TLS, COMMON.replace("/in", "/crlf") + "\r", *ACCESS_WRONG]
    found = read([line.encode() for line in lines], format="access")
    names = ("remote_host", "user", "method", "path", "protocol", "status", "body_bytes", "referer", "user_agent")
    assert columns(found[COMBINED], *names, "event_time") == (
        *("2001:db8::1", "frank", "GET", '/a%20b?x=\\"1\\"', "HTTP/1.1", 200, 2326),
        *('http://example.org/?q=\\"', 'Mozilla/5.0 (\\"x\\")', datetime(2000, 10, 10, 20, 55, 36, tzinfo=UTC)),
    )
    assert columns(found[COMMON], *names) == ("10.0.0.1", "-", "POST", "/in", "HTTP/2", 304, None, "", "")
    assert columns(found[TLS], "request", "method", "path", "status") == ("\\x16\\x03\\x01", None, None, 400)
    assert columns(found[lines[3]], "path", "body_bytes") == ("/crlf", None)
    assert {line: found[line] for line in ACCESS_WRONG} == ACCESS_WRONG


ODD_TIMES = [
    "29/Feb/2024:00:00:00 +0000",
    "29/Feb/2023:00:00:00 +0000",
    "31/Apr/2024:23:59:59 +1400",
    "1/Oct/2000:1:2:3 -0700",
    "10/oct/2000:13:55:60 -0700",
    "10/OCT/2000:24:00:00 -0700",
    "10/Oct/2000:13:55:36 +1800",
    "10/Oct/2000:13:55:36 +1801",
    "10/Oct/2000:13:55:36  -0700",
    " 10/Oct/2000:13:55:36 -0700 ",
    "10/Oct/2000:13:55:36 Z",
    "10/Oct/2000:13:55:36 -07:00",
    "10/Oct/0000:13:55:36 +0000",
    "10/Oct/9999:13:55:36 +0000",
    "10/Oct/2000:13:55:36 GMT",
    "10/Okt/2000:13:55:36 +0000",
    "10/Oct/2000:13:55:36 +0060",
    "10/Oct/2000:13:55:36 -0000",
    "00/Oct/2000:13:55:36 +0000",
    "10/Oct/2000:13:55:36\t+0000",
    "01/Jan/0001:00:00:00 +0100",
    "31/Dec/9999:23:59:59 -0001",
    "10/Oct/12000:13:55:36 +0000",
    "10/Oct/+12000:13:55:36 +0000",
]
ODD_PIECES = [
    "",
    " ",
    "-",
    '"',
    "\\",
    '\\"',
    "\r",
    "\x01",
    "\x0b",
    "\x85",
    "\u2028",
    "\xa0",
    "ü",
    "😀",
    "٣",
    "[",
    "]",
    "9223372036854775807",
    "9223372036854775808",
    "007",
    "99",
    "1000",
    "GET",
    "GET  / HTTP/1.1",
    "GET / HTTP/1.1 X/2",
    "GËT / HTTP/2",
    "get a b c",
    "POST /\x85x HTTP/1.0",
    "\x16\x03",
    "+5",
    "1e3",
]
SOUND = '1.2.3.4~ ~-~ ~frank~ ~[~10/Oct/2000:13:55:36 -0700~]~ ~"~GET /a?b=1 HTTP/1.1~"~ ~200~ ~2326'
SOUND += '~ ~"~http://x/~"~ ~"~Mozilla/4.08 [en] (Win98)~"'


def odd_access_lines(count: int) -> list[bytes]:
    """Lines of access logs with pieces replaced, removed, doubled: most are wrong in one place or two."""
    dice = random.Random(7)
    found = []
    for number in range(count):
        parts = SOUND.split("~")
        if number < len(ODD_TIMES):
            parts[7] = ODD_TIMES[number]
            found.append("".join(parts).encode())
            continue
        for _ in range(dice.choice((0, 1, 1, 2))):
            place, piece = dice.randrange(len(parts)), dice.choice((*ODD_PIECES, *ODD_TIMES))
            parts[place] = dice.choice((piece, parts[place] + piece, parts[place] * 2, ""))
        cut = dice.choice((len(parts), len(parts), 17, dice.randrange(len(parts))))
        found.append(("".join(parts[:cut]) + dice.choice(("", "", "", "\r", " "))).encode())
    return found


def test_access_logs_are_parsed_alike_without_spark(read: Callable[..., dict[str, Any]]):
    """`logferry query` shows lines that are not loaded yet exactly as the loader will write them."""
    lines = sorted(set(odd_access_lines(4000)))
    names = (*ACCESS, "event_time")
    found = read(lines, format="access").items()
    rows = {line: {name: row[name] for name in names} for line, row in found if isinstance(row, dict)}
    told = {line.decode(): access_columns(line.decode()) for line in lines}
    assert rows == {line: row for line, row in told.items() if row is not None}
    assert 300 < len(rows) < len(lines) - 300


def test_logfmt(read: Callable[..., dict[str, Any]]):
    settings: dict[str, Any] = {
        "format": "logfmt",
        "columns": {"level": "string", "took": "double", "n": "int"},
        "event_time": {"column": "ts", "formats": ["epoch_s"]},
    }
    settings["columns"]["ts"] = "double"
    lines = {
        'ts=1700000000.25 level=info msg="a \\"b\\" c\\\\n\\n" took=1.5 n=3 bare': {
            "msg": 'a "b" c\\n\n',
            "bare": "",
        },
        "ts=1 level= n=-": {},
        "  ts=2   level=x  level=y é=ü ": {"é": "ü"},
        'ts=3 q="" a="x=y z"': {"q": "", "a": "x=y z"},
    }
    wrong = {
        "": formats.NOT_LOGFMT,
        'ts=1 msg="open': formats.NOT_LOGFMT,
        "ts=1 =x": formats.NOT_LOGFMT,
        'ts=1 a="b"c': formats.NOT_LOGFMT,
        "ts=1 n=three": "n is not of the type int",
        "level=info": parsing_rows.NO_TIME,
        "ts=99999999999999999999 a=b": parsing_rows.NO_TIME,
    }
    found = read([line.encode() for line in (*lines, *wrong)], **settings)
    for line, rest in lines.items():
        assert found[line]["fields"] == rest, line
    first, second, third, _ = (found[line] for line in lines)
    assert columns(first, "level", "took", "n") == ("info", 1.5, 3)
    assert first["event_time"] == datetime(2023, 11, 14, 22, 13, 20, 250_000, tzinfo=UTC)
    assert columns(second, "level", "n") == ("", None)
    assert third["level"] == "y", "the last one of a name counts"
    assert {line: found[line] for line in wrong} == wrong


def test_regex(read: Callable[..., dict[str, Any]]):
    """Optional and nested groups, types, and what a point stands for."""
    found = read(
        [
            line.encode()
            for line in (
                *("7 (x) rest of it\u2028 and \x85 more", "8  \r", "9 (y) a$1\\b", "10 (z) 12.50", "x (z) ", "", "11"),
                *("99999999999 (a) b", "1 (\x01) c"),
            )
        ],
        format="regex",
        pattern=r"(?<n>\d+) (?:\((?<name>(a|[x-z()]))\))? (?<rest>.*)",
        columns={"n": "int"},
    )
    names = ("n", "name", "rest")
    assert columns(found["7 (x) rest of it\u2028 and \x85 more"], *names) == (7, "x", "rest of it\u2028 and \x85 more")
    assert columns(found["8  \r"], *names) == (8, "", "")
    assert columns(found["9 (y) a$1\\b"], *names) == (9, "y", "a$1\\b")
    assert [found[text] for text in ("x (z) ", "", "11")] == [formats.NO_FIT] * 3
    assert found["99999999999 (a) b"] == "n is not of the type int"
    assert found["1 (\x01) c"] == formats.MARKED
    assert "event_time" not in found["9 (y) a$1\\b"]


def test_delimited_with_quotes_is_what_pythons_csv_reads(read: Callable[..., dict[str, Any]]):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    rows = [["".join(dice.choices('a";, ü\t|\\', k=dice.randrange(6))) for _ in range(3)] for _ in range(300)]
    lines = [",".join('"' + field.replace('"', '""') + '"' for field in row) for row in rows]
    lines += ["a,b,c", ",,", '"a""b",,c', 'a",b,c', '"a"b,c,d', '"a,b,c', "a,b", "a,b,c,d", ""]
    lines = list(dict.fromkeys(lines))
    kinds = dict.fromkeys(["one", "two", "three"], "string")
    found = read([s.encode() for s in lines], format="delimited", separator=",", quoted=True, columns=kinds)
    wrong = {'a",b,c', '"a"b,c,d', '"a,b,c', "a,b", "a,b,c,d", ""}
    assert {line for line in lines if isinstance(found[line], str)} == wrong
    for line in lines:
        if line not in wrong:
            assert [*columns(found[line], *kinds)] == next(csv.reader([line])), line


def test_delimited_types(read: Callable[..., dict[str, Any]]):
    found = read(
        [b"1|x y|2.50|2026-11-20|true", b"-||-||", b'2|"|1|2026-02-30|false', b"3|a|b|2026-11-20|no"],
        format="delimited",
        separator="|",
        columns={"id": "bigint", "t": "string", "price": "decimal(10,2)", "d": "date", "b": "boolean"},
    )
    names = ("id", "t", "price", "d", "b")
    assert columns(found["1|x y|2.50|2026-11-20|true"], *names) == (
        *(1, "x y", Decimal("2.50"), date(2026, 11, 20), True),
    )
    assert columns(found["-||-||"], *names) == (None, "", None, None, None)
    assert found['2|"|1|2026-02-30|false'] == "d is not of the type date"
    assert found["3|a|b|2026-11-20|no"] == "price is not of the type decimal(10,2)"


def test_chunks(spark: SparkSession, tmp_path: Path):
    """Any bytes are one row. The quarantine gets only records that no gateway wrote."""
    sent = chunks_of("a", b"\xff\n\n\x00", b"", "ü".encode())
    records = [(b"a", s.chunk.data, record_headers(s.chunk)) for s in sent]
    rows, bad = Parser(spark, tmp_path).parsed([*records, (b"a", b"x", [])], ParserSettings(format="chunk"))
    assert sorted(row["data"] for row in rows) == sorted(s.chunk.data for s in sent)
    assert {(row["source_id"], row["seqno"]) for row in rows} == {("a", s.chunk.seqno) for s in sent}
    assert [(row["bytes"], row["line"]) for row in bad] == [(b"x", None)]
    assert "line" not in rows[0]


def test_patterns_that_java_refuses_are_reported_before_the_load(spark: SparkSession):
    wrong: dict[str, dict[str, Any]] = {
        "Unclosed group": {"pattern": "(?<a>x"},
        "EEE yyyy": {"pattern": "(?<a>x)", "event_time": {"column": "a", "formats": ["EEE yyyy"]}},
    }
    for said, settings in wrong.items():
        with pytest.raises(LoaderConfigError, match=said):
            parsing_rows.check_parser(spark, ParserSettings.model_validate({"format": "regex", **settings}))
    parsing_rows.check_parser(spark, ParserSettings(format="access"))


def test_patterns_that_recurse_end_no_loader(read: Callable[..., dict[str, Any]]):
    """A stack that overflows would end the JVM, and the next one at the same line."""
    long, longer = b"abcd" * 8_000, b"abcd" * 50_000
    found = read([long, longer, b"a"], format="regex", pattern="(?<x>(?:(?:(?:(?:(a)|b)|c)|d)|e)*)")
    assert found[long.decode()]["x"] == long.decode()
    assert found[longer.decode()] == formats.TOO_LONG
    assert found["a"]["x"] == "a"
