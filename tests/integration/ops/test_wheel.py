"""The wheel works outside of the source tree, with each extra alone.

It is built once. Each extra gets an environment of its own that holds the wheel and the distributions that the extra
requires, no others. In the fast set they are links to those of this environment; the long test installs all of them
from PyPI, under each interpreter that this machine has.
"""

from __future__ import annotations

import email
import http.client
import json
import os
import subprocess
import sys
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest
from logferry.client.testing import FakeGateway
from logferry.ops.cli.main import COMMANDS
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, Setting, configuration, free_ports
from packaging.requirements import Requirement

from tests.support.interpreters import SOURCES, built_wheel, interpreter_of, interpreters

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
EXTRAS = ("client", "gateway", "loaders", "query", "hbase", "ops")
MINORS = (11, 12, 13)
READY_S = 60.0
SHIPPED = {".py", ".toml", ".properties", ".conf", ".yaml", ".bash", ".sha256", ".java"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


class Environment:
    """A virtual environment of its own, empty at first."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        self.logferry = str(folder / "bin" / "logferry")
        run([python, "-m", "venv", "--without-pip", str(folder)], folder.parent)

    def install(self, *what: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--disable-pip-version-check"]
        run([*pip, "--quiet", *what], self.folder)

    def link(self, other: Environment, names: set[str]) -> None:
        """The wheel as it is installed in the other environment, and these distributions of the tests' own one."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        for path in other.folder.glob("lib/python*/site-packages/logferry*"):
            (site / path.name).symlink_to(path)
        for name in names:
            found = distribution(name)
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(found.locate_file(top))))
        script = Path(other.logferry).read_text(encoding="utf-8")
        Path(self.logferry).write_text(script.replace(other.python, self.python), encoding="utf-8")
        Path(self.logferry).chmod(0o755)

    def run(self, *arguments: str, expect: int = 0) -> str:
        """``logferry`` with these arguments, outside of the source tree; its standard output."""
        return run([self.logferry, *arguments], self.folder, expect)


def run(command: list[str], folder: Path, expect: int = 0) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == expect, f"{command}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def required(wheel: Path, extra: str) -> set[str]:
    """The distributions that the wheel needs with this extra, and all that those need."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        ours = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    seen: set[tuple[str, str]] = set()
    todo = [("logferry", extra)]
    while todo:
        name, chosen = todo.pop()
        for text in ours if name == "logferry" else distribution(name).requires or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": chosen}):
                news = {(wanted.name, one) for one in ("", *wanted.extras)} - seen
                seen |= news
                todo += news
    return {name for name, _ in seen} - {"logferry"}


@pytest.fixture(scope="module")
def environments(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Environment]:
    """By extra; "" is the base."""
    folder = tmp_path_factory.mktemp("environments")
    base = Environment(folder / "base")
    base.install("--no-deps", "--no-index", str(wheel))
    found = {"": base}
    for extra in EXTRAS:
        found[extra] = Environment(folder / extra)
        found[extra].link(base, required(wheel, extra))
    return found


def commands_without_help(environment: Environment, extra: str) -> list[str]:
    """The commands of the extra, and of the base, that do not begin their help with themselves."""
    names = [name for name, command in COMMANDS.items() if command.extra in (extra, "")]
    return [name for name in names if f"logferry {name}" not in environment.run(name, "--help")]


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    shipped = [path for name in SOURCES for path in (ROOT / name).rglob("*") if path.suffix in SHIPPED]
    shipped += [ROOT / name / "py.typed" for name in SOURCES]
    shipped += [path for path in (ROOT / "ops" / "deploy").rglob("*") if path.is_file()]
    shipped += (ROOT / "gateway" / "console" / "files").iterdir()
    assert found == {f"logferry/{path.relative_to(ROOT)}" for path in shipped}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_command_of_an_extra_has_its_help(environments: dict[str, Environment], extra: str) -> None:
    assert environments[extra].run("--version") == f"logferry {VERSION}\n"
    assert commands_without_help(environments[extra], extra) == []


def test_a_command_names_the_extra_that_it_needs(environments: dict[str, Environment]) -> None:
    done = subprocess.run([environments[""].logferry, "status"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'logferry[ops]'" in done.stderr


def push_a_file(environment: Environment, tmp_path: Path) -> None:
    """By the push-client, to a stand-in for the gateway."""
    (tmp_path / "app.log").write_text("one\ntwo\n")
    with FakeGateway({"t": 1}) as gateway:
        given = ("--url", gateway.url, "--topic", "t", "--state-dir", str(tmp_path / "state"))
        environment.run("push", *given, "--once", str(tmp_path / "app.log"))
    assert [chunk.data for chunk in gateway.chunks("t")] == [b"one\ntwo\n"]


@pytest.mark.parametrize("choose", [min, max])
def test_the_base_pushes_under_the_oldest_and_the_newest_python(
    choose: Callable[..., str], wheel: Path, tmp_path: Path
) -> None:
    pythons = interpreters()
    environment = Environment(tmp_path / "base", choose(pythons, key=lambda python: pythons[python]))
    environment.install("--no-deps", "--no-index", str(wheel))
    assert "usage: logferry" in environment.run("--help")
    push_a_file(environment, tmp_path)
    imports = "from logferry.client import LogferryHandler, Reader, Writer; import logferry.client.testing"
    run([environment.python, "-c", imports], tmp_path)


@contextmanager
def gateway_of(environment: Environment, kafka: KafkaCluster, folder: Path) -> Iterator[tuple[str, Path]]:
    """A gateway of one worker out of this environment: its URL and its configuration."""
    (port,) = free_ports(1)
    file = folder / "gateway.toml"
    settings: dict[str, Setting] = {"dc": "dc1", "listen": f"127.0.0.1:{port}", "lanes": 2, "prefix": f"wheel-{port}"}
    settings["accept_weak_kafka"] = ["replication", "min-isr"]
    file.write_text(configuration({**settings, "kafka": {"bootstrap_servers": kafka.bootstrap}}), encoding="utf-8")
    child = Child("gateway", [environment.logferry, "gateway", "--config", str(file)], folder / "gateway.log")
    child.start()
    try:
        deadline = time.monotonic() + READY_S
        while not answers(port):
            assert child.running
            assert time.monotonic() < deadline, child.log.read_text()[-4000:]
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", file
    finally:
        child.stop(READY_S)


def answers(port: int) -> bool:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        link.request("GET", "/readyz")
        return link.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()


@pytest.mark.spark
def test_lines_pass_through_the_environments_of_all_extras(
    environments: dict[str, Environment], kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    """File → push-client → gateway → asyncio reader → loader → query → audit, each out of an environment of its own."""
    (tmp_path / "app.log").write_text("one\ntwo\n")
    table, log, topic = str(tmp_path / "table"), str(tmp_path / "app.log"), f"dc1.{topic_name}"
    ops = environments["ops"]
    with gateway_of(environments["gateway"], kafka, tmp_path) as (url, config):
        with urllib.request.urlopen(f"{url}/console/") as page:
            assert page.status == 200
        ops.run("topics", "create", topic_name, "--partitions", "1", "--url", url)
        state = str(tmp_path / "state")
        environments[""].run("push", "--url", url, "--topic", topic_name, "--state-dir", state, "--once", log)
        program = (
            "import asyncio; from logferry.client import AsyncReader\n"
            "async def read():\n"
            f"    async with AsyncReader({url!r}, {topic!r}, start='earliest', follow=False) as reader:\n"
            "        async for chunk in reader: print(chunk.data)\n"
            "asyncio.run(read())"
        )
        client = environments["client"]
        assert run([client.python, "-c", program], client.folder).strip() == str(b"one\ntwo\n")
        given = ("--table", table, "--topics", topic, "--bootstrap", kafka.bootstrap)
        environments["loaders"].run("load", *given, "--once")
        sql = ("SELECT count(*) AS rows FROM logs", "--table", table, "--format", "json")
        assert json.loads(environments["query"].run("query", *sql, "--url", url)) == [{"rows": 2}]
        ops.run("status", "--url", url)
        ops.run("audit", "--config", str(config), "--topic", topic, "--table", table, "--file", log)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("minor", MINORS)
def test_every_extra_installs_from_pypi(minor: int, extra: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter_of(3, minor)
    if python is None:
        pytest.skip(f"no Python 3.{minor} on this machine")
    environment = Environment(tmp_path / "environment", python)
    environment.install(f"logferry[{extra}] @ {wheel.as_uri()}")
    assert commands_without_help(environment, extra) == []
    push_a_file(environment, tmp_path)
