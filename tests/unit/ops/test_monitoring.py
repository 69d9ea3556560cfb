"""Alert rules and dashboards of `ops/deploy`: they name metrics that exist and sections that exist, and each alert is
raised by its series and cleared by a good one, by Prometheus' own `promtool`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DEPLOY, DOCS = ROOT / "ops" / "deploy", ROOT / "ops" / "docs"
RULES_FILE = DEPLOY / "prometheus-alerts.yaml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
DASHBOARDS = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (DEPLOY / "grafana").glob("*.json")}
EXPRESSIONS = {
    **{f"alert {name}": rule["expr"] for name, rule in ALERTS.items()},
    **{
        f"{name}: {panel['title']}": target["expr"]
        for name, board in DASHBOARDS.items()
        for panel in board["panels"]
        for target in panel["targets"]
    },
}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing")


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_leads_to_a_section_of_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("high", "medium", "low")
    assert len(rule["annotations"]["summary"]) > 10
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    text = (DOCS / page).read_text(encoding="utf-8")
    assert anchor in {
        re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in re.findall(r"^#+ (.+)$", text, re.M)
    }
    assert f"| `{name}` | {rule['labels']['severity']} |" in text


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_names_metrics_that_exist(name: str) -> None:
    reference = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(logferry_\w+)`", reference, re.M))
    used = {re.sub(r"_bucket$", "", metric) for metric in re.findall(r"\blogferry_\w+", EXPRESSIONS[name])}
    assert used <= known
    assert used or re.search(r"\b(up|job_\w+|node_\w+|probe_\w+|ALERTS)\b", EXPRESSIONS[name])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_for_grafana(name: str) -> None:
    board = DASHBOARDS[name]
    assert board["uid"] == f"logferry-{name}"
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}


def test_there_is_a_dashboard_of_each_part() -> None:
    assert set(DASHBOARDS) == {"overview", "gateway", "mirror", "deliver", "loader", "push", "keeper"}


# ---- by promtool -------------------------------------------------------------------------------------------------

# Series of two hours by the minute: (name, values that raise the alert, values that do not).
GATEWAY_LANES = [
    f'logferry_lane_state{{dc="{dc}", lane="{n}", state="serving"}}' for dc in ("dc1", "dc2") for n in range(12)
]
MIRROR_LANES = [f'logferry_mirror_lane_open{{target_dc="{dc}", lane="{n}"}}' for dc in ("dc1", "dc2") for n in range(6)]
DELIVERY_LANES = [f'logferry_delivery_lane_open{{dc="dc1", lane="{n}"}}' for n in range(8)]
SUBSCRIPTION = '{dc="dc1", subscription="shop"}'
JOBS = [f'job_end_seconds{{name="{name}"}}' for name in ("load", "audit-dc1", "audit-dc2")]
HOSTS = [f'up{{job="logferry-push", dc="dc1", host="web{n}"}}' for n in range(150)]
GROWING, FLAT = "0+600x180", "5x180"
Series = dict[str, str]


def same(names: list[str], values: str) -> Series:
    return dict.fromkeys(names, values)


def requests(failed: int) -> Series:
    """A hundred requests a minute, of which some fail."""
    return {
        'logferry_requests_total{dc="dc1", status="503"}': f"0+{failed}x180",
        'logferry_requests_total{dc="dc1", status="200"}': f"0+{100 - failed}x180",
    }


def quantile(metric: str, slow: bool) -> Series:
    """A histogram whose observations all lie below 0.01 s, or all above 4 s."""
    labels = 'dc="dc1", instance="a"'
    return {
        f'{metric}_bucket{{{labels}, le="0.01"}}': "0x180" if slow else GROWING,
        f'{metric}_bucket{{{labels}, le="4"}}': "0x180" if slow else GROWING,
        f'{metric}_bucket{{{labels}, le="+Inf"}}': GROWING,
    }


def one(series: str, raised: str, cleared: str) -> tuple[Series, Series]:
    return {series: raised}, {series: cleared}


CASES: dict[str, tuple[Series, Series]] = {
    "WorkerDown": one('up{job="logferry-gateway"}', "0x180", "1x180"),
    "LanesNotServed": (same(GATEWAY_LANES[:-1], "1x180"), same(GATEWAY_LANES, "1x180")),
    "ManyServerErrors": (requests(2), requests(0)),
    "NothingWritten": one('logferry_chunk_bytes_total{dc="dc1", result="written"}', FLAT, GROWING),
    "SlowCommits": (quantile("logferry_transaction_seconds", True), quantile("logferry_transaction_seconds", False)),
    "LanesFailRepeatedly": one('logferry_lane_openings_total{dc="dc1", reason="failure"}', "0+1x180", FLAT),
    "LanesAreFenced": one('logferry_lane_fences_total{dc="dc1"}', "0+1x180", FLAT),
    "UnknownOutcomes": one('logferry_transactions_total{dc="dc1", result="unknown"}', "0+1x180", FLAT),
    "AbortedTransactions": one('logferry_transactions_total{dc="dc1", result="aborted"}', GROWING, FLAT),
    "TransactionStaysOpen": one("logferry_oldest_open_transaction_seconds", "61x180", "0x180"),
    "ClockWrong": one("logferry_clock_ahead_seconds", "-6x180", "-4x180"),
    "EventLoopLate": (
        quantile("logferry_event_loop_lag_seconds", True),
        quantile("logferry_event_loop_lag_seconds", False),
    ),
    "RequestMemory": one("logferry_in_flight_bytes", "220000000x180", "1000x180"),
    "LaneFilling": one("logferry_lane_queued_bytes", "60000000x180", "1000x180"),
    "ManySources": one("logferry_lane_sources", "900000x180", "700000x180"),
    "ConnectionsRefused": one("logferry_connections_refused_total", "0+1x180", FLAT),
    "QuotaReached": one('logferry_throttled_total{dc="dc1", scope="token", name="a"}', "0+1x180", FLAT),
    "TokenExpires": one(
        'logferry_token_expires_timestamp_seconds{dc="dc1", token="a"}', "1000000x180", "9000000x180"
    ),
    "TokensRefused": one('logferry_requests_total{dc="dc1", status="403"}', "0+1x180", FLAT),
    "ChunksRefused": one('logferry_chunks_total{dc="dc1", topic="t", result="gap"}', "0+1x180", FLAT),
    "MirrorWorkerDown": one('up{job="logferry-mirror"}', "0x180", "1x180"),
    "MirrorLanesWithoutOwner": (same(MIRROR_LANES[:-1], "1x180"), same(MIRROR_LANES, "1x180")),
    "MirrorPartitionsStopped": one('logferry_mirror_stopped_partitions{reason="write-rejected"}', "1x180", "0x180"),
    "MirrorSourceDeleted": one('logferry_mirror_stopped_partitions{reason="source-deleted"}', "1x180", "0x180"),
    "MirrorBehind": one("logferry_mirror_lag_seconds", "400x180", "3x180"),
    "MirrorBacklog": one("logferry_mirror_lag_records", "2000000x180", "3x180"),
    "MirrorTransactionsFail": one('logferry_mirror_transactions_total{result="aborted"}', GROWING, FLAT),
    "DeliverWorkerDown": one('up{job="logferry-deliver"}', "0x180", "1x180"),
    "DeliveryLanesNotServed": (same(DELIVERY_LANES[:-1], "1x180"), same(DELIVERY_LANES, "1x180")),
    "DeliveryStopped": one(f"logferry_delivery_stopped_partitions{SUBSCRIPTION}", "1x180", "0x180"),
    "DeliveryStalled": one(f"logferry_delivery_stalled_seconds{SUBSCRIPTION}", "0+60x180", "500x180"),
    "DeliveryRetries": one(f"logferry_delivery_retrying_partitions{SUBSCRIPTION}", "1x180", "0x180"),
    "DeliveryFallsBehind": one(f"logferry_delivery_lag_records{SUBSCRIPTION}", "200000+100x180", "2000000-100x180"),
    "DeliveryMemory": one("logferry_delivery_held_bytes", "120000000x180", "1000x180"),
    "PushNoDelivery": one("logferry_push_away_seconds", "301x180", "0x180"),
    "PushBehind": one("logferry_push_behind_seconds", "700x180", "0x180"),
    "PushFilesInTrouble": one("logferry_push_files_unreadable", "1x180", "0x180"),
    "PushInOtherDataCentre": (
        {'logferry_push_data_centre{dc="dc1", name="dc2"}': "1x180"},
        {'logferry_push_data_centre{dc="dc1", name="dc1"}': "1x180"},
    ),
    "PushClientDown": one('up{job="logferry-push", dc="dc1"}', "0x180", "1x180"),
    "PushHostsMissing": (same(HOSTS[:-1], "1x180"), same(HOSTS, "1x180")),
    "HostDiskFull": (
        {'node_filesystem_avail_bytes{job="node-push", mountpoint="/var"}': "19x180",
         'node_filesystem_size_bytes{job="node-push", mountpoint="/var"}': "100x180"},
        {'node_filesystem_avail_bytes{job="node-push", mountpoint="/var"}': "21x180",
         'node_filesystem_size_bytes{job="node-push", mountpoint="/var"}': "100x180"},
    ),
    "KeeperDown": one('up{job="logferry-keeper", dc="dc1"}', "0x180", "1x180"),
    "KeeperDoesNotLook": one('logferry_keeper_look_timestamp_seconds{dc="dc1"}', "0x180", "0+60x180"),
    "KeeperDoesNotAct": one('logferry_keeper_acting{dc="dc1"}', "0x180", "1x180"),
    "KafkaNeedsOperator": one('logferry_keeper_findings{dc="dc1", kind="dir-failed"}', "1x180", "0x180"),
    "KafkaDirFills": one('logferry_keeper_dir_full_seconds{dc="dc1", broker="1", dir="/a"}', "9000x180", "99000x180"),
    "RecordsDeleted": one('logferry_keeper_deleted_bytes_total{dc="dc1"}', GROWING, FLAT),
    "KeeperActsFail": one('logferry_keeper_records_total{dc="dc1", kind="failed"}', "0+1x180", FLAT),
    "JobNeedsOperator": one('job_exit_status{name="load"}', "1x180", "3x180"),
    "StatusReportsProblem": one('job_exit_status{name="status-mirror-dc2"}', "1x180", "0x180"),
    "LoadDoesNotSucceed": one('job_success_seconds{name="load"}', "0x180", "0+60x180"),
    "TopicNotLoaded": one("logferry_load_complete_timestamp_seconds", "0x180", "0+60x180"),
    "AuditDoesNotSucceed": one('job_success_seconds{name="audit-dc1"}', "-9000x180", "0+60x180"),
    "JobsMissing": (same(JOBS[:-1], "0+60x180"), same(JOBS, "0+60x180")),
    "LoadFollowDown": one(
        'node_systemd_unit_state{name="logferry-load-follow.service", state="active"}', "0x180", "1x180"
    ),
    "CertificateExpires": one('probe_ssl_earliest_cert_expiry{job="logferry-tls"}', "1000000x180", "9000000x180"),
    "ServerDiskFull": (
        {'node_filesystem_avail_bytes{job="node", mountpoint="/warehouse"}': "19x180",
         'node_filesystem_size_bytes{job="node", mountpoint="/warehouse"}': "100x180"},
        {'node_filesystem_avail_bytes{job="node", mountpoint="/warehouse"}': "21x180",
         'node_filesystem_size_bytes{job="node", mountpoint="/warehouse"}': "100x180"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The alerts that ``promtool test rules`` sees, 100 minutes into the bad series, and into the good ones."""
    folder, found = tmp_path_factory.mktemp("promtool"), []
    for kind in (0, 1):
        tests = [
            {
                "interval": "1m",
                "input_series": [{"series": metric, "values": values} for metric, values in case[kind].items()],
                "alert_rule_test": [{"eval_time": "100m", "alertname": name, "exp_alerts": []}],
            }
            for name, case in CASES.items()
        ]
        file = folder / f"{kind}.yaml"
        given = {"rule_files": [str(RULES_FILE)], "evaluation_interval": "5m", "tests": tests}
        file.write_text(yaml.safe_dump(given), encoding="utf-8")
        command = ["promtool", "test", "rules", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        said = done.stdout + done.stderr
        found.append(set(re.findall(r"alertname: (\w+)", said)))
        assert bool(found[-1]) is (done.returncode != 0), said
    return found[0], found[1]


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES_FILE)], check=True, capture_output=True, timeout=60)


@needs_promtool
@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_raised_and_cleared(name: str, fired: tuple[set[str], set[str]]) -> None:
    raised, cleared = fired
    assert name in raised
    assert name not in cleared
