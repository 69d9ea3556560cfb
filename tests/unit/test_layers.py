"""The import arrow points one way, and what decides does no I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Of ours, each package may import itself and: None, everything.
ALLOWED: dict[str, tuple[str, ...] | None] = {
    "client": ("logferry.gateway.contract.chunk",),
    "gateway": (),
    "mirror": ("logferry.gateway",),
    # The mirror's books are read by the code of the gateway's cursors.
    "loaders": (
        "logferry.gateway.contract.chunk",
        "logferry.gateway.errors",
        "logferry.gateway.kafka.client",
        "logferry.gateway.contract.offset_history",
        "logferry.gateway.topics.offset_translation",
        "logferry.client",
    ),
    "ops": None,
}
PURE = ("contract", "sources", "transaction", "wire", "fetch", "rows", "frames", "standing", "selection")
# What the client uses besides, where it is installed: its asyncio faces, and a faster format.
EXTRAS = {"aio": {"aiohttp", "yarl"}, "rows.py": {"msgpack"}}
IO = ("asyncio", "aiohttp", "socket", "subprocess", "threading", "time", "random", "os", "pathlib", "uvloop")


def imported(path: Path) -> Iterator[str]:
    """The full names of what a file imports, also inside of functions; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def files(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("package", ALLOWED)
def test_the_arrow(package: str) -> None:
    allowed = ALLOWED[package]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(package)
        for name in imported(path)
        if within(name, "logferry") and allowed is not None and not within(name, f"logferry.{package}", *allowed)
    ]
    assert found == []


def test_every_package_is_looked_at() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(ALLOWED)
    assert len(files("client")) > 10
    assert len(files("gateway")) > 20


@pytest.mark.parametrize("path", [*files("client"), ROOT / "gateway" / "contract.py"], ids=lambda path: path.stem)
def test_the_client_needs_the_standard_library_alone(path: Path) -> None:
    others = {
        name.partition(".")[0]
        for name in imported(path)
        if not within(name, "logferry.client", "logferry.gateway.contract.chunk", "__future__")
    }
    allowed = EXTRAS.get(path.parent.name, set()) | EXTRAS.get(path.name, set())
    assert others <= {*sys.stdlib_module_names, *allowed}


@pytest.mark.parametrize("module", ["writing.window", "writing.target", "reading.rotation", "reading.membership"])
def test_what_decides_in_the_library_does_no_io_and_has_no_clock(module: str) -> None:
    names = list(imported(ROOT / "client" / f"{module.replace('.', '/')}.py"))
    assert names
    assert [name for name in names if within(name, *IO) and name != "random"] == []


@pytest.mark.parametrize("name", ["Writer", "Reader", "LogferryHandler"])
def test_the_plain_faces_load_nothing_that_is_to_be_installed(name: str) -> None:
    loaded = "{'asyncio', 'aiohttp', 'msgpack'} & {*sys.modules}"
    program = f"import sys; from logferry.client import {name}; print(*({loaded}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("name", ["AsyncWriter", "AsyncReader"])
def test_an_asyncio_face_says_what_it_needs(name: str) -> None:
    program = f"import sys; sys.modules['aiohttp'] = None; from logferry.client import {name}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"{name} needs aiohttp: pip install 'logferry[client]'" in run.stderr


@pytest.mark.parametrize("module", PURE)
def test_what_decides_does_no_io_and_has_no_clock(module: str) -> None:
    names = list(imported(ROOT / "gateway" / f"{module}.py"))
    assert names
    assert [name for name in names if within(name, *IO)] == []
    assert [name for name in names if within(name, "aiokafka") and not within(name, "aiokafka.record")] == []
    ours = [name.split(".")[2] for name in names if within(name, "logferry.gateway")]
    assert set(ours) <= {*PURE, "errors"}


@pytest.mark.parametrize("module", ["plan", "sizes", "sources", "segments", "reset", "translate"])
def test_what_decides_in_the_loader_does_no_io_and_has_no_clock(module: str) -> None:
    names = list(imported(ROOT / "loaders" / f"{module}.py"))
    assert names
    assert [name for name in names if within(name, *IO, "pyspark", "deltalake", "pyarrow")] == []


@pytest.mark.parametrize("module", ["contract", "sources", "transaction", "errors"])
def test_what_decides_loads_no_client_of_anything(module: str) -> None:
    """Not by a detour, either."""
    program = (
        f"import sys, logferry.gateway.{module}; print(*({{'asyncio', 'aiohttp', 'aiokafka'}} & {{*sys.modules}}))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
