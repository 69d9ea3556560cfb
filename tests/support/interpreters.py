"""The Python interpreters of this machine, and the wheel for them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

OLDEST = (3, 9)
ROOT = Path(__file__).parents[2]
SOURCES = ("gateway", "mirror", "loaders", "client", "ops")


@cache
def interpreters() -> dict[str, tuple[int, ...]]:
    """Those on PATH, beside it by pyenv or uv, and the one that runs the tests: from 3.9 on, with their versions."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], sys.version_info.minor)]
    found = [python for name in names if (python := shutil.which(name))]
    for home in (".pyenv/versions", ".local/share/uv/python"):
        found += [str(path) for path in Path.home().glob(f"{home}/*/bin/python3")]
    versions = {python: version_of(python) for python in [*found, sys.executable]}
    return {python: version for python, version in versions.items() if version >= OLDEST}


def interpreter_of(major: int, minor: int) -> str | None:
    """One of that version, None where there is none."""
    return next((python for python, version in interpreters().items() if version[:2] == (major, minor)), None)


def version_of(python: str) -> tuple[int, ...]:
    """Of a Python that runs; (0,) for one that does not."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return (0,)
    return tuple(map(int, done.stdout.split("."))) if re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout) else (0,)


def built_wheel(folder: Path) -> Path:
    """Built from a copy of the sources, so that no earlier build is in it."""
    leave_out = shutil.ignore_patterns("__pycache__", "docs", "decisions")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=leave_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(folder / "source")], cwd=folder, check=True, timeout=600)
    (found,) = folder.glob("*.whl")
    return found
