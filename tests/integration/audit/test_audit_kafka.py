"""The audit over a real Kafka: what is whole is proven, and each kind of damage that is planted is found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.requests import ClusterMetadata, TopicMetadata
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.log.read import committed
from logferry.ops.audit.records.batches import CorruptRecords, StoredRecord, StoredRecords
from logferry.ops.cli.problems import Unavailable, UsageError
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import LANES, PARTITIONS, Plan, Planned, World, audited


@pytest.fixture
async def world(kafka: KafkaCluster, topic_name: str) -> World:
    found = World(kafka.bootstrap, topic_name)
    await found.create()
    return found


def refuting(report: Report) -> list[str]:
    return sorted(finding.kind for finding in report.findings if finding.refutes)


def notes(report: Report) -> list[str]:
    return sorted(finding.kind for finding in report.findings if not finding.refutes)


async def test_what_is_whole_is_proven(world: World):
    plan = world.plan()
    await world.write(plan)
    report = await world.audit()
    assert report.exact
    assert not len(report.findings)
    assert (report.chunks, report.lines) == (15, 60)
    assert report.size_bytes == sum(len(record.chunk.data) for record in plan.records)
    assert report.verdict.startswith("exact: 15 chunks of 3 sources, 60 lines")
    web1 = next(source for source in report.sources if source.source_id == "web1")
    assert (web1.base, web1.first, web1.chunks, web1.is_cut) == (0, plan.records[0].chunk.seqno, 5, False)


async def test_control_records_and_aborted_chunks_are_no_chunks(world: World):
    plan = world.plan()
    first, rest = Plan(plan.records[:6], {}), Plan(plan.records[6:], plan.states)
    await world.write(first, transactional_id=f"{world.name}-1")
    await world.write(rest, transactional_id=f"{world.name}-2", abort=True)
    await world.write(rest, transactional_id=f"{world.name}-3")
    report = await world.audit()
    assert report.exact
    assert report.chunks == 15


# ---- damage of the log -----------------------------------------------------------------------------------


def again(plan: Plan) -> None:
    plan.records.append(plan.records[plan.of("web1")[1]])


def leave_out(plan: Plan) -> None:
    del plan.records[plan.of("web1")[2]]


def leave_out_first(plan: Plan) -> None:
    del plan.records[plan.of("web1")[0]]


def leave_out_last(plan: Plan) -> None:
    del plan.records[plan.of("web1")[-1]]


def swap(plan: Plan) -> None:
    one, other = plan.of("web1")[1:3]
    plan.records[one], plan.records[other] = plan.records[other], plan.records[one]


def elsewhere(plan: Plan) -> None:
    last = plan.of("web1")[-1]
    record = plan.records[last]
    plan.records[last] = record._replace(partition=(record.partition + 1) % PARTITIONS)


def all_elsewhere(plan: Plan) -> None:
    for index in plan.of("web1"):
        record = plan.records[index]
        plan.records[index] = record._replace(partition=(record.partition + 1) % PARTITIONS)


def cut_again(plan: Plan) -> None:
    index = plan.of("web1")[3]
    chunk = plan.records[index].chunk
    assert chunk.prev is not None
    plan.records[index] = plan.records[index]._replace(chunk=chunk._replace(prev=chunk.prev - 5))


def state_ahead(plan: Plan) -> None:
    plan.state("web1", recorded=10_000)


def state_behind(plan: Plan) -> None:
    plan.state("web1", recorded=plan.records[plan.of("web1")[1]].chunk.seqno)


def no_state(plan: Plan) -> None:
    plan.states = {source: state for source, state in plan.states.items() if source.source_id != "web1"}


def state_of_nothing(plan: Plan) -> None:
    source = next(iter(plan.states))
    plan.states[source._replace(source_id="web9")] = plan.states[source]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (again, ["double"]),
        (leave_out, ["gap"]),
        (leave_out_first, ["head-missing"]),
        (leave_out_last, ["state-ahead"]),
        (swap, ["gap", "out-of-order"]),
        (elsewhere, ["source-in-two-partitions", "state-ahead"]),
        (all_elsewhere, ["source-in-wrong-partition"]),
        (cut_again, ["overlap"]),
        (state_ahead, ["state-ahead"]),
        (state_behind, ["state-behind"]),
        (no_state, ["state-missing"]),
        (state_of_nothing, ["state-ahead"]),
    ],
)
async def test_damage_is_found(world: World, damage: Callable[[Plan], None], expected: list[str]):
    plan = world.plan()
    damage(plan)
    await world.write(plan)
    report = await world.audit()
    assert refuting(report) == expected
    assert not report.exact
    assert report.verdict.startswith("NOT exact: ")
    blamed = {finding.source_id for finding in report.findings}
    assert blamed == ({"web9"} if damage is state_of_nothing else {"web1"})


async def test_damage_is_named_with_its_offsets(world: World):
    """Three chunks twice, one after the other, are one finding with a range."""
    plan = world.plan(["web1"])
    plan.records += plan.records[1:4]
    await world.write(plan)
    (double,) = (await world.audit()).findings
    partition = plan.records[0].partition
    assert (double.where, double.source_id) == (f"{world.topic}-{partition}", "web1")
    assert (double.first, double.last, double.count) == (5, 7, 3)


async def test_a_record_that_no_gateway_wrote_is_found(world: World):
    await world.write(world.plan())
    await world.write_foreign(b"hello", [])
    assert refuting(await world.audit()) == ["foreign-record"]


async def test_a_state_that_cannot_be_read_is_found(world: World):
    plan = world.plan()
    source, state = next(iter(plan.states.items()))
    plan.states[source._replace(topic="no\0where")] = state
    await world.write(plan)
    assert refuting(await world.audit()) == ["state-unreadable"]


# ---- what is no damage -----------------------------------------------------------------------------------


async def test_retention_is_no_damage(world: World):
    """web1 loses its beginning, web9 all that it had, and nothing of what is left is blamed."""
    plan = world.plan(["web9", "web1"])
    places = {record.partition for record in plan.records}
    plan.records.sort(key=lambda record: record.source_id == "web1")
    await world.write(plan)
    for partition in places:
        kept = [one for one in world.stored if one.partition == partition and one.source_id == "web1"]
        gone = max(
            (one.offset for one in world.stored if one.partition == partition and one.source_id == "web9"), default=-1
        )
        await world.remove_before(partition, kept[2].offset if kept else gone + 1)
    report = await world.audit()
    assert report.exact
    assert notes(report) == ["removed-by-retention"]
    (web1,) = report.sources
    assert (web1.chunks, web1.is_cut) == (3, True)


async def test_a_lost_chunk_is_found_beside_retention(world: World):
    plan = world.plan(["web1"])
    leave_out_last(plan)
    await world.write(plan)
    await world.remove_before(plan.records[0].partition, 2)
    assert refuting(await world.audit()) == ["state-ahead"]


async def test_states_of_an_older_topic_are_reported(world: World):
    plan = world.plan()
    plan.records.clear()
    for source_id in ("web1", "api1", "web3"):
        plan.state(source_id, topic_id=b"x" * 16)
    await world.write(plan)
    report = await world.audit()
    assert report.exact
    assert notes(report) == ["state-of-older-topic"] * 3


async def test_two_keys_are_reported(world: World):
    plan = world.plan(["web1"])
    (source,) = plan.states
    other = (plan.records[0].partition + 1) % PARTITIONS
    plan.records.append(Planned(other, "web1", Chunk(9, 0, 1, {}, b"elsewhere")))
    plan.states[source._replace(partition_key="k")] = SourceState(world.topic_id, other, 9, 0, 0, 1)
    await world.write(plan)
    report = await world.audit()
    assert report.exact
    assert notes(report) == ["source-under-two-keys"]


async def forget(world: World, plan: Plan) -> None:
    await world.write(Plan([], dict.fromkeys(plan.states)))


async def test_a_source_that_was_forgotten_and_continues(world: World):
    """Its state is recreated with a base in the middle of the log, and its seqnos fall: no damage."""
    plan = world.plan(["web1"])
    wrong = plan.records[3]
    plan.records[3] = wrong._replace(chunk=wrong.chunk._replace(seqno=10**15))
    await world.write(Plan(plan.records[:4], plan.states))
    await forget(world, plan)
    plan.state("web1", base=plan.records[4].chunk.prev)
    await world.write(Plan(plan.records[4:], plan.states))
    report = await world.audit()
    assert notes(report) == ["chain-restarted"]
    assert report.exact


async def test_a_source_that_was_forgotten_and_sends_all_again(world: World):
    plan = world.plan(["web1"])
    await world.write(plan)
    await forget(world, plan)
    await world.write(plan)
    report = await world.audit()
    assert refuting(report) == ["double"]
    assert report.findings.counts == {"double": 1}, "one range"


async def test_a_source_that_was_forgotten_and_is_silent(world: World):
    plan = world.plan(["web1"])
    await world.write(plan)
    await forget(world, plan)
    report = await world.audit()
    assert report.exact
    assert notes(report) == ["state-forgotten"]


async def test_an_open_transaction_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch):
    """Chunks and states of a transaction under way: the audit judges when its outcome is known."""
    reading = asyncio.Event()

    def reads(*arguments: Any) -> AsyncIterator[StoredRecords]:
        reading.set()
        return committed(*arguments)

    monkeypatch.setattr("logferry.ops.audit.audit.committed", reads)
    plan = world.plan()
    producer = AIOKafkaProducer(bootstrap_servers=world.bootstrap, transactional_id=world.name)
    await producer.start()
    await producer.begin_transaction()
    for record in plan.records:
        headers, key = record_headers(record.chunk), record.source_id.encode()
        await producer.send(world.topic, record.chunk.data, key=key, partition=record.partition, headers=headers)
    for source, state in plan.states.items():
        assert state is not None
        lane = lane_of(source.key, LANES)
        await producer.send(world.state_topic, state.encode(), key=source.state_key(), partition=lane)
    await producer.flush()
    audited = asyncio.create_task(world.audit())
    async with asyncio.timeout(60):
        await reading.wait()
    assert not audited.done()
    await producer.commit_transaction()
    await producer.stop()
    report = await audited
    assert report.exact
    assert report.chunks == 15


async def test_a_damaged_batch_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    await world.write(world.plan())

    def damaged(*_: object) -> tuple[list[StoredRecord], int, CorruptRecords]:
        return [], 0, CorruptRecords("the batch at offset 0 has a wrong checksum")

    with monkeypatch.context() as patch:
        patch.setattr("logferry.ops.audit.log.read.committed_records", damaged)
        assert "corrupt-batch" in refuting(await world.audit())
    assert (await world.audit()).exact


async def test_a_source_that_wrote_nothing_yet(world: World):
    plan = world.plan()
    plan.states[SourceIdentity(world.topic, None, "web9")] = SourceState(world.topic_id, 0, None, None, 5, 1)
    await world.write(plan)
    assert (await world.audit()).exact


def gone(views: dict[str, TopicMetadata], topic: str) -> None:
    del views[topic]


def recreated(views: dict[str, TopicMetadata], topic: str) -> None:
    views[topic] = views[topic]._replace(id=b"x" * 16)


def grown(views: dict[str, TopicMetadata], topic: str) -> None:
    views[topic] = views[topic]._replace(partitions=views[topic].partitions * 2)


@pytest.mark.parametrize(
    ("change", "said"), [(gone, "was deleted"), (recreated, "was deleted"), (grown, "more partitions")]
)
async def test_a_topic_that_changes_while_it_is_read_is_not_judged(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, TopicMetadata], str], None], said: str
):
    await world.write(world.plan())
    looks = 0
    describe = KafkaClient.describe

    async def changed_at_the_second_look(kafka: KafkaClient, topics: list[str] | None = None) -> ClusterMetadata:
        nonlocal looks
        view = await describe(kafka, topics)
        looks += topics is None
        if looks == 2:
            change(view.topics, world.topic)
        return view

    monkeypatch.setattr(KafkaClient, "describe", changed_at_the_second_look)
    with pytest.raises(Unavailable, match=said):
        await world.audit()
    assert looks == 2


# ---- wrong use -------------------------------------------------------------------------------------------


async def test_a_topic_that_is_not_there(world: World):
    with pytest.raises(UsageError, match=r"no topic dc1\.missing"):
        await audited(world.bootstrap, "dc1", topics=["missing"], prefix=world.prefix)


async def test_a_data_centre_without_states(world: World):
    with pytest.raises(UsageError, match=r"no state topic .*\.dc7\.state"):
        await audited(world.bootstrap, "dc7", prefix=world.prefix)


async def test_kafka_is_away(world: World):
    with pytest.raises(Unavailable, match=r"Kafka at 127\.0\.0\.1:1"):
        await audited("127.0.0.1:1", "dc1")


async def test_the_only_data_centre_is_found(world: World):
    await world.write(world.plan())
    report = await audited(world.bootstrap, topics=[world.name], prefix=world.prefix)
    assert report.dc == "dc1"
    assert report.exact
