"""Several requests of one file under way: what is acknowledged, what a restart knows, what is held in memory."""

from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.schedule import PushJob
from logferry.client.files.batches import LARGEST_READ_BYTES, READ_BYTES, load
from logferry.client.files.checkpoint import Checkpoint

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
    client.write("a.log", (b"y" * 99 + b"\n") * 60_000)
    client.now += 5
    client.agent.tick(client.now)
    client.step()
    jobs = ahead(client, 5)
    assert client.agent.jobs(client.now, 5) == [], "the limit is the number of threads"
    sizes = [len(job.batch.data) for _, job in jobs if job.batch]
    limits = [READ_BYTES, 2 * READ_BYTES, *[LARGEST_READ_BYTES] * 3]
    assert all(limit - 100 <= size <= limit for size, limit in zip(sizes, limits, strict=True))
    assert client.agent.held_bytes() == sum(sizes)


def test_a_checkpoint_of_the_version_before_has_one_layout(tmp_path: Path) -> None:
    line = '["one", 0, [[0, 4, null, null]], 7, "a", "b"]\n["one", 4, [[0, 4, null, null]], 8, "b", "c"]\n'
    (tmp_path / "cuts.jsonl").write_text(line)
    assert [layout.start for layout in load(tmp_path)["one"]] == [4]
    Checkpoint.open(tmp_path).close()
