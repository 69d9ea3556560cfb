"""The push-client runs on the oldest Python there is from 3.9 on, with nothing but the standard library.

Nothing here is skipped: where there is no older Python than the one of the tests, that one has to do.
"""

import asyncio
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from logferry.client import __version__
from logferry.client.testing import FakeGateway
from logferry.ops.runtime.build_pyz import build

from tests.support.interpreters import interpreters, version_of

ROOT = Path(__file__).parents[3]
LIBRARY = [*sorted((ROOT / "client").glob("writing/*.py")), *sorted((ROOT / "client").glob("reading/*.py"))]
CARRIED = [
    *sorted((ROOT / "client").glob("*.py")),
    *sorted((ROOT / "client" / "agent").glob("*.py")),
    *sorted((ROOT / "client" / "files").glob("*.py")),
    *sorted((ROOT / "client" / "inputs").glob("*.py")),
    *sorted((ROOT / "client" / "transport").glob("*.py")),
    *LIBRARY,
    *sorted((ROOT / "client" / "testing").glob("*.py")),
    ROOT / "gateway" / "__init__.py",
    ROOT / "gateway" / "errors.py",
    *(ROOT / "gateway" / "contract" / f"{name}.py" for name in ("__init__", "names", "chunk", "syslog_frames")),
]


@pytest.fixture(scope="module")
def pythons() -> dict[str, tuple[int, ...]]:
    return interpreters()


@pytest.fixture(scope="module")
def oldest(pythons: dict[str, tuple[int, ...]]) -> str:
    return min(pythons, key=lambda python: pythons[python])


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    assert done.returncode == 0, f"{oldest} {version_of(oldest)}: {done.stderr}"


def test_it_sends_files_byte_for_byte(oldest, bare, tmp_path):
    logs = {
        "a.log": b"one\ntwo\n",
        "crlf.log": b"one\r\ntwo\r\nno newline",
        "binary.log": bytes(range(256)) * 5000,
        "long.log": b"x" * 3_000_000 + b"\n",
    }
    for name, content in logs.items():
        (tmp_path / name).write_bytes(content)
    with FakeGateway({"t": 1}) as gateway:
        gateway.drop_answer()
        gateway.refuse("overloaded")
        gateway.refuse("outcome-unknown")
        done = run(
            oldest, bare, "-m", "logferry.client", "--once", "--url", gateway.url, "--topic", "t", "--host", "h",
            "--state-dir", str(tmp_path / "state"), str(tmp_path / "**" / "*.log"),
        )  # fmt: skip
    assert done.returncode == 0, f"{oldest} {version_of(oldest)}: {done.stderr}"
    sent: dict[str, bytes] = {}
    for chunk in gateway.chunks("t"):
        sent[chunk.source_id] = sent.get(chunk.source_id, b"") + chunk.data
    assert sorted(sent.values()) == sorted(logs.values())
    print(f"ran under Python {'.'.join(map(str, version_of(oldest)))} ({oldest})")


LIBRARY_PROGRAM = """
import logging, sys
from logferry.client import LogferryHandler, Reader, Superseded, Writer
url, topic = sys.argv[1:]
with Writer(url, topic, "a", batch_bytes=200, gzip=True) as writer:
    for number in range(50):
        writer.write(b"%d\\n" % number)
logging.basicConfig(level="INFO", format="%(message)s", handlers=[LogferryHandler(url, topic, "log")])
logging.info("told")
logging.getLogger().handlers[0].close()
told = 0
while told < 51:  # Kafka shows what was written a moment later
    with Reader(url, topic, follow=False) as reader:
        told = len(list(reader.lines()))
for options in ({}, {"consumer": topic}):
    with Reader(url, topic, follow=False, **options) as reader:
        print(*sorted((line.source_id, line.seqno, line.data.decode()) for line in reader.lines()))
        if options:
            reader.commit()
"""


def test_the_library_writes_and_reads(oldest, bare, workers, topic_name):
    asyncio.run(workers.make_topic(topic_name, 2))
    done = run(oldest, bare, "-c", LIBRARY_PROGRAM, workers.urls[1], topic_name)
    assert (done.returncode, done.stderr) == (0, ""), f"{oldest} {version_of(oldest)}"
    expected = [("a", number + 1, str(number)) for number in range(50)] + [("log", 1, "told")]
    assert done.stdout == " ".join(map(str, expected)) + "\n" + " ".join(map(str, expected)) + "\n"


FAKE_PROGRAM = """
import gzip, sys, threading, urllib.request
from logferry.client import Reader, Writer
from logferry.client.testing import FakeGateway
with FakeGateway({"orders": 2}) as gateway:
    for fault in (gateway.drop_answer, gateway.drop_request):
        fault()
    with Writer(gateway.url, "orders", "a", gzip=True) as writer:
        writer.write(b"one\\n")
        writer.write(b"two\\n")
    for options in ({}, {"consumer": "c"}):
        with Reader(gateway.url, "orders", follow=False, **options) as reader:
            print(*(line.data.decode() for line in reader.lines()))
            if options:
                reader.commit()
    print(*(chunk.seqno for chunk in gateway.chunks("orders")), gateway.positions("c"))
"""


def test_the_fake_gateway_needs_nothing_else(oldest, bare):
    done = run(oldest, bare, "-c", FAKE_PROGRAM)
    assert (done.returncode, done.stderr) == (0, ""), f"{oldest} {version_of(oldest)}"
    first, second, rest = done.stdout.splitlines()
    assert (first, second, rest[:3]) == ("one two", "one two", "1 2")


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist") / "logferry-push.pyz"
    build(target)
    return target


def test_the_single_file_sends_what_its_toml_file_says_on_every_python_there_is(pythons, pyz, tmp_path):
    """TOML, too, where Python reads none; without site-packages, the environment, or anything beside it."""
    (tmp_path / "a.log").write_bytes(b"one\ntwo\n")
    newest_of_each = {found[:2]: python for python, found in sorted(pythons.items(), key=lambda item: item[1])}
    for minor, python in newest_of_each.items():
        with FakeGateway({"t": 1}) as gateway:
            (tmp_path / "push.toml").write_text(
                f'url = "{gateway.url}"\nstate_dir = "{tmp_path}/state-{minor[1]}"\n'
                f'[[files]]\npaths = "{tmp_path}/*.log"\ntopic = "t"\n'
            )
            done = subprocess.run(
                [python, "-I", "-S", "-W", "error", str(pyz), "--config", str(tmp_path / "push.toml"), "--once"],
                env={"PATH": os.defpath}, capture_output=True, text=True, timeout=120, cwd="/",
            )  # fmt: skip
        assert done.returncode == 0, f"{python} {minor}: {done.stderr}"
        assert [chunk.data for chunk in gateway.chunks("t")] == [b"one\ntwo\n"]
    assert newest_of_each


def test_the_single_file_is_executable_and_the_same_each_time(pyz, tmp_path):
    build(tmp_path / "again.pyz")
    assert (tmp_path / "again.pyz").read_bytes() == pyz.read_bytes()
    assert os.access(pyz, os.X_OK)
    with zipfile.ZipFile(pyz) as archive:
        names = archive.namelist()
    assert "tomli/LICENSE" in names
    assert "LICENSE" in names
    assert not [name for name in names if not name.endswith((".py", "LICENSE", ".dist-info/METADATA"))]


def test_the_single_file_knows_its_version(oldest, pyz):
    done = subprocess.run([oldest, "-I", pyz, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"logferry {__version__}\n", done.stderr


def test_it_loads_little(oldest, bare):
    """Its start takes a tenth of a second; the modules named here would each add to that, and to its memory."""
    code = "import sys, logferry.client.agent.main; print(*sorted(sys.modules))"
    loaded = set(run(oldest, bare, "-c", code).stdout.split())
    assert "logferry.client.agent.watch" in loaded
    slow = {"asyncio", "urllib.request", "multiprocessing", "typing_extensions", "subprocess", "unittest"}
    slow |= {"logging", "dataclasses", "inspect", "hashlib", "gzip", "http.server"}  # 3 MB of the 8 that it may take
    assert not loaded & slow
