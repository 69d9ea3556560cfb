"""The cache of jars is whole or not there, with a stand-in for Java that does what Ivy would do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime import jars, java
from logferry.ops.runtime.jars import KAFKA, MIRROR_MAKER, SPARK, JarSet

WANTED = JarSet("small", ("org.one:first:1.0", "org.two:second:2.1"))

# Says its version; as Ivy it notes the run, then writes the two jars to where `-retrieve` points.
STAND_IN = """#!{python}
import pathlib, sys, time
arguments = sys.argv[1:]
if "-version" in arguments:
    print("    java.home = {home}", "    java.specification.version = 17", sep="\\n", file=sys.stderr)
    sys.exit()
with open("{home}/runs", "a") as runs:
    runs.write("run\\n")
if pathlib.Path("{home}/offline").exists():
    print("WARN: UnresolvedDependency first")
    sys.exit(1)
if pathlib.Path("{home}/drops-one").exists():
    pathlib.Path("{home}/drops-one").unlink()
    sys.exit(1)
pattern = arguments[arguments.index("-retrieve") + 1]
for name, revision in (("first", "1.0"), ("second", "2.1")):
    place = pattern.replace("[artifact]", name).replace("[revision]", revision).replace("[ext]", "jar")
    pathlib.Path(place).write_bytes(name.encode() * 1000)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home of a Java that plays Ivy, and an empty cache."""
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    stand_in = home / "bin" / "java"
    stand_in.write_text(STAND_IN.format(python=sys.executable, home=home))
    stand_in.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    java.find_java.cache_clear()
    yield home
    java.find_java.cache_clear()


def runs(home: Path) -> int:
    return len((home / "runs").read_text().splitlines()) if (home / "runs").exists() else 0


def test_fetched_once_then_from_the_cache(home: Path) -> None:
    first = jars.fetch_jars(WANTED)
    assert [jar.name for jar in first] == ["first-1.0.jar", "second-2.1.jar"]
    (home / "bin" / "java").unlink()
    assert jars.fetch_jars(WANTED) == first
    assert runs(home) == 1


def test_the_manifest_holds_names_sizes_and_hashes(home: Path) -> None:
    first, second = jars.fetch_jars(WANTED)
    manifest = json.loads((first.parent / "manifest.json").read_text())
    assert manifest == [
        {"name": jar.name, "bytes": jar.stat().st_size, "sha256": hashlib.sha256(jar.read_bytes()).hexdigest()}
        for jar in (first, second)
    ]


@pytest.mark.parametrize("harm", ["cut", "missing", "manifest"])
def test_damage_is_logged_and_fetched_again(home: Path, capfd: pytest.CaptureFixture[str], harm: str) -> None:
    first, _ = jars.fetch_jars(WANTED)
    capfd.readouterr()
    if harm == "cut":
        first.write_bytes(b"half")
    elif harm == "missing":
        first.unlink()
    else:
        (first.parent / "manifest.json").write_text('[{"na')
    jars.fetch_jars(WANTED)
    said = capfd.readouterr().err
    assert "fetching small again" in said
    assert str(first.parent if harm == "manifest" else first) in said
    assert first.read_bytes() == b"first" * 1000
    assert runs(home) == 2


def test_damage_without_network_is_an_error_not_a_half_set(home: Path) -> None:
    first, _ = jars.fetch_jars(WANTED)
    first.write_bytes(b"half")
    (home / "offline").touch()
    with pytest.raises(Unavailable, match="UnresolvedDependency"):
        jars.fetch_jars(WANTED)
    (home / "offline").unlink()
    assert jars.fetch_jars(WANTED)[0].read_bytes() == b"first" * 1000


def test_a_repository_that_drops_a_request_is_asked_again(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "drops-one").touch()
    assert [jar.name for jar in jars.fetch_jars(WANTED)] == ["first-1.0.jar", "second-2.1.jar"]
    assert "trying again" in capfd.readouterr().err
    assert runs(home) == 2


def test_a_set_that_is_not_whole_is_not_taken(home: Path) -> None:
    three = JarSet("three", (*WANTED.coordinates, "org.three:third:3.0"))
    with pytest.raises(Unavailable, match="2 of the 3 jars"):
        jars.fetch_jars(three)
    assert not jars.jar_folder(three).exists()


def test_processes_at_once_fetch_it_once(home: Path) -> None:
    program = (
        "from logferry.ops.runtime import jars; from logferry.ops.runtime.jars import JarSet;"
        f" jars.fetch_jars({WANTED!r})"
    )
    started = [subprocess.Popen([sys.executable, "-c", program], env=dict(os.environ)) for _ in range(4)]
    assert [process.wait() for process in started] == [0, 0, 0, 0]
    assert runs(home) == 1


@pytest.mark.parametrize("pinned", [KAFKA, MIRROR_MAKER, SPARK], ids=lambda pinned: pinned.name)
def test_each_pinned_jar_has_its_own_file_name(pinned: JarSet) -> None:
    parts = [coordinate.split(":") for coordinate in pinned.coordinates]
    assert all(len(part) == 3 and all(part) for part in parts)
    assert len({f"{name}-{revision}" for _, name, revision in parts}) == len(parts)
