"""The archive's calls with offsets, ``/store``, ``/commit_request``, ``/commit``, at real workers: any worker takes any
call, and each repetition gets the same answer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from logferry.gateway.api.archive_schemas import BytesStored, SizeConfirmed, TransactionDescription
from logferry.gateway.contract.chunk import Chunk, chunk_of_record
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import committed_records
from tests.support.gateway import Answer, Gateway, gateway

TOPIC: Final = "offsets-access"
FILE: Final = b"first line\n" + b"second line\n" + b"the third one, without its end"
CUTS: Final = (0, 11, 23, len(FILE))
WITHIN_S: Final = 4.0  # a slow machine has time for some calls


@pytest.fixture(scope="module")
def archive(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    yield from served(kafka, tmp_path_factory.mktemp("offsets"), "offsets", {"commit_within_s": 120})


@pytest.fixture(scope="module")
def hasty(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    yield from served(kafka, tmp_path_factory.mktemp("gone"), "gone", {"commit_within_s": WITHIN_S})


def served(kafka: KafkaCluster, folder: Path, name: str, settings: dict[str, Any]) -> Iterator[Gateway]:
    settings = {"topics": [{"name": "nginx", "topic": TOPIC}], **settings}
    with gateway(kafka, folder, name, receivers={"archive": settings}) as running:
        asyncio.run(running.ask("PUT", f"/v1/topics/{TOPIC}", data=b'{"partitions": 2}', expect=None))
        yield running


class Sender:
    def __init__(self, at: Gateway, name: str | None = None) -> None:
        self.at, self.name = at, name or f"web1/access.log {time.time_ns()}"

    async def call(
        self, path: str, worker: int = 0, expect: int | None = 200, data: bytes = b"", **query: Any
    ) -> Answer:
        query = {"transaction_id": self.name} | query
        return await self.at.ask("POST", f"/{path}?{urlencode(query)}", worker, data=data, expect=expect)

    async def store(self, begin: int, end: int, worker: int = 0, expect: int | None = 200, **other: Any) -> Answer:
        of = {"type": "nginx", "host": "web1", "file": "/var/log/access.log", "offset": begin} | other
        return await self.call("store", worker, expect, FILE[begin:end], **of)

    async def show(self, worker: int = 0, expect: int | None = 200) -> Answer:
        path = "/transactions/" + self.name.replace("/", "%2F").replace(" ", "%20")
        return await self.at.ask("GET", path, worker, expect=expect)

    async def all(self, worker: int = 0) -> None:
        for begin, end in itertools.pairwise(CUTS):
            await self.store(begin, end, worker)

    async def visible(self) -> list[tuple[int, int, Chunk]]:
        """Partition, offset and chunk of each record of the transaction that readers see."""
        records = await committed_records(self.at.kafka.bootstrap, f"dc1.{TOPIC}")
        own = [record for record in records if (record.key or b"").decode() == f"archive/-/{self.name}"]
        return [(r.partition, r.offset, chunk_of_record(r.value or b"", r.headers)) for r in own]


async def test_a_file_is_visible_by_its_commit_at_any_worker(archive: Gateway) -> None:
    it = Sender(archive)
    said: dict[Any, Any] = {}

    def same(key: Any, answer: Answer) -> dict[str, Any]:
        assert said.setdefault(key, answer.document) == answer.document
        found: dict[str, Any] = answer.document
        return found

    async def everything(worker: int) -> None:
        for begin, end in itertools.pairwise(CUTS):
            found = same(begin, await it.store(begin, end, worker))
            assert BytesStored.model_validate(found).stored_bytes == end

    await everything(0)
    await everything(1)
    shown = TransactionDescription.model_validate((await it.show(1)).document)
    assert (shown.state, shown.stored_bytes, shown.partition, shown.offsets) == ("open", len(FILE), None, None)
    for worker in (0, 1):
        found = same("request", await it.call("commit_request", worker, size=len(FILE)))
        assert SizeConfirmed.model_validate(found).state == "prepared"
    assert (await it.show()).document["state"] == "prepared"
    assert await it.visible() == []
    for worker in (1, 0):
        same("commit", await it.call("commit", worker))
        same("commit", await it.show(worker))
        same("request", await it.call("commit_request", worker, size=len(FILE)))
        await everything(worker)
    shown = TransactionDescription.model_validate(said["commit"])
    seen = await it.visible()
    assert shown.state == "committed"
    assert shown.offsets is not None
    assert [(shown.partition, offset) for offset in range(shown.offsets[0], shown.offsets[1] + 1)] == [
        (partition, offset) for partition, offset, _ in seen
    ]
    assert b"".join(chunk.data for _, _, chunk in seen) == FILE
    assert {tuple(sorted(chunk.attributes.items())) for _, _, chunk in seen} == {
        (("file", "/var/log/access.log"), ("host", "web1"), ("type", "nginx"))
    }


async def test_bytes_that_are_missing(archive: Gateway) -> None:
    it = Sender(archive)
    unknown = await it.call("commit_request", expect=404, size=1)
    assert unknown.problem == "unknown-transaction"
    assert (await it.show(expect=404)).problem == "unknown-transaction"
    assert (await it.store(11, 23, expect=409)).document["stored_bytes"] == 0
    await it.store(0, 11)
    early = await it.store(23, len(FILE), 1, expect=409)
    assert (early.problem, early.document["stored_bytes"]) == ("incomplete", 11)
    short = await it.call("commit_request", 1, expect=409, size=len(FILE))
    assert (short.problem, short.document["stored_bytes"]) == ("incomplete", 11)
    assert (await it.call("commit", expect=409)).problem == "conflict"
    await it.all(1)
    long = await it.call("commit_request", expect=409, size=len(FILE) - 1)
    assert (long.problem, long.document["stored_bytes"]) == ("conflict", len(FILE))
    await it.call("commit_request", size=len(FILE))
    await it.call("commit", 1)
    assert b"".join(chunk.data for _, _, chunk in await it.visible()) == FILE


async def test_another_content_is_never_mixed_in(archive: Gateway) -> None:
    it = Sender(archive)
    await it.store(0, 11)
    for problem in (
        await it.call(
            "store", 1, 409, b"other line\n", type="nginx", host="web1", file="/var/log/access.log", offset=0
        ),
        await it.store(0, 11, expect=409, host="web2"),
        await it.store(5, 11, expect=409),
        await it.store(0, 5, 1, expect=409),
    ):
        assert problem.problem == "conflict"
    await it.call("commit_request", size=11)
    assert (await it.store(11, 23, expect=409)).problem == "conflict"
    await it.call("commit")
    assert [chunk.data for _, _, chunk in await it.visible()] == [FILE[:11]]


@pytest.mark.parametrize(
    "path",
    [
        "store?transaction_id=&type=nginx&host=h&file=f&offset=0",
        "store?transaction_id=t&type=nginx&host=h&file=f",
        "store?transaction_id=t&type=nginx&host=h&file=f&offset=-1",
        "store?transaction_id=t&type=nginx&host=h&offset=0",
        "store?transaction_id=t&type=nginx&host=h&file=f&offset=0&piece=1",
        "commit_request?transaction_id=t",
        "commit_request?size=1",
        "commit",
    ],
)
async def test_what_is_malformed_says_what(archive: Gateway, path: str) -> None:
    answer = await archive.ask("POST", f"/{path}", data=b"x" if path.startswith("store") else b"", expect=400)
    assert answer.document["detail"].split(":")[0] in ("transaction_id", "offset", "file", "query", "size")


async def test_a_type_without_a_rule(archive: Gateway) -> None:
    answer = await Sender(archive).store(0, 11, expect=404, type="other")
    assert answer.problem == "unknown-topic"


async def test_what_was_not_committed_in_time_is_expired_for_good(hasty: Gateway) -> None:
    """At both workers, by every call, until the window is over; under another id the file is sent again."""
    it = Sender(hasty)
    await it.store(0, 11)
    async with asyncio.timeout(60):
        while (await it.show(1)).document["state"] != "expired":  # noqa: ASYNC110 - the state of another process
            await asyncio.sleep(0.05)
    for worker in (0, 1):
        shown = TransactionDescription.model_validate((await it.show(worker)).document)
        assert (shown.state, shown.stored_bytes, shown.offsets) == ("expired", 0, None)
        for answer in (
            await it.store(0, 11, worker, expect=410),
            await it.store(11, 23, worker, expect=410),
            await it.call("commit_request", worker, 410, size=11),
            await it.call("commit", worker, 410),
        ):
            assert answer.problem == "expired"
    assert await it.visible() == []
    again = Sender(hasty)
    await again.all()
    await again.call("commit_request", size=len(FILE))
    await again.call("commit")
    assert b"".join(chunk.data for _, _, chunk in await again.visible()) == FILE
