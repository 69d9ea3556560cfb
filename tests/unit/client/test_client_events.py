"""Events: one line each, and no name that is not in the table, or in it for nothing."""

import ast
import re
import sys
from pathlib import Path

import logferry.client
import pytest
from logferry.client.events import EVENTS, tell

SOURCES = sorted(Path(next(iter(logferry.client.__path__))).glob("*.py"))


def told() -> set[str]:
    calls = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return {
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tell"
    }  # type: ignore[attr-defined]


def test_what_is_told_is_what_the_table_has():
    assert told() == EVENTS.keys()


def test_an_unknown_event_is_a_defect():
    with pytest.raises(KeyError):
        tell("no-such-event")


@pytest.mark.parametrize(
    ("value", "shown"),
    [("plain", "plain"), ("two words", '"two words"'), ('a"b', r'"a\"b"'), ("", '""'), (7, "7"), (None, "None"),
     ("a\nb", r'"a\nb"'), ("\udcff", r'"\udcff"'), ("ä b", '"ä b"'), ("a=b", '"a=b"')],
)  # fmt: skip
def test_an_event_is_one_line(value, shown, caplog):
    tell("refused", detail=value)
    (record,) = caplog.records
    assert record.getMessage() == f"refused detail={shown}"
    assert not re.search(r"[\n\r]", record.getMessage())


def test_the_client_imports_the_standard_library_and_the_contract():
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    ours = {name for name in imported if name.startswith("logferry")}
    assert {name for name in ours if not name.startswith("logferry.client")} == {"logferry.gateway.contract.chunk"}
    assert {name.partition(".")[0] for name in imported - ours} <= sys.stdlib_module_names
