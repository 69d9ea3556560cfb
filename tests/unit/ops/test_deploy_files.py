"""Every file of `ops/deploy` has a test that runs it, or lets the program that reads it judge it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import boto3
import pytest
from moto import mock_aws
from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.iam.policy_validation import IAMPolicyDocumentValidator

ROOT: Final = Path(__file__).parents[3]
DEPLOY: Final = ROOT / "ops" / "deploy"

# A file, or a pattern of files that the test finds by itself → the test, below ``tests``.
TESTED: Final = {
    "Containerfile": "integration/ops/test_container_image.py test_the_services_and_the_client_run_from_their_images",
    "compose/compose.yaml": "integration/ops/test_compose_processes.py test_the_services_run_as_they_are_described",
    "compose/*.toml": "integration/ops/test_compose_processes.py test_the_services_run_as_they_are_described",
    "compose/prometheus.yaml": "integration/ops/test_compose_processes.py test_the_services_run_as_they_are_described",
    "compose/grafana-*.yaml": "unit/ops/test_compose.py test_grafana_finds_its_source_and_the_dashboards",
    "grafana/*.json": "integration/ops/test_prometheus.py test_every_panel_has_data",
    "kubernetes/labels/*.yaml": "unit/ops/test_kubernetes.py test_labels_of_pods_take_one_right",
    "kubernetes/kustomization.yaml": "unit/ops/test_kubernetes.py test_kustomize_builds_them",
    "kubernetes/*.yaml": "unit/ops/test_kubernetes.py test_kubernetes_takes_the_object",
    "kubernetes/gateway.toml": "unit/ops/test_kubernetes.py test_a_service_is_served_at_the_port_of_its_configuration",
    "kubernetes/mirror.toml": "unit/ops/test_kubernetes.py test_a_service_is_served_at_the_port_of_its_configuration",
    "kubernetes/deliver.toml": "unit/ops/test_kubernetes.py test_a_service_is_served_at_the_port_of_its_configuration",
    "kubernetes/load.toml": "unit/ops/test_kubernetes.py test_the_loader_and_the_push_client_take_their_files",
    "kubernetes/push.toml": "unit/ops/test_kubernetes.py test_the_loader_and_the_push_client_take_their_files",
    "load-parsers.toml": "unit/ops/test_deploy.py test_each_sample_of_a_log_fits_its_parser",
    "logferry*.service": "unit/ops/test_deploy.py test_systemd_takes_the_units",
    "logferry*.timer": "unit/ops/test_deploy.py test_systemd_takes_the_units",
    "logferry-load.cron": "unit/ops/test_deploy.py test_cron_sends_what_an_operator_must_see",
    "logferry-push.logrotate": "unit/ops/test_deploy_files.py test_logrotate_takes_the_sample",
    "logferry.sysusers": "unit/ops/test_deploy.py test_user_and_folders_are_created",
    "logferry.tmpfiles": "unit/ops/test_deploy.py test_user_and_folders_are_created",
    "logferry_load_dag.py": "integration/ops/test_airflow_dag.py test_the_status_of_the_load_decides_on_a_retry",
    "logferry_submit_dag.py": "integration/ops/test_airflow_dag.py test_so_does_that_of_a_load_by_spark_submit",
    "prometheus-alerts.yaml": "unit/ops/test_monitoring.py test_an_alert_is_raised_and_cleared",
    "receiver.go": "crash/deliver/test_receiver_programs.py test_the_receiver_in_go",
    "s3-lifecycle.json": "unit/ops/test_deploy_files.py test_s3_takes_the_rule_of_unfinished_uploads",
    "s3-*er.json": "unit/ops/test_deploy_files.py test_a_policy_grants_what_its_user_needs_and_no_more",
}
FILES: Final = sorted(
    str(file.relative_to(DEPLOY)) for file in DEPLOY.rglob("*") if file.is_file() and "__pycache__" not in file.parts
)


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_a_test(name: str) -> None:
    tests = [test for pattern, test in TESTED.items() if name == pattern or fnmatch(name, pattern)]
    assert tests, f"ops/deploy/{name} is run or read by no test: write one, and name it in {Path(__file__).name}"


@pytest.mark.parametrize("pattern", TESTED)
def test_the_test_of_a_file_is_there(pattern: str) -> None:
    assert any(fnmatch(name, pattern) for name in FILES), "no such file"
    path, _, name = TESTED[pattern].partition(" ")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / path).read_text(encoding="utf-8"), re.M)


LOGROTATE: Final = shutil.which("logrotate", path="/usr/sbin:/sbin:/usr/bin")


@pytest.mark.skipif(LOGROTATE is None, reason="logrotate is not installed; on Debian: apt-get install logrotate")
def test_logrotate_takes_the_sample(tmp_path: Path) -> None:
    """It rotates a log, keeps the lines of the first rotation as they are, and makes a new file."""
    sample = (DEPLOY / "logferry-push.logrotate").read_text(encoding="utf-8")
    assert "/var/log/app/*.log" in sample
    (tmp_path / "sample").write_text(sample.replace("/var/log/app", str(tmp_path)))
    (tmp_path / "app.log").write_text("a line\n")
    tmp_path.chmod(0o755)
    command = [str(LOGROTATE), "--force", "--state", str(tmp_path / "state"), str(tmp_path / "sample")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ((tmp_path / "app.log").read_text(), (tmp_path / "app.log.1").read_text()) == ("", "a line\n")


# ---- the files for S3, by what judges them in moto and in boto3 --------------------------------------------------

OBJECT, BUCKET, OTHER = "arn:aws:s3:::warehouse/nginx/a", "arn:aws:s3:::warehouse", "arn:aws:s3:::other/a"
READS: Final = {("s3:GetObject", OBJECT), ("s3:ListBucket", BUCKET)}
WRITES: Final = {
    *(("s3:PutObject", OBJECT), ("s3:DeleteObject", OBJECT), ("s3:AbortMultipartUpload", OBJECT)),
    ("s3:ListBucketMultipartUploads", BUCKET),
}
NEVER: Final = {("s3:GetObject", OTHER), ("s3:PutObject", OTHER), ("s3:DeleteBucket", BUCKET)}


@pytest.mark.parametrize(("name", "granted"), [("reader", READS), ("loader", READS | WRITES)])
def test_a_policy_grants_what_its_user_needs_and_no_more(name: str, granted: set[tuple[str, str]]) -> None:
    text = (DEPLOY / f"s3-{name}.json").read_text(encoding="utf-8")
    IAMPolicyDocumentValidator(text).validate()
    policy = IAMPolicy({"policy_document": text})
    found = {
        (action, resource)
        for action, resource in READS | WRITES | NEVER
        if policy.is_action_permitted(action, resource) == PermissionResult.PERMITTED
    }
    assert found == granted


def test_s3_takes_the_rule_of_unfinished_uploads() -> None:
    rule = json.loads((DEPLOY / "s3-lifecycle.json").read_text(encoding="utf-8"))
    with mock_aws():
        s3 = boto3.client("s3", "us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
        s3.create_bucket(Bucket="warehouse")
        s3.put_bucket_lifecycle_configuration(Bucket="warehouse", LifecycleConfiguration=rule)
        assert s3.get_bucket_lifecycle_configuration(Bucket="warehouse")["Rules"] == rule["Rules"]
    assert [set(one) & {"Expiration", "Transition"} for one in rule["Rules"]] == [set()], "it deletes no object"
