"""The two ways to read a line give the same: Arrow's for common forms, and the one in Python, which is the rule."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.parsing.columns import column_type
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.query import line_texts
from logferry.loaders.query.access_lines import AccessLines
from logferry.loaders.query.java_pattern import translate
from logferry.loaders.query.json_lines import Values, arrow_schema, read_by_arrow
from logferry.loaders.query.line_texts import (
    FIELDS,
    DelimitedLines,
    Format,
    LogfmtLines,
    PatternLines,
    UnequalLine,
)
from logferry.loaders.query.parsed_lines import arrow_type, cast_texts
from logferry.loaders.query.spark_values import caster

from tests.support.awkward_lines import NUMBERS, PATTERNS, TIMES, settings_and_lines

LINES = {name: [line.decode(errors="replace") for line in lines] for name, (_, lines) in settings_and_lines().items()}


def check_alike(fmt: Format, lines: list[str], names: list[str]) -> int:
    count = 0
    for texts in fmt.fast(pa.array(lines, pa.string())):
        columns = {name: texts.column(name).to_pylist() for name in names}
        for index, row in enumerate(texts.rows.tolist()):
            read = fmt.slow(lines[row])
            assert not isinstance(read, str), (lines[row], read)
            assert {name: columns[name][index] for name in names} == {name: read[name] for name in names}, lines[row]
            count += 1
    return count


ACCESS = ["remote_host", "ident", "user", "time", "request", "status", "body_bytes", "referer", "user_agent"]
ACCESS += ["method", "path", "protocol"]
WORDS = [
    "1.2.3.4",
    "-",
    " ",
    "  ",
    "[",
    "]",
    '"',
    "\\",
    '\\"',
    "10/Oct/2000:13:55:36 -0700",
    "GET /a HTTP/1.1",
    "GET /",
    "200",
]
WORDS += ["7", "\x01", "\x0b", "é", "\x85", "a b c", "POST /\x85 H/1", "[10/Oct/2000:13:55:36 -0700]", '"-" "-"', ""]


USUAL = ["1.2.3.4", "-", "frank", "10/Oct/2000:13:55:36 -0700", "GET /a HTTP/1.1", "200", "7", "http://x/", "curl"]
# At most two fields are odd, so that many lines still fit.
EDITS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from(WORDS), st.booleans()), max_size=2)


def edited(edits: list[tuple[int, str, bool]]) -> list[str]:
    fields = [*USUAL]
    for place, word, is_added in edits:
        fields[place] = fields[place] + word if is_added else word
    common = '{} {} {} [{}] "{}" {} {}'.format(*fields[:7])
    return [common, common + ' "{}" "{}"'.format(*fields[7:])]


@given(st.lists(EDITS, min_size=1, max_size=20))
def test_access_logs(edits: list[list[tuple[int, str, bool]]]):
    check_alike(AccessLines(), [line for each in edits for line in edited(each)], ACCESS)


@pytest.mark.parametrize("place", range(9))
def test_access_logs_with_one_odd_field(place: int):
    lines = [line for word in WORDS for added in (False, True) for line in edited([(place, word, added)])]
    check_alike(AccessLines(), lines, ACCESS)


def test_most_access_logs_take_the_fast_way():
    line = '1.2.3.4 - frank [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.1" 200 7'
    assert check_alike(AccessLines(), [line, line + ' "-" "é"', line + ' "\\"" "-"', "x"], ACCESS) == 2


@pytest.mark.parametrize("quoted", [False, True])
def test_delimited(quoted: bool):
    lines = [line for name in ("delimited", "delimited quoted") for line in LINES[name]]
    names = [f"c{number}" for number in range(10)]
    for separator in ("||", ";", "a") if not quoted else (";", "a"):
        check_alike(DelimitedLines(names, separator, quoted=quoted), lines, names)
    assert check_alike(DelimitedLines(["a", "b"], ";", quoted=quoted), ["1;2", ";", "x;é", "1"], ["a", "b"]) == 3


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_patterns(number: int):
    pattern = PatternLines(PATTERNS[number].pattern)
    names = list(translate(PATTERNS[number].pattern).groups)
    check_alike(pattern, LINES[f"regex {number}"], names)


def test_a_simple_pattern_takes_the_fast_way():
    assert check_alike(PatternLines(r"(?<a>\w+)\s(?<b>.*)"), ["x y", "x\x0by", "é y", "\u2028 y"], ["a", "b"]) == 2


REFUSED = [
    r"(?<a>[a-z&&[^b]])",
    r"(?<a>[a[b]])",
    r"(?<a>\p{L}+)",
    r"(?:(?<a>x)|y)*",
    r"(?<a>x)+",
    r"(?m)(?<a>x)",
    r"(?<a>(?i)x)",
    r"(?<a>\G)",
    r"(?<a>\R)",
]


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_pattern_without_an_equal_is_refused(pattern: str):
    with pytest.raises(LoaderConfigError, match="may match otherwise outside of Java"):
        translate(pattern)


def test_a_word_boundary_is_for_ascii():
    pattern = PatternLines(r"(?<a>\w+)\b(?<b>.*)")
    assert pattern.slow("x y") == {"a": "x", "b": " y"}
    with pytest.raises(UnequalLine, match="versions of Java differ"):
        pattern.slow("x é")


TEXTS = st.lists(
    st.one_of(
        st.none(),
        st.sampled_from([*NUMBERS, *TIMES, "-"]),
        st.from_regex(r"[+-]?[0-9]{0,20}[.eE]?[0-9]{0,3}", fullmatch=True),
    )
)


ZONED: Any = st.from_regex(
    r"[12][0-9]{3}-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-6][0-9]:[0-6][0-9](\.[0-9]{1,7})?", fullmatch=True
)


@given(
    TEXTS | st.lists(st.tuples(ZONED, st.sampled_from(["Z", "+01:00", "-1730", "+18:00", ""])).map("".join)),
    st.sampled_from(["int", "bigint", "float", "double", "boolean", "decimal(10,2)", "timestamp"]),
)
def test_casts(texts: list[str | None], kind: str):
    values, wrong = cast_texts(pa.array(texts, pa.string()), kind)
    target = arrow_type(column_type(kind))
    want = [None if text in (None, "", "-") else caster(kind)(text or "") for text in texts]
    if kind == "timestamp":  # some are beyond Python's years
        assert values.cast(pa.int64()).to_pylist() == want
    else:
        assert repr(values.to_pylist()) == repr(pa.array(want, target).to_pylist())
    assert wrong.tolist() == [
        text not in (None, "", "-") and one is None for text, one in zip(texts, want, strict=True)
    ]


LOGFMT = ["level", "msg", "status"]
PAIRS: Any = st.tuples(
    st.sampled_from([*LOGFMT, "k.v", "ü", "a+"]),
    st.sampled_from(["", "1", '"a b"', '""', "a=b", "ü", '"x\\\\"', "a\x0bb", '"', "\x01"]),
)


@given(st.lists(st.lists(PAIRS.map("=".join), max_size=4).map(" ".join), min_size=1))
def test_logfmt(lines: list[str]):
    with patch.object(line_texts, "_LEAST_LINES", 1):
        check_alike(LogfmtLines(LOGFMT), lines, [*LOGFMT, FIELDS])


def test_logfmt_of_one_form():
    lines = [f'level=info msg="number {n}" took.s={n} status={200 + n % 3}' for n in range(100)]
    lines += [f"{line} more=1" for line in lines] + [line.replace(" msg", "  msg") for line in lines]
    with patch.object(line_texts, "_LEAST_LINES", 1):
        assert check_alike(LogfmtLines(LOGFMT), lines, [*LOGFMT, FIELDS]) == 200


SIMPLE = {"i": "int", "l": "bigint", "d": "double", "f": "float", "b": "boolean", "s": "string", "a": "array<int>"}
SIMPLE |= {"st": "struct<x:int,y:string,z:array<struct<q:double>>>"}
SCHEMA = arrow_schema(SIMPLE)


def check_json(lines: list[str]) -> int:
    """Also with the column rescued, of which fewer lines are read."""
    count = 0
    assert SCHEMA is not None
    for rescued in (True, False):
        values = Values(ParserSettings(format="json", columns=SIMPLE, rescued=rescued))
        found = [*read_by_arrow(pa.array(lines, pa.string()), SCHEMA, is_flat=rescued)]
        for rows, table in found:
            read = [values.of(lines[row]) for row in rows.tolist()]
            if rescued:
                more = values.rescued(pa.array(lines, pa.string()).take(pa.array(rows)))
                table = table.append_column("rescued", more)
            assert repr(table.to_pylist()) == repr(read)
        count = sum(len(rows) for rows, _ in found)
    return count


def test_json():
    for name in ("json", "json rescued", "json nested"):
        check_json(LINES[name])
        for line in LINES[name][::3]:
            check_json([line])
    assert check_json(['{"i":1,"x":[{}]}', '{"s":"é\\n"}', "{}"]) == 3
    assert check_json(['{"i":1}{"i":2}', '{"i":1,"x":', "1}"]) == 0


OBJECTS: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.sampled_from([*SIMPLE, "x", "é"]), inner)),
)


@given(st.lists(st.dictionaries(st.sampled_from([*SIMPLE, "x"]), OBJECTS), min_size=1, max_size=3))
def test_json_of_any_values(objects: list[Any]):
    import json

    lines = [json.dumps(one, ensure_ascii=len(one) % 2 == 0) for one in objects]
    whole = [line for line in lines if line.isprintable() or line.isascii()]
    for line in whole:
        check_json([line.encode(errors="replace").decode()])


def test_no_line_is_read_twice():
    lines = [f'{{"i":{number}}}' for number in range(300)] + ['{"i":"x"}']
    assert SCHEMA is not None
    found = np.concatenate([rows for rows, _ in read_by_arrow(pa.array(lines), SCHEMA)])
    assert len(found) == len(set(found.tolist())) >= 150
