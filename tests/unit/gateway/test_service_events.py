"""Events of gateway and mirror: no name that is not in the table, and none in it that nobody writes."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from logferry.gateway import log

ROOT = Path(__file__).parents[3]
SOURCES = [path for folder in ("gateway", "mirror", "ops/keeper") for path in sorted((ROOT / folder).rglob("*.py"))]


def written() -> set[str]:
    calls = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = (
        call.args[0]
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and (call.func.attr, getattr(call.func.value, "id", "")) == ("event", "log")
    )
    # One of two events has both names in its place.
    each = (name for one in names for name in ([one.body, one.orelse] if isinstance(one, ast.IfExp) else [one]))
    return {ast.literal_eval(name) for name in each}


def test_the_events_written_are_those_of_the_table() -> None:
    assert written() == log.EVENTS.keys()


def test_an_unknown_event_is_a_defect() -> None:
    with pytest.raises(KeyError):
        log.event("no_such_event")


def test_an_event_is_one_line_with_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    log.event("lane_failed", lane=3, error="a\nb")
    [line] = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {"level": "warning", "event": "lane_failed", "lane": 3, "error": "a\nb"}
