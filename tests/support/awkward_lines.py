"""Lines that parsers read differently if they can: for the comparison of Spark's rows with those made without it."""

# ruff: noqa: E501, RUF005
from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

EVERY: Final = [
    b"",
    b" ",
    b"\r",
    b"\xff",
    b"a\xc3",
    b"\xed\xa0\x80",
    b"a\x00b",
    b"\x01",
    "ü😀\u2028\x85".encode(),
    b"x" * 40_000,
]

NUMBERS: Final = [
    "1",
    "+1",
    "-1",
    "-0",
    "007",
    "1.0",
    "1.5",
    ".5",
    "5.",
    "1e2",
    "1E+2",
    "1e-400",
    "1e400",
    "0x10",
    "0x1p3",
    "1_0",
    "1d",
    "1f",
    "NaN",
    "nan",
    "inf",
    "-INF",
    "+Infinity",
    "-",
    "+",
    ".",
    "--",
    "1,5",
    "2147483647",
    "2147483648",
    "-2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "12345678.125",
    "99999999.995",
    "1.005",
    "-1.005",
    "123456789012345678901234567890123456789",
    "0e100",
    "1e40",
    "16777217",
    "1.00000017881393432617187499",
    "١",
    "4.9e-324",
    "0.1",
    "2.675",
    "1.7976931348623157e308",
    "true",
    "FALSE",
    "yes",
    "n",
    "t",
    "0",
    "on",
] + ["", " 1 ", "\t2\x00", "\xa01", "1\x7f", "1 2"]
TIMES: Final = [
    *("2026-11-20", "2026-1-2", "2026", "2026-11", "2026-11-20 ", "2026-11-20T", "2026-11-20 junk", "+2026-11-20"),
    *("2026-02-29", "2024-02-29", "0000-01-01", "0001-01-01", "9999-12-31", "20261120", "999-01-01", "2026/11/20"),
    *("2026-11-20 10", "2026-11-20 10:1", "2026-11-20 10:01:02", "2026-11-20 10:01:02.1", "2026-11-20 24:00:00"),
    *("2026-11-20T10:01:02.123456789", "2026-11-20T10:01:02Z", "2026-11-20T10:01:02z", "2026-11-20T10:01:02 Z"),
    *("2026-11-20T10:01:02+01:00", "2026-11-20T10:01:02+0100", "2026-11-20T10:01:02+01", "2026-11-20T10:01:02+1:0"),
    *("2026-11-20T10:01:02 Europe/Zurich", "2026-11-20T10:01:02 UTC+1", "2026-11-20T10:01:02 PST", "2026-3-8 2:3:4"),
    *("2026-11-20T10:60", "2026-11-20T10:01:60", "2026-11-20T10:01:02.", "2026-11-20T10:01:", "2026-11-20T10:01Z"),
    *("2026-11-20T10:01:02+18:00", "2026-11-20T10:01:02+18:01", "2026-11-20T10:01:02-00:30", "2026-11-20  10:01:02"),
    *("1900-01-01 00:00:00 Europe/Zurich", "2026-03-29 02:30:00", "2026-10-25 02:30:00", "2026-11-20T10:01:02,5"),
    *("1795341498", "1795341498.25", "1795341498250", "-5", "1969-12-31T23:59:59.5Z", "\t2026-11-20 10:01:02 "),
    *("2026-11-20 10:41:02,250", "2026-11-20 10:41:02,2505", "02026-11-20 10:41:02,250", "+12026-11-20 10:41:02,250"),
    *("Nov 20 10:41:02", "nov  3 10:41:02", "NOV 3 10:41:02", "Feb 29 10:41:02", "Nov 31 10:41:02", "Sept 3 10:41:02"),
    *("Nov\u212a 20 10:41:02", "20/Nov/2026:10:41:02 +0100", "20/nov/2026:10:41:02 -1801", "081109 203518"),
    *("11/20/26 1:02 PM", "11/20/26 13:02 pm", "11/20/26 12:02 am", "2026-11-20T10:41:02.25Z", "2026-11-20T10:41:02.25+0130"),
]  # fmt: skip

# As a date they are beyond Python's years.
_NEAR: Final = [text for text in TIMES if text not in ("+12026-11-20 10:41:02,250", "1795341498")]

JSON_KINDS: Final = {
    "i": "int",
    "l": "bigint",
    "f": "float",
    "d": "double",
    "b": "boolean",
    "s": "string",
    "da": "date",
    "t": "timestamp",
    "de": "decimal(10,2)",
    "a": "array<int>",
    "m": "map<string,double>",
    "at": "string",
    "st": "struct<x:int,y:string,z:array<struct<q:date>>>",
}
_JSON_VALUES: Final = [
    "null",
    "true",
    "false",
    "1",
    "-1",
    "-0",
    "1.0",
    "1.5",
    "1e2",
    "1E-7",
    "1e400",
    "1e40",
    "NaN",
    "Infinity",
    "-INF",
    "+INF",
    "INF",
    "Inf",
    "-Inf",
    "-NaN",
    "01",
    ".5",
    "5.",
    "1e",
    "-",
    "2147483648",
    "9223372036854775808",
    "12345678901234567890.123",
    "123456789.125",
    "1.005",
    '""',
    '"1"',
    '"NaN"',
    '"-Infinity"',
    '"x"',
    '"12.345"',
    '"1e2"',
    '"',
    '1"',
    '"true"',
    '"123"',
    '"-5"',
    '"2026-11-20"',
    '"2026-11-20T10:00GMT+01:00"',
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    '"\\u00zz"',
    '"\\x"',
    '"a\\/b"',
    "'a\"b'",
    "[]",
    "{}",
    "[1,null,3]",
    '[1,"x"]',
    '[1.50,{"k":1E7}]',
    '{"k":1.5}',
    '{"k":"x"}',
    '{"x":1}',
    '{"x":"no"}',
    "tru",
    '{"x":1,"x":2}',
    '{"y":{"z":1.50}}',
    '{"z":[{"q":"2026-11-20"},{}]}',
    '{"z":[{"q":5}]}',
    '["\\u001f\x7f\u2028😀é"]',
]


def json_lines(seed: int, count: int) -> list[bytes]:
    dice = random.Random(seed)
    values = [value for value in _JSON_VALUES if value] + [json.dumps(text) for text in _NEAR]
    found = [f'{{"{name}":{value}}}' for name in JSON_KINDS for value in values]
    for _ in range(count):
        names = [dice.choice((*JSON_KINDS, "x", "I", "s")) for _ in range(dice.randrange(5))]
        space = dice.choice(("", "", " ", "\t", "\n"[:0]))
        inside = f",{space}".join(f'"{name}"{space}:{space}{dice.choice(values)}' for name in names)
        found.append(
            dice.choice(("", "", " ")) + f"{{{inside}}}" + dice.choice(("", "", "", " ", "\t", "x", "}", " }", "{}"))
        )
    odd = ["{", "[]", "null", "7", "{}", "{i:1}", "{'i':1}", '{"i":1,}', '{"i":1 "l":2}', '{"i":1}\r', '{"i":1}\x00}',
           '{"s":"a\tb"}', '\ufeff{"i":1}', '/*c*/{"i":1}', '[{"i":1}]', '{"i":1', '{"s":"x}', "}", '{"\\u0069":4}']  # fmt: skip
    odd += ['{"x":' + "1" * n + "}" for n in (1000, 1001)] + ['{"x":' + "[" * n + "]" * n + "}" for n in (999, 1000)]
    odd += ['{"' + "k" * n + '":1}' for n in (50_000, 50_001)] + [
        '{"de":' + "1" * 20 + "e-15}",
        '{"s":"' + "y" * 5000 + '"}',
    ]
    return [*EVERY, *(line.encode() for line in (*found, *odd))]


_RESCUED_ODD: Final = [
    *("{'i':1,'x':2}", '{"i":1,"x":NaN}', '{"i":1,"x":{"y":[-INF]}}', "{\"x\":'y'}", '{"i":\'1\',"x":1}', '{"s":\'1\'}'),
    *('{"i":1}{"x":2}', '{"i":1}"x":2}', '{"x":1} {"y":2}', '{"x":1},"x":2}', '{"x":1}}', '{} {"x":1}', '{}{}', "{ }", "{\t}"),
    *('{"x":1,"x":2,"i":1,"\\u0069":2}', '{"\\u0078":1,"x":2}', '{"\\u0069":3}', '{"\\u0069":3,"y":1}', '{"I":1,"":2}'),
    *('{"\\ud800":1,"?":2,"x":3}', '{"\\ud83d\\ude00":1,"😀":2}', '{"k,}":"{\\"","k:{":["]"]}', '{ "x"\t:\r[ 1 , {"i": 2} ] }'),
    *('{"x":123456789012345678901234567890.50e-3,"e":1E400}', '{"x":"\x7f ü😀","$1":"\\\\1"}', '{"i":1,"x":{"i":1}}  '),
    *('{"x":%s}' % ("[" * n + "]" * n) for n in (63, 64, 65, 66)),
    *('{"i":1,"x":%s}' % ('{"x":' * n + "1" + "}" * n) for n in (63, 64, 65)),
    *('{"m":{"k":1,"x":%s}}' % ("[" * n + "]" * n) for n in (63, 64)),
]  # fmt: skip
_DEEP: Final = {
    "i": "int",
    "f": "float",
    "ms": "map<string,array<struct<x:int,m:map<string,int>>>>",
    "am": "array<map<string,string>>",
    "sd": "struct<d:decimal(6,2),t:timestamp,da:date,b:boolean,l:bigint,f:float,g:double,sub:struct<m:map<string,date>>>",
}
_DEEP_VALUES: Final = [
    *('{"k":[{"x":1,"m":{"a":1,"b":2,"a":3}},null,{}],"k":[]}', '{"k":null,"j":[{"m":{"":null}}]}', '{"k":[{"x":1.0}]}'),
    *('[{"a":"x","a":[1.50],"b":null},null]', '[{"\\ud800":"1","?":"2"}]', '[[]]', "[{}]", '{"d":1.005}', '{"d":"1.5 "}'),
    *('{"d":123456}', '{"d":true}', '{"t":"2026-11-20T10:00:00+01:00","da":"2026-11-20"}', '{"t":1795341498}', '{"t":1.5}'),
    *('{"b":"true"}', '{"b":true,"l":9223372036854775807,"f":16777217,"g":-0}', '{"f":-0,"g":-0.0}', '{"f":1.00000017881393432617187499}'),
    *('{"l":1e2}', '{"f":"NaN","g":"-Infinity"}', '{"sub":{"m":{"a":"2026-1-2","b":5}}}', '{"sub":{"m":{"a":"5","a":"2026-11-20"}}}'),
    *("16777217", "33554435", "-0", "123456789012345678901234567890", '{"sub":{}}', '{"sub":null,"D":1}', '{"f":9007199791611905}'),
]  # fmt: skip


def rescued_lines(seed: int, count: int) -> list[bytes]:
    """Of objects with keys that are columns or not, one of them often twice."""
    dice = random.Random(seed)
    names, values = (*"iism", "s", "x", "x", "\\u0069", "I", "a b", "é"), [*_JSON_VALUES, '{"x":{"i":[1,{}]}}', "[ ]"]
    found = [*_RESCUED_ODD]
    for _ in range(count):
        pairs = [(dice.choice(names), dice.choice(values)) for _ in range(dice.randrange(5))]
        space = dice.choice(("", "", " ", "\t", "\r"))
        inside = f"{space},".join(f'{space}"{name}"{space}:{space}{value}' for name, value in pairs)
        found.append(f"{{{inside}}}" + dice.choice(("", "", "", " ", "x", "}", "\r")))
    return [*EVERY, *(line.encode() for line in found)]


TYPED: Final = {"i": "int", "l": "bigint", "f": "float", "d": "double", "b": "boolean", "da": "date", "t": "timestamp"}
TYPED_TOO: Final = {**TYPED, "de": "decimal(10,2)", "big": "decimal(38,0)", "s": "string"}


def field_lines(seed: int, count: int, separator: str, *, quoted: bool) -> list[bytes]:
    """Fields of the types in `TYPED_TOO`: each awkward text in each column, then mixtures."""
    dice = random.Random(seed)
    texts = [text for text in (*NUMBERS, *_NEAR, "-") if separator not in text]
    size = len(TYPED_TOO)
    found = []
    for place in range(size):
        found += [separator.join([""] * place + [text] + ["-"] * (size - place - 1)) for text in texts]
    pieces = [*texts, '"', '""', '"a"', f'"a{separator}b"', '"a""b"', '"a"b', "ü😀", "\\", f"a{separator}b"]
    for _ in range(count):
        fields = [dice.choice(("", "-", dice.choice(texts))) for _ in range(size - 1)] + [dice.choice(pieces)]
        if quoted:
            fields = [f'"{text}"' if dice.random() < 0.3 and '"' not in text else text for text in fields]
        found.append(separator.join(fields) + dice.choice(("", "", "", "\r", separator)))
    return [*EVERY, *(line.encode() for line in found)]


def logfmt_lines(seed: int, count: int) -> list[bytes]:
    dice = random.Random(seed)
    keys = [*TYPED_TOO, "k", "ü", "a.b", "=", '"']
    values = [f'"{text}"' if " " in text or "\t" in text else text for text in (*NUMBERS, *_NEAR)]
    values += [
        '""',
        '"a b"',
        '"a\\"b"',
        '"a\\\\nb\\n\\t\\r\\x"',
        '"a',
        'a"b',
        "a=b",
        "=",
        "ü",
        "\\",
        '"a"b',
        '"x=y z"',
        "\x0b",
    ]
    found = [f"{key}={value}" for key in TYPED_TOO for value in values]
    for _ in range(count):
        pairs = [
            dice.choice(keys) + dice.choice(("", "=", "=" + dice.choice(values))) for _ in range(dice.randrange(5))
        ]
        found.append(
            dice.choice(("", "", " "))
            + dice.choice((" ", " ", "  ", "\t")).join(pairs)
            + dice.choice(("", "", " ", "\r", "\x1c"))
        )
    return [*EVERY, *(line.encode() for line in found)]


class Pattern(NamedTuple):
    pattern: str
    columns: dict[str, str]
    samples: Sequence[str]


PATTERNS: Final = (
    Pattern(
        r"(?<at>\S+ \S+) (?<level>[A-Z]{4,5}+) \[(?<thread>[^\]]*)\]:?\s(?<message>.*)$",
        {},
        ("2026-11-20 10:41:02,250 INFO [main]: hello", "2026-11-20 10:41:02 WARN []\tx\ry", "a b ERROR [x] é\u2028"),
    ),
    Pattern(
        r"(?i)(?<verb>get|post)(?: (?<n>-?\d+))?(?<rest> [\w.\-]*?)?(?=;);(?<more>(?:a|b)*+)\s*",
        {"n": "int"},
        ("GET 5 a.b;ab", "poſt;", "Post -0 ;", "get x;ba ", "K;", "get 99999999999 a;", "get ;a\x0b"),
    ),
    Pattern(
        r"(?<a>.+?)(?:,(?<b>[^,]*))?(?<c>(?<!x)!?)\r?",
        {"b": "double"},
        ("a,1.5", "a,b", "a,1!", "x!", "é,", ",,", "\r,1\r"),
    ),
    Pattern(r"\Q[\E(?<k>\w+)](?<v>[\s\S]*|\.)\u0021", {}, ("[k]v!", "[é]v!", "[k]\u2028\n!"[:4] + "!", "[k]!!", "[]!")),
)


def pattern_lines(seed: int, count: int, samples: Sequence[str]) -> list[bytes]:
    dice = random.Random(seed)
    pieces = [*samples, " ", "\r", "\t", "\x0b", "\x85", "\u2028", "\x01", "é", "😀", "5", ";", "!", ",", "[", "]", "A"]
    found = [*samples, *(text + " " for text in TIMES)]
    for _ in range(count):
        text = dice.choice(samples)
        at = dice.randrange(len(text) + 1)
        found.append(text[:at] + dice.choice(pieces) + text[at + dice.randrange(2) :])
    long = samples[0]
    found += [long + "y" * (size - len(long)) for size in (32_768, 32_769)]
    return [*EVERY, *(line.encode("utf-8", "ignore") for line in found)]


def settings_and_lines() -> dict[str, tuple[dict[str, Any], list[bytes]]]:
    """A case of each format: the settings of its parser, and lines."""
    formats = ["iso", "yyyy-MM-dd HH:mm:ss,SSS", "MMM d HH:mm:ss", "epoch_s"]
    others = ["dd/MMM/yyyy:HH:mm:ss Z", "yyMMdd HHmmss", "M/d/yy h:mm a", "yyyy-MM-dd'T'HH:mm:ss.SSX", "epoch_ms"]
    found: dict[str, tuple[dict[str, Any], list[bytes]]] = {
        "json": ({"columns": JSON_KINDS}, json_lines(1, 1500)),
        "json simple": ({"columns": {k: v for k, v in JSON_KINDS.items() if k in "ildbs"}}, json_lines(2, 1500)),
        "json times": (
            {"columns": {"at": "string", "i": "int"}, "event_time": {"column": "at", "formats": formats, "zone": "Europe/Zurich"}},
            [json.dumps({"at": text}).encode() for text in TIMES] + json_lines(3, 100),
        ),
        "json rescued": (
            {"columns": {"i": "int", "s": "string", "m": "map<string,string>"}, "rescued": True}, rescued_lines(11, 1500)
        ),
        "json rescued simple": ({"columns": {"i": "int", "s": "string"}, "rescued": True}, rescued_lines(12, 1500)),
        "json arrays": (
            {"columns": {k: v for k, v in JSON_KINDS.items() if k not in ("de", "m", "st")} | {"st": "struct<x:int,y:string,z:array<float>>"}},
            json_lines(13, 1000),
        ),
        "json nested": (
            {"columns": _DEEP}, [f'{{"{name}":{value}}}'.encode() for name in _DEEP for value in (*_DEEP_VALUES, *_JSON_VALUES)]
        ),
        "json double time": (
            {"columns": {"at": "double"}, "event_time": {"column": "at", "formats": ["epoch_s"]}},
            [f'{{"at":{text}}}'.encode() for text in ("1795341498", "1795341498.25", "1e9", "-1", "1e300", "0.000001")],
        ),
        "logfmt": ({"columns": TYPED_TOO}, logfmt_lines(4, 1500)),
        "delimited": ({"columns": TYPED_TOO, "separator": "||"}, field_lines(5, 1000, "||", quoted=False)),
        "delimited quoted": ({"columns": TYPED_TOO, "separator": ";", "quoted": True}, field_lines(6, 1000, ";", quoted=True)),
        "delimited times": (
            {
                "columns": {"at": "string", "n": "int"},
                "separator": "\t",
                "event_time": {"column": "at", "formats": others},
            },
            [f"{text}\t1".encode() for text in TIMES if "\t" not in text],
        ),
        "lines": ({}, [*EVERY]),
    }  # fmt: skip
    for number, one in enumerate(PATTERNS):
        settings: dict[str, Any] = {"pattern": one.pattern, "columns": one.columns}
        if number == 0:
            settings["event_time"] = {"column": "at", "formats": formats, "zone": "America/New_York"}
        found[f"regex {number}"] = (settings, pattern_lines(7 + number, 600, one.samples))
    return {
        name: ({"format": name.split(" ", maxsplit=1)[0], **settings}, lines)
        for name, (settings, lines) in found.items()
    }
