"""The gateway on a Kafka with TLS, client certificates, passwords and Kafka's own authorizer, and with exactly the
rights of operations/kafka.md."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from logferry.gateway.contract.mirror_state import MirrorCheckpoint, checkpoint_key, mirror_lane_of
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.service.preflight import wait_until_created

from tests.support.kafka_rights import DESCRIBE_CLUSTER, deny, deny_no_more, documented, grant
from tests.support.secured_kafka import PASSWORD, Right, SecuredKafka, as_toml
from tests.support.served_gateway import Gateway

RIGHTS: Final = documented("Gateway of `dc1`")
JSON: Final = {"Accept": "application/x-ndjson"}
TEXT: Final = {"Accept": "text/plain"}
ID: Final = bytes(range(16))
# By operation and resource; the gateway logs the second as `broker_settings_hidden`.
HARMLESS: Final = {
    ("DESCRIBE", "Topic:LITERAL:__consumer_offsets"),
    ("DESCRIBE_CONFIGS", "Cluster:LITERAL:kafka-cluster"),
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """Who connects needs a certificate and a password. The users have no rights yet."""
    users, settings = (
        ("gateway", "blind", "shut-out", "wavering"),
        {"listener.name.secured.ssl.client.auth": "required"},
    )
    kafka = SecuredKafka(tmp_path_factory.mktemp("secured") / "files", users, settings)
    with kafka:
        yield kafka


def connection(kafka: SecuredKafka, user: str, **changes: str) -> str:
    certificate = kafka.plain_settings(user, "certificate")
    files = {name: certificate[name] for name in ("cert_file", "key_file")}
    return as_toml("kafka", kafka.plain_settings(user, "PLAIN") | files | changes)


def served(kafka: SecuredKafka, folder: Path, user: str, workers: int, **settings: int) -> Gateway:
    tables = connection(kafka, user)
    return Gateway(folder, "", workers, tables, settings={"prefix": "logferry", **settings})


def events(gateway: Gateway, *levels: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in gateway.said().splitlines() if line.startswith("{")]
    return [line for line in lines if line["level"] in levels]


def denied(kafka: SecuredKafka, user: str) -> set[tuple[str, str]]:
    """What the authorizer has refused the user."""
    said = kafka.log(1).read_text(encoding="utf-8")
    pattern = rf"Principal = User:{user} is Denied operation = (\S+) from host = \S+ on resource = (\S+)"
    return set(re.findall(pattern, said))


def source(topic: str, name: str, rest: str = "") -> str:
    return f"/v1/topics/{topic}/sources/{name}{rest}"


async def copy_of_dc2(kafka: SecuredKafka) -> None:
    """Topics as a mirror writes them: a topic, the states of its sources, and how far it is mirrored."""
    data, states, checkpoints = "dc2.copied", "logferry.gateway.dc2.state", "logferry.mirror.dc1.state"
    client = KafkaClient({"bootstrap_servers": kafka.bootstrap}, "tests")
    await client.start()
    try:
        for topic in (data, states, checkpoints, "logferry.mirror.dc1.pairs"):
            await client.create_topic(topic, 1, 1, {})
            await wait_until_created(client, topic)
    finally:
        await client.close()
    identity = SourceIdentity(data, None, "far")
    state = SourceState(ID, 0, 7, None, 0, int(time.time() * 1000))
    checkpoint = MirrorCheckpoint(ID, ID, 5, 5, -1, -1, 0, 0, 0, ())
    assert (lane_of(identity.key, 1), mirror_lane_of(data, 0, 1)) == (0, 0)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        await producer.send_and_wait(states, state.encode(), identity.state_key())
        await producer.send_and_wait(checkpoints, checkpoint.encode(), checkpoint_key(data, 0))


async def test_with_the_documented_rights_everything_works(secured: SecuredKafka, tmp_path: Path) -> None:
    """Without the optional ones, over TLS, by a password and a certificate."""
    await grant(secured.bootstrap, "gateway", RIGHTS)
    await copy_of_dc2(secured)
    async with served(secured, tmp_path, "gateway", 2) as gateway:

        async def done(method: str, path: str, status: int = 200, **request: Any) -> Any:
            for worker in range(2) if method == "GET" else (0,):
                deadline = time.monotonic() + 60
                found, document, headers = await gateway.ask(method, path, worker=worker, **request)
                while found == 503 and time.monotonic() < deadline:
                    await asyncio.sleep(float(headers["Retry-After"]))
                    found, document, headers = await gateway.ask(method, path, worker=worker, **request)
                assert found == status, (path, document)
            return document

        await done("PUT", "/v1/topics/rights", 201, data='{"partitions": 1}')
        grown = await done("PUT", "/v1/topics/rights", data='{"partitions": 2}')
        assert (grown["partitions"], "dc1.rights" in str(await done("GET", "/v1/topics"))) == (2, True)
        for number in range(8):
            await done("POST", source("rights", f"s{number}", "/session"))
            await done("POST", source("rights", f"s{number}", "/chunks?seqno=1"), data=b"x\n")
            await done("POST", source("rights", f"s{number}", "/heartbeat"), data='{"position": 2}')
            assert (await done("GET", source("rights", f"s{number}")))["recorded_seqno"] == 1
        assert len((await done("GET", "/v1/topics/rights/sources"))["sources"]) == 8
        pages = [await done("GET", f"/v1/topics/dc1.rights/partitions/{n}/chunks", headers=TEXT) for n in (0, 1)]
        assert b"".join(pages).count(b"\n") == 8
        await check_consumer(gateway, done)
        await done("DELETE", source("rights", "s0"))
        assert (await done("GET", source("rights", "s0")))["recorded_seqno"] is None
        # Of another data centre.
        await done("GET", "/v1/topics/dc2.copied/partitions/0/chunks", headers=TEXT)
        assert (await done("GET", source("copied", "far", "?dc=dc2")))["recorded_seqno"] == 7
        translated = await done("GET", "/v1/topics/dc2.copied/partitions/0/translate?offset=5&from=dc2&to=dc1")
        assert translated["translated"] == 5
        status = await done("GET", "/v1/status")
        assert (status["warnings"], status["kafka"]["error"]) == ([], None)
    assert denied(secured, "gateway") == HARMLESS
    assert PASSWORD not in gateway.said()
    consumer = AIOKafkaConsumer("dc1.rights", bootstrap_servers=secured.bootstrap, auto_offset_reset="earliest")
    async with consumer:
        found = [(await consumer.getone()).key for _ in range(8)]
    assert sorted(found) == [b"s%d" % number for number in range(8)]


async def check_consumer(gateway: Gateway, done: Any) -> None:
    """A read session, a commit of all that it was sent, and positions."""
    consumer = "/v1/consumers/rights"
    async with gateway.session.get(f"{gateway.urls[0]}{consumer}/stream?topic=dc1.rights", headers=JSON) as stream:
        frames: list[Any] = []
        async with asyncio.timeout(60):
            while sum(frame["frame"] == "chunk" for frame in frames) < 8:
                frames.append(json.loads(await stream.content.readline()))
        opened, assigned = frames[0]["session"], frames[1]
        read = {frame["partition"]: frame["offset"] + 1 for frame in frames if frame["frame"] == "chunk"}
        positions = [{"topic": "dc1.rights", "partition": number, "offset": at} for number, at in read.items()]
        body = json.dumps({"generation": assigned["generation"], "positions": positions})
        await done("POST", f"{consumer}/sessions/{opened}/commit", data=body)
    assert {row["offset"] for row in (await done("GET", consumer + "/offsets"))["positions"]} == {*read.values()}
    # Kafka misses the session a moment later.
    reset = '{"topic": "dc1.rights", "to": "earliest"}'
    async with asyncio.timeout(60):
        while (await gateway.ask("PUT", consumer + "/offsets", data=reset))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_without_the_right_to_describe_the_cluster_it_serves_and_no_source_expires(
    secured: SecuredKafka, tmp_path: Path
) -> None:
    """The brokers' time is not known then. Once the right is granted, silent sources expire, without a restart."""
    await grant(secured.bootstrap, "blind", [right for right in RIGHTS if right != DESCRIBE_CLUSTER])
    async with served(secured, tmp_path, "blind", 1, source_retention_ms=1000) as gateway:

        async def recorded(name: str) -> int | None:
            status, document, _ = await gateway.ask("GET", source("blind", name))
            assert status == 200, document
            seqno = document["recorded_seqno"]
            assert seqno is None or isinstance(seqno, int)
            return seqno

        await gateway.ask("PUT", "/v1/topics/blind", data='{"partitions": 1}')
        await gateway.ask("POST", source("blind", "silent", "/chunks?seqno=1"), data=b"x\n")
        (missing,) = (event["reason"] for event in events(gateway, "warning") if event["event"] == "clock_differs")
        _, status, _ = await gateway.ask("GET", "/v1/status")
        assert status["warnings"] == [missing]
        assert "no source expires" in missing
        assert "the right to describe the cluster" in missing
        assert denied(secured, "blind") == HARMLESS | {("DESCRIBE", "Cluster:LITERAL:kafka-cluster")}
        # Four times the retention; a search for silent sources each quarter of it.
        until, seqno = time.monotonic() + 4, 0
        while time.monotonic() < until:
            seqno += 1
            answered, document, _ = await gateway.ask(
                "POST", source("blind", "busy", f"/chunks?seqno={seqno}"), data=b"x"
            )
            assert answered == 200, document
            assert await recorded("silent") == 1
        await grant(secured.bootstrap, "blind", [DESCRIBE_CLUSTER])
        async with asyncio.timeout(60):
            while await recorded("silent") is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert "clocks_agree" in {event["event"] for event in events(gateway, "info")}
        assert (await gateway.ask("GET", "/v1/status"))[1]["warnings"] == []


async def test_workers_that_may_not_use_their_group_for_a_while_join_it_again_and_record_once(
    secured: SecuredKafka, tmp_path: Path
) -> None:
    """Longer than Kafka takes them for members. Nothing is restarted. The workers are asked in turn, so that both must
    know who owns the source's lane."""
    await grant(secured.bootstrap, "shut-out", RIGHTS)
    names = ("logferry.gateway.dc1", "logferry.gateway.dc1.state")
    group: list[Right] = [("GROUP", names[0], "LITERAL", operation) for operation in ("READ", "DESCRIBE")]
    async with served(secured, tmp_path, "shut-out", 2) as gateway:
        await gateway.ask("PUT", "/v1/topics/shut-out", data='{"partitions": 1}')
        recorded = 0

        async def write_until(is_over: Callable[[int, int], bool]) -> None:
            """Each chunk until it is recorded. ``is_over``: of the last status and the chunks recorded since."""
            nonlocal recorded
            first = recorded
            async with asyncio.timeout(90):
                for number in itertools.count():
                    path = source("shut-out", "s", f"/chunks?seqno={recorded + 1}")
                    line = b"%d\n" % (recorded + 1)
                    status, document, _ = await gateway.ask("POST", path, worker=number % 2, data=line)
                    assert status in (200, 503) or "outcome-unknown" in document["type"], document
                    recorded += status == 200
                    if is_over(status, recorded - first):
                        return

        await write_until(lambda _, count: count == 20)
        await deny(secured.bootstrap, "shut-out", group)
        client = KafkaClient({"bootstrap_servers": secured.bootstrap}, "tests")
        await client.start()

        async def write_while_group(fits: Callable[[dict[str, list[int]]], bool]) -> None:
            async with asyncio.timeout(60):
                while (found := await client.group_assignment(*names)) is None or fits(found):
                    await write_until(lambda _status, _count: True)

        try:
            await write_while_group(lambda found: found != {})
            said = [one["error"] for one in events(gateway, "warning") if one["event"] == "group_membership_failed"]
            assert ["GroupAuthorizationFailed" in error for error in said] == [True] * 2
            await deny_no_more(secured.bootstrap, "shut-out", group)
            await write_while_group(lambda found: sorted(map(len, found.values())) != [2, 2])
        finally:
            await client.close()
        await write_until(lambda _, count: count == 20)
        page = await gateway.ask("GET", "/v1/topics/dc1.shut-out/partitions/0/chunks", headers=TEXT)
    assert page[1] == b"".join(b"%d\n" % (number + 1) for number in range(recorded))


class Writers:
    """Write each chunk again and again until it is recorded, by each worker in turn. ``answers``: what they got last,
    by topic."""

    def __init__(self, gateway: Gateway, topics: Iterable[str], sources: int) -> None:
        self._gateway = gateway
        self.recorded = {(topic, f"s{n}"): 0 for topic in topics for n in range(sources)}
        self.answers: dict[str, list[tuple[int, str]]] = {topic: [] for topic in topics}

    async def write(self, topic: str, name: str) -> None:
        """Until it is cancelled."""
        for number in itertools.count():
            seqno = self.recorded[topic, name] + 1
            path = source(topic, name, f"/chunks?seqno={seqno}")
            data = f"{name} {seqno}\n".encode()
            status, document, _ = await self._gateway.ask("POST", path, worker=number % 2, data=data)
            assert status in (200, 503) or "outcome-unknown" in document["type"], document
            self.recorded[topic, name] += status == 200
            self.answers[topic].append((status, str(document.get("detail"))))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def record(self, topic: str, count: int) -> None:
        """Returns when each source of the topic has so many chunks more."""
        wanted = {key: seqno + count for key, seqno in self.recorded.items() if key[0] == topic}
        await self.until(lambda: all(self.recorded[key] >= seqno for key, seqno in wanted.items()))


async def lanes_of(gateway: Gateway) -> list[Any]:
    """As the workers describe them."""
    return [(await gateway.ask("GET", "/v1/status", worker=number))[1]["lanes"] for number in range(2)]


GATEWAY: Final = "logferry.gateway.dc1"
# What is missing for a while, what the writers are told, and whether that is to harm its topic alone.
MISSING: Final[list[tuple[Right, str, bool]]] = [
    (("TOPIC", "dc1.victim", "LITERAL", "WRITE"), "grant Write on the topic", True),
    (("TOPIC", "dc1.victim", "LITERAL", "DESCRIBE"), "TopicAuthorizationFailed", True),
    (("TRANSACTIONAL_ID", f"{GATEWAY}.", "PREFIXED", "WRITE"), "TransactionalIdAuthorizationFailed", False),
    (("TOPIC", f"{GATEWAY}.state", "LITERAL", "WRITE"), "it failed (NotCommitted)", False),
]


async def test_a_right_that_is_missing_for_a_while_harms_its_topic_alone_and_nothing_is_recorded_twice(
    secured: SecuredKafka, tmp_path: Path
) -> None:
    """While sources of all lanes write to two topics. Nothing is restarted."""
    await grant(secured.bootstrap, "wavering", RIGHTS)
    async with served(secured, tmp_path, "wavering", 2) as gateway:
        for topic in ("victim", "other"):
            await gateway.ask("PUT", f"/v1/topics/{topic}", data='{"partitions": 1}')
        writers = Writers(gateway, ("victim", "other"), 6)
        tasks = [asyncio.create_task(writers.write(*key)) for key in writers.recorded]
        try:
            await writers.record("victim", 5)
            for right, reason, alone in MISSING:
                for answers in writers.answers.values():
                    answers.clear()
                await deny(secured.bootstrap, "wavering", [right])
                async with asyncio.timeout(60):
                    while reason not in f"{writers.answers['victim']} {await lanes_of(gateway)}":  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                if alone:
                    await writers.record("other", 20)
                    assert {status for status, _ in writers.answers["other"]} == {200}, right
                await deny_no_more(secured.bootstrap, "wavering", [right])
                await writers.record("victim", 5)
                await writers.record("other", 5)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [error for error in ended if not isinstance(error, asyncio.CancelledError)] == []
    for topic in ("victim", "other"):
        recorded = {name: count for (of, name), count in writers.recorded.items() if of == topic}
        found: dict[str, list[int]] = {name: [] for name in recorded}
        options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
        async with AIOKafkaConsumer(f"dc1.{topic}", bootstrap_servers=secured.bootstrap, **options) as consumer:
            while any(len(found[name]) < count for name, count in recorded.items()):
                record = await asyncio.wait_for(consumer.getone(), 60)
                name, seqno = (record.value or b"").decode().split()
                found[name].append(int(seqno))
        assert found == {name: [*range(1, len(seqnos) + 1)] for name, seqnos in found.items()}


async def test_a_wrong_password_ends_the_start_with_a_word_and_without_the_password(
    secured: SecuredKafka, tmp_path: Path
) -> None:
    tables = connection(secured, "gateway", sasl_password_file=str(secured.folder / "wrong-password"))
    gateway = Gateway(tmp_path, "", 1, tables)
    (worker,) = gateway.workers
    worker.start()
    try:
        assert await asyncio.to_thread(worker.wait_for_end, 60)
    finally:
        worker.stop(5)
    assert worker.exit_status == 3
    assert "kafka_away" in gateway.said()
    assert "Authentication failed" in gateway.said()
    assert "a wrong one" not in gateway.said()
