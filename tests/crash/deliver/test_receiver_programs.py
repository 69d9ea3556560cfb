"""The receivers that the documentation shows, killed while a real `logferry deliver` sends to them: each chunk once.

* The guide's program in Python, word for word, and the one in Go: killed with SIGKILL at random, under load.
* `logferry.client.receiver` with PostgreSQL: killed at each of its steps: batch noted, output not written; output
  written, not committed; committed, not answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, free_ports

from tests.support.delivery import Deliver, deliver, send, subscribe
from tests.support.gateway import Gateway
from tests.support.postgres import postgresql

ROOT = Path(__file__).parents[3]
SEED = int(os.environ.get("LOGFERRY_SEED", random.randrange(10**6)))
_PATIENCE_S = 120
_SOURCES, _CHUNKS, _KILLS = 4, 60, 6
Row = tuple[str, int]


@pytest.fixture(scope="module")
def pushing(kafka: KafkaCluster, workers: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deliver]:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "secrets").mkdir()
    (folder / "secrets" / "key").write_text("a secret\n")
    with deliver(kafka, folder, "shared", secrets_dir=str(folder / "secrets")) as running:
        yield running


async def _until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not holds():  # noqa: ASYNC110  another process writes
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not in time: {what()}") from None


async def _survives_kills(
    workers: Gateway, topic_name: str, program: Child, url: str, rows: Callable[[], list[Row]], **settings: Any
) -> None:
    """Each chunk once and in the order of its source, however often the program was killed."""
    rng = random.Random(SEED)
    print(f"LOGFERRY_SEED={SEED}")
    topic = await workers.make_topic(topic_name, 2)
    program.start()
    try:
        await subscribe(workers, topic_name, topic, url, max_bytes=1024, secret_file="key", **settings)
        names = [f"web{number}" for number in range(_SOURCES)]
        writing = asyncio.gather(*(send(workers, topic_name, name, range(1, _CHUNKS + 1)) for name in names))
        for kill in range(_KILLS):
            wanted = _SOURCES * _CHUNKS * kill // (_KILLS + 1)
            await _until(lambda wanted=wanted: len(rows()) > wanted, lambda: (len(rows()), program.log_tail()))  # type: ignore[misc]
            await asyncio.sleep(rng.random() / 20)
            program.send(signal.SIGKILL)
            program.wait_for_end(10)
            program.restart()
        written = [one for some in await writing for one in some]
        await _until(lambda: len(rows()) >= len(written), lambda: (len(rows()), program.log_tail()))
    finally:
        program.stop(10)
    for name in names:
        assert [row for row in rows() if row[0] == name] == [row for row in written if row[0] == name]


async def test_the_program_of_the_guide(workers: Gateway, pushing: Deliver, topic_name: str, tmp_path: Path) -> None:
    page = (ROOT / "ops/docs/guides/push-delivery.md").read_text()
    [text] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [port] = free_ports(1)
    assert text.count("port=8400") == 1
    (tmp_path / "receiver.py").write_text(text.replace("port=8400", f"port={port}"))
    (tmp_path / "billing-key").write_text("a secret\n")

    def rows() -> list[Row]:
        try:
            with closing(sqlite3.connect(f"file:{tmp_path / 'billing.db'}?mode=ro", uri=True, timeout=60)) as file:
                return [(source, seqno) for source, seqno in file.execute("SELECT source, seqno FROM lines")]
        except sqlite3.OperationalError:
            return []  # not there yet

    command = ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} receiver.py"]
    program = Child("receiver", command, tmp_path / "log")
    await _survives_kills(workers, topic_name, program, f"http://127.0.0.1:{port}/logs", rows)


async def test_the_receiver_in_go(workers: Gateway, pushing: Deliver, topic_name: str, tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("needs go (Debian: apt-get install golang-go)")
    built = [go, "build", "-o", str(tmp_path / "receiver"), str(ROOT / "ops/deploy/receiver.go")]
    env = {**os.environ, "GO111MODULE": "off"}
    await asyncio.to_thread(subprocess.run, built, check=True, timeout=300, env=env)
    (tmp_path / "key").write_text("a secret\n")
    (tmp_path / "data").mkdir()
    [port] = free_ports(1)
    output, state = tmp_path / "data" / "lines.ndjson", tmp_path / "data" / "state.json"

    def rows() -> list[Row]:
        """What is committed."""
        if not state.exists():
            return []
        lines = output.read_bytes()[: json.loads(state.read_text())["OutputBytes"]].splitlines()
        return [(row["source_id"], row["seqno"]) for row in map(json.loads, lines)]

    options = ["-listen", f"127.0.0.1:{port}", "-dir", str(tmp_path / "data"), "-key", str(tmp_path / "key")]
    command = [str(tmp_path / "receiver"), *options]
    program = Child("receiver", command, tmp_path / "log")
    await _survives_kills(workers, topic_name, program, f"http://127.0.0.1:{port}/", rows, compression="gzip")
    # The window between output and commit, for certain: the next start cuts off what it finds there.
    with output.open("ab") as file:
        file.write(b'{"source_id": "web0", "seqno": 1, "offs')
    program.restart()
    await _until(lambda: output.stat().st_size == json.loads(state.read_text())["OutputBytes"], program.log_tail)
    second = Child("second", command, tmp_path / "second.log")
    second.start()
    assert await asyncio.to_thread(second.wait_for_end, 30)
    assert "in use by another receiver" in second.log_tail()
    program.stop(10)


_STEPS = ("checked", "noted", "written", "committed")
_PROGRAM = """
    import json, os, pathlib, signal, sys
    import psycopg
    from aiohttp import web
    from logferry.client.receiver import Receiver, Refused

    port, database, plan = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    connection = psycopg.connect(database)
    connection.execute("CREATE TABLE IF NOT EXISTS lines (id SERIAL, source TEXT, seqno BIGINT)")
    receiver = Receiver(connection, [b"a secret"], style="%s")
    receiver.create_table()


    def reached_step(step):
        if plan.exists() and plan.read_text() == step:
            plan.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


    async def take(request):
        try:
            delivery = receiver.check(request.headers, await request.read())
            reached_step("checked")
            with connection.transaction():
                reached = receiver.take(delivery)
                reached_step("noted")
                if reached is not None:
                    rows = [json.loads(line) for line in delivery.body.splitlines()]
                    new = [(row["source_id"], row["seqno"]) for row in rows if row["offset"] >= reached]
                    with connection.cursor() as cursor:
                        cursor.executemany("INSERT INTO lines (source, seqno) VALUES (%s, %s)", new)
                reached_step("written")
            reached_step("committed")
        except Refused as refused:
            return web.Response(status=refused.status, text=str(refused))
        return web.Response()


    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/logs", take)
    web.run_app(app, host="127.0.0.1", port=port)
"""


async def test_postgresql_killed_at_each_step(
    workers: Gateway, pushing: Deliver, topic_name: str, tmp_path: Path
) -> None:
    psycopg = pytest.importorskip("psycopg")
    (tmp_path / "receiver.py").write_text(textwrap.dedent(_PROGRAM))
    plan, [port] = tmp_path / "plan", free_ports(1)
    topic = await workers.make_topic(topic_name)
    with postgresql() as database:
        command = [sys.executable, str(tmp_path / "receiver.py"), str(port), database, str(plan)]
        program = Child("receiver", command, tmp_path / "log")

        def rows() -> list[Row]:
            with psycopg.connect(database) as connection:
                return list(connection.execute("SELECT source, seqno FROM lines ORDER BY id").fetchall())

        program.start()
        try:
            url = f"http://127.0.0.1:{port}/logs"
            await subscribe(workers, topic_name, topic, url, secret_file="key", max_wait_ms=0)
            written = await send(workers, topic_name, "web", range(1, 4))
            for number, step in enumerate(_STEPS):
                plan.write_text(step)
                written += await send(workers, topic_name, "web", range(4 + 3 * number, 7 + 3 * number))
                await _until(lambda: not program.running, program.log_tail)
                assert not plan.exists(), program.log_tail()
                program.restart()
                count = len(written)
                await _until(lambda count=count: len(rows()) >= count, program.log_tail)  # type: ignore[misc]
            assert rows() == written
        finally:
            program.stop(10)
