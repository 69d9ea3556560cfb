"""The metrics of loads as Prometheus and node_exporter get them from the command."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from logferry.loaders.location import Location
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports
from prometheus_client.parser import text_string_to_metric_families

from tests.support.loader import Topic, chunks_of
from tests.support.loader_process import LoaderProcess, run_module, wait_for

pytestmark = pytest.mark.spark

SEGMENTS = """
[tables.parser]
format = "json"
columns = { at = "string" }
event_time = { column = "at", formats = ["iso"] }
[tables.segments]
"""


def numbers(text: str) -> dict[tuple[str, ...], float]:
    """Without prefix and table."""
    return {
        (s.name.removeprefix("logferry_load_"), *(v for k, v in sorted(s.labels.items()) if k != "table")): s.value
        for metric in text_string_to_metric_families(text)
        for s in metric.samples
    }


@pytest.mark.long
async def test_a_load_that_follows_is_scraped(topic: Topic, tmp_path: Path):
    await topic.create()
    await topic.write(chunks_of("a", b'{"at": "2026-11-20T10:00:00Z"}\nnot json\n'))
    (port,) = free_ports(1)
    options = ["--follow", "--metrics-listen", f"127.0.0.1:{port}"]
    table = Location.of(tmp_path / "t")
    loader = LoaderProcess(topic.bootstrap, table, topic.name, *options, scratch=tmp_path, settings=SEGMENTS)

    def scraped() -> dict[tuple[str, ...], float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return numbers(answer.read().decode())
        except OSError:
            return {}

    try:
        wait_for(lambda: scraped().get(("complete_timestamp_seconds", topic.name), 0) > 0, "a scrape", loader)
        found = scraped()
        assert (found["rows_total",], found["quarantined_rows_total",]) == (1, 1)
        assert found["lag_records", topic.name] == 0
        wait_for(lambda: scraped().get(("segments", "waiting")) == 1, "a look at the segments", loader)
        await topic.delete()
        wait_for(lambda: ("stopped_topics", "removed", topic.name) in scraped(), "the stop", loader)
        loader.process.terminate()
        assert loader.finish()[0] == 1
    finally:
        loader.process.kill()


async def test_a_load_leaves_a_file_and_the_next_one_continues_it(kafka: KafkaCluster, topic: Topic, tmp_path: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n2\n"))
    file = tmp_path / "load.prom"
    job = ["--table", str(tmp_path / "t"), "--topics", topic.name, "--master", "local[1]", "--metrics-file", str(file)]
    assert run_module([*job, "--bootstrap", kafka.bootstrap]).returncode == 0
    first = numbers(file.read_text())
    assert (first["rows_total",], first["exit_status",], first["lag_records", topic.name]) == (2, 0, 0)
    away = run_module([*job, "--bootstrap", f"127.0.0.1:{free_ports(1)[0]}"])
    assert away.returncode == 3, away.stdout
    second = numbers(file.read_text())
    assert (second["rows_total",], second["exit_status",]) == (2, 3)
    assert second["errors_total", "kafka_unavailable"] == 1
    key = ("complete_timestamp_seconds", topic.name)
    assert second[key] == first[key]
