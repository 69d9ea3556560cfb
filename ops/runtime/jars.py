"""Fetches the jars of Kafka, MirrorMaker and Spark once per user, with the Ivy that pyspark ships.

``jar_pins.toml`` names each of them, ``jar_pins.sha256`` holds their hashes (as `sha256sum` writes them). A set of jars
is a folder in the cache whose name contains the hash of its list. Guarantees:

* The folder is complete or absent: it is built under another name and renamed in one step, with a manifest (name,
  size, time of the last change, SHA-256) in it.
* Only files with the pinned hashes are used, whatever the repository. Each is hashed after it was fetched, and again
  when its size or time differs from the manifest. A folder that does not fit is reported as damaged, never used, and
  fetched again.
* One process fetches, others wait for it, by a file lock that the kernel drops when the holder dies.
* An interrupted fetch resumes: Ivy's own cache is kept until the set is complete. Ivy verifies each file against
  the repository's checksums.
* When all jars are present, neither the network nor Java is used.

``LOGFERRY_KAFKA_VERSION`` names another Kafka than the newest one, for tests.

Ivy uses its default repository; ``LOGFERRY_IVY_SETTINGS`` names an Ivy settings file for another one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import ssl
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from logferry.loaders.config import WHICH_PYSPARK
from logferry.ops.cli.problems import CommandError, Unavailable
from logferry.ops.runtime.java import cache_dir, find_java
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# The newest is the default.
KAFKA_VERSIONS = {"4.3": "kafka", "4.2": "kafka42", "4.1": "kafka41"}
HBASE_VERSIONS = {"2.6": "hbase", "2.5": "hbase25"}
STORES = ("s3", "gs", "azure")  # of tables, with jars of their own; HDFS needs none beside pyspark's

_MANIFEST = "manifest.json"
# A repository that drops one of fifty requests is asked again; what was fetched is kept between the attempts.
_ATTEMPTS = 3
_LOOK_S = 0.2
_MAGIC, _JKS_VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2
# A JKS file ends with a hash over password, this text and content; the password is no secret.
_SEAL = b"Mighty Aphrodite"
PASSWORD = "changeit"

# Ivy's `ibiblio` with `m2compatible` is Maven Central; the list is complete, so that no POM is read.
_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""
_MODULE = """<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
<info organisation="logferry" module="{}"/>
<dependencies>
{}</dependencies></ivy-module>
"""
_DEPENDENCY = '<dependency org="{}" name="{}" rev="{}" transitive="false" conf="*->default">{}</dependency>\n'


class JarSet(NamedTuple):
    """A list of jars, ``organisation:module:revision`` or with ``:classifier``, and the name of its folder.

    ``sha256``: by file name.
    """

    name: str
    coordinates: tuple[str, ...]
    sha256: Mapping[str, str]


def _pinned_sets() -> Iterator[tuple[str, JarSet]]:
    pins = tomllib.loads(Path(__file__).with_name("jar_pins.toml").read_text(encoding="utf-8"))
    hashes = Path(__file__).with_name("jar_pins.sha256").read_text(encoding="utf-8").splitlines()
    sha256 = {name: digest for digest, name in map(str.split, hashes)}
    for name, pinned in pins.items():
        lines = [line.split() for line in pinned["jars"].strip().splitlines()]
        coordinates = tuple(f"{organisation}:{jar}" for organisation, *jars in lines for jar in jars)
        files = ["-".join(coordinate.split(":")[1:]) + ".jar" for coordinate in coordinates]
        yield name, JarSet(pinned["name"], coordinates, {file: sha256[file] for file in files})


SETS = dict(_pinned_sets())
KAFKA, MIRROR_MAKER, HDFS, S3_PROXY = (SETS[name] for name in ("kafka", "mirror_maker", "hdfs", "s3_proxy"))


def kafka_jars(version: str | None = None) -> list[Path]:
    """Kafka's broker and command-line tools. ``version``: of `KAFKA_VERSIONS`; else ``LOGFERRY_KAFKA_VERSION``.

    Raises Unavailable when they cannot be fetched, CommandError for another version.
    """
    wanted = version or os.environ.get("LOGFERRY_KAFKA_VERSION") or next(iter(KAFKA_VERSIONS))
    if wanted not in KAFKA_VERSIONS:
        known = ", ".join(KAFKA_VERSIONS)
        raise CommandError(f"no jars are known for Kafka {wanted}: LOGFERRY_KAFKA_VERSION may be {known}")
    return fetch_jars(SETS[KAFKA_VERSIONS[wanted]])


def mirror_maker_jars() -> list[Path]:
    """Kafka and the further jars of MirrorMaker 2. Raises Unavailable."""
    return kafka_jars() + fetch_jars(MIRROR_MAKER)


def spark_jars(*, s3: bool = False, gs: bool = False, azure: bool = False) -> list[Path]:
    """The jars beside those of the installed pyspark: Kafka connector and Delta; those of the stores of tables.

    Raises Unavailable, CommandError where there are none for this pyspark.
    """
    name = spark_set(_pyspark_version())
    of_stores = {"s3_" + name: s3, "s3_sdk": s3, "gs": gs, "azure_" + name: azure}
    wanted = [SETS[name], *(SETS[one] for one, is_wanted in of_stores.items() if is_wanted)]
    return [jar for one in wanted for jar in fetch_jars(one)]


def spark_set(pyspark: str) -> str:
    """The name of the jars for a pyspark, by its minor version. Raises CommandError for another one."""
    major, _, rest = pyspark.partition(".")
    name = f"spark{major}{rest.partition('.')[0]}"
    if name not in SETS:
        raise CommandError(f"no jars are known for pyspark {pyspark}: {WHICH_PYSPARK}")
    return name


def _pyspark_version() -> str:
    try:
        return version("pyspark")
    except PackageNotFoundError:
        raise Unavailable("pyspark is missing: pip install 'logferry[loaders]'") from None


def hdfs_jars() -> list[Path]:
    """The servers of HDFS, and what they need of pyspark's jars. Raises Unavailable."""
    return [*fetch_jars(HDFS), *fetch_jars(SETS["hdfs_web"]), *sorted(_pyspark_jars())]


def yarn_jars() -> list[Path]:
    """The servers of YARN. Raises Unavailable."""
    return [*hdfs_jars(), *fetch_jars(SETS["yarn"])]


def hbase_jars(version: str = "2.6", *, hdfs: bool = False) -> list[Path]:
    """ZooKeeper and HBase, servers and client, for tests and the demo. ``version``: of `HBASE_VERSIONS`. ``hdfs``: its
    files are there. Raises Unavailable.
    """
    jars = [*fetch_jars(SETS["hbase"]), *(fetch_jars(SETS["hbase_hdfs"]) if hdfs else [])]
    name = HBASE_VERSIONS[version]
    if name == "hbase":
        return jars
    of_hbase = {
        f"{artifact}-{revision}.jar"
        for organisation, artifact, revision in (one.split(":") for one in SETS["hbase"].coordinates)
        if organisation == "org.apache.hbase"
    }
    return [*fetch_jars(SETS[name]), *(jar for jar in jars if jar.name not in of_hbase)]


def s3_proxy_jars() -> list[Path]:
    """A second S3 server, for tests. Raises Unavailable."""
    return fetch_jars(S3_PROXY)


def spark_environment(*, s3: bool = False) -> dict[str, str]:
    """The variables with which a loader finds its Java and jars. Raises Unavailable."""
    return {"JAVA_HOME": str(find_java().home), "LOGFERRY_SPARK_JARS": os.pathsep.join(map(str, spark_jars(s3=s3)))}


def fetch_jars(wanted: JarSet) -> list[Path]:
    """The jars of a set, from the cache or fetched now. Raises Unavailable when they cannot be fetched, or what was
    fetched has other hashes.
    """
    folder = jar_folder(wanted)
    jars, damage = _stored(wanted, folder)
    if damage:
        _say(f"{damage}; fetching {wanted.name} again")
    if not jars:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"waiting for another process that fetches {folder.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _stored(wanted, folder)[0]:  # no other process fetched it meanwhile
                _fetch(wanted, folder)
        jars, damage = _stored(wanted, folder)
        if damage:
            raise Unavailable(damage)
    return jars


def jar_folder(wanted: JarSet) -> Path:
    digest = hashlib.sha256("\n".join(wanted.coordinates).encode()).hexdigest()[:8]
    return cache_dir() / "jars" / f"{wanted.name}-{digest}"


def _stored(wanted: JarSet, folder: Path) -> tuple[list[Path], str]:
    """The jars by their manifest; none if it is missing, or if the folder differs from it, with the difference."""
    try:
        noted = {one["name"]: one for one in json.loads((folder / _MANIFEST).read_text("utf-8"))}
    except FileNotFoundError:
        return [], ""
    except (ValueError, TypeError, KeyError):
        return [], f"{folder / _MANIFEST} cannot be read"
    if noted.keys() != wanted.sha256.keys():
        return [], f"{folder / _MANIFEST} lists other jars"
    jars = [folder / name for name in noted]
    if missing := [str(jar) for jar in jars if not jar.exists()]:
        return [], f"{missing[0]} is missing"
    unknown = [jar for jar in jars if noted[jar.name] != _facts(wanted, jar)]
    for jar in unknown:
        if (digest := _sha256(jar)) != wanted.sha256[jar.name]:
            return [], f"{jar} has the SHA-256 {digest} instead of {wanted.sha256[jar.name]}"
    if unknown:
        # The next use hashes again where this cannot be written.
        with suppress(OSError):
            _write_manifest(wanted, folder, jars)
    return jars, ""


def _sha256(jar: Path) -> str:
    with jar.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts(wanted: JarSet, jar: Path) -> dict[str, object]:
    """What the manifest says of a jar that has the pinned hash."""
    at = jar.stat()
    return {"name": jar.name, "bytes": at.st_size, "mtime_ns": at.st_mtime_ns, "sha256": wanted.sha256[jar.name]}


def _write_manifest(wanted: JarSet, folder: Path, jars: Sequence[Path]) -> None:
    """For jars that have the pinned hashes. Raises OSError."""
    new = folder / f"{_MANIFEST}.{os.getpid()}"
    with new.open("w", encoding="utf-8") as file:
        json.dump([_facts(wanted, jar) for jar in jars], file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _MANIFEST)


def _fetch(wanted: JarSet, folder: Path) -> None:
    """Lets Ivy fetch into another folder, then renames it. The caller holds the lock."""
    work = folder.with_name(folder.name + ".fetching")
    new = work / "jars"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for left in reversed(range(_ATTEMPTS)):
        try:
            _run_ivy(wanted, work, new)
            break
        except Unavailable as problem:
            if not left:
                raise
            _say(f"{str(problem).splitlines()[0]}; trying again")
    jars = sorted(new.glob("*.jar"))
    if len(jars) != len(wanted.coordinates):
        raise Unavailable(f"Ivy fetched {len(jars)} of the {len(wanted.coordinates)} jars of {wanted.name}; see {work}")
    for jar in jars:
        if (digest := _sha256(jar)) != wanted.sha256.get(jar.name):
            # Ivy would bring what it has kept.
            shutil.rmtree(work)
            raise Unavailable(
                f"{jar.name} has the SHA-256 {digest}, but {wanted.name} needs {wanted.sha256.get(jar.name)}. It was "
                "removed: ask who changed it in the repository. LOGFERRY_IVY_SETTINGS names another repository, and "
                "LOGFERRY_SPARK_JARS other jars for Spark, which are not checked."
            )
    _write_manifest(wanted, new, jars)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    shutil.rmtree(work)


def _run_ivy(wanted: JarSet, work: Path, new: Path) -> None:
    settings = os.environ.get("LOGFERRY_IVY_SETTINGS")
    if not settings:
        settings = str(work / "ivysettings.xml")
        Path(settings).write_text(_SETTINGS, encoding="utf-8")
    dependencies = "".join(map(_dependency, wanted.coordinates))
    (work / "ivy.xml").write_text(_MODULE.format(wanted.name, dependencies), encoding="utf-8")
    java, trusted = find_java(), work / "authorities.jks"
    trust: list[str] = []
    if java.is_wheel and (certificates := ssl.create_default_context().get_ca_certs(binary_form=True)):
        # Its Java does not know an authority added to this machine, such as that of a company's TLS proxy.
        trusted.write_bytes(_jks(certificates))
        trust = [f"-Djavax.net.ssl.trustStore={trusted}", "-Djavax.net.ssl.trustStoreType=JKS"]
    command = [
        *(str(java.executable), "-Djava.net.useSystemProxies=true", *trust, f"-Divy.default.ivy.user.dir={work}"),
        *("-jar", str(_ivy_jar()), "-settings", settings, "-cache", str(work / "cache"), "-ivy", str(work / "ivy.xml")),
        *("-types", "jar", "bundle", "-retrieve", str(new / "[artifact]-[revision](-[classifier]).[ext]")),
    ]
    with (work / "ivy.log").open("w+b") as log:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as ivy:
            try:
                _show_progress(ivy, wanted, work / "cache")
            except BaseException:
                ivy.kill()
                raise
        log.seek(0)
        output = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    if ivy.returncode != 0:
        wrong = [line for line in output if "WARN" in line or "ERROR" in line or "Exception" in line] or output
        raise Unavailable(
            f"cannot fetch the jars of {wanted.name} from Maven Central (needed once):\n  "
            + "\n  ".join(wrong[-12:])
            + "\n  The files fetched so far are kept: repeat the command to resume. For another repository set"
            " LOGFERRY_IVY_SETTINGS to an Ivy settings file."
        )


def _dependency(coordinate: str) -> str:
    organisation, module, revision, *classifier = coordinate.split(":")
    artifact = f'<artifact name="{module}" type="jar" m:classifier="{classifier[0]}"/>' if classifier else ""
    return _DEPENDENCY.format(organisation, module, revision, artifact)


def _ivy_jar() -> Path:
    found = [jar for jar in sorted(_pyspark_jars()) if jar.name.startswith("ivy-")]
    if not found:
        raise Unavailable("fetching the jars needs Ivy, which is part of pyspark: pip install 'logferry[loaders]'")
    return found[-1]


def _pyspark_jars() -> Iterator[Path]:
    spec = importlib.util.find_spec("pyspark")
    return (Path(spec.origin).parent / "jars").glob("*.jar") if spec and spec.origin else iter(())


def _jks(certificates: Sequence[bytes]) -> bytes:
    """A list of authorities in Java's format JKS: header, one entry per certificate, hash."""
    content = struct.pack(">III", _MAGIC, _JKS_VERSION, len(certificates))
    for number, certificate in enumerate(certificates):
        alias = _java_text(f"authority-{number}")
        head = struct.pack(">I", _TRUSTED_CERTIFICATE) + alias + struct.pack(">Q", 0) + _java_text("X.509")
        content += head + struct.pack(">I", len(certificate)) + certificate
    return content + hashlib.sha1(PASSWORD.encode("utf-16-be") + _SEAL + content).digest()


def _java_text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode("ascii")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show_progress(ivy: subprocess.Popen[bytes], wanted: JarSet, cache: Path) -> None:
    """Shows the progress of ``ivy`` until it ends (without a terminal: one line per set)."""
    console = Console(stderr=True)
    if not console.is_terminal:
        _say(f"fetching {wanted.name}: {len(wanted.coordinates)} jars")
    columns = (TextColumn("fetching {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("jars"))
    more = (TextColumn("{task.fields[mb]:.1f} MB"), TimeElapsedColumn())
    with Progress(*columns, *more, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(wanted.name, total=len(wanted.coordinates), mb=0.0)
        while ivy.poll() is None:
            time.sleep(_LOOK_S)
            sizes = [path.stat().st_size for path in cache.glob("*/*/*s/*.jar")]
            bar.update(task, completed=len(sizes), mb=sum(sizes) / 1e6)


def main(argv: list[str]) -> int:
    """Fetches all that `logferry up` and `logferry load` need, for tables on disks and on the named stores."""
    parser = argparse.ArgumentParser(prog="python -m logferry.ops.runtime.jars", description="Fetches the jars.")
    parser.add_argument("--stores", default="", metavar="NAMES", help="of tables beside disks, as in s3,gs")
    stores = set(filter(None, parser.parse_args(argv).stores.split(",")))
    if unknown := stores - set(STORES):
        parser.error(f"--stores: {', '.join(sorted(unknown))} is none of {', '.join(STORES)}")
    try:
        kafka_jars()
        spark_jars(**{name: name in stores for name in STORES})
    except CommandError as problem:
        _say(str(problem))
        return problem.exit_status
    print(f"jars: complete in {cache_dir() / 'jars'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
