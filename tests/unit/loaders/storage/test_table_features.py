"""Tables with features of Delta that the loader cannot keep: refused by name, finally, before a row is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake.exceptions import CommitFailedError
from logferry.loaders.errors import LedgerBroken, Transient, UnsupportedFeature
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.commit import DataFiles, commit_files, commit_once, commit_rows
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import unsupported_features
from logferry.loaders.storage.retention import RETAIN, compact_table
from logferry.loaders.storage.tables import read_state

from tests.support.loaded_table import MAIN, NOON, LoadedTable

# Name → reader and writer features, properties, metadata of the column ``text``.
CASES: dict[str, tuple[list[str], list[str], dict[str, str], dict[str, Any]]] = {
    "deletionVectors": (["deletionVectors"], [], {"delta.enableDeletionVectors": "true"}, {}),
    "checkConstraints": ([], ["checkConstraints"], {"delta.constraints.positive": "seqno > 0"}, {}),
    "rowTracking": ([], ["rowTracking", "domainMetadata"], {"delta.enableRowTracking": "true"}, {}),
    "clustering": ([], ["clustering", "domainMetadata"], {}, {}),
    "inCommitTimestamp": ([], ["inCommitTimestamp"], {"delta.enableInCommitTimestamps": "true"}, {}),
    "generatedColumns": ([], ["generatedColumns"], {}, {"delta.generationExpression": "upper(source_id)"}),
    "columnMapping": (
        ["columnMapping"],
        [],
        {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "99"},
        {},
    ),
    "noSuchFeature": (["noSuchFeature"], [], {}, {}),
}


def with_feature(path: Path, case: str) -> None:
    """As Spark's ALTER TABLE does, by a commit of its own."""
    readers, writers, properties, column = CASES[case]
    log = path / "_delta_log"
    actions = [json.loads(line) for file in sorted(log.glob("*.json")) for line in file.read_text().splitlines()]
    metadata = [action["metaData"] for action in actions if "metaData" in action][-1]
    metadata["configuration"] |= properties
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"]):
        if case == "columnMapping":
            field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
        elif field["name"] == "text":
            field["metadata"] = column
    metadata["schemaString"] = json.dumps(schema)
    protocol: dict[str, Any] = {"minReaderVersion": 3 if readers else 1, "minWriterVersion": 7}
    protocol |= {"readerFeatures": readers} if readers else {}
    protocol["writerFeatures"] = [*readers, *writers]
    number = int(max(file.stem for file in log.glob("*.json"))) + 1
    lines = [json.dumps({"protocol": protocol}), json.dumps({"metaData": metadata})]
    (log / f"{number:020}.json").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("case", CASES)
def test_a_table_with_it_is_refused_by_its_name(case: str, tmp_path: Path):
    logs = LoadedTable(tmp_path)
    logs.load(NOON, NOON)
    commits = len(list(Path(logs.paths.main).glob("_delta_log/*.json")))
    with_feature(Path(logs.paths.main), case)
    with pytest.raises(UnsupportedFeature, match=case):
        commit_rows(MAIN.empty_table(), logs.paths.main, 1, "run")
    with pytest.raises(UnsupportedFeature, match=case):
        read_state(TablePaths.of(logs.paths.main))
    with pytest.raises(UnsupportedFeature, match=case):
        compact_table(logs.paths.main, 0, RETAIN)
    assert len(list(Path(logs.paths.main).glob("_delta_log/*.json"))) == commits + 1
    assert not issubclass(UnsupportedFeature, Transient), "--follow ends"


def test_what_is_not_used_does_no_harm():
    properties = {"delta.columnMapping.mode": "none", "delta.enableDeletionVectors": "false", "delta.appendOnly": "x"}
    assert unsupported_features(["checkConstraints", "generatedColumns"], properties, [("a", {"comment": "b"})]) == []
    assert unsupported_features([], {"delta.constraints.a": "b > 0"}, []) == ["checkConstraints (a: b > 0)"]


def test_a_commit_that_is_refused_without_a_race_is_final(tmp_path: Path):
    logs = LoadedTable(tmp_path)
    logs.load(NOON)

    def write(*_: Any) -> None:
        raise CommitFailedError("the table wants something")

    with pytest.raises(UnsupportedFeature, match="the table wants something"):
        commit_once(write, logs.paths.main, 99, "run", 0)
    assert open_table(logs.paths.main) is not None


def test_no_batch_is_committed_on_top_of_one_that_was_overwritten(tmp_path: Path):
    """Spark's commit to a mounted folder looks for the file, and then renames: it may replace a commit in between."""
    logs = LoadedTable(tmp_path)
    logs.load(NOON)
    logs.load(NOON)
    newest = max(Path(logs.paths.main).glob("_delta_log/*.json"))
    newest.write_text(json.dumps({"commitInfo": {"timestamp": 0, "operation": "OPTIMIZE"}}) + "\n")
    commits = len(list(Path(logs.paths.main).glob("_delta_log/*.json")))
    with pytest.raises(LedgerBroken, match="holds batch 0 and no longer 1: another program has replaced a commit"):
        commit_files(DataFiles(logs.paths.main), logs.paths.main, 2, "run", after=1)
    assert len(list(Path(logs.paths.main).glob("_delta_log/*.json"))) == commits
    assert commit_files(DataFiles(logs.paths.main), logs.paths.main, 1, "run", after=0).ours
    assert commit_files(DataFiles(logs.paths.main), logs.paths.main, 2, "run", after=1).ours
