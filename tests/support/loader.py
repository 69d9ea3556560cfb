"""For the loader's tests: chunks into Kafka as a gateway writes them, a loader as a process, tables read without Spark.

`rows_of` is the reference for what must come out: plain Python over the chunks that were committed.

For tests that kill loaders: which file appears at which step, and waiting for it.

Nothing in the loader helps: the tables' folders are watched.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.structs import RecordMetadata, TopicPartition
from deltalake import DeltaTable
from logferry.gateway.contract.chunk import Chunk, Headers, record_headers
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.ledger import last_batch, open_table
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java

from tests.support.checker import History, Stored, digest, violations

# When the chunks of these tests were made: 2023-11-14 22:13:20 UTC.
CREATED_MS = 1_700_000_000_000


class Line(NamedTuple):
    """What of a row must be exact. ``data`` is the text's bytes, or those in the quarantine."""

    source_id: str | None
    seqno: int | None
    line: int | None
    data: bytes
    newline: bool | None


class Sent(NamedTuple):
    source_id: str
    chunk: Chunk


# ---- Kafka -----------------------------------------------------------------------------------------------


class Topic:
    """One topic of a test, written by transactions. ``committed`` is what readers of committed records must see."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.committed: list[Sent] = []
        self._transactions = 0
        self._is_held = False

    async def create(self, partitions: int = 1, **configs: str) -> None:
        """Without a retention: a broker looks for old records at any time, and tests write some of days ago."""
        kept = {"retention.ms": "-1", **configs}
        admin = await self._admin()
        try:
            await admin.create_topics([NewTopic(self.name, partitions, 1, topic_configs=kept)])
        finally:
            await admin.close()

    async def exists(self) -> bool:
        admin = await self._admin()
        try:
            return self.name in await admin.list_topics()
        finally:
            await admin.close()

    async def delete(self) -> None:
        admin = await self._admin()
        try:
            await admin.delete_topics([self.name])
            async with asyncio.timeout(30):
                while self.name in await admin.list_topics():  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.02)
        finally:
            await admin.close()

    async def grow(self, partitions: int) -> None:
        admin = await self._admin()
        try:
            await admin.create_partitions({self.name: NewPartitions(partitions)})
        finally:
            await admin.close()

    async def remove_before(self, partition: int, offset: int) -> None:
        admin = await self._admin()
        try:
            await admin.delete_records({TopicPartition(self.name, partition): RecordsToDelete(offset)})
        finally:
            await admin.close()

    async def write(
        self, chunks: Iterable[Sent], *, partitions: int = 1, commit: bool = True, recorded_ms: int | None = None
    ) -> None:
        """One transaction with these chunks, spread over the partitions by source. ``recorded_ms``: else now.

        Returns when readers of committed records can pass it, unless a test holds a transaction open.
        """
        producer = await self._begun(chunks, partitions, recorded_ms)
        try:
            await (producer.commit_transaction() if commit else producer.abort_transaction())
        finally:
            await producer.stop()
        if not self._is_held:
            await self._passed(partitions)
        if commit:
            self.committed.extend(chunks)

    async def open_transaction(
        self, chunks: Iterable[Sent], *, partitions: int = 1, recorded_ms: int | None = None
    ) -> AIOKafkaProducer:
        """The chunks are sent; the transaction is for the caller to end."""
        self._is_held = True
        return await self._begun(chunks, partitions, recorded_ms)

    async def _begun(self, chunks: Iterable[Sent], partitions: int, recorded_ms: int | None) -> AIOKafkaProducer:
        producer = await self._producer()
        await producer.begin_transaction()
        for source_id, chunk in chunks:
            partition = sum(source_id.encode()) % partitions
            headers = record_headers(chunk)
            await producer.send(
                self.name,
                chunk.data,
                key=source_id.encode(),
                partition=partition,
                timestamp_ms=recorded_ms,
                headers=headers,
            )
        await producer.flush()
        return producer

    async def _passed(self, partitions: int) -> None:
        """The coordinator answers a commit before its markers are written."""
        places = [TopicPartition(self.name, number) for number in range(partitions)]
        clients = [
            AIOKafkaConsumer(bootstrap_servers=self.bootstrap, isolation_level=level)
            for level in ("read_committed", "read_uncommitted")
        ]
        try:
            for client in clients:
                await client.start()
            async with asyncio.timeout(WAIT_S):
                while True:
                    stable, ends = [await client.end_offsets(places) for client in clients]
                    if stable == ends:
                        return
                    await asyncio.sleep(0.01)
        finally:
            for client in clients:
                await client.stop()

    async def write_raw(self, value: bytes | None, key: bytes | None, headers: Headers) -> RecordMetadata:
        """A record as some other program might write it."""
        producer = await self._producer()
        try:
            async with producer.transaction():
                return await producer.send_and_wait(self.name, value, key=key, partition=0, headers=headers)
        finally:
            await producer.stop()

    async def _producer(self) -> AIOKafkaProducer:
        self._transactions += 1
        producer = AIOKafkaProducer(
            bootstrap_servers=self.bootstrap,
            transactional_id=f"{self.name}-{self._transactions}",
            max_request_size=32 << 20,
            max_batch_size=1 << 20,
        )
        await producer.start()
        return producer

    async def _admin(self) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        return admin


def chunks_of(source_id: str, *parts: bytes, start: int = 0, created_ms: int = CREATED_MS) -> list[Sent]:
    """Chunks one after the other, numbered by the position after their last byte."""
    found, position = [], start
    for data in parts:
        seqno = position + max(1, len(data))
        found.append(Sent(source_id, Chunk(seqno, position, created_ms, {"host": "web1"}, data)))
        position = seqno
    return found


# ---- what must be in the tables --------------------------------------------------------------------------


def rows_of(sent: Iterable[Sent]) -> tuple[set[Line], set[Line]]:
    """(rows of the table, lines of the quarantine) for these chunks."""
    rows: set[Line] = set()
    bad: set[Line] = set()
    for source_id, chunk in sent:
        *whole, rest = chunk.data.split(b"\n")
        lines = [(line, True) for line in whole] + ([(rest, False)] if rest else [])
        for number, (data, newline) in enumerate(lines):
            line = Line(source_id, chunk.seqno, number, data, newline)
            (rows if _is_utf8(data) else bad).add(line)
    return rows, bad


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def stored(path: Path) -> list[dict[str, Any]]:
    """All rows of a table, read without Spark."""
    rows: list[dict[str, Any]] = DeltaTable(str(path)).to_pyarrow_table().to_pylist()
    return rows


def quarantine(path: Path) -> list[dict[str, Any]]:
    """What stands in the quarantine of the table at ``path``: not the lines that a batch of the table has brought."""
    paths = TablePaths.of(path)
    last = last_batch(open_table(paths.main))
    rows = stored(paths.quarantine)
    return [
        row
        for row in rows
        if (row["resolved"] is None or row["resolved"] > last) and (row.get("since") is None or row["since"] <= last)
    ]


def check_exact(table: Path, sent: Iterable[Sent]) -> None:
    """The tables hold these chunks' lines: all of them, none twice, none other, byte for byte."""
    want_rows, want_bad = rows_of(sent)
    paths = TablePaths.of(table)
    rows = [_line(row, row["text"].encode()) for row in stored(paths.main)]
    bad = [_line(row, row["bytes"]) for row in quarantine(table)]
    for what, have, want in (("table", rows, want_rows), ("quarantine", bad, want_bad)):
        assert len(have) == len(set(have)), f"{what}: {len(have) - len(set(have))} rows stand twice"
        assert not want - set(have), f"{what}: missing {sorted(want - set(have), key=str)[:3]}"
        assert not set(have) - want, f"{what}: not written {sorted(set(have) - want, key=str)[:3]}"


def check_kept(table: Path, sent: Sequence[Sent]) -> None:
    """`check_exact`, and the judgement of the checker on the chunks as they can be put together from the tables."""
    check_exact(table, sent)
    history = History()
    for source_id, chunk in sent:
        if chunk.data:
            history.note(source_id, chunk.seqno, chunk.data, "ok")
    found = violations(history, _chunks_in(TablePaths.of(table)))
    assert not found, found[:3]


def _chunks_in(paths: TablePaths) -> list[Stored]:
    """Each chunk wherever it came from: one that was loaded from two offsets is there twice."""
    lines = [(row, row["text"].encode()) for row in stored(paths.main)]
    lines += [(row, row["bytes"]) for row in stored(paths.quarantine)]
    chunks: dict[tuple[str, int, int, int], dict[int, bytes]] = {}
    for row, data in lines:
        place = (row["source_id"], row["partition"], row["offset"], row["seqno"])
        chunks.setdefault(place, {})[row["line"]] = data + b"\n" * row["newline"]
    return [
        Stored(*place, prev=None, digest=digest(b"".join(parts[number] for number in sorted(parts))))
        for place, parts in chunks.items()
    ]


def _line(row: dict[str, Any], data: bytes) -> Line:
    return Line(row["source_id"], row["seqno"], row["line"], data, row["newline"])


# ---- a loader as a process -------------------------------------------------------------------------------


class LoaderProcess:
    """``logferry load``, or ``logferry table``, and its JVM."""

    def __init__(
        self,
        bootstrap: str,
        table: Path,
        topic: str,
        *options: str,
        scratch: Path,
        settings: str = "",
        dc: str = "dc1",
        as_json: bool = True,
    ) -> None:
        """``options``: of a load; where the first one is a sub-command of `table`, of that one. ``settings``: more of
        the table's, as TOML.
        """
        file = scratch / f"load-{dc}-{table.name}-{crc32(settings.encode())}.toml"
        file.write_text(
            f'dc = "{dc}"\nkafka.bootstrap_servers = "{bootstrap}"\n'
            f'[spark]\nmaster = "local[2]"\ndriver_memory = "512m"\nscratch = "{scratch / "runs"}"\n'
            f'[[tables]]\npath = "{table}"\ntopics = ["{topic}"]\nmax_records = 400\n{settings}\n'
        )
        module, given = ["logferry.loaders"], list(options)
        if given and not given[0].startswith("-"):
            module, given = ["logferry.loaders.commands.table", given[0], str(table)], given[1:]
        command = [sys.executable, "-m", *module, "--config", str(file), *["--json"] * as_json, *given]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=loader_env()
        )

    def jvm(self) -> int | None:
        """The process of the JVM, once there is one (before it is Java, it is the shell that becomes Java)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            numbers = [int(number) for number in children.read_text().split()]
            return next((n for n in numbers if b"java" in Path(f"/proc/{n}/cmdline").read_bytes()[:200]), None)
        except (FileNotFoundError, ProcessLookupError):
            return None

    def kill(self, *, python: bool = True, jvm: bool = True) -> int | None:
        """SIGKILL for the loader, its JVM, or both; returns the JVM's number."""
        number = self.jvm()
        if jvm and number is not None:
            os.kill(number, signal.SIGKILL)
        if python:
            self.process.kill()
        return number

    def finish(self) -> tuple[int, dict[str, Any], str]:
        """(exit status, the summary or nothing, standard error) when it has ended."""
        out, err = self.process.communicate()
        return self.process.returncode, json.loads(out) if out else {}, err.decode()


def loader_env() -> dict[str, str]:
    jars = os.pathsep.join(map(str, spark_jars()))
    return {**os.environ, **java_env(), "LOGFERRY_SPARK_JARS": jars}


def java_env() -> dict[str, str]:
    """Our Java, compiling less: short runs take half the time."""
    return {"JAVA_HOME": str(find_java().home), "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def run_module(
    arguments: Sequence[str], env: dict[str, str] | None = None, module: str = "logferry.loaders"
) -> subprocess.CompletedProcess[str]:
    """The command to its end, with its output."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=env or loader_env(), stdin=subprocess.DEVNULL, check=False
    )


def run_table(arguments: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``logferry table`` to its end, with its output."""
    return run_module(arguments, env, "logferry.loaders.commands.table")


WAIT_S = 120

Watch = Callable[[TablePaths], int]


def commits(path: Path) -> int:
    return sum(1 for file in (path / "_delta_log").glob("*.json") if file.stem.isdigit())


def data_files(path: Path) -> int:
    return sum(1 for _ in path.glob("batch-*/**/*.parquet"))


# What grows at a step, and from which number on: creating a table is its first commit.
STEPS: dict[str, Watch] = {
    "ledger": lambda paths: commits(paths.ledger),
    "quarantine": lambda paths: commits(paths.quarantine),
    "mid-write": lambda paths: data_files(paths.main),
    "commit": lambda paths: commits(paths.main),
}


def wait_for(condition: Callable[[], bool], what: str, loader: LoaderProcess | None = None) -> None:
    """Looks all the time: the windows to be hit are milliseconds wide."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen in {WAIT_S} s")
        if loader is not None and loader.process.poll() is not None:
            raise AssertionError(f"the loader ended before {what}: {loader.finish()}")
        time.sleep(0.001)


@contextmanager
def loaders(bootstrap: str, scratch: Path) -> Iterator[Callable[..., LoaderProcess]]:
    """``begin(table, topic, settings, *options)`` starts one; none is left behind."""
    started: list[LoaderProcess] = []

    def begin(table: Path, topic: str, settings: str = "", *options: str) -> LoaderProcess:
        started.append(LoaderProcess(bootstrap, table, topic, *options, scratch=scratch, settings=settings))
        return started[-1]

    yield begin
    for loader in started:
        if loader.process.poll() is None:
            loader.kill()
        if loader.process.stdout is not None and not loader.process.stdout.closed:
            loader.finish()
