"""A DAG for Airflow with its Spark provider: a load every five minutes by spark-submit, on the cluster of a connection.

The workers have the command, a spark-submit of the same Spark, and the connection ``spark_default``. The load runs in
client mode, so its exit status is known: one that an operator must look at (1 or 2) is not tried again.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from datetime import UTC, datetime, timedelta

from airflow.exceptions import AirflowException, AirflowFailException
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import dag

LOGFERRY = "/opt/logferry-services/current/bin/logferry"
CONFIG = "/etc/logferry/load.toml"


class SubmittedLoad(SparkSubmitOperator):
    """With the jars, the driver's stack and the program that the installed command names."""

    def execute(self, context):
        named = [LOGFERRY, "load", "--print-submit", "--config", CONFIG]
        printed = subprocess.run(named, check=True, stdout=subprocess.PIPE, text=True).stdout
        _, self.jars, _, stack, self.application = shlex.split(printed)
        self.conf = {**(self.conf or {}), "spark.driver.extraJavaOptions": stack}
        try:
            super().execute(context)
        except AirflowException as error:
            if re.search(r"Error code is: [12]\b", str(error)):
                raise AirflowFailException("an operator must act, see the report above") from error
            raise


@dag(schedule="*/5 * * * *", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False, max_active_runs=1)
def logferry_submit():
    SubmittedLoad(
        task_id="load",
        conn_id="spark_default",
        deploy_mode="client",
        application_args=["--config", CONFIG, "--stop-s", "3000", "--json"],
        retries=5,
        retry_delay=timedelta(minutes=2),
    )


logferry_submit()
