"""The metrics of a run as Prometheus gets them: scraped from the endpoint, and read from the file."""

from __future__ import annotations

import io
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from logferry.loaders.batches.execute import BatchDone
from logferry.loaders.errors import KafkaUnavailable, LoaderConfigError, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import PartitionOffsets, Range, StoppedTopic, TopicOffsets, changed
from logferry.loaders.runs.metrics import LoadMetrics, observed, stop_kind
from logferry.loaders.runs.table_run import Backlog, LoadEvent, RunEnded
from logferry.loaders.runs.table_runner import Reporter
from logferry.loaders.storage.commit import LOST_RACES
from logferry.ops.stack.processes import Child, free_ports, get, stop_all
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

TABLE = Location.of(Path("/data/nginx"))
A, B = (Range(f"dc1.{name}", 0, "id", 0, 10) for name in "ab")
Series = dict[tuple[str, ...], float]


def batch(number: int, *ranges: Range, ours: bool = True) -> BatchDone:
    return BatchDone(number, ours, ranges, 9, 1000, 90, 3, 2.0)


def series(text: str) -> Series:
    """By name without prefix, and the values of the labels after the table."""
    found = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            assert sample.labels.pop("table", str(TABLE)) == str(TABLE)
            labels = [value for _, value in sorted(sample.labels.items(), reverse=True)]
            found[sample.name.removeprefix("logferry_load_"), *labels] = sample.value
    return found


class Runs:
    """Loads that report to the metrics."""

    def __init__(self, metrics: LoadMetrics) -> None:
        self.metrics = metrics
        self.reporter = Reporter(Console(file=io.StringIO()), as_json=True)
        self.reporter.metrics = metrics
        self.report = self.reporter.begin(TABLE)

    def load(self, *events: LoadEvent, error: Exception | None = None) -> Series:
        def run() -> Iterator[LoadEvent]:
            yield from events
            if error:
                raise error

        self.reporter.follow(self.report, run())
        return self.series()

    def series(self) -> Series:
        return series(generate_latest(self.metrics.registry).decode())


@pytest.fixture
def runs() -> Runs:
    return Runs(LoadMetrics())


def test_what_a_load_does_is_counted(runs: Runs):
    found = runs.load(Backlog(20, (A, B)), batch(0, A), batch(1, B._replace(end=4), ours=False))
    assert found["rows_total",] == 90, "those of another loader are its own"
    assert (found["quarantined_rows_total",], found["bytes_total",], found["batches_total",]) == (3, 2000, 2)
    assert (found["batch_seconds_total",], found["last_batch_seconds",]) == (4, 2)
    assert (found["lag_records", A.topic], found["lag_records", B.topic]) == (0, 6)
    assert runs.load(Backlog(7, (A._replace(start=10, end=11), B._replace(start=4))))["lag_records", B.topic] == 6


def test_the_time_of_a_complete_load_stays_where_a_later_one_fails(runs: Runs):
    assert ("complete_timestamp_seconds", A.topic) not in runs.load(error=KafkaUnavailable("away"))
    first = runs.load(Backlog(10, (A,)), batch(0, A))["complete_timestamp_seconds", A.topic]
    failed = runs.load(error=KafkaUnavailable("away"))
    cut = runs.load(Backlog(10, (A,)), RunEnded("limit"))
    assert failed["errors_total", "kafka_unavailable"] == 2
    assert failed["complete_timestamp_seconds", A.topic] == cut["complete_timestamp_seconds", A.topic] == first
    assert runs.load(Backlog(0, (A,)))["complete_timestamp_seconds", A.topic] > first


def test_a_stopped_topic_keeps_the_time_of_its_last_load_and_has_no_lag(runs: Runs):
    first = runs.load(Backlog(0, (A, B)))
    found = runs.load(Backlog(0, (A, B)), StoppedTopic(B.topic, f"{B.topic} no longer exists"))
    assert found["stopped_topics", B.topic, "removed"] == 1
    assert ("lag_records", B.topic) not in found
    name = "complete_timestamp_seconds"
    assert found[name, B.topic] == first[name, B.topic]
    assert found[name, A.topic] > first[name, A.topic]
    cut = runs.load(Backlog(0, (A, B)), RunEnded("limit"))
    assert cut["stopped_topics", B.topic, "removed"] == 1, "this load may not have looked at it"
    assert not [key for key in runs.load(Backlog(0, (A, B))) if key[0] == "stopped_topics"]


def test_commits_that_lost_a_race_are_counted_for_their_table(runs: Runs):
    LOST_RACES.update([f"{TABLE}_quarantine", str(TABLE), "/data/other"])
    assert runs.load(Backlog(0))["commit_races_total",] == 2
    assert LOST_RACES.pop("/data/other") == 1


def view(earliest: int = 0, stable: int = 10, topic_id: str = "id", *, partitions: int = 1) -> TopicOffsets:
    return TopicOffsets(A.topic, topic_id, dict.fromkeys(range(partitions), PartitionOffsets(earliest, stable)))


STOPS = {
    "removed": ([A], None),
    "missing": ([], None),
    "recreated": ([A], view(topic_id="other")),
    "partition_removed": ([A], view(partitions=0)),
    "records_removed": ([A], view(earliest=12, stable=20)),
    "truncated": ([A], view(stable=9)),
}


@pytest.mark.parametrize("kind", STOPS)
def test_each_reason_has_a_label(kind: str):
    reason = changed(A.topic, *STOPS[kind])
    assert reason is not None
    assert stop_kind(reason) == kind


def test_a_new_partition_without_its_first_records_has_one_too():
    assert stop_kind(str(changed(A.topic, [A], view(1, partitions=2)))) == "records_removed"


def test_it_is_scraped_while_the_run_lasts():
    (port,) = free_ports(1)
    with observed(f"127.0.0.1:{port}", None) as metrics:
        assert metrics is not None
        found = Runs(metrics).load(Backlog(10, (A,)), batch(0, A))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert series(answer.read().decode()) == found
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", ":9300", "192.0.2.1:1", "127.0.0.1:99999"])
def test_an_address_that_cannot_be_used(listen: str):
    with pytest.raises(LoaderConfigError, match="metrics_listen"), observed(listen, None):
        pass


def test_files_of_several_runs_are_one_series(tmp_path: Path):
    file = tmp_path / "load.prom"
    for status in (0, 3):
        with observed(None, file) as metrics:
            assert metrics is not None
            error = KafkaUnavailable("away") if status else None
            done: list[LoadEvent] = [] if status else [Backlog(10, (A,)), batch(0, A)]
            Runs(metrics).load(*done, error=error)
            metrics.exit_status = status
        found = series(file.read_text())
        assert (found["rows_total",], found["exit_status",]) == (90, status)
        assert found["end_timestamp_seconds",] >= found["complete_timestamp_seconds", A.topic]
    assert found["errors_total", "kafka_unavailable"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["load.prom"]


def test_a_run_that_cannot_start_keeps_the_numbers_of_the_one_before(tmp_path: Path):
    file = tmp_path / "load.prom"
    file.write_text("no metrics at all {")
    with observed(None, file) as metrics:
        assert metrics is not None
        first = Runs(metrics).load(Backlog(10, (A,)), batch(0, A))
    with pytest.raises(KafkaUnavailable), observed(None, file):
        raise KafkaUnavailable("away")
    found = series(file.read_text())
    assert found["exit_status",] == 3
    for key in [("rows_total",), ("complete_timestamp_seconds", A.topic)]:
        assert found[key] == first[key]


PUSHGATEWAY = shutil.which("prometheus-pushgateway") or shutil.which("pushgateway")


@pytest.fixture
def pushgateway(tmp_path: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [str(PUSHGATEWAY), f"--web.listen-address=127.0.0.1:{port}", f"--persistence.file={tmp_path}/stored"]
    url, child = f"http://127.0.0.1:{port}", Child("pushgateway", command, tmp_path / "pushgateway.log")
    child.start()
    try:
        deadline = time.monotonic() + 30
        while get(url, "/-/ready")[0] != 200:
            assert time.monotonic() < deadline, child.log_tail()
            time.sleep(0.02)
        yield url
    finally:
        stop_all([child], 10)


@pytest.mark.skipif(PUSHGATEWAY is None, reason="prometheus-pushgateway (Debian's package) is not installed")
def test_pushes_of_several_runs_are_one_series_and_groups_are_apart(pushgateway: str):
    for group, status in (("", 0), ("", 3), ("/metrics/job/other/instance/dc%2D2", 0)):
        with observed(None, None, pushgateway + group) as metrics:
            assert metrics is not None
            error = KafkaUnavailable("away") if status else None
            done: list[LoadEvent] = [] if status else [Backlog(10, (A,)), batch(0, A)]
            Runs(metrics).load(*done, error=error)
            metrics.exit_status = status
    found: dict[tuple[str, str], Series] = {}
    for metric in text_string_to_metric_families(get(pushgateway, "/metrics")[1].decode()):
        for sample in metric.samples:
            if sample.name.startswith("logferry_load_"):
                of = found.setdefault((sample.labels["job"], sample.labels["instance"]), {})
                labels = {name: sample.labels[name] for name in ("topic", "kind") if name in sample.labels}
                of[sample.name.removeprefix("logferry_load_"), *labels.values()] = sample.value
    first, other = found["logferry-load", ""], found["other", "dc-2"]
    assert (first["rows_total",], first["exit_status",], first["errors_total", "kafka_unavailable"]) == (90, 3, 1)
    assert first["end_timestamp_seconds",] >= first["complete_timestamp_seconds", A.topic]
    assert (other["rows_total",], other["exit_status",]) == (90, 0)


def test_a_pushgateway_that_does_not_answer_is_named_and_the_file_is_written_before(tmp_path: Path):
    file, url = tmp_path / "load.prom", f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(StorageUnavailable, match=f"pushed to {url}"), observed(None, file, url) as metrics:
        Runs(cast(LoadMetrics, metrics)).load(Backlog(10, (A,)), batch(0, A))
    assert series(file.read_text())["rows_total",] == 90


@pytest.mark.parametrize(
    "url",
    [
        *("pushgateway:9091", "ftp://pushgateway", "http://", "http://user:secret@pushgateway", "http://p?job=a"),
        *("http://p/job/a", "http://p/metrics/job", "http://p/metrics/instance/a", "http://p/metrics/job/a/instance"),
    ],
)
def test_a_pushgateway_that_cannot_be_one(url: str):
    with pytest.raises(LoaderConfigError, match="metrics_push") as refused, observed(None, None, url):
        pass
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["load.txt", "missing/load.prom"])
def test_a_file_that_node_exporter_would_not_read(name: str, tmp_path: Path):
    with pytest.raises(LoaderConfigError, match="metrics_file"), observed(None, tmp_path / name):
        pass
