"""A compaction that is killed at each step, beside loads: every row once, and the next call completes it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from logferry.loaders.storage.files import list_files, open_table
from logferry.loaders.storage.ledger import existing_table, last_batch
from logferry.loaders.storage.merge import MERGED

from tests.support.loaded_table import HOUR, NOON, LoadedTable
from tests.support.loader import WAIT_S
from tests.support.loader_faults import seeded

pytestmark = pytest.mark.timeout(600)


def compaction(logs: LoadedTable) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "logferry.loaders.commands.table", "compact", str(logs.paths.main), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def is_written(logs: LoadedTable) -> bool:
    """A file of the merge is there, complete or not."""
    named = set(existing_table(logs.paths.main).file_uris())
    files = [file.name for file in list_files(logs.paths.main) if file.name.startswith(MERGED)]
    return any(not any(uri.endswith(name) for uri in named) for name in files)


@pytest.mark.parametrize("step", ["written", "committed"])
def test_killed_beside_loads(step: str, tmp_path: Path):
    logs, dice = LoadedTable(tmp_path, ["topic"]), seeded()
    killed = 0
    for _ in range(4):
        for _ in range(12):
            logs.load(NOON, NOON + HOUR, None, bad=[NOON])
        version = existing_table(logs.paths.main).version()
        victim, deadline = compaction(logs), time.monotonic() + WAIT_S
        while victim.poll() is None:
            reached = is_written(logs) if step == "written" else existing_table(logs.paths.main).version() > version
            if reached:
                time.sleep(dice.random() * 0.02 * killed)  # killed at the step, or somewhat later
                victim.kill()
                killed += 1
                break
            assert time.monotonic() < deadline
        victim.communicate()
        logs.load(NOON)
        assert logs.offsets == list(range(logs.offset))
    assert killed
    last = compaction(logs)
    out, err = last.communicate()
    assert last.returncode == 0, (out, err)
    assert logs.offsets == list(range(logs.offset))
    assert len(existing_table(logs.paths.main).file_uris()) == 1
    assert (last_batch(open_table(logs.paths.main)), logs.quarantined) == (logs.batch, 48)
