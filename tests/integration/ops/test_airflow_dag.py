"""The sample for Airflow in a real Airflow, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

DAG = Path(__file__).parents[3] / "ops" / "deploy" / "logferry_load_dag.py"
INSTALLED = "/opt/logferry-services/current/bin/logferry"

Airflow = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    """``airflow(load, *arguments)`` runs it with this program in place of the loader."""
    folder = tmp_path_factory.mktemp("airflow")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    pip = [str(folder / "venv" / "bin" / "pip"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "apache-airflow==3.3.2"], check=True, timeout=1200)
    (folder / "dags").mkdir()
    program = folder / "logferry"
    (folder / "dags" / DAG.name).write_text(DAG.read_text(encoding="utf-8").replace(INSTALLED, str(program)))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"AIRFLOW_HOME": str(folder), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "NO_COLOR": "1"}
    env["PATH"] = f"{folder / 'venv' / 'bin'}:{env['PATH']}"

    def run(load: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        program.write_text(f'#!/bin/sh\necho "called with $*"\n{load}\n')
        program.chmod(0o755)
        given = [str(folder / "venv" / "bin" / "airflow"), *arguments]
        out = subprocess.STDOUT
        return subprocess.run(given, env=env, stdout=subprocess.PIPE, stderr=out, text=True, timeout=600, check=False)

    migrated = run("true", "db", "migrate")
    assert migrated.returncode == 0, migrated.stdout[-2000:]
    return run


def test_the_status_of_the_load_decides(airflow: Airflow):
    done = airflow("exit 0", "dags", "test", "logferry_load")
    assert "called with load --config /etc/logferry/load.toml --stop-s 3000 --json" in done.stdout, done.stdout[-3000:]
    assert "state=success" in done.stdout or "SUCCESS" in done.stdout, done.stdout[-3000:]
    refused = airflow("exit 1", "dags", "test", "logferry_load")
    assert "an operator must act" in refused.stdout, refused.stdout[-3000:]
    assert "UP_FOR_RETRY" not in refused.stdout.upper()
    away = airflow("exit 3", "dags", "test", "logferry_load")
    assert "UP_FOR_RETRY" in away.stdout.upper(), away.stdout[-3000:]
