"""What libraries and forgotten tasks say in a service is in its log as events: each line of standard error is JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_SERVICE = """
import asyncio, gc, logging, sys
from logferry.gateway.service.processes import run_service

class Config:
    workers = 1

async def fails():
    raise ValueError("of a task")

async def serve(config, worker, reload):
    task = asyncio.create_task(fails())
    await asyncio.wait([task])
    del task
    gc.collect()
    logging.getLogger("some.library").warning("two\\nlines of %s", "text")
    logging.getLogger("some.library").info("not of interest")

sys.exit(run_service("plain", "text", ["--config", "x.toml", "--worker", "0"], lambda _: Config, serve))
"""


def test_each_line_is_an_event(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _SERVICE], cwd=tmp_path, capture_output=True, text=True, check=True)
    forgotten, warned = (json.loads(line) for line in done.stderr.splitlines())
    assert (forgotten["event"], forgotten["level"], forgotten["logger"]) == ("library_message", "warning", "asyncio")
    assert "never retrieved" in forgotten["message"]
    assert forgotten["raised"].endswith("ValueError: of a task\n")
    assert (warned["logger"], warned["message"], warned["raised"]) == ("some.library", "two\nlines of text", None)
