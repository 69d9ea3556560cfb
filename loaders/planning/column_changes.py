"""Changes of a column's type: which ones keep every stored value, so that a table can take them on. Pure.

Types are those of Delta's schema in JSON. The rules are those of Delta's type widening (protocol, "Type Widening"), of
the types that a parser has; and a struct may get fields, behind those that it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from logferry.loaders.parsing.columns import ColumnType

_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
# The digits of whole numbers; as decimals they have none after the point.
_WHOLE: Final = {"integer": 10, "long": 20}
_WIDER: Final[Mapping[str, Collection[str]]] = {"integer": ("long", "double"), "float": ("double",)}


_NULLABILITY: Final = frozenset(("nullable", "containsNull", "valueContainsNull", "metadata"))


def column_types(schema_json: str) -> dict[str, ColumnType]:
    """Name → type. Schemas of Delta and Spark differ only in nullability, which is left out."""
    schema = json.loads(schema_json, object_hook=lambda node: {key: node[key] for key in node.keys() - _NULLABILITY})
    return {field["name"]: field["type"] for field in schema["fields"]}


class ColumnChanges(NamedTuple):
    """By name, what a job wants of a table. ``refused``: with the stored and the wanted type."""

    wider: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def column_changes(have: Mapping[str, ColumnType], want: Mapping[str, ColumnType]) -> ColumnChanges:
    """Of the columns that both have."""
    changed = [name for name in want if name in have and have[name] != want[name]]
    wider = [name for name in changed if is_wider(have[name], want[name])]
    refused = [f"{n} ({_said(have[n])}, not {_said(want[n])})" for n in changed if n not in wider]
    return ColumnChanges(tuple(wider), tuple(refused))


def is_wider(have: ColumnType, want: ColumnType) -> bool:
    """Whether every value of ``have`` is one of ``want``, too; also where they are the same type."""
    if isinstance(have, str) or isinstance(want, str):
        return have == want or (isinstance(have, str) and isinstance(want, str) and _is_wider(have, want))
    if have["type"] != want["type"]:
        return False
    if have["type"] == "array":
        return is_wider(have["elementType"], want["elementType"])
    if have["type"] == "map":
        return have["keyType"] == want["keyType"] and is_wider(have["valueType"], want["valueType"])
    old, new = have["fields"], want["fields"]
    if [field["name"] for field in old] != [field["name"] for field in new[: len(old)]]:
        return False
    return all(is_wider(old[i]["type"], new[i]["type"]) for i in range(len(old)))


def _is_wider(have: str, want: str) -> bool:
    if want in _WIDER.get(have, ()):
        return True
    decimal = _DECIMAL.fullmatch(want)
    if decimal is None:
        return False
    digits, scale = int(decimal[1]), int(decimal[2])
    if have in _WHOLE:
        return digits - scale >= _WHOLE[have]
    stored = _DECIMAL.fullmatch(have)
    return stored is not None and scale >= int(stored[2]) and digits - scale >= int(stored[1]) - int(stored[2])


def _said(kind: ColumnType) -> str:
    """As in a configuration."""
    if isinstance(kind, str):
        return {"integer": "int", "long": "bigint"}.get(kind, kind)
    if kind["type"] == "array":
        return f"array<{_said(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<string,{_said(kind['valueType'])}>"
    fields: list[dict[str, Any]] = kind["fields"]
    return "struct<" + ",".join(f"{field['name']}:{_said(field['type'])}" for field in fields) + ">"
