"""`make datacenters` on a smaller scale, and the network that it makes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from logferry.ops.stack.processes import processes_with

from tests.datacenters.network import DELAY_MS

ROOT: Final = Path(__file__).parents[3]
# In a process of its own: it leaves the networks and the mounts of the tests.
_LINK: Final = """
import socket, sys, time
from pathlib import Path
from tests.datacenters.network import Network

def answered_ms(timeout_s):
    began = time.monotonic()
    try:
        socket.create_connection(("kafka2.dc2.example", 9), timeout_s)
    except ConnectionRefusedError:  # an answer of the host
        return (time.monotonic() - began) * 1000
    except TimeoutError:
        return None

with Network(Path(sys.argv[1])) as network:
    network.enter("load1.dc1.example")
    best = [answered_ms(20) for _ in range(3)]
    network.cut()
    none = answered_ms(2)
    network.mend()
    print("RESULT", min(best), none, answered_ms(20) is not None)
"""


def _run(*command: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the link's test prints; skipped where this process may not make networks."""
    done = _run("-c", _LINK, str(tmp_path_factory.mktemp("networks")))
    if "this needs network namespaces" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_link_delays_both_ways_and_is_cut_without_an_answer(networks: str) -> None:
    found = re.search(r"RESULT (\S+) (\S+) (\S+)", networks)
    assert found is not None
    best, none, is_back = found.groups()
    assert float(best) >= 2 * DELAY_MS
    assert (none, is_back) == ("None", "True")


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("networks")
def test_a_data_centre_is_cut_off_and_everything_is_exact() -> None:
    times = ["--well", "10", "--fault", "10", "--cut", "20", "--after", "15"]
    done = _run("-m", "tests.datacenters", *times, timeout_s=1400)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "EXACT: every line" in done.stdout
    for dc in ("dc1", "dc2"):
        assert f"audit of {dc} ended with status 0" in done.stdout
        # While the link is cut, both write on, and no reader of a copy gets anything.
        assert _cells(done.stdout, f"a writer in {dc}:")[0] != "0"
        assert _cells(done.stdout, f"a reader in {dc} of what {'dc2' if dc == 'dc1' else 'dc1'} writes")[0] != ""


def _cells(printed: str, title: str) -> list[str]:
    """Of the table with this title, in the phase of the cut."""
    row = next(line for line in printed.partition(title)[2].splitlines() if line.startswith("the link is cut"))
    return row.removeprefix("the link is cut").split()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("networks")
def test_nothing_is_left_after_ctrl_c() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.datacenters"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if "step 1" in line)
    deadline = time.monotonic() + 60
    while not (found := processes_with("logferry-datacenters-", "kafka")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found, line
    process.send_signal(signal.SIGINT)
    said = process.stdout.read()
    assert process.wait(100) == 130, said
    assert processes_with("logferry-datacenters-") == []
