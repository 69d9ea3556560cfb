"""Many topics into many tables by one entry of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ConfigError
from logferry.loaders.jobs import check_apart, expand


def test_a_table_of_each_topic_whatever_its_data_centre():
    template = TableJob(path=Path("/t/{topic}"), topics=["*.*"], max_records=7)
    found = expand(template, ["dc2.nginx", "dc1.nginx", "dc1.app.web"])
    assert {str(job.path): (job.topics, job.max_records) for job in found} == {
        "/t/app.web": (["dc1.app.web"], 7),
        "/t/nginx": (["dc1.nginx", "dc2.nginx"], 7),
    }
    check_apart(found)


def test_tables_that_would_share_a_folder():
    template = TableJob(path=Path("/t/{topic}"), topics=["*"])
    with pytest.raises(ConfigError, match="/t/a_ledger would belong to two tables, /t/a and /t/a_ledger"):
        check_apart(expand(template, ["dc1.a", "dc1.a_ledger"]))
