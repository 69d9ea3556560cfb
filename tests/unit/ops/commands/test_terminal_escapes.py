"""Text of others has no effect on a terminal: not from log lines, names of sources, or answers. Files get it as it is.

The status has a test of its own.
"""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from logferry.client import Chunk
from logferry.loaders.commands import inspection
from logferry.loaders.errors import LoadError
from logferry.ops.audit import command as audit_command
from logferry.ops.audit.compare.mirror_copy import MirrorReport, PartitionFinding
from logferry.ops.cli import main
from logferry.ops.cli.problems import CommandError
from logferry.ops.commands import query, read
from rich.console import Console

EVIL = "a\x1b]0;x\x07\x1b[2J\r\x7f\x9b31m\u202eä"
SEEN = "a\\x1b]0;x\\x07\\x1b[2J\\r\\x7f\\x9b31m\\u202eä"
SIGNS = ("\x1b", "\x07", "\r", "\x7f", "\x9b", "\u202e")


class Output(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(newline="")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Bytes(io.BytesIO):
    def isatty(self) -> bool:
        return True


def queried(kind: str, *, is_terminal: bool) -> str:
    output = Output(is_terminal=is_terminal)
    rows = pa.table({EVIL: [EVIL, "x\ny"], "n": [["\x9b"], None]})
    query.FORMATS[kind](rows.to_reader(), output)
    return output.getvalue()


def test_a_query_shows_control_characters_escaped_on_a_terminal() -> None:
    for kind in query.FORMATS:
        shown = queried(kind, is_terminal=True)
        assert not any(sign in shown for sign in SIGNS), kind
    lines = queried("table", is_terminal=True).splitlines()
    assert [line.split("  ")[0].rstrip() for line in lines] == [SEEN, "-" * len(SEEN), SEEN, "x\\ny", "(2 rows)"]
    assert queried("csv", is_terminal=True) == f'{SEEN},n\n{SEEN},"[""\\x9b""]"\nx\\ny,\n'


def test_what_a_query_writes_to_a_file_is_unchanged() -> None:
    assert queried("csv", is_terminal=False) == f'{EVIL},n\n{EVIL},"[""\x9b""]"\n"x\ny",\n'
    assert json.loads(queried("json", is_terminal=False)) == [{EVIL: EVIL, "n": ["\x9b"]}, {EVIL: "x\ny", "n": None}]
    assert EVIL in queried("table", is_terminal=False)


@pytest.mark.parametrize("kind", list(read.FORMATS))
def test_read_shows_control_characters_escaped_on_a_terminal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_reader", lambda *_: None)
    chunk = Chunk("dc1", "dc1.t", 0, 1, EVIL, 5, None, None, 7, {}, f"{EVIL}\tb\n".encode() + b"\xff\n")
    args: Any = SimpleNamespace(format=kind, consumer=None, until_end=True)
    shown, file = Bytes(), io.BytesIO()
    for output in (shown, file):
        read.ReadCommand(args, output, read.ReadProgress(None))._write(chunk)
    assert file.getvalue() == read.FORMATS[kind](chunk)
    text = shown.getvalue().decode()
    assert not any(sign in text for sign in SIGNS)
    if kind == "text":
        assert text == f"{SEEN}\tb\n\\xff\n"


def test_an_error_shows_control_characters_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise CommandError(f"{EVIL}\nand more")

    module: Any = ModuleType("fails")
    module.main = fails
    monkeypatch.setitem(sys.modules, "fails", module)
    monkeypatch.setitem(main.COMMANDS, "topics", main.Command("fails", "", ""))
    assert main.main(["topics"]) == 1
    assert capsys.readouterr().err == f"logferry: {SEEN}\nand more\n"


def test_an_audit_of_a_mirror_shows_control_characters_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def audited(*_: object) -> MirrorReport:
        found = PartitionFinding("dc1.t", 0)
        found.wrong = EVIL
        return MirrorReport("dc1", "dc2", [found])

    monkeypatch.setattr(audit_command, "_mirror_report", audited)
    assert audit_command.main(["--mirror", "dc1:dc2"]) == 1
    assert capsys.readouterr().out.startswith(f"dc1.t-0: {SEEN}\n")


def test_an_audit_as_json_has_them_escaped_as_json_does_also_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name of a file that is no UTF-8, too, which a pipe cannot take as it is."""

    async def audited(*_: object) -> MirrorReport:
        found = PartitionFinding("dc1.t", 0)
        found.wrong = EVIL + "\udcff"
        return MirrorReport("dc1", "dc2", [found])

    monkeypatch.setattr(audit_command, "_mirror_report", audited)
    assert audit_command.main(["--mirror", "dc1:dc2", "--json"]) == 1
    text = capsys.readouterr().out
    assert not any(sign in text for sign in SIGNS)
    (partition,) = json.loads(text)["partitions"]
    assert partition["wrong"] == EVIL + "\udcff"


def test_the_commands_of_tables_show_control_characters_escaped() -> None:
    pytest.importorskip("pyspark")
    from logferry.loaders.runs.table_runner import Reporter

    for style in (True, False):
        output = io.StringIO()
        console = Console(file=output, width=200, force_terminal=style, color_system=None)
        facts: dict[str, Any] = {"table": EVIL, "last": None, "planned": None, "positions": [], "quarantine": {EVIL: 1}}
        inspection.show(facts, console)
        Reporter(console, as_json=False).finish(LoadError(EVIL))
        text = output.getvalue()
        assert text.count(SEEN) == 3
        assert not any(sign in text for sign in SIGNS)
