"""A mirror between two clusters with Kafka's own authorizer: with exactly its documented rights, and with less."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewPartitions, NewTopic
from logferry.ops.cli.main import main as command

from tests.support.kafka import alter_topic, becomes, commit
from tests.support.kafka_rights import deny, deny_no_more, grant, rights_of_script
from tests.support.mirror import differences_in_the_end, pairs_by_history
from tests.support.mirrored_topic import World, mirroring, settings_of
from tests.support.secured_kafka import Right, SecuredKafka


class SecuredCentres:
    """A Kafka in each; the users have certificates or access tokens. Who logs in must do so again soon."""

    def __init__(self, folder: Path) -> None:
        again = {"listener.name.secured.connections.max.reauth.ms": "2000"}
        self._clusters = {dc: SecuredKafka(folder / dc, ["unused"], again) for dc in ("dc1", "dc2")}

    def cluster(self, dc: str) -> SecuredKafka:
        return self._clusters[dc]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCentres]:
    found = SecuredCentres(tmp_path_factory.mktemp("centres"))
    with found.cluster("dc1"), found.cluster("dc2"):
        yield found


def rights_of_mirror(world: World, *, here: bool) -> list[Right]:
    """Without the optional ones, which are those on the cluster."""
    places = ("dc2", "dc1", world.folder) if here else ("dc1", "dc2", world.folder)
    found = rights_of_script(*places)["mirror" if here else "mirror-dc2"]
    return [
        (kind, name.replace("logferry.", f"{world.name}."), pattern, operation)
        for kind, name, pattern, operation in found
        if kind != "CLUSTER"
    ]


async def connect(
    world: World, stack: SecuredCentres, user: str, rights: dict[str, list[Right]], login: str = "certificate"
) -> None:
    """The mirror connects as a user that has these rights in each data centre, and no others."""
    for dc, granted in rights.items():
        await grant(stack.cluster(dc).bootstrap, user, granted)
    there, here = (stack.cluster(dc).plain_settings(user, login) for dc in ("dc1", "dc2"))
    world.configure(kafka=here, remote=[{"dc": "dc1", "topics": [f"{world.name}*"], "kafka": there}])


async def status_of(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    exit_status = await asyncio.to_thread(command, ["status", "--mirror", url])
    return exit_status, " ".join(capsys.readouterr().out.split())


def denials(world: World) -> list[dict[str, Any]]:
    """The events of the worker in which Kafka refuses something, but for the brokers' settings, which it can miss."""
    events = [json.loads(line) for line in (world.folder / "mirror-dc2-0.log").read_text().splitlines()]
    refused = [event for event in events if "AuthorizationFailed" in json.dumps(event)]
    return [event for event in refused if event["event"] != "broker_settings_hidden"]


async def test_with_the_rights_of_script_everything_is_done(
    world: World, stack: SecuredCentres, capsys: pytest.CaptureFixture[str]
) -> None:
    rights = {"dc1": rights_of_mirror(world, here=False), "dc2": rights_of_mirror(world, here=True)}
    await connect(world, stack, "documented", rights)
    states = f"{world.name}.gateway.dc1.state"
    await world.admin(
        world.there, "create_topics", [NewTopic(states, 1, 1, topic_configs={"cleanup.policy": "compact"})]
    )
    async with AIOKafkaProducer(bootstrap_servers=world.there) as producer:
        await producer.send_and_wait(states, b"a state", key=b"a source")
    await world.create(partitions=2)
    await world.write(b"0", b"1")
    await world.write(b"2", partition=1)
    with mirroring(world.mirror) as url:
        assert await world.differences() == []
        assert await differences_in_the_end((world.there, states), (world.here, states)) == []
        await world.admin(world.there, "create_partitions", {world.topic: NewPartitions(3)})
        await world.write(b"3", partition=2)
        assert await world.differences() == []
        await alter_topic(world.here, world.topic, max_message_bytes="1000")
        await alter_topic(world.there, world.topic, max_message_bytes="3000000", retention_ms="987654321")
        # It is refused here, so the settings are compared at once.
        await world.write(bytes(2_000_000), partition=1, max_request_size=1 << 22)
        assert await world.differences() == []
        assert (await settings_of(world.here, world.topic))["retention.ms"] == "987654321"
        await commit(stack.cluster("dc1"), "readers", world.topic, 1)
        pairs = await pairs_by_history(world.here, world.mirror.pairs)
        assert await becomes(stack.cluster("dc2"), "readers", world.topic, pairs[world.topic, 0][1])
    with mirroring(world.mirror) as url:
        await world.write(b"4")
        assert await world.differences() == []
        await world.state(url, "caught-up")
        exit_status, said = await status_of(url, capsys)
        assert (exit_status, "no problem found" in said) == (0, True), said
    assert denials(world) == []


async def test_with_access_tokens_it_copies_while_brokers_end_its_connections(
    world: World, stack: SecuredCentres, capsys: pytest.CaptureFixture[str]
) -> None:
    """OAUTHBEARER in both data centres. Kafka ends what has not logged in again in time, and each new connection reads
    the token: it waits for one that Kafka takes."""
    rights = {"dc1": rights_of_mirror(world, here=False), "dc2": rights_of_mirror(world, here=True)}
    await connect(world, stack, "tokens", rights, "OAUTHBEARER")
    clusters = [stack.cluster(dc) for dc in ("dc1", "dc2")]
    await world.create()
    sent = 0

    async def write_for(seconds: float) -> None:
        nonlocal sent
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await world.write(*[b"%d" % number for number in range(sent, sent + 10)])
            sent += 10

    with mirroring(world.mirror) as url:
        await write_for(5)  # some logins long
        assert await world.differences() == []
        for cluster in clusters:
            (cluster.folder / "tokens.token").write_text(cluster.token("tokens", seconds=-60))
        async with asyncio.timeout(60):
            while (await status_of(url, capsys))[0] != 1:
                await write_for(1)
        for cluster in clusters:
            (cluster.folder / "tokens.token").write_text(cluster.token("tokens"))
        assert await world.differences() == []
        assert (await world.state(url, "caught-up"))["source_end"] >= sent
        async with asyncio.timeout(60):
            while (await status_of(url, capsys))[0] != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert denials(world) == []
    # A refused login ends there. What is sent on as if it were none fails with an error that nobody retries.
    brokers = [cluster.log(1).read_text() for cluster in clusters]
    assert any("Could not validate the access token" in said for said in brokers)
    assert ["Unexpected Kafka request" in said for said in brokers] == [False, False]


async def test_without_alterconfigs_it_copies_and_names_the_right(
    world: World, stack: SecuredCentres, capsys: pytest.CaptureFixture[str]
) -> None:
    here = [right for right in rights_of_mirror(world, here=True) if right[3] != "ALTER_CONFIGS"]
    await connect(world, stack, "unaltering", {"dc1": rights_of_mirror(world, here=False), "dc2": here})
    await world.create(1, **{"retention.ms": "123456789"})
    other = NewTopic(world.topic, 1, 1, topic_configs={"retention.ms": "987654321"})
    await world.admin(world.here, "create_topics", [other])
    await world.write(b"0", b"1")
    with mirroring(world.mirror) as url:
        assert await world.differences() == []
        exit_status, said = await status_of(url, capsys)
        assert exit_status == 0
        assert f"the settings of {world.topic} here may differ" in said
        assert "AlterConfigs" in said
        assert "retention.ms" in said
        assert {event["event"] for event in denials(world)} == {"target_not_altered"}
    assert (await settings_of(world.here, world.topic))["retention.ms"] == "987654321"
    await grant(world.here, "unaltering", [("TOPIC", "dc1.", "PREFIXED", "ALTER_CONFIGS")])
    with mirroring(world.mirror) as url:
        await world.write(b"2")
        assert await world.differences() == []
        assert "may differ" not in (await status_of(url, capsys))[1]
    assert (await settings_of(world.here, world.topic))["retention.ms"] == "123456789"


class Case(NamedTuple):
    """``stops``: of each partition, None: it is copied. ``here``, ``there``: the operations that the mirror lacks."""

    stops: tuple[str | None, ...]
    here: Collection[str] = ()
    there: Collection[str] = ()
    is_here: bool = True


HERE: Final = ("READ", "WRITE", "CREATE", "ALTER", "DESCRIBE_CONFIGS", "ALTER_CONFIGS")
THERE: Final = ("DESCRIBE", "READ", "DESCRIBE_CONFIGS")
CASES: Final = {
    "whole": Case((None,)),
    "unreadable": Case(("target-unreadable",), here=["READ"]),
    # Its copy holds nothing, but a transaction that hangs there would not be seen.
    "unchecked": Case(("write-rejected",), here=["READ"]),
    "unwritable": Case(("write-rejected",), here=["WRITE"]),
    "missing": Case(("target-not-created",), here=["CREATE"], is_here=False),
    "ungrown": Case((None, "target-not-created"), here=["ALTER"]),
    # AlterConfigs includes DescribeConfigs.
    "undescribed": Case((None,), here=["DESCRIBE_CONFIGS", "ALTER_CONFIGS"]),
    "hidden": Case(("target-not-created",), here=[operation for operation in HERE if operation != "CREATE"]),
    "unfetched": Case(("fetch-rejected",), there=["READ"]),
    "unknown": Case(("target-not-created",), there=["DESCRIBE_CONFIGS"], is_here=False),
}


async def test_a_topic_with_a_right_too_few_stops_alone_and_by_name(
    world: World, stack: SecuredCentres, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = {name: f"{world.topic}-{name}" for name in CASES}
    rights = {dc: [r for r in rights_of_mirror(world, here=dc == "dc2") if r[1] != "dc1."] for dc in ("dc1", "dc2")}
    for name, case in CASES.items():
        for dc, every, lacked in (("dc1", THERE, case.there), ("dc2", HERE, case.here)):
            rights[dc] += [("TOPIC", topics[name], "LITERAL", one) for one in every if one not in lacked]
        await world.admin(world.there, "create_topics", [NewTopic(topics[name], len(case.stops), 1)])
        if case.is_here:
            await world.admin(world.here, "create_topics", [NewTopic(topics[name], 1, 1)])
    await connect(world, stack, "uneven", rights)

    async def write(*names: str) -> None:
        async with AIOKafkaProducer(bootstrap_servers=world.there, acks="all") as producer:
            for name in names:
                for partition in range(len(CASES[name].stops)):
                    await producer.send_and_wait(topics[name], name.encode(), partition=partition)

    async with AIOKafkaProducer(bootstrap_servers=world.here, acks="all") as producer:
        # Without a record nothing has to be read.
        await producer.send_and_wait(topics["unreadable"], b"of another program", partition=0)
    await write(*CASES)
    with mirroring(world.mirror) as url:
        for name, case in CASES.items():
            for partition, stop in enumerate(case.stops):
                found = await world.state(url, stop or "caught-up", partition, topics[name])
                assert stop is None or "uthoriz" in found["stop"]["detail"] or "grant" in found["stop"]["detail"], found
        copied = [name for name, case in CASES.items() if case.stops == (None,)]
        await write(*copied)
        for name in copied:
            assert await differences_in_the_end((world.there, topics[name]), (world.here, topics[name])) == []
        stops = {(name, n): stop for name, case in CASES.items() for n, stop in enumerate(case.stops) if stop}
        expected = {f"{topics[name]}-{n} of dc1 stopped: {stop}" for (name, n), stop in stops.items()}
        said = ""
        # A lane that fences after a refusal says so for a moment, and not what has stopped.
        while not all(text in said for text in expected):
            exit_status, said = await status_of(url, capsys)
        assert exit_status == 1
        assert f"the settings of {topics['undescribed']} here may differ" in said
        assert "DescribeConfigs" in said
        # A topic that is hidden by rights does not pass for a deleted one, and is copied on once it is seen again.
        hidden: list[Right] = [("TOPIC", topics["whole"], "LITERAL", "DESCRIBE")]
        await deny(world.there, "uneven", hidden)
        found = await world.state(url, "fetch-rejected", 0, topics["whole"])
        assert found["stop"]["detail"] == "dc1 hides the topic from the mirror: grant Read on it"
        await write("whole")
        await deny_no_more(world.there, "uneven", hidden)
        assert await differences_in_the_end((world.there, topics["whole"]), (world.here, topics["whole"])) == []
        await world.state(url, "caught-up", 0, topics["whole"])
