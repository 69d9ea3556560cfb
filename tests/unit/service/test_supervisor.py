"""All workers of a host: one that refuses its first start ends them all, one that refuses later harms no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_PATIENCE_S = 60
# Worker 0 does what the lines of the file `plan` say, one at each start; worker 1 serves.
_SERVICE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).parent
worker = sys.argv[sys.argv.index("--worker") + 1]
with open(folder / f"started-{worker}", "a") as file:
    file.write(f"{os.getpid()}\\n")
started = len((folder / f"started-{worker}").read_text().split())
plan = (folder / "plan").read_text().split() if worker == "0" else []
do = plan[started - 1] if started <= len(plan) else "serve"
if do == "refuse":
    sys.exit(2)
if do == "die":
    while not (folder / "started-1").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    signal.pause()
"""
_SUPERVISE = """
import sys
from pathlib import Path
from logferry.gateway.service import processes as supervisor
supervisor._RESTART_S = supervisor._REFUSED_S = 0.05
sys.exit(supervisor.supervise("plain_service", Path(sys.argv[1]), 2))
"""


def started(folder: Path, worker: int) -> list[str]:
    file = folder / f"started-{worker}"
    return file.read_text().split() if file.exists() else []


def supervising(folder: Path, plan: str) -> subprocess.Popen[bytes]:
    (folder / "plain_service.py").write_text(_SERVICE)
    (folder / "plan").write_text(plan)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", _SUPERVISE, str(folder / "x.toml")], env={**os.environ, "PYTHONPATH": path}
    )


@pytest.mark.parametrize("plan", ["refuse", "refuse serve"])
def test_a_first_start_that_is_refused_ends_all(tmp_path: Path, plan: str) -> None:
    with supervising(tmp_path, plan) as running:
        assert running.wait(_PATIENCE_S) == 2
        assert len(started(tmp_path, 0)) == 1


def test_a_later_start_that_is_refused_is_tried_again_while_the_others_serve(tmp_path: Path) -> None:
    """As when a topic turned weak, or the configuration was changed, while all workers served."""
    with supervising(tmp_path, "die refuse refuse serve") as running:
        deadline = time.monotonic() + _PATIENCE_S
        while len(started(tmp_path, 0)) < 4:
            assert running.poll() is None, "the others were ended for it"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(started(tmp_path, 1)) == 1
        running.send_signal(signal.SIGTERM)
        assert running.wait(_PATIENCE_S) == 0
