"""A loader as a process, for tests that kill it: which file appears at which step, and waiting for it.

Nothing in the loader helps: the tables' folders are watched.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import list_files
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java

from tests.support.loader import WAIT_S


class LoaderProcess:
    """``logferry load``, or ``logferry table``, and its JVM."""

    def __init__(
        self,
        bootstrap: str,
        table: Location,
        topic: str,
        *options: str,
        scratch: Path,
        settings: str = "",
        dc: str = "dc1",
        as_json: bool = True,
    ) -> None:
        """``options``: of a load; where the first one is a sub-command of `table`, of that one. ``settings``: more of
        the table's, as TOML.
        """
        file = scratch / f"load-{dc}-{table.name}-{crc32(settings.encode())}.toml"
        file.write_text(
            f'dc = "{dc}"\nkafka.bootstrap_servers = "{bootstrap}"\n'
            f'[spark]\nmaster = "local[2]"\ndriver_memory = "512m"\nscratch = "{scratch / "runs"}"\n'
            f'[[tables]]\npath = "{table}"\ntopics = ["{topic}"]\nmax_records = 400\n{settings}\n'
        )
        module, given = ["logferry.loaders"], list(options)
        if given and not given[0].startswith("-"):
            module, given = ["logferry.loaders.commands.table", given[0], str(table)], given[1:]
        command = [sys.executable, "-m", *module, "--config", str(file), *["--json"] * as_json, *given]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=loader_env()
        )

    def jvm(self) -> int | None:
        """The process of the JVM, once there is one (before it is Java, it is the shell that becomes Java)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            numbers = [int(number) for number in children.read_text().split()]
            return next((n for n in numbers if b"java" in Path(f"/proc/{n}/cmdline").read_bytes()[:200]), None)
        except (FileNotFoundError, ProcessLookupError):
            return None

    def kill(self, *, python: bool = True, jvm: bool = True) -> int | None:
        """SIGKILL for the loader, its JVM, or both; returns the JVM's number."""
        number = self.jvm()
        if jvm and number is not None:
            os.kill(number, signal.SIGKILL)
        if python:
            self.process.kill()
        return number

    def finish(self) -> tuple[int, dict[str, Any], str]:
        """(exit status, the summary or nothing, standard error) when it has ended."""
        out, err = self.process.communicate()
        return self.process.returncode, json.loads(out) if out else {}, err.decode()


def loader_env() -> dict[str, str]:
    variables = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "azure": "AZURE_STORAGE_USE_EMULATOR"}
    stores = {store: variable in os.environ for store, variable in variables.items()}
    jars = os.pathsep.join(map(str, spark_jars(**stores)))
    return {**os.environ, **java_env(), "LOGFERRY_SPARK_JARS": jars}


def java_env() -> dict[str, str]:
    """Our Java, compiling less: short runs take half the time."""
    return {"JAVA_HOME": str(find_java().home), "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def run_module(
    arguments: Sequence[str], env: dict[str, str] | None = None, module: str = "logferry.loaders"
) -> subprocess.CompletedProcess[str]:
    """The command to its end, with its output."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=env or loader_env(), stdin=subprocess.DEVNULL, check=False
    )


def run_table(arguments: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``logferry table`` to its end, with its output."""
    return run_module(arguments, env, "logferry.loaders.commands.table")


Watch = Callable[[TablePaths], int]


def commits(path: Location) -> int:
    return sum(1 for file in list_files(path / "_delta_log") if re.fullmatch(r"[0-9]+\.json", file.name))


def data_files(path: Location) -> int:
    """In a mounted folder those of tasks that are not committed, too."""
    return sum(1 for file in list_files(path) if re.fullmatch(r"batch-.*/.*\.parquet", file.name))


# What grows at a step, and from which number on: creating a table is its first commit.
STEPS: dict[str, Watch] = {
    "ledger": lambda paths: commits(paths.ledger),
    "quarantine": lambda paths: commits(paths.quarantine),
    "mid-write": lambda paths: data_files(paths.main),
    "commit": lambda paths: commits(paths.main),
}


def wait_for(
    condition: Callable[[], bool], what: str, loader: LoaderProcess | None = None, within_s: float = WAIT_S
) -> None:
    """Looks all the time: the windows to be hit are milliseconds wide. In a store a look takes as long, and is paid by
    the server that the loader waits for: it gets two thirds of the time.
    """
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        if condition():
            return
        took = time.monotonic() - began
        if began > deadline:
            raise AssertionError(f"{what} did not happen in {within_s} s")
        if loader is not None and loader.process.poll() is not None:
            raise AssertionError(f"the loader ended before {what}: {loader.finish()}")
        time.sleep(max(0.001, 2 * took))


@contextmanager
def loaders(bootstrap: str, scratch: Path) -> Iterator[Callable[..., LoaderProcess]]:
    """``begin(table, topic, settings, *options)`` starts one; none is left behind."""
    started: list[LoaderProcess] = []

    def begin(table: Location, topic: str, settings: str = "", *options: str) -> LoaderProcess:
        started.append(LoaderProcess(bootstrap, table, topic, *options, scratch=scratch, settings=settings))
        return started[-1]

    yield begin
    end_all(started)


def end_all(started: Iterable[LoaderProcess]) -> None:
    """None is left behind."""
    for loader in started:
        if loader.process.poll() is None:
            loader.kill()
        if loader.process.stdout is not None and not loader.process.stdout.closed:
            loader.finish()
