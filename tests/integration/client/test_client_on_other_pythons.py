"""The unit tests of the push-client and the library under each other Python of this machine, from 3.9 on.

Left out are those of `logferry hbase`, whose extra needs a newer Python, and by themselves those that ask the gateway
or the loader for the truth.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interpreters import ROOT, interpreters

# What the tests need; the base install of the client needs nothing.
PACKAGES = ("aiohttp", "cramjam", "hypothesis", "msgpack", "prometheus-client", "pytest", "pytest-asyncio",
            "pytest-timeout", "pytest-xdist", "trustme", "zstandard")  # fmt: skip
# Where the gateway runs, too, tests ask it for the truth.
OF_GATEWAY = ("aiokafka", "crc32c", "google-re2", "pydantic", "uvloop")
OTHERS = {version[:2]: python for python, version in interpreters().items() if version[:2] != sys.version_info[:2]}
LEAST_PASSED = 1_500


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("minor", range(9, 15))
def test_the_unit_tests_of_the_client_pass(minor: int, tmp_path: Path) -> None:
    if not (python := OTHERS.get((3, minor))):
        pytest.skip(f"this machine has no Python 3.{minor} beside the one of the tests")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    own = str(tmp_path / "venv/bin/python")
    subprocess.run(
        [own, "-m", "pip", "install", "--quiet", *PACKAGES, *(OF_GATEWAY if minor >= 11 else ())],
        check=True,
        timeout=900,
    )
    (tmp_path / "path").mkdir()
    (tmp_path / "path/logferry").symlink_to(ROOT)
    needs_loader = "tests/unit/client/transport/test_unencrypted_token.py"
    ignored = [f"--ignore={path}" for path in ("tests/unit/client/hbase", needs_loader)]
    tests = ["tests/unit/client", *ignored, "--confcutdir=tests/unit"]
    done = subprocess.run(
        [own, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not long", *tests],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path / "path")}, capture_output=True, text=True,
        timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= LEAST_PASSED
