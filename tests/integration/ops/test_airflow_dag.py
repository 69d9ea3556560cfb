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

# ``airflow(load)`` runs the DAG with this program in place of the loader: its calls, and the output of Airflow.
Airflow = Callable[[str], tuple[list[str], str]]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    folder = tmp_path_factory.mktemp("airflow")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    pip = [str(folder / "venv" / "bin" / "pip"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "apache-airflow==3.3.2"], check=True, timeout=1200)
    (folder / "dags").mkdir()
    program, calls = folder / "logferry", folder / "calls"
    dag = DAG.read_text(encoding="utf-8")
    for sample, here in {INSTALLED: str(program), "minutes=2": "seconds=1", "retries=5": "retries=1"}.items():
        assert sample in dag
        dag = dag.replace(sample, here)
    (folder / "dags" / DAG.name).write_text(dag)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"AIRFLOW_HOME": str(folder), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "NO_COLOR": "1"}
    env["PATH"] = f"{folder / 'venv' / 'bin'}:{env['PATH']}"

    def call(*arguments: str) -> str:
        command = [str(folder / "venv" / "bin" / "airflow"), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
        return done.stdout + done.stderr

    def run(load: str) -> tuple[list[str], str]:
        program.write_text(f'#!/bin/sh\necho "$*" >> {calls}\n{load}\n')
        program.chmod(0o755)
        calls.write_text("")
        said = call("dags", "test", "logferry_load")
        return calls.read_text().splitlines(), said

    assert "migration done" in call("db", "migrate")
    return run


# Exit status of the load → how often it is called, and how the run of the DAG ends.
ENDS = {0: (1, "success"), 1: (1, "failed"), 3: (2, "failed")}


@pytest.mark.parametrize("status", ENDS)
def test_the_status_of_the_load_decides_on_a_retry(airflow: Airflow, status: int):
    times, end = ENDS[status]
    calls, said = airflow(f"exit {status}")
    assert calls == ["load --config /etc/logferry/load.toml --stop-s 3000 --json"] * times, said[-3000:]
    assert f"new_state={end}" in said, said[-3000:]
