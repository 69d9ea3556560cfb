"""Events: one line each, and no name that is not in the table, or in it for nothing."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import logferry.client
import pytest
from logferry.client.events import EVENTS, log_event

SOURCES = sorted(Path(next(iter(logferry.client.__path__))).rglob("*.py"))


def told() -> set[str]:
    names = set()
    for node in (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "log_event":
            event = node.args[0]
            assert isinstance(event, ast.Constant), ast.unparse(node)
            assert isinstance(event.value, str), ast.unparse(node)
            names.add(event.value)
    return names


def test_the_logged_events_are_those_of_the_table() -> None:
    assert told() == EVENTS.keys()


def test_an_unknown_event_is_a_defect() -> None:
    with pytest.raises(KeyError):
        log_event("no-such-event")


@pytest.mark.parametrize(
    ("value", "shown"),
    [("plain", "plain"), ("two words", '"two words"'), ('a"b', r'"a\"b"'), ("", '""'), (7, "7"), (None, "None"),
     ("a\nb", r'"a\nb"'), ("\udcff", r'"\udcff"'), ("ä b", '"ä b"'), ("a=b", '"a=b"')],
)  # fmt: skip
def test_an_event_is_one_line(value: int | str | None, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    log_event("refused", detail=value)
    (record,) = caplog.records
    assert record.getMessage() == f"refused detail={shown}"
    assert not re.search(r"[\n\r]", record.getMessage())


def test_the_client_imports_the_standard_library_and_the_contract() -> None:
    """Of the contract only what runs on Python 3.9; test_layers says which modules may need more."""
    imported: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    ours = {name for name in imported if name.startswith("logferry")}
    assert {name for name in ours if not name.startswith("logferry.client")} == {
        "logferry.gateway.contract.chunk",
        "logferry.gateway.contract.names",
        "logferry.gateway.contract.syslog_frames",
        "logferry.gateway.errors",
    }
    others = {name.partition(".")[0] for name in imported - ours}
    if sys.version_info >= (3, 10):  # it lists the modules of the standard library
        assert others - sys.stdlib_module_names == {"aiohttp", "google", "kazoo", "msgpack", "yarl"}
