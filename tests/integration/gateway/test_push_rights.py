"""Push delivery on a Kafka with an authorizer and a login: the documented rights are enough, no others are asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaProducer
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.service.preflight import wait_until_created

from tests.support.delivery import PushReceiver, Received, deliver, receiver
from tests.support.kafka_rights import deny, deny_no_more, documented, grant
from tests.support.secured_kafka import PASSWORD, Right, SecuredKafka

# The page names the topics of dead letters by their beginning.
_ANY_LETTERS: Final[Right] = ("TOPIC", "dc1.", "LITERAL", "WRITE")
LETTERS: Final[Right] = ("TOPIC", "dc1.letters", "LITERAL", "WRITE")
HIDDEN: Final[Right] = ("TOPIC", "dc1.orders", "LITERAL", "DESCRIBE")
RIGHTS: Final = documented("Push delivery of `dc1`")
# By operation and resource, as for the gateway; without the first the brokers' time is not known.
HARMLESS: Final = {
    ("DESCRIBE", "Cluster:LITERAL:kafka-cluster"),
    ("DESCRIBE", "Topic:LITERAL:__consumer_offsets"),
    ("DESCRIBE_CONFIGS", "Cluster:LITERAL:kafka-cluster"),
}


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredKafka]:
    kafka = SecuredKafka(tmp_path / "secured", ("deliver",))
    with kafka:
        yield kafka


def denied(kafka: SecuredKafka) -> set[tuple[str, str]]:
    said = kafka.log(1).read_text(encoding="utf-8")
    return set(
        re.findall(r"Principal = User:deliver is Denied operation = (\S+) from host = \S+ on resource = (\S+)", said)
    )


async def write(kafka: SecuredKafka, seqnos: range) -> list[tuple[str, int]]:
    """As a gateway writes them; the third one is bad."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for seqno in seqnos:
            data = b"bad\n" if seqno == 3 else b"line %d\n" % seqno
            headers = record_headers(Chunk(seqno, None, 1_764_000_000_000, {}, data))
            await producer.send_and_wait("dc1.orders", data, key=b"web1", partition=0, headers=headers)
    return [("web1", seqno) for seqno in seqnos if seqno != 3]


async def test_with_the_documented_rights_everything_is_delivered(secured: SecuredKafka, tmp_path: Path) -> None:
    """Without the optional ones. A missing right is named where it is missed, and what waits for it continues."""
    assert _ANY_LETTERS in RIGHTS
    await grant(secured.bootstrap, "deliver", [right for right in RIGHTS if right != _ANY_LETTERS])
    client = KafkaClient({"bootstrap_servers": secured.bootstrap}, "tests")
    await client.start()
    try:
        for topic in ("dc1.orders", "dc1.letters"):
            await client.create_topic(topic, 1, 1, {})
            await wait_until_created(client, topic)

        async def behave(got: Received) -> int | None:
            return 422 if b"bad" in got.body else None

        async with receiver(PushReceiver(behave)) as got:
            definition = {"topics": ["dc1.orders"], "url": got.url, "start": "earliest", "max_bytes": 1024}
            letters = {"on_rejection": "split", "dead_letter_topic": "letters"}
            settings: dict[str, Any] = {
                "connection": secured.plain_settings("deliver", "PLAIN"),
                "subscriptions.billing": {**definition, **letters},
            }
            written = await write(secured, range(1, 5))
            with deliver(secured, tmp_path / "one", "logferry", **settings) as running:
                await running.until(
                    lambda units: any(unit["error"] and "letters" in unit["error"]["detail"] for unit in units),
                    "error that names the topic of dead letters",
                    90,
                )
                assert ("WRITE", "Topic:LITERAL:dc1.letters") in denied(secured)
                await grant(secured.bootstrap, "deliver", [LETTERS])
                await got.until(lambda: len(got.rows) >= len(written), "all but the bad one", 90)
                # Hidden for a while: the worker says so, and continues where it was.
                await deny(secured.bootstrap, "deliver", [HIDDEN])
                await running.until(lambda units: units == [], "end of what is hidden")
                written += await write(secured, range(5, 8))
                assert (await running.status())["warnings"] == [
                    "Kafka hides dc1.orders, so nothing of it is delivered: grant Read on it"
                ]
                await deny_no_more(secured.bootstrap, "deliver", [HIDDEN])
                await got.until(lambda: len(got.rows) >= len(written), "what was written meanwhile", 90)
                assert (await running.status())["warnings"] == []
                assert PASSWORD not in running.log()
            # Another worker takes over what the first one left.
            written += await write(secured, range(8, 11))
            with deliver(secured, tmp_path / "two", "logferry", **settings):
                await got.until(lambda: len(got.rows) >= len(written), "what came later", 90)
            assert got.problems(written) == []
        assert await client.offset("dc1.letters", 0, EARLIEST) == 0
        [record] = (await client.fetch("dc1.letters", 0, 0, max_bytes=1 << 20)).records
        assert record.value == b"bad\n"
        meanwhile = {("WRITE", "Topic:LITERAL:dc1.letters"), ("DESCRIBE", "Topic:LITERAL:dc1.orders")}
        assert denied(secured) - meanwhile <= HARMLESS
    finally:
        await client.close()
