"""Benchmark of `logferry query` on a tail, against a bare consumer that reads the same bytes."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

from logferry.ops.bench.harness.figures import Figure, Side, alternate, compared
from logferry.ops.bench.harness.kafka import chunks, java_consumer
from logferry.ops.bench.harness.usage import Program, ended_cpu_s
from logferry.ops.bench.suites.load import _filled, _run

_LINES: Final = 5_000_000
_CHUNK: Final = 128 << 10
_TOPIC: Final = "dc1.access"
_ROUNDS: Final = 3
_STATEMENTS: Final = {
    "count": "SELECT count(*) AS n FROM logs",
    "group": "SELECT status, count(*), sum(body_bytes) FROM logs WHERE path LIKE '/api/%' GROUP BY ALL ORDER BY ALL",
}


def query_tail() -> Figure:
    """5 million lines of an access log behind a table of one chunk: seconds of ``count(*)``, and of a filter with
    groups on parsed columns, from the start of the command; ``ratio``: of the count to Kafka's ConsumerPerformance.
    """
    payloads = chunks(64, _CHUNK)
    count = 1 + _LINES * 64 // sum(payload.count(b"\n") for payload in payloads)
    size_mb = sum(len(payloads[number % 64]) for number in range(count)) / 1e6
    with _filled(_TOPIC, _CHUNK, count) as (folder, bootstrap):
        table = folder / "table"
        which = ["--table", str(table), "--topics", _TOPIC, "--bootstrap", bootstrap, "--parser", "access"]
        _run("logferry.loaders", *which, "--json", "--max-records", "1", "--stop-records", "1")
        rounds = alternate(_ROUNDS, partial(_ours, bootstrap, table), partial(_bare, bootstrap, count, size_mb), 0)
    return compared("seconds of count(*) over a tail / of a bare consumer", "count_s", rounds)


def _ours(bootstrap: str, table: Path, _: int) -> Side:
    found: Side = {}
    for name, sql in _STATEMENTS.items():
        before_s = ended_cpu_s()
        command = [
            sys.executable,
            "-m",
            "logferry.ops.cli.main",
            "query",
            sql,
            "--table",
            str(table),
            "--format",
            "csv",
        ]
        program = Program([*command, "--bootstrap", bootstrap], stdout=subprocess.PIPE).until(bound_s=600)
        found |= {f"{name}_s": program.took_s, f"{name}_cpu_s": ended_cpu_s() - before_s, f"{name}_mb": program.peak_mb}
    return found


def _bare(bootstrap: str, records: int, size_mb: float, number: int) -> Side:
    rate = java_consumer(bootstrap, _TOPIC, records, f"bare-{number}")
    return {"count_s": size_mb / rate, "mb_s": rate}
