"""What an application on a standalone Spark cluster did, by its event log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path


def told_by(events: Path) -> dict[str, str]:
    """Spark's settings by which an application writes down what it does."""
    events.mkdir(exist_ok=True)
    names = {"enabled": "true", "dir": events.as_uri(), "compress": "false", "rolling.enabled": "false"}
    return {f"spark.eventLog.{name}": value for name, value in names.items()}


def tasks_by_executor(events: Path) -> Counter[str]:
    """How many tasks each executor of the application has ended well; the driver would be named ``driver``."""
    (log,) = (path for path in events.rglob("*") if path.is_file() and path.stat().st_size)
    said = [json.loads(line) for line in log.read_text().splitlines()]
    return Counter(
        one["Task Info"]["Executor ID"]
        for one in said
        if one["Event"] == "SparkListenerTaskEnd" and one["Task End Reason"]["Reason"] == "Success"
    )
