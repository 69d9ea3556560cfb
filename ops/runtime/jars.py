"""Fetches the jars of Kafka, MirrorMaker and Spark once per user, by the Ivy that pyspark ships.

A set of jars is a folder in the cache whose name holds the hash of its list. What is guaranteed:

* The folder is whole or not there: it is put together beside its place and moved in by one rename, with a
  manifest (name, size, SHA-256) in it.
* Names and sizes are compared on each use. A folder that does not fit its manifest is said to be damaged and is
  fetched again; it is never used.
* One process fetches, others wait for it (a file lock, which the kernel drops when its holder dies).
* An interrupted fetch goes on where it stopped: Ivy's own cache stands beside the set until this is whole. Ivy
  checks what it fetches against the repository's checksums.
* When all is there, neither the network nor Java is touched.

Ivy asks the repository that is its own default; ``LOGFERRY_IVY_SETTINGS`` names a settings file of Ivy for those
who have a repository of their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import quoteattr

from logferry.ops import pins
from logferry.ops.cli.problems import Problem, Unavailable
from logferry.ops.runtime.java import find_java
from logferry.ops.runtime.user_dirs import cache_dir
from logferry.ops.truststore import write_truststore
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_MANIFEST = "manifest.json"

# Ivy's `ibiblio` with `m2compatible` means Maven Central; what is fetched is listed, so no POM needs to be read.
_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""


class Damaged(Problem):
    """A folder of the cache does not hold what its manifest says."""


def kafka_jars() -> list[Path]:
    """Kafka's broker and its command line tools. Raises Unavailable when they have to be fetched and can't be."""
    return fetched(pins.KAFKA)


def mirror_maker_jars() -> list[Path]:
    """Kafka and what MirrorMaker 2 needs beside it."""
    return kafka_jars() + fetched(pins.MIRROR_MAKER)


def spark_jars() -> list[Path]:
    """What goes beside pyspark's own jars: Kafka connector and Delta."""
    return fetched(pins.SPARK)


def fetched(wanted: pins.JarSet) -> list[Path]:
    """The jars of a set, from the cache or fetched now. Raises Unavailable if that cannot be done."""
    folder = folder_of(wanted)
    try:
        return _checked(folder)
    except FileNotFoundError:
        pass
    except Damaged as problem:
        _say(f"{problem}; fetching {wanted.name} again")
    with _locked(folder):
        try:
            return _checked(folder)  # another process fetched it while this one waited
        except (FileNotFoundError, Damaged):
            _fetch(wanted, folder)
    return _checked(folder)


def folder_of(wanted: pins.JarSet) -> Path:
    digest = hashlib.sha256("\n".join(wanted.coordinates).encode()).hexdigest()[:8]
    return cache_dir() / "jars" / f"{wanted.name}-{digest}"


def _checked(folder: Path) -> list[Path]:
    """The jars by their manifest. Raises FileNotFoundError without one, Damaged if the folder differs from it."""
    text = (folder / _MANIFEST).read_text(encoding="utf-8")
    try:
        sizes = {entry["name"]: entry["bytes"] for entry in json.loads(text)}
    except (ValueError, TypeError, KeyError):
        raise Damaged(f"{folder / _MANIFEST} cannot be read") from None
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{folder / name} is missing") from None
        if found != size:
            raise Damaged(f"{folder / name} has {found} bytes instead of {size}")
    return [folder / name for name in sizes]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that fetches {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(wanted: pins.JarSet, folder: Path) -> None:
    """Lets Ivy fetch into a folder beside, then moves it in. The lock is held."""
    work = folder.with_name(folder.name + ".fetching")
    new = work / "jars"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    _run_ivy(wanted, work, new)
    jars = sorted(new.glob("*.jar"))
    if len(jars) != len(wanted.coordinates):
        raise Unavailable(f"Ivy brought {len(jars)} of the {len(wanted.coordinates)} jars of {wanted.name}; see {work}")
    manifest = [
        {"name": jar.name, "bytes": jar.stat().st_size, "sha256": hashlib.sha256(jar.read_bytes()).hexdigest()}
        for jar in jars
    ]
    with (new / _MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    shutil.rmtree(work)


def _run_ivy(wanted: pins.JarSet, work: Path, new: Path) -> None:
    settings = os.environ.get("LOGFERRY_IVY_SETTINGS")
    if not settings:
        settings = str(work / "ivysettings.xml")
        Path(settings).write_text(_SETTINGS, encoding="utf-8")
    (work / "ivy.xml").write_text(_ivy_file(wanted), encoding="utf-8")
    java, trusted = find_java(), work / "authorities.jks"
    trust: tuple[str, ...] = ()
    if java.is_wheel and write_truststore(trusted):
        trust = (f"-Djavax.net.ssl.trustStore={trusted}", "-Djavax.net.ssl.trustStoreType=JKS")
    command = [
        *(str(java.executable), "-Djava.net.useSystemProxies=true", *trust, f"-Divy.default.ivy.user.dir={work}"),
        *("-jar", str(_ivy_jar()), "-settings", settings, "-cache", str(work / "cache"), "-ivy", str(work / "ivy.xml")),
        *("-types", "jar", "bundle", "-retrieve", str(new / "[artifact]-[revision].[ext]")),
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ivy:
        try:
            said = _shown(ivy, wanted, work / "cache")
        except BaseException:
            ivy.kill()
            raise
    if ivy.returncode != 0:
        wrong = [line for line in said if "WARN" in line or "ERROR" in line or "Exception" in line] or said
        raise Unavailable(
            f"The jars of {wanted.name} could not be fetched (they are fetched once, from Maven Central):\n  "
            + "\n  ".join(wrong[-12:])
            + "\n  What came so far is kept; run the same again. Behind a repository of your own: set"
            " LOGFERRY_IVY_SETTINGS to an Ivy settings file."
        )


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    found = sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar")) if spec and spec.origin else []
    if not found:
        raise Unavailable(
            "pyspark is not installed, and with it Ivy, which fetches the jars; pip install 'logferry[ops]'"
        )
    return found[-1]


def _ivy_file(wanted: pins.JarSet) -> str:
    lines = ['<ivy-module version="2.0">', f"<info organisation='logferry' module={quoteattr(wanted.name)}/>"]
    lines.append("<dependencies>")
    for coordinate in wanted.coordinates:
        organisation, name, revision = map(quoteattr, coordinate.split(":"))
        lines.append(
            f'<dependency org={organisation} name={name} rev={revision} transitive="false" conf="*->default"/>'
        )
    return "\n".join([*lines, "</dependencies>", "</ivy-module>"])


# ---- what is shown ---------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shown(ivy: subprocess.Popen[bytes], wanted: pins.JarSet, cache: Path) -> list[str]:
    """Shows the progress of ``ivy`` until it ends; what it said, as lines. One line a set without a terminal."""
    said: list[str] = []
    if ivy.stdout is None:
        raise ValueError("Ivy's output is not piped")
    reader = threading.Thread(target=lambda: said.extend(_lines(ivy)), daemon=True)
    reader.start()
    console = Console(stderr=True)
    if not console.is_terminal:
        _say(f"fetching {wanted.name}: {len(wanted.coordinates)} jars")
        reader.join()
    else:
        _show_bar(console, reader, wanted, cache)
    ivy.wait()
    return said


def _show_bar(console: Console, reader: threading.Thread, wanted: pins.JarSet, cache: Path) -> None:
    columns = (TextColumn("fetching {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("jars"))
    with Progress(*columns, TextColumn("{task.fields[mb]:.1f} MB"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(wanted.name, total=len(wanted.coordinates), mb=0.0)
        while reader.is_alive():
            reader.join(0.2)
            sizes = [path.stat().st_size for path in cache.glob("*/*/*s/*.jar")]
            bar.update(task, completed=len(sizes), mb=sum(sizes) / 1e6)


def _lines(ivy: subprocess.Popen[bytes]) -> list[str]:
    if ivy.stdout is None:
        return []
    return [line.decode(errors="replace").strip() for line in ivy.stdout]


def main() -> int:
    started = time.monotonic()
    before = [folder_of(wanted).exists() for wanted in (pins.KAFKA, pins.SPARK)]
    try:
        sets = [("Kafka", kafka_jars()), ("Spark and Delta", spark_jars())]
    except Problem as problem:
        _say(str(problem))
        return problem.exit_status
    if all(before):
        print(f"jars: all there ({cache_dir() / 'jars'})")
        return 0
    for name, jars in sets:
        print(f"{name}: {len(jars)} jars, {sum(jar.stat().st_size for jar in jars) / 1e6:.0f} MB")
    print(f"kept in {cache_dir() / 'jars'}; took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
