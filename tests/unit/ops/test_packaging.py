"""pyproject.toml names every package and every data file of the tree, so that the wheel is complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[3]
FOLDERS = ("gateway", "mirror", "loaders", "client", "ops")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
NOT_SHIPPED = ("ops/docs", "ops/decisions", "ops/mkdocs.yml", *(f"{folder}/README.md" for folder in FOLDERS))


# For other programs; data, whatever they end in.
SAMPLES = ROOT / "ops" / "deploy"


def test_every_package_is_listed_once_and_exists() -> None:
    found = {
        "logferry." + ".".join(file.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if file.parent != SAMPLES
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_data_file_is_listed() -> None:
    listed = {
        file.relative_to(ROOT)
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
        if file.is_file()
    }
    files = (path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    found = {
        file
        for file in files
        if (file.suffix not in (".py", ".pyc") or ROOT / file.parent == SAMPLES)
        and not any(file.is_relative_to(other) for other in NOT_SHIPPED)
    }
    assert listed == found


def test_every_top_package_is_typed() -> None:
    assert all((ROOT / folder / "py.typed").exists() for folder in FOLDERS)


def test_the_version_is_not_that_of_a_release_and_is_named_alike() -> None:
    """The tree is ahead of the last release while the changelog has changes after it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\] - ", changes, re.M)
    if "### " in changes.partition("## [Unreleased]")[2].partition("\n## ")[0]:
        assert Version(version) > Version(released[0])
    else:
        assert version == released[0]
    named = r"logferry-([\w.]+)-py3-none-any|logferry(?:-push)?:(\d[\w.]*\d)|newTag: (\d[\w.]*\d)"
    pages = ("reference/requirements.md", "operations/production.md", "operations/containers.md")
    files = [*(ROOT / "ops/docs" / page for page in pages), SAMPLES / "Containerfile"]
    files += [SAMPLES / "compose/compose.yaml", SAMPLES / "kubernetes/kustomization.yaml"]
    for file in files:
        found = {"".join(groups) for groups in re.findall(named, file.read_text(encoding="utf-8"))}
        assert found == {version}, f"{file.relative_to(ROOT)} names another version than pyproject.toml"
