"""The push-client runs on the oldest Python there is from 3.9 on, with nothing but the standard library."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from model.fake_gateway import FakeGateway, Served

ROOT = Path(__file__).parents[2]
OLDEST = (3, 9)
CARRIED = [*sorted((ROOT / "client").glob("*.py")), ROOT / "gateway" / "__init__.py", ROOT / "gateway" / "contract.py"]


def version(python: str) -> tuple[int, ...]:
    """Of a Python that runs; (0,) for one that does not."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return (0,)
    return tuple(map(int, done.stdout.split("."))) if re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout) else (0,)


@pytest.fixture(scope="module")
def oldest() -> str:
    """On PATH, beside it by pyenv or uv, or the one that runs the tests."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], sys.version_info.minor)]
    pythons = [found for name in names if (found := shutil.which(name))]
    for home in (".pyenv/versions", ".local/share/uv/python"):
        pythons += [str(path) for path in Path.home().glob(f"{home}/*/bin/python3")]
    usable = {python: version(python) for python in [*pythons, sys.executable]}
    return min((p for p, v in usable.items() if v >= OLDEST), key=lambda python: usable[python])


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A folder with the client and the contract, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("bare")
    for path in CARRIED:
        target = folder / "logferry" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


def run(oldest: str, bare: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without site-packages, with warnings as errors."""
    return subprocess.run(
        [oldest, "-S", "-s", "-W", "error", *arguments],
        env={"PATH": os.defpath, "PYTHONPATH": str(bare)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_every_module_compiles_and_imports(oldest, bare):
    modules = [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in CARRIED]
    imports = "\n".join(f"import logferry.{name}" for name in modules if not name.endswith(("__main__", "__init__")))
    done = run(oldest, bare, "-c", imports)
    assert done.returncode == 0, f"{oldest} {version(oldest)}: {done.stderr}"


def test_it_sends_files_byte_for_byte(oldest, bare, tmp_path):
    logs = {
        "a.log": b"one\ntwo\n",
        "crlf.log": b"one\r\ntwo\r\nno newline",
        "binary.log": bytes(range(256)) * 5000,
        "long.log": b"x" * 3_000_000 + b"\n",
    }
    for name, content in logs.items():
        (tmp_path / name).write_bytes(content)
    gateway = FakeGateway()
    gateway.faults.extend(["", "cut after", "503", "500 before"])
    with Served(gateway) as served:
        done = run(
            oldest, bare, "-m", "logferry.client", "--once", "--url", served.url, "--topic", "t", "--host", "h",
            "--state-dir", str(tmp_path / "state"), str(tmp_path / "**" / "*.log"),
        )  # fmt: skip
    assert done.returncode == 0, f"{oldest} {version(oldest)}: {done.stderr}"
    assert sorted(stored.content() for stored in gateway.sources.values()) == sorted(logs.values())
    print(f"ran under Python {'.'.join(map(str, version(oldest)))} ({oldest})")
