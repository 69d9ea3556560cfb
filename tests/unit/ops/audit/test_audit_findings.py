"""Every kind of finding is in the table of kinds and in the documentation, and the audit needs no pyspark."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[4]
AUDIT = ROOT / "ops" / "audit"
PAGE = ROOT / "ops" / "docs" / "reference" / "findings.md"
DOCS = ROOT / "ops" / "docs"
_KIND = re.compile(r"[a-z]+(-[a-z]+)*")
# Calls whose argument at this index is a kind.
_CALLS = {"Finding": 0, "Damage": 0, "Break": 0, "add": 0, "_add": 0, "add_stray": 1}


def reported() -> Iterator[tuple[str, str]]:
    """(kind, module) of every literal that a module passes as a kind, directly or by a variable ``kind``."""
    for path in sorted(AUDIT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found: list[ast.expr] = []
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                found = node.args[_CALLS.get(name, 99) :][:1]
            elif isinstance(node, ast.Assign) and "kind" in ast.unparse(node.targets[0]):
                found = [node.value]
            for value in found:
                parts = value.elts[:1] if isinstance(value, ast.Tuple) else [value]
                parts = [p for v in parts for p in ([v.body, v.orelse] if isinstance(v, ast.IfExp) else [v])]
                for one in parts:
                    if isinstance(one, ast.Constant) and isinstance(one.value, str) and _KIND.fullmatch(one.value):
                        yield one.value, path.name


def notes() -> Iterator[str]:
    """Each kind that a call passes together with a literal False, which is ``refutes``."""
    for path in sorted(AUDIT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "refutes")]
                given = [value.value for value in values if isinstance(value, ast.Constant)]
                if any(value is False for value in given):
                    yield from (v for v in given if isinstance(v, str) and _KIND.fullmatch(v) and "-" in v)


def kinds_of(page: Path) -> dict[str, list[str]]:
    """The rows of the page's tables whose first cell is code: its text, and the other cells."""
    rows = [line.strip(" |").split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    return {cells[0].strip("`"): cells[1:] for cells in rows if cells[0].startswith("`")}


def test_the_page_of_findings_has_every_kind_with_its_meaning_and_what_to_do() -> None:
    listed = kinds_of(PAGE)
    assert {kind for kind, _ in reported()} == listed.keys()
    assert [
        kind for kind, cells in listed.items() if len(cells) != 3 or not all(cell.endswith(".") for cell in cells[1:])
    ] == []


def test_the_page_of_findings_says_which_kinds_refute() -> None:
    listed = {kind: cells[0] for kind, cells in kinds_of(PAGE).items()}
    assert {kind for kind, verdict in listed.items() if verdict == "note"} == set(notes())
    assert {kind for kind, verdict in listed.items() if verdict not in ("note", "refutes")} == {"found-earlier"}


def test_the_command_runs_where_pyspark_is_not_installed():
    program = (
        "import sys; sys.modules['pyspark'] = sys.modules['py4j'] = None\n"
        "from logferry.ops.audit.command import main\n"
        "sys.exit(main(['--bootstrap', '127.0.0.1:1', '--table', '/nowhere/t']))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, "no Delta table" in run.stderr) == (3, True), run.stderr
