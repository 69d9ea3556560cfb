"""The demo's query: SQL over the table and what is not loaded yet, by ``logferry query``, without Spark."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logferry.loaders.storage.ledger import open_table
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo.plan import Plan

_SQL: Final = "SELECT count(*) AS rows FROM logs"
_LIMIT_S: Final = 120.0


@dataclass(frozen=True)
class Asked:
    """What the query answered. ``stored``: rows of the table alone, a moment before."""

    rows: int
    stored: int
    seconds: float

    @property
    def behind(self) -> int:
        """Rows that no loader had loaded."""
        return self.rows - self.stored


def ask(plan: Plan, urls: Sequence[str]) -> Asked:
    """Raises Unavailable with what the query said."""
    stored, started = stored_rows(plan.table), time.monotonic()
    given = [part for url in urls[:1] for part in ("--url", url)]
    command = [sys.executable, "-m", "logferry.ops", "query", _SQL, "--table", str(plan.table), *given]
    try:
        done = subprocess.run(
            [*command, "--format", "json"], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"logferry query gave no answer within {_LIMIT_S:.0f} s") from None
    seconds = time.monotonic() - started
    if done.returncode or done.stderr:
        raise Unavailable(f"logferry query ended with status {done.returncode}: {done.stderr.strip()}")
    return Asked(int(json.loads(done.stdout)[0]["rows"]), stored, seconds)


def stored_rows(path: Path) -> int:
    """Of the table, without what is in its quarantine."""
    table = open_table(path)
    return 0 if table is None else int(table.to_pyarrow_dataset().count_rows())
