"""The file that podman writes of a container, in the form of the kubelet's runtimes, while the client is killed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import pytest

from tests.support.fake_gateway import FakeGateway, Served

MISSING: Final = [tool for tool in ("podman", "runc", "conmon") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="podman with runc needs root here"),
]

# Messages up to 40,000 characters: a runtime parts those beyond 16 KiB, or 8 KiB. Every third one is of stderr.
MESSAGES: Final = 150
PROGRAM: Final = f"""
i=0
while [ $i -lt {MESSAGES} ]; do
    size=$((i * 7919 % 40000 + 4))
    if [ $((i % 3)) -eq 0 ]; then printf "%0${{size}}d\\n" $i >&2; else printf "%0${{size}}d\\n" $i; fi
    i=$((i + 1))
done
printf "no end"
"""


def expected(stream: str) -> list[bytes]:
    return [b"%0*d" % (i * 7919 % 40000 + 4, i) for i in range(MESSAGES) if (i % 3 == 0) == (stream == "stderr")]


def run_container(folder: Path, log: Path) -> None:
    """With a root that has a shell and nothing else."""
    root = folder / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy("/bin/sh", root / "bin" / "sh")
    linked = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True, timeout=60).stdout
    for library in (word for word in linked.split() if word.startswith("/")):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    store = ["--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a container may not raise the limits of this process
    limits = [f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=4096:4096", "--network=none"]
    podman = ["podman", "--runtime=runc", "--cgroup-manager=cgroupfs", *store]
    log_options = ["--log-driver=k8s-file", f"--log-opt=path={log}"]
    command = [*podman, "run", "--rm", *limits, *log_options, "--rootfs", str(root), "/bin/sh", "-c", PROGRAM]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"podman runs no container here: {done.stderr[-500:]!r}")


def test_the_messages_of_a_container_arrive_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / "pods" / "shop_web_0f" / "main" / "0.log"
    log.parent.mkdir(parents=True)
    gateway = FakeGateway()
    with Served(gateway) as served:
        client = [
            sys.executable, "-m", "logferry.client", "--url", served.url, "--topic", "t", "--state-dir",
            str(tmp_path / "state"), "--format", "cri", "--chunk-bytes", "65536", "--linger-ms", "10",
            str(tmp_path / "pods" / "*" / "*" / "*.log"),
        ]  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="lf-") as folder:  # podman wants a short path
            run_container(Path(folder), log)
        content = log.read_bytes()
        assert content.count(b" P ") > 100, "long messages come in parts"
        log.unlink()
        for part in range(4):  # in pieces, so that each client meets a file that grows
            with log.open("ab") as file:
                file.write(content[len(content) * part // 4 : len(content) * (part + 1) // 4])
            before = len(gateway.requests)
            with subprocess.Popen(client, stderr=subprocess.DEVNULL) as process:
                deadline = time.monotonic() + 120
                while len(gateway.requests) < before + 3:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                process.send_signal(signal.SIGKILL)
        assert subprocess.run([*client, "--once"], stderr=subprocess.DEVNULL, timeout=120, check=False).returncode == 0
    (stored,) = [each for each in gateway.sources.values() if each.chunks]
    lines: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    for line in stored.content().split(b"\n")[:-1]:
        _, stream, message = line.split(b" ", 2)
        lines[stream.decode()].append(message)
    assert stored.recorded == len(content)
    assert lines["stderr"] == expected("stderr")
    assert lines["stdout"] == [*expected("stdout"), b"no end"]
    assert [chunk.attributes["unfinished"] for chunk in stored.chunks if "unfinished" in chunk.attributes] == ["stdout"]
    assert {(c.attributes["namespace"], c.attributes["pod"], c.attributes["container"]) for c in stored.chunks} == {
        ("shop", "web", "main")
    }
