"""Where `logferry query` and `load` learn how the store of a table is accessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.loaders.location import S3Access
from logferry.ops.cli.problems import UsageError
from logferry.ops.commands.load import _stores
from logferry.ops.commands.query import _location


def test_query_takes_the_access_of_a_loaders_configuration(tmp_path: Path) -> None:
    file = tmp_path / "load.conf"
    file.write_text(
        '[kafka]\nbootstrap_servers = "kafka1:9092"\n[s3]\nendpoint = "http://127.0.0.1:9000"\n'
        f'access_key_file = "{tmp_path / "key"}"\n'
    )
    access = _location("s3://bucket/logs", str(file)).access
    assert isinstance(access, S3Access)
    assert (access.endpoint, access.access_key_file) == ("http://127.0.0.1:9000", tmp_path / "key")
    assert _location("s3://bucket/logs", None).access == S3Access()


@pytest.mark.parametrize("text", ["[s3]\nendpoint = 'minio'\n", "[s3]\nkey = 'x'\n", "[s3"])
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "load.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"--stores: .*load\.toml"):
        _location("s3://bucket/logs", str(file))


@pytest.mark.parametrize("arguments", [["--config", "FILE"], ["--config=FILE"]])
def test_the_jars_of_a_store_are_fetched_whatever_the_name_of_the_configuration(
    tmp_path: Path, arguments: list[str]
) -> None:
    file = tmp_path / "load.conf"
    file.write_text('[[tables]]\npath = "s3://bucket/logs"\n')
    named = [argument.replace("FILE", str(file)) for argument in arguments]
    assert _stores(named) == {"s3": True, "gs": False, "azure": False}
