"""A standalone Spark cluster: a master and workers, each a process with executors of its own, on loopback."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.processes import Child, free_ports, stop_all

SPARK = Path(pyspark.__file__).parent
_READY_S = 180
_STOP_S = 15


class Standalone:
    """``url``: the master's. ``workers`` of one core and a gigabyte each.

    ``are_pinned``: each worker runs on a core of its own, with its executors and the threads of their JVMs. Without it
    Spark starts one task at a time in an executor, which compiles and collects garbage on every core.
    """

    def __init__(self, folder: Path, workers: int = 2, *, are_pinned: bool = False) -> None:
        self.folder = folder
        self._port = free_ports(2 + workers)[0]
        self.url = f"spark://127.0.0.1:{self._port}"
        env = {
            **os.environ,
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(SPARK),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        classes = f"{SPARK / 'bin' / 'spark-class'}", "org.apache.spark.deploy"
        master = [classes[0], f"{classes[1]}.master.Master", "--host", "127.0.0.1", "--port", str(self._port)]
        self._children = [Child("master", [*master, "--webui-port", str(self._port + 1)], folder / "master.log", env)]
        cores = sorted(os.sched_getaffinity(0))
        for number in range(workers):
            at = ["--host", "127.0.0.1", "--webui-port", str(self._port + 2 + number), "-d", str(folder / f"w{number}")]
            worker = [classes[0], f"{classes[1]}.worker.Worker", "-c", "1", "-m", "1g", *at, self.url]
            if are_pinned:
                worker = ["taskset", "--cpu-list", str(cores[number % len(cores)]), *worker]
            self._children.append(Child(f"worker-{number}", worker, folder / f"worker-{number}.log", env))

    def start(self) -> None:
        """Returns when the master has all workers."""
        master, *workers = self._children
        master.start()
        deadline = time.monotonic() + _READY_S
        while not self._facts():
            self._wait(deadline, "master.log")
        for worker in workers:
            worker.start()
        while sum(one["state"] == "ALIVE" for one in self._facts().get("workers", ())) < len(workers):
            self._wait(deadline, "worker-0.log")

    def _wait(self, deadline: float, log: str) -> None:
        """Raises TimeoutError, with the end of the log."""
        if time.monotonic() > deadline:
            raise TimeoutError((self.folder / log).read_text()[-2000:])
        time.sleep(0.1)

    def stop(self) -> None:
        stop_all(self._children, _STOP_S)

    def executors(self) -> list[int]:
        """The processes of executors that run now."""
        workers = [child.pid for child in self._children[1:] if child.pid is not None]
        return [pid for worker in workers for pid in _children_of(worker) if b"ExecutorBackend" in _command(pid)]

    def _facts(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port + 1}/json/", timeout=5) as answer:
                facts: dict[str, Any] = json.load(answer)
                return facts
        return {}


def _children_of(pid: int) -> list[int]:
    return [int(n) for file in Path(f"/proc/{pid}/task").glob("*/children") for n in file.read_text().split()]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextmanager
def standalone(folder: Path, workers: int = 2, *, are_pinned: bool = False) -> Iterator[Standalone]:
    folder.mkdir()
    cluster = Standalone(folder, workers, are_pinned=are_pinned)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
