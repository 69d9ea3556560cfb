"""Many topics into many tables by one entry of the configuration."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import Config, TableJob
from logferry.loaders.location import Location
from logferry.loaders.runs.table_run import LoadEvent
from logferry.loaders.runs.table_runner import Reporter, TableRunner, apart, expand_template
from rich.console import Console


def test_a_table_of_each_topic_whatever_its_data_centre():
    template = TableJob(path=Location.of(Path("/t/{topic}")), topics=["*.*"], max_records=7)
    found = expand_template(template, ["dc2.nginx", "dc1.nginx", "dc1.app.web"])
    assert {str(job.path): (job.topics, job.max_records) for job in found} == {
        "/t/app.web": (["dc1.app.web"], 7),
        "/t/nginx": (["dc1.nginx", "dc2.nginx"], 7),
    }
    assert apart(found, lambda _: False) == (found, {})


def test_of_tables_that_would_share_a_folder_one_is_loaded():
    template = TableJob(path=Location.of(Path("/t/{topic}")), topics=["*"])
    jobs = expand_template(template, ["dc1.a", "dc1.a_ledger", "dc1.b"])
    kept, refused = apart(jobs, lambda _: False)
    assert [str(job.path) for job in kept] == ["/t/a", "/t/b"]
    assert {str(path): str(why) for path, why in refused.items()} == {
        "/t/a_ledger": "/t/a_ledger would belong to two tables, /t/a and /t/a_ledger"
    }
    kept, refused = apart(jobs, lambda job: job.path.name == "a_ledger")
    assert [str(job.path) for job in kept] == ["/t/a_ledger", "/t/b"], "a new topic does not stop a table"
    assert list(refused) == [Location.of("/t/a")]


def test_a_topic_cannot_lead_out_of_the_folder():
    template = TableJob(path=Location.of(Path("/t/{topic}")), topics=["*"])
    assert [str(job.path) for job in expand_template(template, ["dc1...", "dc1..", "dc1.a", "dc1...."])] == [
        "/t/...",
        "/t/a",
    ]


def test_the_other_tables_are_loaded_and_the_refused_one_is_reported(tmp_path: Path):
    loaded: list[str] = []

    class Kafka:
        def names(self, _: Any) -> list[str]:
            return ["dc1.a", "dc1.a_ledger", "dc1...", "dc1.b"]

    class FakeLoader:
        kafka, spark = Kafka(), SimpleNamespace(sparkContext=SimpleNamespace(setLocalProperty=lambda *_: None))

    def work(_: Loader, job: TableJob) -> Iterator[LoadEvent]:
        loaded.append(job.path.name)
        return iter(())

    raw = {"kafka": {"bootstrap_servers": "k:1"}, "tables": [{"path": tmp_path / "{topic}", "topics": ["*"]}]}
    reporter = Reporter(Console(file=io.StringIO()), as_json=True)
    loader: Any = FakeLoader()
    TableRunner(loader, Config.model_validate(raw), reporter, threading.Event()).each(work)
    assert sorted(loaded) == ["a", "b"]
    errors = {report.path.name: str(report.error) for report in reporter.tables if report.error}
    assert errors.keys() == {"a_ledger", "{topic}"}
    assert "names no folder" in errors["{topic}"]
    assert reporter.finish() == 2
