"""What it costs the push-client to look at a thousand files in which nothing happens; there is no inotify in it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from logferry.ops.bench.harness.figures import Figure
from logferry.ops.bench.harness.usage import Meter, rss_mb
from logferry.ops.bench.suites.throughput import make_topic
from logferry.ops.stack.stack import Stack

_FILES: Final = 1000
_FOLDERS: Final = 20
_ROUNDS: Final = 3
_SECONDS: Final = 15.0
_SETTLED_S: Final = 60.0  # a file that has been quiet so long is looked at once a second
_BOUND_S: Final = 120.0


def push_idle_cpu_percent() -> Figure:
    """Of one processor, with 1,000 files in 20 folders that were quiet for a minute, new files looked for."""
    with tempfile.TemporaryDirectory() as name, Stack(Path(name) / "stack", workers=1) as stack:
        folder, state = Path(name) / "logs", Path(name) / "state"
        for number in range(_FILES):
            path = folder / str(number % _FOLDERS) / f"{number}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{number}\n")
        make_topic(stack.urls()[0], "idle", 4)
        command = [sys.executable, "-m", "logferry.client", "--url", stack.urls()[0], "--topic", "idle"]
        command += ["--state-dir", str(state), str(folder / "**" / "*.log")]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as client:
            try:
                _until_sent(state / "status.json")
                time.sleep(_SETTLED_S)
                percents = []
                for _ in range(_ROUNDS):
                    with Meter([client.pid]) as meter:
                        time.sleep(_SECONDS)
                    percents.append(100 * meter.cpu_s / meter.wall_s)
                ours = {"cpu_percent": round(statistics.median(percents), 2), "rss_mb": rss_mb([client.pid])}
            finally:
                client.kill()
    return Figure("push_idle_cpu_percent", "% of a processor", ours, {}, _ROUNDS, value=ours["cpu_percent"])


def _until_sent(status: Path) -> None:
    """Raises RuntimeError when it takes too long."""
    deadline = time.monotonic() + _BOUND_S
    while time.monotonic() < deadline:
        if status.exists():
            rows = json.loads(status.read_text())["files"]
            if len(rows) == _FILES and not any(row["lag_bytes"] for row in rows):
                return
        time.sleep(0.5)
    raise RuntimeError(f"{_FILES} small files are not sent after {_BOUND_S} s")
