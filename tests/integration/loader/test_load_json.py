"""JSON lines against Python's json: keys without a column, nested types, and how strict both are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from logferry.loaders.parsing import formats
from logferry.loaders.parsing.columns import RESCUED_DEPTH

pytestmark = pytest.mark.spark

Read = Callable[..., dict[str, Any]]
NAMES = ("id", "at")
RESCUED: dict[str, Any] = {"format": "json", "columns": {"id": "int", "at": "string"}, "rescued": True}


def plain(_: str) -> Any:
    raise ValueError("not strict")


def rescued(line: str) -> str | None:
    """The reference: the text of each member whose key is no column, of the last one where a key comes twice."""
    scanner = json.JSONDecoder(parse_constant=plain)
    members: list[tuple[str, str]] = []
    at = line.index("{") + 1
    while line[at:].lstrip(" \t\r")[0] != "}":
        start = at + len(line[at:]) - len(line[at:].lstrip(" \t\r,"))
        key, after = scanner.raw_decode(line, start)
        value = line.index(":", after) + 1
        _, at = scanner.raw_decode(line, value + len(line[value:]) - len(line[value:].lstrip(" \t\r")))
        members.append((key, line[start:at]))
    last = {key: number for number, (key, _) in enumerate(members)}
    kept = [text for number, (key, text) in enumerate(members) if key not in NAMES and last[key] == number]
    return "{" + ",".join(kept) + "}" if kept else None


def nested(levels: int) -> str:
    return '{"id": 1, "deep": ' + "[" * levels + "]" * levels + "}"


LINES = [
    "{}",
    " { } ",
    '{"id": 1, "at": "x"}',
    '{"id": 1, "more": 123456789012345678901234567890123456789012345678901234567890, "half": 1.50, "e": 1e400}',
    '{"more": {"a": [1, {"b": "}]\\"\\\\"}], "": {}}, "id": 7, "none": null, "yes":true , "t"\t:\r "\\u00e4\\ud83d x"}',
    '{"ID": 1, "Id": 2, "id": 3}',
    '{"a": 1, "b": 2, "a": "3", "id": 1, "id": 2, "c": 4, "a": {"a": 1, "a": 2}}',
    '{"\\u0069d": 5, "\\u0061t": "y", "\\u0078": 6, "x": 7}',
    '{"k,": "a,b", "k:{": "\\"", "k}": [","], "ключ": "значение 😀", "$1": "\\\\1"}',
    '{"id": null, "": ""}',
    nested(RESCUED_DEPTH),
]
# Columns of their own would take them, but they are no JSON.
TWICE = [
    '{"id": 1} {"x": 2}',
    '{"id": 1, "x": 2}{"x": 3}',
    '{"id": 1} "x": 2}',
    '{"id": 1}, "x": 2}',
    '{"id": 1, "x": 2}}',
]
LENIENT = [
    *TWICE,
    "{'id': 1, 'x': 2}",
    '{"id": 1, "x": NaN}',
    '{"id": 1, "x": [-Infinity]}',
    '{"id": 1, "x": {"y": \'z\'}}',
]


def test_keys_without_a_column_are_kept_as_they_are(read: Read):
    found = read([line.encode() for line in (*LINES, *LENIENT, nested(RESCUED_DEPTH + 1))], **RESCUED)
    for line in LINES:
        assert found[line]["rescued"] == rescued(line), line
    assert {found[line] for line in (*LENIENT, nested(RESCUED_DEPTH + 1))} == {formats.NOT_STRICT}
    assert found[LINES[7]]["id"] == 5, "an escaped key is the same key"
    assert found[LINES[2]]["rescued"] is None
    wrong = read([b'{"id": "x", "more": 1}', b"[1]", b"{"], **RESCUED)
    assert list(wrong.values()) == [formats.NOT_OBJECT, formats.NOT_OBJECT, formats.NOT_JSON]


def test_random_objects_are_rescued_as_python_reads_them(read: Read):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    letters = "aid{}[],:\"\\ 'äN0€😀\t"

    def value(levels: int) -> Any:
        kind = dice.randrange(6 if levels else 4)
        if kind < 4:
            text = "".join(dice.choices(letters, k=dice.randrange(5)))
            return (text, dice.randrange(-(10**40), 10**40), dice.uniform(-1, 1), dice.choice((True, False, None)))[
                kind
            ]
        if kind == 4:
            return [value(levels - 1) for _ in range(dice.randrange(4))]
        return {"".join(dice.choices(letters, k=2)): value(levels - 1) for _ in range(dice.randrange(4))}

    lines = []
    for number in range(400):
        members = {"".join(dice.choices(letters, k=dice.randrange(4))): value(4) for _ in range(dice.randrange(5))}
        separators = dice.choice(((",", ":"), (" , ", "\t: ")))
        lines.append(json.dumps({"id": number, **members}, ensure_ascii=dice.random() < 0.5, separators=separators))
    found = read([line.encode() for line in lines], **RESCUED)
    rows = {line: found[line]["rescued"] for line in lines if isinstance(found[line], dict)}
    assert len(rows) > 350, "`id` is sometimes another value"
    assert rows == {line: rescued(line) for line in rows}
    assert {found[line] for line in lines if line not in rows} <= {formats.NOT_OBJECT}


def test_any_number_of_keys_that_come_twice(read: Read):
    """The work of a line does not grow with the square of its keys."""
    members = [f'"k{number}": {number}' for number in range(20_000)]
    line = "{" + ",".join([*members, *members]) + "}"
    found = read([line.encode()], **RESCUED)[line]["rescued"]
    assert found == rescued(line) == "{" + ",".join(members) + "}"
    mapped = f'{{"c": {line}}}'
    found = read([mapped.encode()], format="json", columns={"c": "map<string,int>"})[mapped]["c"]
    assert found == json.loads(line)


# Type of the column → values in the line, with the value of the row; those of `WRONG` send the line to the quarantine.
NESTED: dict[str, dict[str, Any]] = {
    "struct<x:int>": {
        '{"x": 1}': {"x": 1},
        '{"y": 1}': {"x": None},
        '{"X": 1}': {"x": None},
        "{}": {"x": None},
        "null": None,
        '{"x": 1, "x": 2}': {"x": 2},
    },
    "array<int>": {"[1, null]": [1, None], "[]": []},
    "map<string,int>": {
        '{"a": 1, "": null}': {"a": 1, "": None},
        '{"a": 1, "b": 2, "a": 3}': {"a": 3, "b": 2},
        "{}": {},
    },
    "array<struct<s:string,n:int>>": {
        '[{"s": "a", "n": 1}, null]': [{"s": "a", "n": 1}, None],
        '[{"s": {"q": [1, "x"]}}]': [{"s": '{"q":[1,"x"]}', "n": None}],
    },
    "struct<d:decimal(6,2)>": {
        '{"d": 1.005}': {"d": Decimal("1.01")},
        '{"d": "1.5"}': {"d": Decimal("1.50")},
        '{"d": 1e2}': {"d": Decimal("100.00")},
    },
    "struct<t:timestamp>": {
        '{"t": "2026-11-20T10:00:00+01:00"}': {"t": datetime(2026, 11, 20, 9, tzinfo=UTC)},
        '{"t": "2026-11-20 10:00:00"}': {"t": datetime(2026, 11, 20, 10, tzinfo=UTC)},
        '{"t": 1795341498}': {"t": datetime(2026, 11, 22, 9, 58, 18, tzinfo=UTC)},
    },
    "struct<t:date>": {'{"t": "2026-11-20"}': {"t": date(2026, 11, 20)}},
    "struct<t:boolean>": {'{"t": true}': {"t": True}},
    "struct<t:double>": {'{"t": 1}': {"t": 1.0}, '{"t": 1e400}': {"t": float("inf")}},
    "struct<a:array<map<string,struct<b:array<map<string,decimal(4,1)>>>>>>": {
        '{"a": [{"k": {"b": [{"z": 1.05, "z": 2}]}}, {"k": null}]}': {
            "a": [{"k": {"b": [{"z": Decimal("2.0")}]}}, {"k": None}]
        },
        '{"a": [{"k": {"b": []}, "k": {"b": null}}]}': {"a": [{"k": {"b": None}}]},
    },
}
WRONG = {
    "struct<x:int>": ['{"x": "1"}', '{"x": 1.0}', '{"x": 2147483648}', "[]", "5", '"s"', '[{"x": 1}]'],
    "array<int>": ['[1, "2"]', "[1.5]", "{}", "1", "[[1]]"],
    "map<string,int>": ['{"a": "1"}', "[]", "5"],
    "array<struct<s:string,n:int>>": ['[{"s": "a", "n": "x"}]', "[5]", '{"s": "a"}'],
    "struct<d:decimal(6,2)>": ['{"d": 123456.7}', '{"d": "x"}', '{"d": true}', '{"d": ""}'],
    "struct<t:timestamp>": ['{"t": "x"}', '{"t": 1.5}', '{"t": ""}'],
    "struct<t:date>": ['{"t": "20.11.2026"}', '{"t": 5}'],
    "struct<t:boolean>": ['{"t": "true"}', '{"t": 1}'],
    "struct<t:double>": ['{"t": "1.5"}', '{"t": ""}'],
    "struct<a:array<map<string,struct<b:array<map<string,decimal(4,1)>>>>>>": [
        '{"a": [{"k": {"b": [{"z": "x"}]}}]}',
        '{"a": [{"k": {"b": 5}}]}',
    ],
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_values_are_as_strict_as_others(kind: str, read: Read):
    right = {f'{{"c": {value}, "after": {i}}}': row for i, (value, row) in enumerate(NESTED[kind].items())}
    wrong = [f'{{"c": {value}, "after": 0}}' for value in WRONG[kind]]
    found = read([line.encode() for line in (*right, *wrong)], format="json", columns={"c": kind, "after": "int"})
    assert {line: found[line]["c"] for line in right} == right
    assert {found[line] for line in wrong} == {formats.NOT_OBJECT}
