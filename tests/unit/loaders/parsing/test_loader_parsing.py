"""The settings of a parser: what is refused, the name in the ledger, and what is decided without Spark."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.loaders.parsing import settings as parsing_settings
from logferry.loaders.parsing.columns import column_type, named_groups
from logferry.loaders.parsing.formats import spark_fields
from logferry.loaders.parsing.settings import ParserSettings, settings_of
from pydantic import ValidationError

JSON: dict[str, Any] = {"format": "json", "columns": {"b": "int", "a": "string"}}
REGEX: dict[str, Any] = {"format": "regex", "pattern": r"(?<at>\S+) (?<n>\d+)", "columns": {"n": "int"}}
TIME = {"column": "at", "formats": ["iso"]}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a format that is none": ({"format": "xml"}, "format"),
    "a key that is none": ({"format": "lines", "colums": {}}, "colums"),
    "no columns": ({"format": "json"}, "json needs columns"),
    "columns of what has none": ({"columns": {"a": "int"}}, "columns: not a setting of the format lines"),
    "a pattern elsewhere": ({**JSON, "pattern": "x"}, "pattern: not a setting of the format json"),
    "rescued elsewhere": (
        {"format": "logfmt", "columns": {"a": "int"}, "rescued": True},
        "rescued: not a setting of the format logfmt",
    ),
    "a column of that name": (
        {"format": "json", "columns": {"Rescued": "int"}, "rescued": True},
        "rescued is a column of every row",
    ),
    "bytes in JSON": ({**JSON, "columns": {"a": "array<binary>"}}, "'binary' is not a type"),
    "no pattern": ({"format": "regex"}, "regex needs a pattern"),
    "no group": ({"format": "regex", "pattern": "(a)"}, "no named group"),
    "a column that is no group": ({**REGEX, "columns": {"m": "int"}}, "m is not a group"),
    "a group twice": ({"format": "regex", "pattern": "(?<a>.)(?<a>.)"}, "is defined twice"),
    "a type that is none": ({**JSON, "columns": {"a": "integer"}}, "'integer' is not a type; types are string"),
    "a text as an array": (
        {**REGEX, "columns": {"n": "array<int>"}},
        "type array<int> is not supported for this format",
    ),
    "a name with a blank": ({**JSON, "columns": {"a b": "int"}}, "not a column"),
    "a name of every row": ({**JSON, "columns": {"offset": "int"}}, "offset is a column of every row"),
    "a name of every row, larger": ({**JSON, "columns": {"Offset": "int"}}, "offset is a column of every row"),
    "names alike": ({**JSON, "columns": {"a": "int", "A": "int"}}, "upper and lower case"),
    "no separator": ({"format": "delimited", "columns": {"a": "int"}}, "needs a separator"),
    "a long separator with quotes": (
        {"format": "delimited", "columns": {"a": "int"}, "separator": "||", "quoted": True},
        "one character other than the quote",
    ),
    "a time of no column": ({**REGEX, "event_time": {**TIME, "column": "x"}}, "x is not a column"),
    "a time of an array": (
        {"format": "json", "columns": {"at": "array<int>"}, "event_time": TIME},
        "a string or a number is needed",
    ),
    "a time of lines": ({"event_time": TIME}, "event_time: not a setting of the format lines"),
    "a zone that is none": ({**REGEX, "event_time": {**TIME, "zone": "Mars/Olympus"}}, "not a time zone"),
    "no format of a time": ({**REGEX, "event_time": {**TIME, "formats": []}}, "formats"),
    "a quote left open": ({**REGEX, "event_time": {**TIME, "formats": ["yyyy'T"]}}, "not closed"),
    "a column of access that is none": ({"format": "access", "columns": {"agent": "string"}}, "columns of access are"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_is_reported(case: str):
    given_settings, said = WRONG[case]
    with pytest.raises(ValidationError, match=re.escape(said)):
        ParserSettings.model_validate(given_settings)


RIGHT = [
    {},
    {"format": "chunk"},
    {"format": "access"},
    {"format": "access", "columns": {"status": "string"}},
    JSON,
    {**JSON, "rescued": True},
    {"format": "json", "columns": {"rescued": "string"}},
    {"format": "json", "columns": {"a": "array<map<string,int>>"}},
    {**REGEX, "event_time": {**TIME, "zone": "Europe/Zurich"}},
    {"format": "delimited", "columns": {"b": "int", "a": "decimal(5,2)"}, "separator": "\t"},
    {"format": "logfmt", "columns": {"level": "string"}},
]


@pytest.mark.parametrize("given_settings", RIGHT)
def test_the_ledger_gives_back_what_was_planned(given_settings: dict[str, Any]):
    settings = ParserSettings.model_validate(given_settings)
    found = settings_of(settings.name, settings.as_json)
    assert found == settings
    assert list(found.kinds) == list(settings.kinds), "the order of columns"


def test_every_setting_is_in_the_name():
    names = {ParserSettings.model_validate(one).name for one in RIGHT}
    assert len(names) == len(RIGHT)
    assert ParserSettings().name == "lines/1"
    turned = ParserSettings.model_validate({"format": "json", "columns": dict(reversed(JSON["columns"].items()))})
    assert turned.name != ParserSettings.model_validate(JSON).name, "the order of columns counts"


def test_names_of_tables_that_were_loaded_before_stay():
    """A batch that an older loader has planned is finished after an upgrade; one with a map is parsed otherwise now."""
    assert ParserSettings.model_validate({**JSON, "rescued": False}).name == "json/1:abb37ad35916"
    assert ParserSettings.model_validate({"format": "json", "columns": {"a": "map <string,int>"}}).name[:7] == "json/2:"


def test_another_version_is_another_parser(monkeypatch: pytest.MonkeyPatch):
    settings = ParserSettings.model_validate(JSON)
    monkeypatch.setitem(parsing_settings.VERSIONS, "json", 2)
    assert settings_of(settings.name.replace("json/2", "json/1"), settings.as_json) is None
    assert settings_of("xml/1", "") is None


# ---- named groups -------------------------------------------------------------------------------------------

GROUPS = {
    r"(?<a>x)": {"a": 1},
    r"(x)(?<a_b>(y)(?<c>z))": {"a_b": 2, "c": 4},
    r"\((?<a>x)": {"a": 1},
    r"[(](?<a>x)[^)(?<b>]": {"a": 1},
    r"[[(]a(](?<a>x)": {"a": 1},
    r"\Q(?<b>(\E(?<a>x)": {"a": 1},
    r"(?:(?=(x))(?<=(y))(?<!z)(?i)(?<a>x))": {"a": 3},
    r"(?>(?<a>x)++)": {"a": 1},
}


@pytest.mark.parametrize("pattern", GROUPS)
def test_groups(pattern: str):
    plain, groups = named_groups(pattern)
    assert groups == GROUPS[pattern]
    assert "?<a" not in plain.replace(r"\Q(?<b>(\E", "")


def test_a_group_that_is_referred_to():
    assert named_groups(r"(x)(?<q>['\"])1\k<q>2").pattern == r"(x)(['\"])1(?:\2)2"
    with pytest.raises(ValueError, match="does not refer to a group"):
        named_groups(r"\k<q>(?<q>x)")


_PIECES = st.sampled_from(["x", "(y)", "(?:z|(w))", r"\(", "[(]", "(?P<{}>v)", "((?P<{}>u))", r"[^()]", "(?=(t)?)"])


@given(st.lists(_PIECES, max_size=12))
def test_groups_are_those_of_pythons_re(pieces: list[str]):
    pattern = "".join(piece.format(f"g{i}") for i, piece in enumerate(pieces))
    plain, groups = named_groups(pattern.replace("?P<", "?<"))
    assert groups == dict(re.compile(pattern).groupindex)
    assert re.compile(plain).groups == re.compile(pattern).groups


# ---- types --------------------------------------------------------------------------------------------------

TYPES = {
    "int": "int",
    " bigint ": "bigint",
    "decimal(10, 2)": "decimal(10,2)",
    "array<struct<a:string,b:decimal(3,1)>>": "array<struct<a:string,b:decimal(3,1)>>",
    "map<string,array<int>>": "map<string,array<int>>",
}
NO_TYPES = ["", "Int", "int int", "array", "array<int", "map<int,int>", "struct<a>", "struct<a:int,a:int>", "a-b"]
NO_TYPES += ["decimal(0,0)", "decimal(2,3)", "decimal(39,1)", "decimal", "struct<>", "array<" * 20 + "int" + ">" * 20]


@pytest.mark.parametrize("text", TYPES)
def test_types(text: str):
    assert spark_fields(a=text)[0].dataType.simpleString() == TYPES[text]


@pytest.mark.parametrize("text", NO_TYPES)
def test_no_types(text: str):
    with pytest.raises(ValueError, match=r"not a type|goes deeper|a field twice|not a column"):
        column_type(text)
