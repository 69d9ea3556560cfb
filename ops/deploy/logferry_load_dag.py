"""A DAG for Airflow: a load every five minutes, and a task that waits for an hour to be complete.

The workers have the command, and the tables as their user. A load that an operator must look at (status 1 or 2) is not
tried again; one that waits for Kafka, storage or Spark (3), was interrupted (130) or killed is.
"""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta

from airflow.exceptions import AirflowFailException
from airflow.sdk import dag, task

LOGFERRY = "/opt/logferry-services/current/bin/logferry"
CONFIG = "/etc/logferry/load.toml"
TABLE = "/warehouse/nginx"


@dag(schedule="*/5 * * * *", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False, max_active_runs=1)
def logferry_load():
    @task(retries=5, retry_delay=timedelta(minutes=2))
    def load() -> None:
        done = subprocess.run([LOGFERRY, "load", "--config", CONFIG, "--stop-s", "3000", "--json"], check=False)
        if done.returncode in (1, 2):
            raise AirflowFailException(f"status {done.returncode}: an operator must act, see the report above")
        done.check_returncode()

    load()


@dag(schedule="@hourly", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False)
def logferry_hour():
    """For jobs over an hour of a table with segments: they come after ``is_ready``."""

    @task.sensor(poke_interval=60, timeout=6 * 3600, mode="reschedule")
    def is_ready(data_interval_start=None) -> bool:
        hour = f"{data_interval_start:%Y-%m-%dT%H}"
        done = subprocess.run([LOGFERRY, "table", "segments", "wait", TABLE, hour, "--timeout-s", "0"], check=False)
        if done.returncode not in (0, 1):
            done.check_returncode()
        return done.returncode == 0

    is_ready()


logferry_load()
logferry_hour()
