"""The words that are out (``ops/docs/development/style.md`` lists them) occur nowhere that a user or maintainer reads.

Checked are the documentation, the help of every command, and all strings, docstrings and comments of the code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from logferry.ops.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
STYLE = ROOT / "ops" / "docs" / "development" / "style.md"
FOLDERS = ("gateway", "mirror", "loaders", "client", "ops")
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "ops" / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in (*FOLDERS, "tests")),
]
_BLOCK = re.compile(r"^## Words that are out$.*?^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@cache
def words() -> dict[str, str]:
    """The words, and what to write instead: the fenced block of the style page, one ``word: replacement`` a line."""
    block = _BLOCK.search(STYLE.read_text(encoding="utf-8"))
    assert block is not None, "the style page has no block of words"
    return dict(line.split(": ", 1) for line in block[1].splitlines())


@cache
def pattern() -> re.Pattern[str]:
    alternatives = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in words())
    return re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE)


def found(text: str, where: str, line: int = 1) -> list[str]:
    """``path:line: word -> replacement`` of every word in the text, which begins at this line."""
    hits = []
    for match in pattern().finditer(text):
        word = " ".join(match[0].lower().split())
        hits.append(f"{where}:{line + text.count(chr(10), 0, match.start())}: {word} -> {words()[word]}")
    return hits


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings, docstrings and comments of a module, each with its line; comments on adjacent lines are one."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    comments = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    first, lines = 0, list[str]()
    for token in comments:
        if lines and token.start[0] == first + len(lines):
            lines.append(token.string.lstrip("#"))
            continue
        yield first, "\n".join(lines)
        first, lines = token.start[0], [token.string.lstrip("#")]
    yield first, "\n".join(lines)


def help_of(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The help of a command and of its sub-commands, from the parser that the command itself builds."""
    parsers: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        parsers.append(parser)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    with contextlib.suppress(SystemExit):
        importlib.import_module(COMMANDS[command].module).main(["--help"])
    assert parsers, f"logferry {command} built no parser"
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return "\n".join(parser.format_help() for parser in parsers)


def test_the_list_has_words():
    assert len(words()) >= 15
    assert found("The loader\ngoes\n  on Anew.", "x") == [
        f"x:2: goes on -> {words()['goes on']}",
        f"x:3: anew -> {words()['anew']}",
    ]
    assert found("begins-anew", "x") == [f"x:1: anew -> {words()['anew']}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documentation(page: Path):
    text = page.read_text(encoding="utf-8")
    if page == STYLE:
        text = text.replace(_BLOCK.search(text)[1], "")  # type: ignore[index]
    assert found(text, str(page.relative_to(ROOT))) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch):
    assert found(help_of(command, monkeypatch), f"logferry {command} --help") == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_code(folder: str):
    """Strings (errors, help, log messages), docstrings and comments."""
    hits = [
        hit
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in texts(path)
        for hit in found(text, str(path.relative_to(ROOT)), line)
    ]
    assert hits == [], "\n" + "\n".join(hits)
