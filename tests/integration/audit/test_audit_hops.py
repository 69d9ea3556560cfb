"""One command over the whole chain: files, the log, its copy in another data centre, the table; damage at each hop."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import DC, Plan, World


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """The Kafka of dc2."""
    with KafkaCluster("far", tmp_path_factory.mktemp("far")) as cluster:
        yield cluster


class Chain:
    """Files of two sources, their chunks in both data centres, and a table."""

    def __init__(self, near: str, far: str, name: str, folder: Path) -> None:
        now = int(time.time() * 1000)
        self.here, self.there = World(near, name, at_ms=now), World(far, name, at_ms=now)
        self.folder, self.table, self.plan = folder, folder / "t", Plan([], {})
        self.files = {f"host:{folder}/{name}.log#1": folder / f"{name}.log" for name in ("web1", "api1")}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def begin(self) -> None:
        await self.here.create()
        await self.there.create()
        self.plan = self.here.plan(self.files, chunks=6)
        for index, record in enumerate(self.plan.records):
            path = self.files[record.source_id]
            with path.open("ab") as file:
                file.write(record.chunk.data)
            chunk = record.chunk._replace(attributes={"path": str(path)})
            self.plan.records[index] = record._replace(chunk=chunk)
        await self.write(self.plan.records[:8])
        # Its own transaction, so that offsets differ.
        await self.mirror(self.plan.records[:8])
        self.here.load().write(self.table)
        state_file, files = self.folder / "audit.state", self.folder / "*.log"
        self.config = self.folder / "audit.toml"
        self.config.write_text(
            f'dc = "{DC}"\nprefix = "{self.here.prefix}"\ntopics = ["{self.here.name}"]\nstate_file = "{state_file}"\n'
            f'files = ["{files}"]\ntables = ["{self.table}"]\n[kafka]\nbootstrap_servers = "{self.here.bootstrap}"\n'
            f'[[copies]]\ndc = "dc2"\n[copies.kafka]\nbootstrap_servers = "{self.there.bootstrap}"\n'
        )

    async def write(self, records: list[Any]) -> None:
        plan = Plan(records, {})
        for source, state in self.plan.states.items():
            written = [one.chunk.seqno for one in (*self.here.stored, *records) if one.source_id == source.source_id]
            assert state is not None
            plan.states[source] = state._replace(recorded=max(written), topic_id=self.here.topic_id)
        await self.here.write(plan)

    async def mirror(self, records: list[Any]) -> None:
        await self.there.write(Plan(records, {}), transactional_id=self.here.name)

    def audit(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "logferry.ops.cli.main", "audit", "--config", str(self.config)]
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )

    def told(self) -> dict[str, Any]:
        done = self.audit("--json")
        assert done.stderr == ""
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if found["exact"] else 1)
        return found


@pytest.fixture
async def chain(kafka: KafkaCluster, far: KafkaCluster, topic_name: str, tmp_path: Path) -> Chain:
    found = Chain(kafka.bootstrap, far.bootstrap, topic_name, tmp_path)
    await found.begin()
    return found


async def test_one_command_proves_every_hop(chain: Chain):
    first = chain.told()
    assert first["exact"]
    assert first["counts"]["chunks"] == 8
    notes = first["counts"]["findings"]
    assert notes == {"not-sent-yet": 2}, "the files are longer than what was sent"
    for source in first["sources"]:
        (copy,) = source["copies"]
        assert (copy["dc"], copy["chunks"], copy["hash"]) == ("dc2", source["chunks"], source["hash"])
        (file,) = (file for file in first["files"] if file["source_id"] == source["source_id"])
        assert (file["chunks"], file["hash"]) == (source["chunks"], source["hash"])
        assert (source["rows"], source["lines"]) == (16, 16)
    assert first["tables"][0]["compared"] == 32

    await chain.write(chain.plan.records[8:])
    await chain.mirror(chain.plan.records[8:10])
    second = chain.told()
    assert second["exact"]
    assert second["counts"]["findings"] == {"not-mirrored-yet": 2}
    assert second["tables"][0]["not_loaded"] == 4
    assert second["read"]["records"] <= 4 + 2, "the new ones, and of each partition the last one again"
    assert second["read"]["files"] == 0
    brief = chain.audit("--brief")
    assert (brief.returncode, brief.stderr) == (0, "")
    (line,) = brief.stdout.splitlines()
    assert line.startswith("exact: 12 chunks of 2 sources, 48 lines, ")
    shown = chain.audit("--full").stdout
    for hop in ("2 files", "log of dc1", "copy in dc2", "rows of"):
        assert hop in shown
    assert "not mirrored yet: 2 records" in shown


async def test_damage_is_named_at_its_hop(chain: Chain):
    assert chain.told()["exact"]
    path = chain.path("api1")
    data = path.read_bytes()

    # A copy that has one more than the original.
    record = chain.plan.records[8]
    forged = record.chunk._replace(data=record.chunk.data.replace(b"line", b"LINE"))
    await chain.mirror([record._replace(chunk=forged)])
    told = chain.told()
    assert told["counts"]["refuting"] == {"copy-differs": 1}
    assert f"dc2: {chain.here.topic}-{record.partition}" in {one["where"] for one in told["findings"]}

    # The original comes, and it is another one; and a chunk that is not what the file is.
    await chain.write(chain.plan.records[8:])
    path.write_bytes(data.replace(b"chunk 5 line 1", b"chunk 5 line X"))
    done = chain.audit("--brief")
    assert done.returncode == 1
    assert "here differ, after 0 alike" in done.stdout
    assert f"file-differs: {path}" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("NOT exact: ")
    path.write_bytes(data)

    row = chain.here.stored[0]
    DeltaTable(str(chain.table)).delete(f"source_id = '{row.source_id}' and seqno = {row.chunk.seqno} and line = 3")
    told = chain.told()
    (missing,) = (one for one in told["findings"] if one["kind"] == "missing-row")
    assert (missing["source_id"], missing["first"]) == (row.source_id, row.offset)


@pytest.mark.long
async def test_settings_that_cannot_be_used(chain: Chain):
    assert chain.told()["exact"]
    right = chain.config.read_text()
    for before, after, said in (
        ('dc = "dc2"', 'dc = "dc1"', "dc1 is the audited data centre"),
        ("[[copies]]", "speed = 7\n[[copies]]", "kafka.speed: Extra inputs are not permitted"),
        (str(chain.table), "/nowhere/t", "no Delta table"),
        (f'["{chain.here.name}"]', "[]", "written by an audit of topics"),
    ):
        assert before in right
        chain.config.write_text(right.replace(before, after))
        done = chain.audit()
        assert (done.returncode in (2, 3), done.stdout) == (True, "")
        assert said in done.stderr


@pytest.mark.long
async def test_a_file_that_was_rotated_and_one_that_comes_later(chain: Chain):
    """What no audit has compared is compared from its beginning, though its first chunks were read before."""
    web, api = chain.path("web1"), chain.path("api1")
    aside = chain.folder / "aside"
    web.rename(aside)
    assert chain.told()["exact"]
    aside.rename(web)
    await chain.write(chain.plan.records[8:])
    await chain.mirror(chain.plan.records[8:])
    api.rename(chain.folder / "api1.1.log")
    api.write_bytes(b"another line\n")
    told = chain.told()
    assert told["exact"], told["findings"]
    assert told["counts"]["findings"] == {"file-replaced": 1, "not-sent-yet": 1}
    files = {Path(file["path"]).name: file for file in told["files"]}
    size = sum(len(one.chunk.data) for one in chain.plan.records) // 2
    for name, source_id in (("web1.log", f"host:{web}#1"), ("api1.1.log", f"host:{api}#1")):
        assert (files[name]["source_id"], files[name]["begin"], files[name]["recorded"]) == (source_id, 0, size)
    assert (files["api1.log"]["source_id"], files["api1.log"]["not_sent_bytes"]) == (None, 13)
    assert chain.told()["counts"]["refuting"] == {"file-not-stored": 1}, "by the next audit something of it is stored"
    api.unlink()
    web.write_bytes(web.read_bytes().replace(b"chunk 0", b"chunk X"))
    assert chain.told()["exact"], "what was compared, and has its place and size, is compared by a full audit"
    done = chain.audit("--full", "--brief")
    assert f"file-differs: {web}" in done.stdout
