"""Names: a public class name means one thing, a file that a text names exists, a module is imported under its name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("gateway", "mirror", "loaders", "client", "ops")
# A configuration and its limits are named alike in each product.
SHARED = {"Config", "Limits"}
# Pages that name what was renamed, and modules that were removed.
HISTORY = {"CHANGELOG.md", "upgrade.md"}
PAGES = [
    *(page for page in sorted(ROOT.glob("*.md")) if page.name not in HISTORY),
    *(page for page in sorted((ROOT / "ops" / "docs").rglob("*.md")) if page.name not in HISTORY),
    *(ROOT / folder / "README.md" for folder in (*FOLDERS, "tests")),
]
_FILE = re.compile(r"[\w./{},*-]*[\w}*]\.py\b")
_FOLDER = re.compile(r"`((?:gateway|mirror|loaders|client|ops|tests)/(?:[\w-]+/)*)`")
_MODULE = re.compile(r"\blogferry((?:\.\w+)+)")
# Names of files in texts that are not files of this repository.
EXAMPLES = {
    "job.py",
    "hourly.py",
    "read_chunks.py",
    "copy_orders.py",
    "test_orders.py",
    "http_client.py",
    "logferry/__init__.py",
    "quarantine.py",
}


@cache
def modules() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def files() -> list[str]:
    return [f"/{path.relative_to(ROOT)}" for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py")]


def expanded(name: str) -> Iterator[str]:
    """``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if braces is None:
        yield name.lstrip("./")
        return
    for one in braces[1].split(","):
        yield from expanded(name[: braces.start()] + one + name[braces.end() :])


def missing_files(text: str) -> set[str]:
    names = {name for found in _FILE.findall(text) for name in expanded(found)}
    return {name for name in names - EXAMPLES if "*" not in name and not any(f.endswith(f"/{name}") for f in files())}


def missing_modules(text: str) -> set[str]:
    """Dotted names whose longest module does not exist, or does not contain the rest."""
    missing = set()
    for match in _MODULE.finditer(text):
        parts = match[1].split(".")[1:]
        if parts[0] not in FOLDERS or re.match(r"dc\d?$", (*parts, "")[1]):  # a folder, not a topic
            continue
        depth = len(parts)
        while depth and not (
            ROOT.joinpath(*parts[:depth]).is_dir() or ROOT.joinpath(*parts[:depth]).with_suffix(".py").is_file()
        ):
            depth -= 1
        path = ROOT.joinpath(*parts[:depth])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if parts[depth:] and not re.search(rf"\b{parts[depth]}\b", module.read_text(encoding="utf-8")):
            missing.add(match[0])
    return missing


def test_a_public_class_name_is_used_once():
    found = defaultdict(list)
    for path in modules():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SHARED} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_and_modules_that_a_page_names_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    folders = {name for name in _FOLDER.findall(text) if not (ROOT / name).is_dir()}
    assert (missing_files(text), missing_modules(text), folders) == (set(), set(), set())


def test_each_of_the_twelve_tasks_takes_at_most_two_files():
    page = ROOT / "ops" / "docs" / "development" / "architecture.md"
    section = page.read_text(encoding="utf-8").partition("## Where is …?")[2].partition("\n## ")[0]
    tasks = [_FILE.findall(row) for row in section.splitlines() if row.startswith("| ") and ".py" in row]
    assert len(tasks) == 12
    assert all(1 <= len(files) <= 2 for files in tasks)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_that_docstrings_and_comments_name_exist(folder: str):
    missing = []
    for path in modules():
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        text = path.read_text(encoding="utf-8")
        prose = [
            node.value
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        prose += re.findall(r"#.*", text)
        missing += [f"{path.relative_to(ROOT)}: {name}" for one in prose for name in sorted(missing_files(one))]
    assert missing == []


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_a_module_of_ours_is_imported_under_its_own_name(folder: str):
    """Or under a longer one that holds it, as `push_config`, where two modules of one name meet."""
    aliases = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                names = [(alias.name, alias.asname) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(f"{node.module}.{alias.name}", alias.asname) for alias in node.names]
            else:
                continue
            for name, alias in names:
                parts = name.split(".")
                ours = ROOT.joinpath(*parts[1:]) if parts[0] == "logferry" else ROOT.joinpath(*parts)
                is_module = parts[0] in ("logferry", "tests") and (ours.is_dir() or ours.with_suffix(".py").is_file())
                if is_module and alias is not None and parts[-2 if parts[-1] == "__main__" else -1] not in alias:
                    aliases.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name} as {alias}")
    assert aliases == []
