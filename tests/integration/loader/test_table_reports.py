"""A real loader reports its table to a real gateway, which is killed while a batch is written."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from logferry.gateway.token_command import new_token
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.gateway_report import table_name
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Topic, chunks_of
from tests.support.loader_process import LoaderProcess, commits, data_files, wait_for
from tests.support.served_gateway import Gateway

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

RIGHTS = {
    "admin": 'admin = ["*"]\nread = ["*"]\nwrite = ["*"]',
    "loader": 'read = ["access"]\nreport = ["access"]',
    "stranger": 'read = ["other"]\nreport = ["other"]',
}
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
OLD, NEW = NOW - timedelta(hours=5), NOW - timedelta(hours=2)
PARSER = r"""
parser = { format = "regex", pattern = '(?<at>\S+) (?<what>.*)', event_time = { column = "at", formats = ["iso"] } }
segments = { late_wait_s = 0, source_idle_s = 3600 }
"""
WAIT_S = 300


def lines(hour: datetime, *minutes: int) -> bytes:
    return b"".join(f"{(hour + timedelta(minutes=m)).isoformat()} line {m}\n".encode() for m in minutes)


async def until(said: Callable[[], Awaitable[Any]], what: str) -> Any:
    """What is said, as soon as it is something."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await said()):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.1)
    return found


@pytest.fixture
async def served(kafka: KafkaCluster, tmp_path: Path) -> AsyncIterator[tuple[Gateway, dict[str, str]]]:
    made = {name: new_token() for name in RIGHTS}
    tables = "".join(f'[[tokens]]\nname = "{n}"\nsha256 = "{made[n][1]}"\n{RIGHTS[n]}\n' for n in RIGHTS)
    async with Gateway(tmp_path, kafka.bootstrap, 2, tables) as gateway:
        yield gateway, {name: token for name, (token, _) in made.items()}


async def kill_and_restart(gateway: Gateway, between: Callable[[], None] = lambda: None) -> None:
    for worker in gateway.workers:
        await asyncio.to_thread(worker.send, signal.SIGKILL)
    await asyncio.to_thread(between)
    for worker in gateway.workers:
        worker.start()
    await gateway._ready()


async def test_an_hour_waits_for_a_silent_source_by_name_and_a_gateway_that_is_killed_costs_no_batch(
    served: tuple[Gateway, dict[str, str]], kafka: KafkaCluster, tmp_path: Path
) -> None:
    gateway, secret = served
    for name in ("access", "other"):
        status, said, _ = await gateway.ask("PUT", f"/v1/topics/{name}", secret["admin"], json={"partitions": 1})
        assert status in (200, 201), said
    for source, data in (("silent", lines(OLD, 1)), ("busy", lines(NEW, 10))):
        path = f"/v1/topics/access/sources/{source}/chunks?seqno=1"
        assert (await gateway.ask("POST", path, secret["admin"], data=data))[0] == 200
    token = tmp_path / "token"
    token.write_text(secret["loader"])
    told = f'urls = ["{gateway.urls[0]}", "{gateway.urls[1]}"]\ntoken_file = "{token}"\n'
    settings = f"{PARSER}[gateways.dc1]\n{told}[report]\n{told}"
    table = Location.of(tmp_path / "warehouse" / "access")
    paths, name = TablePaths.of(table), table_name(table)
    loader = LoaderProcess(kafka.bootstrap, table, "dc1.access", "--follow", scratch=tmp_path, settings=settings)

    async def reported(**wanted: Any) -> Any:
        status, found, _ = await gateway.ask("GET", f"/v1/tables/{name}", secret["admin"], worker=1)
        if status == 404:
            return None
        assert status == 200, found
        is_it = all(found[key] == value for key, value in wanted.items())
        return found if is_it and found["segments"]["checked"] else None

    try:
        found = await until(reported, "a report after a check")
        by_name = {one["segment"]: one for one in found["segments"]["newest"]}
        hour = by_name[OLD.strftime("%Y-%m-%dT%H")]
        assert [one["source_id"] for one in hour["waits_for"]] == ["silent"]
        assert hour["waits_for"][0]["topic"] == "dc1.access"
        assert hour["waits_for"][0]["at"] == (OLD + timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert "waits for silent in dc1.access" in hour["why"]
        assert {one["source_id"] for one in by_name[NEW.strftime("%Y-%m-%dT%H")]["waits_for"]} == {"silent", "busy"}
        assert (found["location"], found["topics"], found["every_s"]) == (str(table), ["dc1.access"], 60.0)
        assert [(one["topic"], one["records"]) for one in found["lag"]] == [("dc1.access", 0)]
        assert found["error"] is None
        for who, names in (("loader", [name]), ("stranger", [])):
            listed = (await gateway.ask("GET", "/v1/tables", secret[who]))[1]["tables"]
            assert [one["name"] for one in listed] == names
        assert (await gateway.ask("GET", f"/v1/tables/{name}", secret["stranger"]))[0] == 404
        assert (await gateway.ask("DELETE", f"/v1/tables/{name}", secret["stranger"]))[0] == 404

        before, files = commits(paths.main), data_files(paths.main)
        topic = Topic(kafka.bootstrap, "dc1.access")
        await topic.write(chunks_of("busy", *[lines(NEW, minute) for minute in range(11, 50)], start=5000))
        await asyncio.to_thread(wait_for, lambda: data_files(paths.main) > files, "a batch being written", loader)
        loader.process.send_signal(signal.SIGSTOP)  # its Spark continues, but it commits nothing

        def commit() -> None:
            loader.process.send_signal(signal.SIGCONT)
            wait_for(lambda: commits(paths.main) > before, "the commit without a gateway", loader)

        await kill_and_restart(gateway, commit)
        rows = {one["segment"]: one["rows"] for one in found["segments"]["newest"]}
        new = NEW.strftime("%Y-%m-%dT%H")

        async def newer() -> Any:
            later = await reported()
            there = {one["segment"]: one["rows"] for one in later["segments"]["newest"]} if later else {}
            return later if there.get(new) == rows[new] + 39 else None

        later = await until(newer, "a report with the batch that nobody could be told of")
        assert later["batch"]["batch"] > found["batch"]["batch"]
        loader.process.terminate()
        status, summary, err = loader.finish()
        assert (status, summary["rows"], summary["tables"][0]["error"]) == (0, 41, None), err
        assert err.count("no report to the gateway") <= 1
        last = await reported(every_s=None)
        assert last is not None, "the last report says that the run has ended"
        await kill_and_restart(gateway)
        assert await reported() == last
        assert (await gateway.ask("DELETE", f"/v1/tables/{name}", secret["loader"]))[0] == 200
        assert (await gateway.ask("GET", "/v1/tables", secret["admin"]))[1] == {"tables": []}
    finally:
        loader.kill()
