"""The images of `ops/deploy/Containerfile`: built by buildah without a registry, run by podman with a root that is
read-only.

The base is made by debootstrap, from the mirror that apt uses; ``LOGFERRY_IMAGE_BASE`` is a folder with one that was
made before.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from logferry.ops.runtime.build_pyz import build
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports, get

from tests.support.checker import committed_records
from tests.support.interpreters import built_wheel

MISSING: Final = [tool for tool in ("buildah", "podman", "runc", "debootstrap") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root"),
]

CONTAINERFILE: Final = Path(__file__).parents[3] / "ops" / "deploy" / "Containerfile"
READY_S: Final = 90.0


class Store:
    """Images and containers of this test alone, below a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._options = ["--root", str(folder / "root"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]

    def run(self, tool: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # runc, not crun, which knows no cgroups of both versions at once.
        runtime = ["--runtime=runc", "--cgroup-manager=cgroupfs"] if tool == "podman" else []
        command = [tool, *runtime, *self._options, *arguments]
        # There is no systemd whose timers would run the health check; the test runs it.
        env = {**os.environ, "DISABLE_HC_SYSTEMD": "true"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With both images."""
    folder = tmp_path_factory.mktemp("images")
    found, context = Store(folder), folder / "dist"
    context.mkdir()
    wheel = built_wheel(folder / "wheel")
    shutil.copy(wheel, context)
    build(context / "logferry-push.pyz")
    # The base has Debian's Python, 3.11; the wheels are for this one.
    assert sys.version_info[:2] == (3, 11), "the wheels of the dependencies are fetched for Python 3.11"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(context), f"{wheel}[gateway]"]
    subprocess.run(fetch, check=True, timeout=600)
    root = Path(os.environ.get("LOGFERRY_IMAGE_BASE") or made_base(folder))
    container = found.run("buildah", "from", "scratch").stdout.strip()
    found.run("buildah", "copy", "--quiet", container, str(root), "/")
    found.run("buildah", "commit", "--quiet", "--rm", container, "localhost/base")
    options = ["--format", "docker", "--isolation", "chroot", "--build-arg", "BASE=localhost/base"]
    options += ["--build-arg", "EXTRAS=gateway", "--build-arg", "PIP_NO_INDEX=1", "-f", str(CONTAINERFILE)]
    for target, name in (("services", "logferry"), ("push", "logferry-push")):
        found.run("buildah", "build", *options, "--target", target, "-t", f"localhost/{name}", str(context))
    yield found
    # Files of containers belong to others, below mounts of their own.
    found.run("podman", "rm", "--all", "--force", check=False)
    found.run("buildah", "rm", "--all", check=False)


def made_base(folder: Path) -> Path:
    """A minimal Debian 12 with Python."""
    policy = subprocess.run(["apt-cache", "policy"], capture_output=True, text=True, check=True, timeout=60).stdout
    mirror = re.search(r"(https?://\S+) bookworm/main", policy)
    if mirror is None:
        pytest.skip("apt has no mirror of Debian 12: name the folder of a base by LOGFERRY_IMAGE_BASE")
    include = "--include=python3,python3-venv,ca-certificates"
    made = ["debootstrap", "--variant=minbase", include, "bookworm", str(folder / "base"), mirror[1]]
    subprocess.run(made, check=True, capture_output=True, timeout=1200)
    return folder / "base"


# A container may not raise the limits of this process; podman would.
FILES: Final = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
OPTIONS: Final = [
    *("--read-only", "--network=host", "--cap-drop=all", "--security-opt=no-new-privileges"),
    *(f"--ulimit=nofile={FILES}:{FILES}", "--ulimit=nproc=4096:4096"),
]


def test_the_services_and_the_client_run_from_their_images(kafka: KafkaCluster, store: Store, tmp_path: Path) -> None:
    """A gateway takes what a client sends; both as user 10001, on a root that they cannot write."""
    [port] = free_ports(1)
    config, logs = tmp_path / "config", tmp_path / "logs"
    for folder in (config, logs):
        folder.mkdir()
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    (config / "gateway.toml").write_text(
        f'dc = "dc1"\nprefix = "images"\nlisten = "127.0.0.1:{port}"\nlanes = 2\n'
        f'accept_weak_kafka = ["replication", "min-isr"]\n[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\n'
    )
    url = f"http://127.0.0.1:{port}"
    mounts = [f"--volume={config}:/etc/logferry:ro", "--tmpfs=/tmp"]
    health = f"--env=LOGFERRY_HEALTH_URL={url}/healthz"
    store.run("podman", "run", "--detach", "--name=gateway", *OPTIONS, *mounts, health, "localhost/logferry")
    deadline = time.monotonic() + READY_S
    while get(url, "/readyz")[0] != 200:
        assert time.monotonic() < deadline, store.run("podman", "logs", "gateway", check=False).stderr
        time.sleep(0.2)
    assert store.run("podman", "healthcheck", "run", "gateway").returncode == 0
    assert store.run("podman", "exec", "gateway", "id", "-u").stdout.strip() == "10001"
    assert store.run("podman", "exec", "gateway", "touch", "/opt/x", check=False).returncode != 0

    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/topics/t", b'{"partitions": 1}', method="PUT")).close()
    (logs / "a.log").write_text("one\ntwo\n")
    state = ["--tmpfs=/var/lib/logferry-push:mode=0777", f"--volume={logs}:/logs:ro"]
    sent = ["--once", "--url", url, "--topic", "t", "--state-dir", "/var/lib/logferry-push", "/logs/*.log"]
    store.run("podman", "run", "--rm", *OPTIONS, *state, "localhost/logferry-push", *sent)
    stored = asyncio.run(committed_records(kafka.bootstrap, "dc1.t"))
    assert [record.value for record in stored] == [b"one\ntwo\n"]
    store.run("podman", "stop", "--time=30", "gateway")
    assert store.run("podman", "inspect", "--format={{.State.ExitCode}}", "gateway").stdout.strip() == "0"


def test_the_image_of_the_client_is_small_and_apart(store: Store) -> None:
    sizes = {
        name: int(store.run("podman", "image", "inspect", "--format={{.Size}}", f"localhost/{name}").stdout)
        for name in ("logferry", "logferry-push")
    }
    assert sizes["logferry-push"] < sizes["logferry"]
    found = store.run(
        "podman", "run", "--rm", *OPTIONS, "--entrypoint=ls", "localhost/logferry-push", "/opt", "/opt/logferry"
    )
    assert found.stdout.split() == ["/opt:", "logferry", "/opt/logferry:", "logferry-push.pyz"]
