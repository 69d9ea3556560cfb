"""For tests that kill loaders: which file appears at which step, and waiting for it.

Nothing in the loader helps: the tables' folders are watched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from logferry.loaders.storage.ledger import TablePaths

from tests.support.loader import LoaderProcess

WAIT_S = 120

Watch = Callable[[TablePaths], int]


def commits(path: Path) -> int:
    return sum(1 for file in (path / "_delta_log").glob("*.json") if file.stem.isdigit())


def data_files(path: Path) -> int:
    return sum(1 for _ in path.glob("batch-*/**/*.parquet"))


# What grows at a step, and from which number on: creating a table is its first commit.
STEPS: dict[str, Watch] = {
    "ledger": lambda paths: commits(paths.ledger),
    "quarantine": lambda paths: commits(paths.quarantine),
    "mid-write": lambda paths: data_files(paths.main),
    "commit": lambda paths: commits(paths.main),
}


def wait_for(condition: Callable[[], bool], what: str, loader: LoaderProcess | None = None) -> None:
    """Looks all the time: the windows to be hit are milliseconds wide."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen in {WAIT_S} s")
        if loader is not None and loader.process.poll() is not None:
            raise AssertionError(f"the loader ended before {what}: {loader.finish()}")
        time.sleep(0.001)


@contextmanager
def loaders(bootstrap: str, scratch: Path) -> Iterator[Callable[..., LoaderProcess]]:
    """``begin(table, topic, settings, *options)`` starts one; none is left behind."""
    started: list[LoaderProcess] = []

    def begin(table: Path, topic: str, settings: str = "", *options: str) -> LoaderProcess:
        started.append(LoaderProcess(bootstrap, table, topic, *options, scratch=scratch, settings=settings))
        return started[-1]

    yield begin
    for loader in started:
        if loader.process.poll() is None:
            loader.kill()
        if loader.process.stdout is not None and not loader.process.stdout.closed:
            loader.finish()
