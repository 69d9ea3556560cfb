"""Several requests of one file under way: what is acknowledged, what a restart knows, what is held in memory."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.schedule import PushJob
from logferry.client.files.batches import LARGEST_READ_BYTES, READ_BYTES, load
from logferry.client.files.checkpoint import Checkpoint
from logferry.client.files.chunking import FileBatch
from logferry.client.transport.cluster import RETRY_S
from logferry.client.transport.source_request import GatewayAnswer, Outcome

from tests.support.fake_gateway import FakeGateway

LINES = b"".join(b"%07d\n" % number for number in range(1000))
SMALL = {"chunk_bytes": 1024, "line_bytes": 1024, "request_bytes": 1024}


def ahead(client: Any, count: int) -> list[tuple[Any, PushJob]]:
    """So many requests, each begun when the body of the one before has left."""
    found: list[tuple[Any, PushJob]] = []
    while len(found) < count:
        ((source, job),) = client.agent.jobs(client.now, 1)
        client.agent.sent(source, job, client.now)
        found.append((source, job))
    return found


def begun(client: Any) -> None:
    """The session is open, and has had an acknowledgement."""
    client.write("a.log", LINES)
    client.step()
    client.step()


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_only_what_is_acknowledged_without_a_hole_counts(client: Any) -> None:
    begun(client)
    (source,) = client.agent.watch.sources.values()
    jobs = ahead(client, 4)
    outcomes = [client.pusher.perform(job) for _, job in jobs]
    position = source.reading.position
    for at, acknowledged in ((2, 3), (0, 3), (3, 4), (1, 4)):
        # An answer acknowledges what lies before it, too: `prev` allows none without that.
        client.agent.finish(*jobs[at], outcomes[at], client.now)
        assert source.reading.position == position + 1024 * acknowledged
    assert client.agent.remember(client.now)
    assert source.entry.position == position + 4096


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_a_request_that_overtook_another_goes_again_behind_it(client: Any, gateway: FakeGateway) -> None:
    begun(client)
    first, second, third = ahead(client, 3)
    late = [(one, client.pusher.perform(one[1])) for one in (second, third)]
    for one, outcome in late:
        assert outcome.answer.type == "gap"
        client.agent.finish(*one, outcome, client.now)
    assert client.agent.jobs(client.now, 4) == [], "the one before is still under way"
    client.agent.finish(*first, client.pusher.perform(first[1]), client.now)
    again = ahead(client, 2)
    assert [job.batch for _, job in again] == [second[1].batch, third[1].batch]
    for one in again:
        client.agent.finish(*one, client.pusher.perform(one[1]), client.now)
    client.settle()
    assert client.stored() == [LINES]


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_a_client_that_was_killed_sends_all_that_was_under_way_cut_alike(client: Any, gateway: FakeGateway) -> None:
    begun(client)
    jobs = ahead(client, 3)
    client.close()
    layouts = load(Path(client.config.state_dir))[jobs[0][1].source_id]
    assert [(layout.start, layout.end) for layout in layouts] == [
        (job.batch.start, job.batch.end) for _, job in jobs if job.batch
    ]
    client.begin()
    (kept,) = (source.batches.reader.kept for source in first_look(client))
    assert kept == layouts
    client.settle()
    assert client.stored() == [LINES]


def first_look(client: Any) -> list[Any]:
    client.agent.tick(client.now)
    return list(client.agent.watch.sources.values())


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_a_truncation_keeps_what_was_read_before_it(client: Any, gateway: FakeGateway) -> None:
    begun(client)
    jobs = ahead(client, 3)
    client.write("a.log", b"another\n", "wb")
    client.now += 5
    client.agent.tick(client.now)
    for source, job in jobs:
        client.agent.finish(source, job, client.pusher.perform(job), client.now)
    client.settle()
    assert sorted(client.stored()) == [LINES[: 4 * 1024], b"another\n"]


def test_requests_grow_while_others_are_under_way_and_are_bounded(client: Any) -> None:
    client.write("a.log", b"x" * 99 + b"\n")
    client.settle()
    client.write("a.log", (b"y" * 99 + b"\n") * 90_000)
    client.now += 5
    client.agent.tick(client.now)
    client.step()
    jobs = ahead(client, 4)
    assert client.agent.jobs(client.now, 5) == [], "one thread stays free for other files"
    sizes = [len(job.batch.data) for _, job in jobs if job.batch]
    limits = [READ_BYTES, 2 * READ_BYTES, *[LARGEST_READ_BYTES] * 2]
    assert len(set(limits)) == 3
    assert len(sizes) == len(limits)
    assert all(limit - 100 <= size <= limit for size, limit in zip(sizes, limits))
    assert client.agent.held_bytes() == sum(sizes)


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_a_file_whose_requests_hang_delays_no_other(client: Any) -> None:
    begun(client)
    ahead(client, client.config.threads - 1)
    client.write("b.log", b"in time\n")
    client.now += 5
    client.agent.tick(client.now)
    for _ in range(2):
        ((source, job),) = client.agent.jobs(client.now, 1)
        client.agent.finish(source, job, client.pusher.perform(job), client.now)
    assert b"in time\n" in client.stored()


def more_one_by_one(client: Any, files: int) -> Iterator[list[tuple[Any, PushJob]]]:
    """Each file has lines when nothing is left to send of those before it; what is sent then, several at a time."""
    for number in range(files):
        client.write(f"{number}.log", LINES[:1024])
    client.settle()
    sources = sorted(client.agent.watch.sources.values(), key=lambda source: source.entry.path)
    for number, source in enumerate(sources):
        Path(source.entry.path).write_bytes(LINES)
        client.agent.watch.refresh(source, client.now + number / 1000)
        jobs: list[tuple[Any, PushJob]] = []
        while found := client.agent.jobs(client.now + number / 1000, 1):
            client.agent.sent(*found[0], client.now)
            jobs += found
            assert found[0][0] is source
        yield jobs


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_memory_is_bounded_where_the_first_requests_hang_and_others_overtake_them(client: Any) -> None:
    threads = client.config.threads
    for hanging, jobs in enumerate(more_one_by_one(client, files=8), 1):
        assert jobs
        for source, job in jobs[1:]:
            client.agent.finish(source, job, client.pusher.perform(job), client.now)
        if hanging == threads:
            break
    assert client.agent.held_bytes() <= 2 * threads * 1024


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_few_sources_keep_batches_that_are_refused_while_they_wait(client: Any) -> None:
    """The first request is refused, and those behind it overtook it."""
    refused = Outcome(GatewayAnswer(429, "overloaded"), None)
    for jobs in more_one_by_one(client, files=20):
        assert len(jobs) > 1
        for source, job in jobs:
            outcome = refused if job is jobs[0][1] else client.pusher.perform(job)
            client.agent.finish(source, job, outcome, client.now)
    assert client.agent.held_bytes() <= 2 * client.config.request_bytes + 4 * 1024


def test_nothing_that_was_acknowledged_stays_in_memory(client: Any) -> None:
    client.write("a.log", LINES)
    client.settle()
    (source,) = client.agent.watch.sources.values()
    held = [each for each in gc.get_objects() if isinstance(each, FileBatch)]
    assert not source.window.slots
    assert [batch for batch in held if bytes(batch.data) == LINES] == []


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_requests_that_fail_together_are_one_failure(client: Any, gateway: FakeGateway) -> None:
    begun(client)
    (source,) = client.agent.watch.sources.values()
    for failures in (1, 2):
        jobs = ahead(client, 3 if failures == 1 else 1)
        gateway.faults.extend(["500 before"] * len(jobs))
        for one in jobs:
            client.agent.finish(*one, client.pusher.perform(one[1]), client.now)
        assert source.window.failures == failures
        assert source.window.not_before <= client.now + RETRY_S[0] * failures
        client.now = source.window.not_before


@pytest.mark.parametrize("client", [{**SMALL, "idle_s": 1000.0}], indirect=True)
def test_batches_that_are_cut_smaller_wait_for_no_end_of_a_line(client: Any) -> None:
    """Behind them there is the begin of a line."""
    begun(client)
    client.settle()
    client.write("a.log", LINES[:2048] + b"half a line")
    client.now += 5
    client.agent.tick(client.now)
    jobs = ahead(client, 2)
    assert client.agent.jobs(client.now, 1) == []
    too_large = Outcome(GatewayAnswer(413, "too-large"), None)
    for source, job in jobs:
        source.batches.reader.limits = source.batches.reader.limits._replace(chunk_bytes=4096)  # so it can be less
        assert client.agent.jobs(client.now, 1) == [], "nothing is cut anew while the old ones are under way"
        client.agent.finish(source, job, too_large, client.now)
    client.settle()
    assert client.stored() == [LINES + LINES[:2048]]


@pytest.mark.parametrize("client", [{**SMALL, "request_bytes": 4096}], indirect=True)
def test_a_part_of_a_request_is_no_proof_that_all_of_it_was_acknowledged(client: Any, gateway: FakeGateway) -> None:
    """The gateway has recorded a part of the first one; then the client is killed. It is in the midst of that one."""
    begun(client)
    client.write("a.log", LINES)
    client.now += 5
    client.agent.tick(client.now)
    (source, first), *others = ahead(client, 2)
    assert first.batch is not None
    part = first.batch._replace(data=first.batch.data[:1024], pieces=first.batch.pieces[:1])
    client.pusher.perform(first._replace(batch=part))
    gateway.sources[source.name].session += 1  # that of another client
    for one in ((source, first), *others):
        client.agent.finish(*one, client.pusher.perform(one[1]), client.now)
    client.now += 5
    ((_, asked),) = client.agent.jobs(client.now, 1)
    client.agent.finish(source, asked, client.pusher.perform(asked), client.now)
    assert source.reading.position == part.end
    assert client.agent.remember(client.now)
    client.restart()
    (again,) = first_look(client)
    assert again.entry.position == part.end
    assert again.reading.position <= part.end


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_an_answer_that_is_lost_and_came_to_nothing_is_no_error(client: Any) -> None:
    """A later request was acknowledged before, and so the one whose answer is lost."""
    client.write("a.log", LINES[:3072])
    client.step()
    client.step()
    (source, first), second = ahead(client, 2)
    outcomes = [client.pusher.perform(one[1]) for one in ((source, first), second)]
    client.agent.finish(*second, outcomes[1], client.now)
    client.agent.finish(source, first, Outcome(GatewayAnswer(0, detail="cut"), None), client.now)
    assert client.stored() == [LINES[:3072]]
    assert source.status(client.now).error == ""


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_an_answer_that_names_less_than_the_whole_request_acknowledges_nothing(client: Any) -> None:
    begun(client)
    ((source, job),) = ahead(client, 1)
    assert job.batch is not None
    less = Outcome(GatewayAnswer(200, recorded_seqno=job.batch.end - 1), None)
    client.agent.finish(source, job, less, client.now)
    assert source.reading.position == job.batch.start
    client.settle()
    assert client.stored() == [LINES]


@pytest.mark.parametrize("client", [SMALL], indirect=True)
def test_a_gateway_that_has_less_than_it_said_is_sent_that_again(client: Any, gateway: FakeGateway) -> None:
    """A gap before the first request: it overtook none."""
    begun(client)
    ((source, job),) = client.agent.jobs(client.now, 1)
    client.agent.finish(source, job, client.pusher.perform(job), client.now)
    stored = gateway.sources[source.name]
    stored.recorded = stored.chunks.pop().prev
    client.settle()
    assert client.stored() == [LINES]


def test_a_checkpoint_of_the_version_before_has_one_layout(tmp_path: Path) -> None:
    line = '["one", 0, [[0, 4, null, null]], 7, "a", "b"]\n["one", 4, [[0, 4, null, null]], 8, "b", "c"]\n'
    (tmp_path / "cuts.jsonl").write_text(line)
    assert [layout.start for layout in load(tmp_path)["one"]] == [4]
    Checkpoint.open(tmp_path).close()
