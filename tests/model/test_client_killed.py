"""The real client as a process, killed by SIGKILL at random moments while files are written and rotated.

What must hold: every file's bytes are in exactly one source, from the first to the last, whatever was killed and
whatever the gateway answered meanwhile. A failing run prints its seed; LOGFERRY_SEED runs it again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_gateway import FAULTS, FakeGateway, Served

KILLS = 12
NAMES = ("a.log", "b.log", "deep/er/c.log")


class Writer(threading.Thread):
    """Writes lines, also half ones, and rotates by renaming; ends by itself after `finish`."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self.folder = folder
        self.random = random.Random(seed)
        self.ended = threading.Event()
        for name in NAMES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        number = 0
        while not self.ended.wait(self.random.uniform(0.0, 0.01)):
            number += 1
            path = self.folder / self.random.choice(NAMES)
            if path.exists() and self.random.random() < 0.02:
                path.rename(path.with_name(f"{path.name}.{number}"))
            with path.open("ab") as file:
                for _ in range(self.random.randrange(1, 80)):
                    file.write(b"%s %d %s\n" % (path.name.encode(), number, self.random.randbytes(20).hex().encode()))
                file.write(self.random.choice((b"", b"", b"half a line ")))

    def finish(self) -> dict[str, bytes]:
        """What the files hold in the end."""
        self.ended.set()
        self.join()
        return {str(path): path.read_bytes() for path in self.folder.rglob("*.log*")}


def client(root: Path, url: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "logferry.client", "--url", url, "--topic", "t", "--host", "h"]
    options = ["--state-dir", str(root / "state"), "--linger-ms", "10", "--chunk-bytes", "4096", "--timeout", "30"]
    with (root / "client.err").open("ab") as stderr:
        return subprocess.Popen([*command, *options, *more, str(root / "logs" / "**" / "*.log*")], stderr=stderr)


def resumed(root: Path) -> int:
    return (root / "client.err").read_text().count(" source-resumed ")


def until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30.0
    while not is_so():
        assert process.poll() is None, f"the client ended by itself: {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("faults", [(), FAULTS], ids=["calm gateway", "faulty gateway"])
def test_killed_again_and_again(tmp_path, faults):
    seed = int(os.environ.get("LOGFERRY_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"LOGFERRY_SEED={seed}")
    chance = random.Random(seed)
    gateway = FakeGateway()
    writer = Writer(tmp_path / "logs", seed)
    with Served(gateway) as first, Served(gateway) as second:
        gateway.other_url = second.url
        writer.start()
        for kill in range(KILLS):
            before = resumed(tmp_path) if kill else 0
            process = client(tmp_path, first.url)
            if not kill:  # the checkpoint has a file before its first chunk is sent
                until(lambda: any(source.chunks for source in gateway.sources.values()), process)
            elif kill % 2:  # the others are killed while they start, too
                until(lambda: resumed(tmp_path) > before, process)  # noqa: B023  # it is over before the next turn
            moment = chance.uniform(0.1, 0.8)
            try:
                process.wait(moment)
                pytest.fail(f"the client ended by itself: {process.returncode}")
            except subprocess.TimeoutExpired:
                process.kill()
            process.wait()
            assert process.returncode == -signal.SIGKILL
            gateway.faults.extend(chance.choices(faults, k=3) if faults else ())
        files = writer.finish()
        gateway.faults.clear()
        assert client(tmp_path, first.url, "--once").wait(60) == 0
    stored = {name: source for name, source in gateway.sources.items() if source.chunks}
    for name, source in stored.items():
        assert [c.prev for c in source.chunks] == [0, *[c.seqno for c in source.chunks[:-1]]], name
    assert sorted(source.content() for source in stored.values()) == sorted(files.values())
    assert len(files) >= len(NAMES)
    assert resumed(tmp_path) >= KILLS // 2
