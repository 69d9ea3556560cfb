"""The SQL of `logferry query` reads the table alone, whoever wrote the statement."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.ops.cli.problems import UsageError
from logferry.ops.commands.query import main

from tests.support.loaded_table import NOON, LoadedTable


def test_the_table_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logs = LoadedTable(tmp_path)
    logs.load(NOON, NOON)
    (tmp_path / "secret.csv").write_text("a\n1\n")
    options = ["--table", str(logs.paths.main), "--no-tail", "--format", "csv"]
    assert main(['SELECT count(*) AS n FROM logs WHERE "offset" < 9', *options]) == 0
    assert capsys.readouterr().out == "n\n2\n"
    secret = tmp_path / "secret.csv"
    for statement in (
        f"SELECT * FROM read_csv('{secret}')",
        f"SELECT * FROM '{secret}'",
        f"COPY logs TO '{tmp_path / 'out.csv'}'",
        f"ATTACH '{tmp_path / 'new.db'}'",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SELECT * FROM tail",
    ):
        with pytest.raises(UsageError):
            main([statement, *options])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["secret.csv"]
    assert capsys.readouterr().out == ""
