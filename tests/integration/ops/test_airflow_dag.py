"""The samples for Airflow in a real Airflow with its real Spark provider, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyspark
import pytest
from logferry.ops.runtime.jars import spark_environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

DEPLOY: Final = Path(__file__).parents[3] / "ops" / "deploy"
INSTALLED: Final = "/opt/logferry-services/current/bin/logferry"
CONFIG: Final = "/etc/logferry/load.toml"
PROVIDER: Final = "apache-airflow-providers-apache-spark==6.3.4"
JARS: Final = ["--jars", "a.jar,b.jar", "--driver-java-options", "-Xss4m", "/opt/logferry_load.py"]

# ``airflow(dag, program, load)`` runs the DAG with this script for the program: its calls, and the output of Airflow.
Airflow = Callable[[str, str, str], tuple[list[str], str]]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    """The Spark provider is installed without pyspark, which it does not use to submit."""
    folder = tmp_path_factory.mktemp("airflow")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    pip = [str(folder / "venv" / "bin" / "pip"), "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "apache-airflow==3.3.2"], check=True, timeout=1200)
    subprocess.run([*pip, "--no-deps", PROVIDER], check=True, timeout=300)
    for name in ("dags", "bin"):
        (folder / name).mkdir()
    calls = folder / "calls"
    replaced = {INSTALLED: str(folder / "bin" / "logferry"), CONFIG: str(folder / "load.toml")}
    replaced |= {"minutes=2": "seconds=1", "retries=5": "retries=1"}
    for file in DEPLOY.glob("logferry_*_dag.py"):
        dag = file.read_text(encoding="utf-8")
        for sample, here in replaced.items():
            assert sample in dag
            dag = dag.replace(sample, here)
        (folder / "dags" / file.name).write_text(dag)
    (folder / "load.toml").write_text("nonsense = 1\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"AIRFLOW_HOME": str(folder), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "NO_COLOR": "1"}
    env["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": "local[1]"})
    env["PATH"] = f"{folder / 'bin'}:{folder / 'venv' / 'bin'}:{env['PATH']}"

    def call(*arguments: str) -> str:
        command = [str(folder / "venv" / "bin" / "airflow"), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
        return done.stdout + done.stderr

    def run(dag: str, program: str, load: str) -> tuple[list[str], str]:
        for name, script in {"logferry": f"echo '{' '.join(JARS)}'", program: f'echo "$*" >> {calls}\n{load}'}.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / "bin" / name).chmod(0o755)
        calls.write_text("")
        said = call("dags", "test", dag)
        return calls.read_text().replace(str(folder / "load.toml"), CONFIG).splitlines(), said

    assert "migration done" in call("db", "migrate")
    return run


# Exit status of the load → how often it is called, and how the run of the DAG ends.
ENDS: Final = {0: (1, "success"), 1: (1, "failed"), 3: (2, "failed")}
LOADED: Final = f"--config {CONFIG} --stop-s 3000 --json"


@pytest.mark.parametrize("status", ENDS)
def test_the_status_of_the_load_decides_on_a_retry(airflow: Airflow, status: int) -> None:
    times, end = ENDS[status]
    calls, said = airflow("logferry_load", "logferry", f"exit {status}")
    assert calls == [f"load {LOADED}"] * times, said[-3000:]
    assert f"new_state={end}" in said, said[-3000:]


@pytest.mark.parametrize("status", ENDS)
def test_so_does_that_of_a_load_by_spark_submit(airflow: Airflow, status: int) -> None:
    """The master is that of the connection; jars, stack and program are those that the command names."""
    times, end = ENDS[status]
    calls, said = airflow("logferry_submit", "spark-submit", f"exit {status}")
    assert len(calls) == times, said[-3000:]
    assert f"new_state={end}" in said, said[-3000:]
    for submitted in calls:
        assert submitted.endswith(f"{JARS[-1]} {LOADED}")
        for part in ("--master local[1]", "--jars a.jar,b.jar", f"--conf spark.driver.extraJavaOptions={JARS[3]}"):
            assert part in submitted


def test_a_real_spark_submit_passes_the_status_of_the_load(airflow: Airflow) -> None:
    """Of a configuration that the loader refuses."""
    named = [sys.executable, "-m", "logferry.ops.cli.main", "load", "--print-submit"]
    printed = subprocess.run(named, check=True, capture_output=True, text=True, timeout=600).stdout.split()
    exports = "".join(f"export {name}='{value}'\n" for name, value in spark_environment().items())
    spark = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    script = f"{exports}export PYSPARK_PYTHON={sys.executable}\n"
    script += f'args=$(echo "$*" | sed "s|{JARS[1]}|{printed[1]}|; s|{JARS[-1]}|{printed[-1]}|")\nexec {spark} $args'
    calls, said = airflow("logferry_submit", "spark-submit", script)
    assert len(calls) == 1, said[-3000:]
    assert "nonsense" in said, said[-3000:]
    assert "Error code is: 2" in said, said[-3000:]
    assert "new_state=failed" in said
