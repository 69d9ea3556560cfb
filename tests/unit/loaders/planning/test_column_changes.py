"""Which types a column may change to: a table of cases."""

from __future__ import annotations

import json

import pytest
from logferry.loaders.parsing.columns import ColumnType, column_type, schema_field
from logferry.loaders.planning.column_changes import column_changes, column_types, is_wider

WIDER = {
    ("int", "bigint"),
    ("int", "double"),
    ("int", "decimal(10,0)"),
    ("int", "decimal(14,4)"),
    ("bigint", "decimal(20,0)"),
    ("float", "double"),
    ("decimal(12,2)", "decimal(14,2)"),
    ("decimal(12,2)", "decimal(14,4)"),
    ("array<int>", "array<bigint>"),
    ("map<string,float>", "map<string,double>"),
    ("struct<a:int>", "struct<a:bigint>"),
    ("struct<a:int>", "struct<a:int,b:string>"),
    ("array<struct<a:map<string,int>>>", "array<struct<a:map<string,bigint>,b:date>>"),
}
OTHER = {
    ("bigint", "int"),
    ("bigint", "double"),
    ("double", "float"),
    ("double", "decimal(38,10)"),
    ("float", "bigint"),
    ("int", "float"),
    ("int", "string"),
    ("string", "int"),
    ("int", "decimal(9,0)"),
    ("int", "decimal(12,4)"),
    ("bigint", "decimal(19,0)"),
    ("decimal(12,2)", "decimal(12,3)"),
    ("decimal(12,2)", "decimal(13,1)"),
    ("decimal(12,2)", "double"),
    ("date", "timestamp"),
    ("boolean", "int"),
    ("array<int>", "int"),
    ("int", "array<int>"),
    ("array<int>", "map<string,int>"),
    ("array<bigint>", "array<int>"),
    ("struct<a:int,b:int>", "struct<a:int>"),
    ("struct<a:int,b:int>", "struct<b:int,a:int>"),
    ("struct<a:int>", "struct<b:string,a:int>"),
    ("struct<a:int>", "struct<A:int>"),
}


@pytest.mark.parametrize(("have", "want"), sorted(WIDER))
def test_these_are_wider(have: str, want: str):
    assert is_wider(column_type(have), column_type(want))
    assert not is_wider(column_type(want), column_type(have))


@pytest.mark.parametrize(("have", "want"), sorted(OTHER))
def test_these_are_not(have: str, want: str):
    assert not is_wider(column_type(have), column_type(want))


def test_what_is_refused_is_said_as_in_a_configuration():
    kinds = {"same": "int", "wide": "int", "items": "array<struct<n:bigint,m:map<string,int>>>", "gone": "int"}
    have = {name: column_type(kind) for name, kind in kinds.items()}
    want: dict[str, ColumnType] = have | {
        "wide": column_type("bigint"),
        "items": column_type("string"),
        "new": "string",
    }
    del want["gone"]
    found = column_changes(have, want)
    assert found.wider == ("wide",)
    assert found.refused == ("items (array<struct<n:bigint,m:map<string,int>>>, not string)",)


def test_nullability_is_no_type():
    kind = {"type": "array", "elementType": "long", "containsNull": False}
    schema = {"type": "struct", "fields": [{**schema_field("a", kind), "nullable": False}]}
    assert column_types(json.dumps(schema)) == {"a": {"type": "array", "elementType": "long"}}
