"""The archive's protocol against real workers: any worker takes any call, and each repetition gets the same answer."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.gateway.api.archive_schemas import PieceStored, UploadCommitted, UploadDescription, UploadRequested
from logferry.gateway.contract.chunk import Chunk, chunk_of_record
from logferry.gateway.contract.names import lane_of
from logferry.gateway.token_command import new_token
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.checker import committed_records
from tests.support.gateway import LANES, Answer, Gateway, gateway

TOKENS: Final = {name: new_token() for name in ("hosts", "other", "narrow", "admin")}
RULES: Final = [{"name": "access*", "topic": "in-access"}, {"name": "gone", "topic": "in-no-such-topic"}]
TOKEN_SETTINGS: Final[list[dict[str, Any]]] = [
    {"name": "hosts", "sha256": TOKENS["hosts"][1], "write": ["in-*"]},
    {"name": "other", "sha256": TOKENS["other"][1], "write": ["elsewhere"]},
    {"name": "narrow", "sha256": TOKENS["narrow"][1], "write": ["in-*"], "sources": "archive/narrow/ok-*"},
    {"name": "admin", "sha256": TOKENS["admin"][1], "admin": ["*"], "read": ["*"]},
]
PIECES: Final = [b"first\n", b"second\nthird\n", b"last, without its end"]
WITHIN_S: Final = 4.0  # a slow machine has time for some calls


@pytest.fixture(scope="module")
def archive(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    settings = {"topics": RULES, "file_bytes": 4096, "file_pieces": 5}
    with served(kafka, tmp_path_factory.mktemp("archive"), "archive", settings) as running:
        asyncio.run(make_topic(running))
        yield running


@pytest.fixture(scope="module")
def hasty(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Transactions end soon, and there is room for few."""
    settings = {"topics": RULES, "commit_within_s": WITHIN_S, "lane_uploads": 3, "lane_bytes": 1 << 20}
    with served(kafka, tmp_path_factory.mktemp("hasty"), "hasty", settings) as running:
        asyncio.run(make_topic(running))
        yield running


async def make_topic(at: Gateway) -> None:
    data = b'{"partitions": 2}'
    await at.ask("PUT", "/v1/topics/in-access", data=data, headers=bearer("admin"), expect=None)


def served(kafka: KafkaCluster, folder: Path, name: str, settings: dict[str, Any]) -> Any:
    return gateway(kafka, folder, name, tokens=TOKEN_SETTINGS, receivers={"archive": settings})


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[token][0]}"}


class Transaction:
    """A transaction of a token's, at any worker."""

    def __init__(self, at: Gateway, token: str = "hosts", name: str | None = None) -> None:
        self.at, self.token = at, token
        self.name = name or f"t {time.time_ns()}/x"
        self.digests: list[str] = []

    async def call(self, method: str, rest: str, worker: int = 0, expect: int | None = 200, **options: Any) -> Answer:
        path = f"/v1/archive/{quote(self.name, safe='')}{rest}"
        headers = {**bearer(self.token), **options.pop("headers", {})}
        return await self.at.ask(method, path, worker, expect=expect, headers=headers, **options)

    async def store(self, piece: int, data: bytes, worker: int = 0, expect: int | None = 200, **options: Any) -> Answer:
        query = f"/store?piece={piece}"
        if piece == 1:
            query += "&host=web1&file=%2Fvar%2Flog%2Faccess.log&log_type=access-log"
        else:
            query += f"&digest={self.digests[piece - 2]}"
        answer = await self.call("POST", query, worker, expect, data=data, **options)
        if answer.status == 200:
            self.digests[piece - 1 :] = [answer.document["digest"]]
        return answer

    async def end(self, kind: str, worker: int = 0, expect: int = 200, digest: str | None = None) -> Answer:
        return await self.call("POST", f"/{kind}?digest={digest or self.digests[-1]}", worker, expect)

    async def commit_all(self, *pieces: bytes) -> dict[str, Any]:
        for number, piece in enumerate(pieces, 1):
            await self.store(number, piece, number % 2)
        await self.end("commit_request")
        found: dict[str, Any] = (await self.end("commit", 1)).document
        return found


async def stored(at: Gateway, source_id: str) -> list[Chunk]:
    """The chunks of a source, which stand side by side in one partition."""
    records = await committed_records(at.kafka.bootstrap, "dc1.in-access")
    found = [record for record in records if (record.key or b"").decode() == source_id]
    offsets = [record.offset for record in found]
    assert len({record.partition for record in found}) <= 1
    assert offsets == list(range(offsets[0], offsets[0] + len(found))) if found else True
    return [chunk_of_record(record.value or b"", record.headers) for record in found]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - the state of another process
            await asyncio.sleep(0.05)


# ---- the calls --------------------------------------------------------------------------------------------------


async def test_a_file_is_visible_by_its_commit_at_any_worker(archive: Gateway) -> None:
    """Every call is repeated at the other worker, before and after the commit, with the same answer."""
    it = Transaction(archive)
    said: dict[str, Any] = {}

    async def store(worker: int, *, is_packed: bool = False) -> None:
        for number, piece in enumerate(PIECES, 1):
            packed: dict[str, Any] = {"headers": {"Content-Encoding": "gzip"}} if is_packed else {}
            answer = await it.store(number, gzip.compress(piece) if is_packed else piece, worker, **packed)
            assert said.setdefault(f"piece {number}", answer.document) == answer.document

    async def end(kind: str, worker: int) -> None:
        answer = await it.end(kind, worker)
        assert said.setdefault(kind, answer.document) == answer.document

    await store(0)
    await store(1, is_packed=True)
    assert (await it.call("GET", "")).document["state"] == "open"
    for worker in (0, 1):
        await end("commit_request", worker)
    assert (await it.call("GET", "", 1)).document["state"] == "requested"
    source_id = f"archive/hosts/{it.name}"
    assert await stored(archive, source_id) == []
    for worker in (0, 1, 0):
        await end("commit", worker)
        await end("commit_request", worker)
        await store(worker)
    described = (await it.call("GET", "")).document
    committed = said["commit"]
    assert {**committed, **said["commit_request"], "state": "committed"} == described
    chunks = await stored(archive, source_id)
    assert [chunk.data for chunk in chunks] == PIECES
    assert [chunk.seqno for chunk in chunks] == list(range(committed["first_seqno"], committed["last_seqno"] + 1))
    assert [chunk.prev for chunk in chunks] == [chunk.seqno - 1 for chunk in chunks]
    PieceStored.model_validate(said["piece 1"])
    UploadRequested.model_validate(said["commit_request"])
    UploadCommitted.model_validate(committed)
    UploadDescription.model_validate(described)
    metadata = {"host": "web1", "file": "/var/log/access.log", "log_type": "access-log"}
    assert all(chunk.attributes == metadata for chunk in chunks)
    assert committed == {
        "transaction": it.name,
        "source_id": source_id,
        "topic": "dc1.in-access",
        "partition": committed["partition"],
        "first_seqno": committed["first_seqno"],
        "last_seqno": committed["first_seqno"] + 2,
        "digest": it.digests[-1],
    }
    path = f"/v1/topics/in-access/sources?prefix={quote(source_id, safe='')}"
    (row,) = (await archive.ask("GET", path, headers=bearer("admin"))).document["sources"]
    assert (row["recorded_seqno"], row["finished"]) == (committed["last_seqno"], True)


async def test_what_a_worker_has_forgotten_is_read_from_kafka(archive: Gateway) -> None:
    """The one that stored the first pieces is restarted. Of those the second is in no memory then: the first was sent
    again."""
    it = Transaction(archive)
    source_id = f"archive/hosts/{it.name}"
    for number, piece in enumerate(PIECES[:2], 1):
        await it.store(number, piece)
    digests, owner = [*it.digests], await archive.owner(source_id)
    await asyncio.to_thread(archive.workers[owner].child.restart)
    await asyncio.to_thread(archive.wait_ready)
    await it.store(1, PIECES[0])
    it.digests = [*it.digests, *digests[1:]]
    await it.store(3, PIECES[2])
    await it.end("commit_request")
    await it.end("commit")
    assert [chunk.data for chunk in await stored(archive, source_id)] == PIECES


async def test_two_clients_with_one_id(archive: Gateway) -> None:
    """The second one learns at its first piece that differs; what is visible is the first one's, whole."""
    first = Transaction(archive)
    second = Transaction(archive, name=first.name)
    await first.store(1, PIECES[0])
    await second.store(1, PIECES[0], 1)
    await first.store(2, PIECES[1])
    assert (await second.store(2, b"another", 1, 409)).problem == "conflict"
    longer = Transaction(archive, name=first.name)
    longer.digests = [*first.digests]
    await longer.store(3, b"and more", 1)
    assert (await first.end("commit_request", expect=409)).problem == "conflict"
    await longer.end("commit_request")
    assert (await first.end("commit", expect=409)).problem == "conflict"
    await longer.end("commit")
    assert [chunk.data for chunk in await stored(archive, f"archive/hosts/{first.name}")] == [*PIECES[:2], b"and more"]
    other = Transaction(archive, name=first.name)
    answer = await other.store(1, b"a file of its own", expect=409)
    assert "another transaction id" in answer.document["detail"]


async def test_the_order_of_calls(archive: Gateway) -> None:
    it = Transaction(archive)
    it.digests = ["0" * 32]
    for answer in (
        await it.store(2, b"x", expect=404),
        await it.end("commit_request", 1, expect=404),
        await it.end("commit", expect=404),
        await it.call("GET", "", 1, expect=404),
    ):
        assert answer.problem == "unknown-transaction"
    it.digests = []
    await it.store(1, b"x")
    assert (await it.end("commit", expect=409)).problem == "conflict"
    it.digests *= 3
    assert (await it.store(3, b"x", expect=409)).problem == "gap"
    del it.digests[1:]
    await it.end("commit_request")
    assert (await it.store(2, b"y", 1, 409)).problem == "conflict"
    await it.end("commit", 1)


@pytest.mark.parametrize(
    ("rest", "data", "status", "problem", "named"),
    [
        ("/store", b"x", 400, "bad-request", "piece"),
        ("/store?piece=0&host=a&file=b&log_type=access", b"x", 400, "bad-request", "piece"),
        ("/store?piece=-1", b"x", 400, "bad-request", "piece"),
        ("/store?piece=1&host=a&file=b", b"x", 400, "bad-request", "log_type"),
        ("/store?piece=1&host=a&file=&log_type=access", b"x", 400, "bad-request", "file"),
        ("/store?piece=1&host=a&file=b&log_type=access&colour=red", b"x", 400, "bad-request", "colour"),
        ("/store?piece=1&host=a&file=b%0Ac&log_type=access", b"", 400, "bad-request", "body"),
        ("/store?piece=1&host=a&file=b&log_type=unknown", b"x", 404, "unknown-topic", "unknown"),
        ("/store?piece=1&host=a&file=b&log_type=gone", b"x", 404, "unknown-topic", "in-no-such-topic"),
        ("/store?piece=2", b"x", 400, "bad-request", "digest"),
        ("/store?piece=2&digest=XY", b"x", 400, "bad-request", "digest"),
        ("/commit_request", b"", 400, "bad-request", "digest"),
        ("/commit?digest=12", b"", 400, "bad-request", "digest"),
        (f"/commit?digest={'0' * 32}", b"x", 400, "bad-request", "body"),
        (f"/commit?digest={'0' * 32}&piece=1", b"", 400, "bad-request", "piece"),
        ("/begin", b"", 404, "not-found", "begin"),
    ],
)
async def test_bad_calls(archive: Gateway, rest: str, data: bytes, status: int, problem: str, named: str) -> None:
    answer = await Transaction(archive).call("POST", rest, data=data, expect=status)
    assert answer.problem == problem
    assert named in answer.document["detail"]


async def test_limits_of_a_file(archive: Gateway) -> None:
    large = Transaction(archive)
    assert (await large.store(1, b"x" * 4097, expect=413)).problem == "too-large"
    await large.store(1, b"x" * 4096)
    assert (await large.store(2, b"x", expect=413)).problem == "too-large"
    many = Transaction(archive)
    for number in range(1, 6):
        await many.store(number, b"x")
    assert (await many.store(6, b"x", expect=413)).problem == "too-large"
    assert len(await stored(archive, (await many.commit_all(*[b"x"] * 5))["source_id"])) == 5


async def test_rights(archive: Gateway) -> None:
    """Each token has its own transactions, and needs the right to write the topic as their source."""
    name = f"ok-{time.time_ns()}"
    for token in ("hosts", "narrow"):
        it = Transaction(archive, token, name)
        committed = await it.commit_all(token.encode())
        assert [chunk.data for chunk in await stored(archive, committed["source_id"])] == [token.encode()]
    for token, other in (("other", name), ("narrow", "not-ok")):
        it = Transaction(archive, token, other)
        assert (await it.store(1, b"x", 1, 403)).problem == "forbidden"
        assert (await it.call("GET", "", expect=404)).problem == "unknown-transaction"
    nobody = await archive.ask("POST", f"/v1/archive/{name}/commit?digest={'0' * 32}", expect=401)
    assert nobody.problem == "unauthenticated"


async def test_the_script_of_the_guide(archive: Gateway, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "ops/docs/guides/archive.md").read_text(encoding="utf-8")
    script = guide.partition("```bash\n")[2].partition("```")[0].replace("http://127.0.0.1:8080", archive.urls[1])
    # The token may have any letters.
    script = script.replace("1M", "1K").replace("curl -sS", f"curl -sS -H 'Authorization: Bearer {TOKENS['hosts'][0]}'")
    file, name = tmp_path / "access.log", f"{time.time_ns()}"
    lines = "".join(f"line {number}\n" for number in range(200))
    file.write_text(lines)
    run = await asyncio.create_subprocess_exec("bash", "-c", f"set -u\n{script}\nsend {file} {name}")
    assert await asyncio.wait_for(run.wait(), 60) == 0
    chunks = await stored(archive, f"archive/hosts/{name}")
    assert len(chunks) > 1
    assert b"".join(chunk.data for chunk in chunks).decode() == lines
    assert [path.name for path in tmp_path.iterdir()] == ["access.log"]


# ---- time and space ---------------------------------------------------------------------------------------------


async def offsets_of(at: Gateway, topic: str, lane: int) -> tuple[int, int]:
    """The first and the next offset of the lane's partition."""
    consumer = AIOKafkaConsumer(bootstrap_servers=at.kafka.bootstrap, isolation_level="read_committed")
    await consumer.start()
    try:
        tp = TopicPartition(topic, lane)
        return (await consumer.beginning_offsets([tp]))[tp], (await consumer.end_offsets([tp]))[tp]
    finally:
        await consumer.stop()


async def test_what_is_not_committed_in_time_is_gone_and_its_space_with_it(hasty: Gateway) -> None:
    """Two open ones fill the share of a token; when they are gone there is room again, also in Kafka."""
    name = f"{time.time_ns()}"
    lane = lane_of(f"archive/hosts/{name}", LANES)
    same_lane = (f"{name}-{n}" for n in range(1000) if lane_of(f"archive/hosts/{name}-{n}", LANES) == lane)
    open_ = [Transaction(hasty, name=other) for other in (name, next(same_lane))]
    third = Transaction(hasty, name=next(same_lane))

    async def is_gone() -> bool:
        answers = [await it.call("GET", "", 1, expect=None) for it in open_]
        return all(answer.problem == "unknown-transaction" for answer in answers)

    async def is_full() -> bool:
        """Whether a third one is refused; the lane may be slower than their time."""
        if any([(await it.store(1, b"x" * 400_000, expect=None)).status != 200 for it in open_]):
            return False  # the third one still has a place of those that ended meanwhile
        answer = await third.store(1, b"x", 1, expect=None)
        return answer.problem == "overloaded" and "lane_uploads" in answer.document["detail"]

    await until(is_full)
    await until(is_gone)
    for it in open_:
        assert (await it.end("commit_request", 1, expect=404)).problem == "unknown-transaction"
    source_id = f"archive/hosts/{name}"
    metrics = (await hasty.ask("GET", "/metrics", await hasty.owner(source_id), headers=bearer("admin"))).body
    lines = metrics.decode().splitlines()
    assert f'logferry_lane_staged_bytes{{lane="{lane}"}} 0.0' in lines
    assert f'logferry_lane_uploads{{lane="{lane}"}} 0.0' in lines
    topic = f"{hasty.state_topic.removesuffix('.state')}.archive"

    async def is_freed() -> bool:
        first, end = await offsets_of(hasty, topic, lane)
        return end - first <= 2  # the marker of the last transaction, and a margin of one record

    await until(is_freed)
    committed = await third.commit_all(b"there is room")
    assert [chunk.data for chunk in await stored(hasty, committed["source_id"])] == [b"there is room"]
    assert await stored(hasty, source_id) == []


async def test_the_bytes_of_a_lane(hasty: Gateway) -> None:
    async def is_refused() -> bool:
        it = Transaction(hasty)
        await it.store(1, b"x" * 600_000)
        answer = await it.store(2, b"x" * 600_000, expect=None)
        return answer.problem == "overloaded" and "lane_bytes" in answer.document["detail"]

    await until(is_refused)
