"""Which partitions are refused, for how long, and what becomes of the requests of one transaction that met them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import partition_of
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal, SourceTable
from logferry.gateway.lanes.group_commit import Answered, PendingRequests
from logferry.gateway.lanes.transaction import Draft, OpenSession, RecordHeartbeat, Request, WriteChunks, WriteOutcome
from logferry.gateway.topics.health import PartitionHealth

TOPIC = TopicFacts("dc1.t", b"i" * 16, 2, 1 << 20)
NOW = 1_700_000_000_000


def source_in(partition: int, nth: int = 0) -> SourceIdentity:
    fitting = [name for name in map(str, range(99)) if partition_of(name, 2) == partition]
    return SourceIdentity("dc1.t", None, fitting[nth])


BAD, GOOD, GOOD_TOO = source_in(0), source_in(1), source_in(1, 1)


def write(source: SourceIdentity, seqno: int) -> WriteChunks:
    return WriteChunks(TOPIC, source, None, [Chunk(seqno, None, None, {}, b"x")], 10)


def view(leader: int, in_sync: int) -> Any:
    partition = SimpleNamespace(partition=0, leader=leader, isr=list(range(in_sync)), replicas=[0, 1, 2])
    return SimpleNamespace(name="dc1.t", partitions=[partition])


# ---- the table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leader", "in_sync", "why"),
    [(-1, 3, "it has no leader"), (1, 1, "1 of its replicas are in sync, min.insync.replicas is 2"), (1, 2, None)],
)
def test_metadata_shows_what_takes_nothing(leader: int, in_sync: int, why: str | None) -> None:
    health = PartitionHealth()
    health.judge(view(leader, in_sync), 2)
    assert health.why("dc1.t", 0) == why
    assert health.why("dc1.t", 1) is None


def test_what_comes_back_soon_is_refused_longer_each_time() -> None:
    now = 0.0
    health = PartitionHealth(lambda: now)
    waits = []
    for _ in range(4):
        health.refuse({("dc1.t", 0): "gone"})
        began = now
        while health.why("dc1.t", 0) is not None:
            now += 0.5
            health.accept([("dc1.t", 0)])
        waits.append(now - began)
        now += 1
    assert waits == [0.5, 1.0, 2.0, 4.0]
    now += 120
    health.accept([])
    health.refuse({("dc1.t", 0): "gone"})
    health.accept([("dc1.t", 0)])
    assert health.why("dc1.t", 0) is None, "after two quiet minutes it starts from the beginning"


class ChangingKafka:
    """One partition; what its metadata and its leader say is set by the test."""

    def __init__(self) -> None:
        self.leader, self.answers = -1, False
        self.asked = asyncio.Event()

    async def describe(self, topics: list[str]) -> Any:
        self.asked.set()
        return SimpleNamespace(topics={"dc1.t": view(self.leader, 3)})

    async def offset(self, topic: str, partition: int, time_ms: int) -> int:
        self.asked.set()
        if not self.answers:
            raise errors.RequestTimedOutError
        return 0


async def test_a_partition_is_written_again_when_its_leader_answers() -> None:
    health, kafka = PartitionHealth(), ChangingKafka()
    health.refuse({("dc1.t", 0): "gone"})
    watching = asyncio.create_task(health.watch(kafka, lambda _: 2))  # type: ignore[arg-type]
    try:
        for leader, answers in ((-1, True), (1, False)):
            kafka.leader, kafka.answers = leader, answers
            for _ in range(2):
                kafka.asked.clear()
                await asyncio.wait_for(kafka.asked.wait(), 60)
            assert health.why("dc1.t", 0) is not None
        kafka.answers = True
        async with asyncio.timeout(60):
            while True:
                if health.why("dc1.t", 0) is None:
                    break
                await asyncio.sleep(0.05)
    finally:
        watching.cancel()


# ---- one transaction -------------------------------------------------------------------------------------------


def test_only_what_would_be_written_there_is_refused() -> None:
    table = SourceTable()
    draft = Draft(table, NOW)
    draft.add(write(BAD, 1))
    for key, raw in draft.states.items():
        table.apply(key, raw)
    draft = Draft(table, NOW, refused=lambda _, number: "gone" if number == 0 else None)
    outcome, must_wait = draft.add(write(BAD, 2))
    assert isinstance(outcome, Refusal)
    assert (outcome.kind, must_wait) == ("kafka-unavailable", False)
    assert "partition 0 of dc1.t takes nothing now: gone" in outcome.detail
    duplicate, _ = draft.add(write(BAD, 1))
    assert isinstance(duplicate, WriteOutcome)
    assert duplicate.duplicates == 1
    assert isinstance(draft.add(write(GOOD, 1))[0], WriteOutcome)
    assert set(draft.chunks) == {("dc1.t", 1)}


class Requests:
    """Requests of one lane, each with its answer."""

    def __init__(self, *requests: Request) -> None:
        self.pending = PendingRequests()
        self.answers = [self.pending.add(request, 30) for request in requests]
        self.draft = Draft(SourceTable(), NOW)

    def gather(self, count: int) -> None:
        for _ in range(count):
            pending = self.pending.take()
            outcome, _ = self.draft.add(pending.request)
            self.pending.hold(pending, outcome)

    def left(self) -> list[Request]:
        found = []
        while self.pending.is_queued:
            found.append(self.pending.take().request)
        return found


async def test_what_met_a_bad_partition_fails_and_the_rest_is_queued_again_in_its_order() -> None:
    first, second, session = write(GOOD, 1), write(GOOD, 2), OpenSession(TOPIC, GOOD_TOO)
    bad, later, behind = write(BAD, 1), write(GOOD, 3), write(BAD, 2)
    requests = Requests(first, bad, session, second, later, behind)
    requests.gather(4)
    requests.pending.undo(requests.draft, NotCommitted("gone", unavailable={("dc1.t", 0): "it has no leader"}))
    for number in (1, 5):
        with pytest.raises(Problem, match="kafka-unavailable"):
            requests.answers[number].result()
    assert [answer.done() for answer in requests.answers] == [False, True, False, False, False, True]
    assert requests.left() == [first, session, second, later]


async def test_without_a_partition_to_blame_all_of_the_transaction_fails() -> None:
    first, bad, later = write(GOOD, 1), write(BAD, 1), write(GOOD, 2)
    requests = Requests(first, bad, later)
    requests.gather(2)
    requests.pending.undo(requests.draft, NotCommitted("Kafka did not answer"))
    assert all(answer.done() for answer in requests.answers)
    for answer in requests.answers:
        with pytest.raises(Problem):
            answer.result()


async def test_a_heartbeat_needs_no_partition() -> None:
    beat = RecordHeartbeat(TOPIC, BAD, None, Heartbeat(NOW))
    requests = Requests(beat, write(GOOD, 1))
    requests.gather(2)
    requests.pending.undo(requests.draft, NotCommitted("gone", unavailable={("dc1.t", 0): "it has no leader"}))
    assert requests.left()[0] is beat
    assert not any(isinstance(answer, Answered) for answer in requests.answers)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("Kafka has not ended the transaction before this one", "failed: Kafka has not ended the transaction"),
        # The text of an error may name a topic of another caller.
        (errors.KafkaError("dc1.other-0: away"), "failed: KafkaError"),
    ],
)
async def test_why_a_transaction_failed_is_said_without_the_names_of_others(
    cause: errors.KafkaError | str, said: str
) -> None:
    requests = Requests(write(GOOD, 1))
    requests.gather(1)
    requests.pending.undo(requests.draft, NotCommitted(cause))
    with pytest.raises(Problem, match=said) as raised:
        requests.answers[0].result()
    assert "other" not in raised.value.detail
