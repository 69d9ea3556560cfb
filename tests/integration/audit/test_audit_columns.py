"""Changed columns of stored rows, with the right text: the audit names column, partition, offset and line."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pa_fs
import pytest
from aiokafka import AIOKafkaProducer
from deltalake import DeltaTable
from logferry.loaders.config import S3Settings
from logferry.loaders.location import Location
from logferry.loaders.parsing.columns import access_columns
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import delete_files, file_system, list_files
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.log.partition import PartitionLog
from logferry.ops.audit.workers.worker_pool import WorkerPool
from logferry.ops.cli.problems import Unavailable
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.s3_server import BUCKET, S3Server

from tests.support.audit import MAIN, Load, World, commit

_TEXTS = ("remote_host", "ident", "user", "time", "request", "method", "path", "protocol", "referer", "user_agent")
ACCESS = pa.schema(
    [
        *MAIN,
        *((name, pa.string()) for name in _TEXTS),
        *(("status", pa.int32()), ("body_bytes", pa.int64()), ("event_time", pa.timestamp("us", "UTC"))),
        *(("event_date", pa.date32()), ("recorded_date", pa.date32())),
    ]
)


def access_lines(source_id: str, number: int) -> bytes:
    """The usual form, the common format, one that only the parser reads, and one that it does not."""
    start = f"10.0.0.{number} - {source_id} [10/Oct/2025:13:55:{number:02} +0200]"
    lines = [
        f'{start} "GET /a?n={number} HTTP/1.1" 200 {number} "-" "agent näher"',
        f'{start} "GET /a?n={number} HTTP/1.1" 200 -',
        f'{start} "say \\"hi\\" here" 404 07 "-" "-"',
        "no access log",
    ]
    return "\n".join(lines).encode() + b"\n"


@pytest.fixture
async def world(kafka: KafkaCluster, topic_name: str) -> World:
    found = World(kafka.bootstrap, topic_name)
    await found.create()
    await found.write(found.plan(content=access_lines))
    return found


def loaded(world: World) -> Load:
    """As the loader does with the parser ``access``, whose quarantine gets what is no row."""
    load = world.load()
    load.entries = [entry._replace(parser="access/1") for entry in load.entries]
    rows, quarantine = [], list(load.quarantine)
    for row in load.rows:
        more = access_columns(row["text"])
        if more is not None:
            dates = {"event_date": more["event_time"].date(), "recorded_date": row["recorded"].date()}
            rows.append({**row, **more, **dates})
        else:
            quarantine.append({**row, "bytes": row["text"].encode(), "reason": "no access log"})
    load.rows, load.quarantine = rows, quarantine
    return load


def refuting(report: Report) -> list[str]:
    return sorted(finding.kind for finding in report.findings if finding.refutes)


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_rows_of_a_parser_are_proven(
    world: World, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
):
    in_processes(monkeypatch)
    load = loaded(world)
    report = await world.audit(table=load.write(tmp_path / "t", main=ACCESS), workers=workers)
    assert report.exact
    assert not len(report.findings)
    assert report.table is not None
    assert (report.table.parsed, report.table.unparsed) == (len(load.rows), 0) == (45, 0)
    assert report.table.compared == 60


def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the few bytes of a test."""
    monkeypatch.setattr("logferry.ops.audit.audit._SMALL_RECORDS", 0)
    monkeypatch.setattr("logferry.ops.audit.compare.table._SMALL_BYTES", 0)


_HOUR = timedelta(hours=1)
CHANGES: list[tuple[str, Any]] = [
    ("recorded", lambda row: row["recorded"] + timedelta(milliseconds=1)),
    ("recorded", lambda _: None),
    ("created", lambda row: row["created"] - _HOUR),
    ("prev", lambda row: row["prev"] + 1),
    ("prev", lambda _: None),
    ("attributes", lambda _: [("host", "there")]),
    ("attributes", lambda row: [*row["attributes"], ("more", "")]),
    ("attributes", lambda _: []),
    ("attributes", lambda _: None),
    ("event_time", lambda row: row["event_time"] + _HOUR),
    ("event_date", lambda row: row["event_date"] + timedelta(days=1)),
    ("recorded_date", lambda row: row["recorded_date"] + timedelta(days=1)),
    ("status", lambda row: row["status"] + 1),
    ("status", lambda _: None),
    ("body_bytes", lambda row: (row["body_bytes"] or 0) + 1),
    *((name, lambda _: "other") for name in _TEXTS),
]


@pytest.mark.parametrize(
    ("column", "change", "number"),
    [
        *((*one, 0) for one in CHANGES),
        *((*one, number) for one in CHANGES for number in (1, 2) if one[0] in ("request", "event_time", "body_bytes")),
    ],
)
async def test_a_changed_column_is_named(world: World, tmp_path: Path, column: str, change: Any, number: int):
    """``number``: the usual form of a line, the common format, and a line that only the parser reads."""
    load = loaded(world)
    at = next(at for at, row in enumerate(load.rows) if row["line"] == number and at > 12)
    row = load.rows[at]
    load.rows[at] = {**row, column: change(row)}
    report = await world.audit(table=load.write(tmp_path / "t", main=ACCESS))
    kinds = set(refuting(report))
    # The day of a changed time is wrong, too; the segments of a table follow from its times.
    assert kinds == {"changed-column"}
    found = next(one for one in report.findings if f"{column} is" in one.detail)
    assert (found.where, found.first, found.last) == (f"{world.topic}-{row['partition']}", row["offset"], row["offset"])
    assert found.source_id == row["source_id"]
    assert found.detail.startswith(f"seqno {row['seqno']}, line {number}: {column} is ")


async def test_a_row_that_the_parser_does_not_read_is_named(world: World, tmp_path: Path):
    load = loaded(world)
    line = load.quarantine.pop()
    load.rows.append({**load.rows[-1], **line, "text": "no access log"})
    report = await world.audit(table=load.write(tmp_path / "t", main=ACCESS))
    assert "no row of the parser access/1" in next(iter(report.findings)).detail


async def test_columns_that_the_jvm_alone_parses_are_said_to_be_not_compared(world: World, tmp_path: Path):
    load = loaded(world)
    java = ParserSettings(format="regex", pattern=r"(?<user>[a-z&&[^b]]+)")
    load.entries = [entry._replace(parser=java.name, settings=java.as_json) for entry in load.entries]
    report = await world.audit(table=load.write(tmp_path / "t", main=ACCESS))
    assert report.exact
    assert [(one.kind, one.count) for one in report.findings] == [("columns-not-compared", 45)]
    assert f"{java.name}: pattern: '[a-z&&' may match otherwise" in next(iter(report.findings)).detail


@pytest.mark.parametrize(
    ("column", "value"), [("recorded", None), ("key", b"other"), ("headers", [{"key": "x", "value": b"y"}])]
)
async def test_a_changed_column_of_a_whole_record_is_named(world: World, tmp_path: Path, column: str, value: Any):
    await world.write_foreign(b"hello", [("x", b"1"), ("x", b"2")])
    load = loaded(world)
    at = next(at for at, row in enumerate(load.quarantine) if row["bytes"] == b"hello")
    assert refuting(await world.audit(table=load.write(tmp_path / "t", main=ACCESS))) == ["foreign-record"]
    load.quarantine[at] = {**load.quarantine[at], column: value}
    report = await world.audit(table=load.write(tmp_path / "u", main=ACCESS))
    assert refuting(report) == ["changed-column", "foreign-record"]
    assert any(f"the whole record: {column} is" in one.detail for one in report.findings)


async def test_a_changed_column_of_the_quarantine_is_named(world: World, tmp_path: Path):
    load = loaded(world)
    load.quarantine[3] = {**load.quarantine[3], "created": None}
    report = await world.audit(table=load.write(tmp_path / "t", main=ACCESS))
    assert refuting(report) == ["changed-column"]
    assert "created is null in the table" in next(iter(report.findings)).detail


async def test_each_audit_finds_it_until_it_is_repaired(world: World, tmp_path: Path):
    state = tmp_path / "state"
    good, bad = loaded(world), loaded(world)
    table = good.write(tmp_path / "t", main=ACCESS)
    assert (await world.audit(table=table, state_file=state)).exact
    for name, change in (("status", 7), ("recorded", None)):
        bad.rows[20] = {**good.rows[20], name: change}
        main = DeltaTable(str(TablePaths.of(table).main))
        main.delete()
        commit(Path(str(TablePaths.of(table).main)), 1, pa.Table.from_pylist(bad.rows, schema=ACCESS))
        for _ in range(2):
            assert "changed-column" in refuting(await world.audit(table=table, state_file=state)), name
        DeltaTable(str(TablePaths.of(table).main)).delete()
        commit(Path(str(TablePaths.of(table).main)), 1, pa.Table.from_pylist(good.rows, schema=ACCESS))
        assert (await world.audit(table=table, state_file=state)).exact


async def test_no_decoder_of_the_gateway_has_a_part_in_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise AssertionError("the audit decodes by itself")

    for name in ("kafka.client.committed_records", "contract.chunk.chunk_of_record"):
        monkeypatch.setattr(f"logferry.gateway.{name}", broken)
    monkeypatch.setattr("logferry.gateway.contract.source_state.SourceState.decode", broken)
    load = loaded(world)
    assert (await world.audit(table=load.write(tmp_path / "t", main=ACCESS))).exact
    load.rows[7] = {**load.rows[7], "text": "forged"}
    assert "changed-row" in refuting(await world.audit(table=load.write(tmp_path / "u", main=ACCESS)))


# ---- processes ---------------------------------------------------------------------------------------------------


async def test_processes_find_what_one_finds(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_processes(monkeypatch)
    load = loaded(world)
    load.rows[4] = {**load.rows[4], "status": 7}
    load.rows[9] = {**load.rows[9], "text": "forged"}
    load.rows.append({**load.rows[9], "partition": 9})
    table = load.write(tmp_path / "t", main=ACCESS)
    found = []
    for workers in (1, 2, 3):
        report = await world.audit(table=table, workers=workers)
        as_dict = report.as_dict()
        del as_dict["seconds"]
        as_dict["findings"] = sorted(map(str, as_dict["findings"]))
        as_dict["sources"].sort(key=str)
        found.append(as_dict)
    assert found[0] == found[1] == found[2]


class Killed(WorkerPool):
    """Its first worker is killed when it has its job."""

    def _started(self, count: int) -> list[Any]:
        workers = super()._started(count)
        os.kill(workers[0].process.pid, signal.SIGKILL)
        return workers


async def test_a_worker_that_is_killed_is_an_error_by_name(world: World, monkeypatch: pytest.MonkeyPatch):
    in_processes(monkeypatch)
    monkeypatch.setattr("logferry.ops.audit.audit.WorkerPool", Killed)
    with pytest.raises(Unavailable, match=rf"process \d+\) was ended by SIGKILL while it read {world.topic}-\d"):
        await world.audit(workers=2)


class Logged(WorkerPool):
    pids: list[int] = []  # noqa: RUF012

    def _started(self, count: int) -> list[Any]:
        workers = super()._started(count)
        self.pids.extend(one.process.pid for one in workers)
        return workers


async def test_no_worker_outlives_the_audit(world: World, monkeypatch: pytest.MonkeyPatch):
    in_processes(monkeypatch)
    monkeypatch.setattr("logferry.ops.audit.audit.WorkerPool", Logged)
    Logged.pids.clear()
    assert (await world.audit(workers=2)).exact
    monkeypatch.setattr(PartitionLog, "__getstate__", lambda _: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        await world.audit(workers=2)
    assert len(Logged.pids) == 4
    for pid in Logged.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class Watched(WorkerPool):
    """Remembers how its processes were started."""

    seen: list[bytes] = []  # noqa: RUF012

    def close(self) -> None:
        for one in self._workers:
            self.seen += [Path(f"/proc/{one.process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        super().close()


async def test_tables_on_s3_with_keys_that_only_the_processes_get(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    in_processes(monkeypatch)
    monkeypatch.setattr("logferry.ops.audit.audit.WorkerPool", Watched)
    Watched.seen.clear()
    load = loaded(world)
    load.rows[4] = {**load.rows[4], "status": 7}
    load.write(tmp_path / "t", main=ACCESS)
    for name in ("access", "secret"):
        (tmp_path / name).write_text(f"{name}-of-this-test\n")
    with S3Server(tmp_path / "s3") as server:
        access, secret = tmp_path / "access", tmp_path / "secret"
        s3 = S3Settings(endpoint=server.endpoint, access_key_file=access, secret_key_file=secret)
        place = Location.of(f"s3://{BUCKET}/warehouse", s3.access)
        for name in ("t", "t_ledger", "t_quarantine"):
            pa_fs.copy_files(str(tmp_path / name), name, destination_filesystem=file_system(place))
        report = await world.audit(tables=[str(place / "t")], s3=s3, workers=2)
        assert refuting(report) == ["changed-column"]
        (gone, *_) = list_files(place / "t")[-1:]
        delete_files(place / "t", [gone.name])
        with pytest.raises(Unavailable) as refused:
            await world.audit(tables=[str(place / "t")], s3=s3, workers=2)
    assert len(Watched.seen) >= 4
    for text in (*Watched.seen, str(refused.value).encode()):
        assert b"secret-of-this-test" not in text


async def test_ctrl_c_ends_all_processes(world: World, tmp_path: Path):
    """While they wait for the end of an open transaction."""
    producer = AIOKafkaProducer(bootstrap_servers=world.bootstrap, transactional_id=world.name)
    await producer.start()
    try:
        async with producer.transaction():
            for partition in (0, 1):
                await asyncio.gather(*[await producer.send(world.topic, b"x", partition=partition) for _ in range(600)])
            config = tmp_path / "audit.toml"
            config.write_text(
                f'dc = "dc1"\nprefix = "{world.prefix}"\ntopics = ["{world.name}"]\n'
                f'kafka.bootstrap_servers = "{world.bootstrap}"\n'
            )
            command = (sys.executable, "-m", "logferry.ops", "audit", "--config", str(config), "--workers", "2")
            # Tests that a shell runs in the background ignore SIGINT, which is inherited.
            heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            run = await asyncio.create_subprocess_exec(
                *command, start_new_session=True, stderr=subprocess.PIPE, preexec_fn=heeding
            )
            try:
                children: list[str] = []
                async with asyncio.timeout(120):
                    while len(children) < 2:
                        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
                        await asyncio.sleep(0.02)
                os.killpg(run.pid, signal.SIGINT)
                _, said = await asyncio.wait_for(run.communicate(), 60)
            finally:
                if run.returncode is None:
                    run.kill()
            assert run.returncode == 130, said
            assert b"Traceback" not in said
            assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    finally:
        await producer.stop()
