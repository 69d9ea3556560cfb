"""The cache of jars is whole or not there, with a stand-in for Java that does what Ivy would do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from logferry.loaders.config import TESTED_PYSPARK
from logferry.ops.cli.problems import CommandError, Unavailable
from logferry.ops.runtime import jars, java
from logferry.ops.runtime.jars import SETS, JarSet
from packaging.requirements import Requirement

PINNED = {
    f"{name}.jar": hashlib.sha256(name.partition("-")[0].encode() * 1000).hexdigest()
    for name in ("first-1.0", "second-2.1")
}
WANTED = JarSet("small", ("org.one:first:1.0", "org.two:second:2.1"), PINNED)

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
    place = pattern.replace("[artifact]-[revision](-[classifier])", f"{{name}}-{{revision}}").replace("[ext]", "jar")
    said = pathlib.Path("{home}/forged")
    pathlib.Path(place).write_bytes(said.read_bytes() if said.exists() else name.encode() * 1000)
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
    assert manifest_of(first) == [
        {
            "name": jar.name,
            "bytes": jar.stat().st_size,
            "mtime_ns": jar.stat().st_mtime_ns,
            "sha256": hashlib.sha256(jar.read_bytes()).hexdigest(),
        }
        for jar in (first, second)
    ]


def manifest_of(jar: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((jar.parent / "manifest.json").read_text())
    return found


@pytest.mark.parametrize("own", [False, True], ids=["the default", "a repository of one's own"])
def test_a_file_with_another_hash_is_never_taken(home: Path, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is not kept: the next attempt asks the repository again."""
    if own:
        monkeypatch.setenv("LOGFERRY_IVY_SETTINGS", str(home / "settings.xml"))
    (home / "forged").write_bytes(b"forged")
    with pytest.raises(Unavailable) as caught:
        jars.fetch_jars(WANTED)
    for part in (
        "first-1.0.jar",
        hashlib.sha256(b"forged").hexdigest(),
        PINNED["first-1.0.jar"],
        "LOGFERRY_IVY",
    ):
        assert part in str(caught.value)
    assert runs(home) == 1, "another attempt would bring the same"
    assert not jars.jar_folder(WANTED).exists()
    assert list(jars.jar_folder(WANTED).parent.rglob("*.jar")) == []
    (home / "forged").unlink()
    assert jars.fetch_jars(WANTED)[0].read_bytes() == b"first" * 1000


def test_a_jar_of_another_content_in_the_cache_is_fetched_again(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A jar with other content of the same size, as an attacker would put there."""
    first, _ = jars.fetch_jars(WANTED)
    forged = b"tsrif" * 1000
    first.write_bytes(forged)
    jars.fetch_jars(WANTED)
    said = capfd.readouterr().err
    for part in (str(first), hashlib.sha256(forged).hexdigest(), PINNED[first.name], "fetching small again"):
        assert part in said
    assert first.read_bytes() == b"first" * 1000


def test_a_manifest_does_not_vouch_for_another_hash(home: Path) -> None:
    """Each field fits the file, but not the pinned hash."""
    first, _ = jars.fetch_jars(WANTED)
    first.write_bytes(b"forged")
    facts = {"name": first.name, "bytes": 6, "mtime_ns": first.stat().st_mtime_ns}
    facts["sha256"] = hashlib.sha256(b"forged").hexdigest()
    (first.parent / "manifest.json").write_text(json.dumps([facts, manifest_of(first)[1]]))
    assert jars.fetch_jars(WANTED)[0].read_bytes() == b"first" * 1000


@pytest.mark.parametrize("since", ["copied", "manifest without times"])
def test_hashes_are_computed_once(home: Path, since: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a folder of an earlier version, or one that was copied from another host."""
    hashed: list[str] = []
    plain = jars._sha256

    def noted(jar: Path) -> str:
        hashed.append(jar.name)
        return plain(jar)

    monkeypatch.setattr(jars, "_sha256", noted)
    first, second = jars.fetch_jars(WANTED)
    assert hashed == [first.name, second.name]
    jars.fetch_jars(WANTED)
    assert len(hashed) == 2
    if since == "copied":
        os.utime(first, ns=(5, 5))
    else:
        old = [{name: one[name] for name in ("name", "bytes", "sha256")} for one in manifest_of(first)]
        (first.parent / "manifest.json").write_text(json.dumps(old))
    many = 1 if since == "copied" else 2
    for _ in range(2):
        assert jars.fetch_jars(WANTED) == [first, second]
        assert len(hashed) == 2 + many
    assert runs(home) == 1


@pytest.mark.parametrize("harm", ["cut", "missing", "manifest", "unlisted"])
def test_damage_is_logged_and_fetched_again(home: Path, capfd: pytest.CaptureFixture[str], harm: str) -> None:
    first, _ = jars.fetch_jars(WANTED)
    capfd.readouterr()
    if harm == "cut":
        first.write_bytes(b"half")
    elif harm == "missing":
        first.unlink()
    elif harm == "unlisted":
        (first.parent / "manifest.json").write_text(json.dumps(manifest_of(first)[:1]))
    else:
        (first.parent / "manifest.json").write_text('[{"na')
    jars.fetch_jars(WANTED)
    said = capfd.readouterr().err
    assert "fetching small again" in said
    assert str(first.parent if harm in ("manifest", "unlisted") else first) in said
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
    three = JarSet("three", (*WANTED.coordinates, "org.three:third:3.0"), {**PINNED, "third-3.0.jar": "0" * 64})
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


@pytest.mark.parametrize("pinned", SETS.values(), ids=SETS.keys())
def test_each_pinned_jar_has_its_own_file_name(pinned: JarSet) -> None:
    parts = [coordinate.split(":") for coordinate in pinned.coordinates]
    assert all(len(part) in (3, 4) and all(part) for part in parts)
    assert len({tuple(part[1:]) for part in parts}) == len(parts)
    assert pinned.sha256.keys() == {f"{'-'.join(part[1:])}.jar" for part in parts}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pinned.sha256.values())


def test_no_hash_is_left_of_a_jar_that_is_not_pinned() -> None:
    lines = (Path(jars.__file__).with_name("jar_pins.sha256")).read_text().splitlines()
    names = [line.split()[1] for line in lines]
    assert names == sorted(set(names))
    assert set(names) == {name for pinned in SETS.values() for name in pinned.sha256}


def test_the_kafka_is_the_newest_one_or_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "fetch_jars", lambda wanted: [Path(wanted.name)])
    monkeypatch.delenv("LOGFERRY_KAFKA_VERSION", raising=False)
    assert [str(jar) for jar in jars.kafka_jars()] == ["kafka-4.3.1"]
    monkeypatch.setenv("LOGFERRY_KAFKA_VERSION", "4.1")
    assert [str(jar) for jar in jars.kafka_jars()] == ["kafka-4.1.2"]
    assert [str(jar) for jar in jars.kafka_jars("4.2")] == ["kafka-4.2.2"]
    monkeypatch.setenv("LOGFERRY_KAFKA_VERSION", "4.0")
    with pytest.raises(CommandError, match=r"Kafka 4\.0: LOGFERRY_KAFKA_VERSION may be 4\.3, 4\.2, 4\.1"):
        jars.kafka_jars()


def test_the_jars_are_those_of_the_installed_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any patch of a minor version; the tested ones are those that pip may install."""
    monkeypatch.setattr(jars, "fetch_jars", lambda wanted: [Path(wanted.name)])
    for installed, names in {
        "4.1.3": ["spark-4.1.3", "s3a-3.4.2", "aws-sdk-2.29.52"],
        "4.0.1": ["spark-4.0.4", "s3a-3.4.1", "aws-sdk-2.29.52"],
    }.items():
        monkeypatch.setattr(jars, "version", {"pyspark": installed}.__getitem__)
        assert [str(jar) for jar in jars.spark_jars(s3=True)] == names
        assert [str(jar) for jar in jars.spark_jars()] == names[:1]
        assert [str(jar) for jar in jars.spark_jars(gs=True)] == [names[0], "gcs-4.0.4"]
        hadoop = names[1].rpartition("-")[2]
        assert [str(jar) for jar in jars.spark_jars(azure=True)] == [names[0], f"azure-{hadoop}"]


@pytest.mark.parametrize("installed", ["3.5.8", "4.2.0", "40.1.0"])
def test_another_pyspark_is_refused_by_name(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "version", {"pyspark": installed}.__getitem__)
    with pytest.raises(CommandError, match=f"pyspark {installed}: install one of pyspark==4.1.3, pyspark==4.0.4"):
        jars.spark_jars()


def test_pins_loader_and_package_agree_on_the_versions() -> None:
    root = Path(jars.__file__).parents[2]
    pins = tomllib.loads((root / "ops/runtime/jar_pins.toml").read_text())
    assert {one["pyspark"] for one in pins.values() if "pyspark" in one} == set(TESTED_PYSPARK.values())
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["loaders"]
    allowed = next(Requirement(one) for one in extra if one.startswith("pyspark")).specifier
    known = [f"4.{minor}.{patch}" for minor in (0, 1) for patch in range(6)]
    assert set(allowed.filter(known)) == set(TESTED_PYSPARK.values())
