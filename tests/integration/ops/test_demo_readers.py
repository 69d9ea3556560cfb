"""The demo's readers: each chunk once, also by the one that moves between the data centres."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from logferry.ops.demo.readers import IndependentReader, ReaderAccount
from logferry.ops.stack.stack import Stack

from tests.support.checker import read_back
from tests.support.clients import Load
from tests.support.mirror import make_topic
from tests.support.mirror_lane import until

LIMIT_S = 90


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=("dc1", "dc2"), mirrors=1) as stack:
        yield stack


def seqnos(account: ReaderAccount) -> dict[str, list[int]]:
    return {source_id: [seqno for seqno, _ in seen.arrivals] for source_id, seen in account.sources.items()}


async def test_readers_have_each_chunk_once_in_order(stack: Stack) -> None:
    stack.kill("dc2/mirror-0", signal.SIGSTOP)
    topic = await make_topic(stack, "roaming", 2)
    reader = IndependentReader([stack.urls("dc1")], topic)
    roaming = IndependentReader([stack.urls("dc1"), stack.urls("dc2")], topic)
    with reader, roaming:
        async with Load("roaming", stack.urls("dc1"), seed=33, sources=8) as load:
            # The second data centre does not have the topic: it is left again.
            await until(lambda: roaming.moves >= 2 or roaming.failed, LIMIT_S)
            stack.kill("dc2/mirror-0", signal.SIGCONT)
            await until(lambda: roaming.moves >= 6 or roaming.failed, LIMIT_S)
            await load.acknowledged(50)
        log = sorted(await read_back(stack.cluster("dc1").bootstrap, topic), key=lambda record: record[1:3])
        await until(lambda: reader.account.chunks >= len(log) or reader.failed, LIMIT_S)
        await until(lambda: roaming.account.chunks >= len(log) or roaming.failed, LIMIT_S)
    assert (reader.failed, roaming.failed) == (None, None)
    stored: dict[str, list[int]] = {}
    for record in log:
        stored.setdefault(record.source, []).append(record.seqno)
    assert seqnos(reader.account) == seqnos(roaming.account) == stored
    ends = {place: at.offset for place, at in reader.positions.items()}
    assert set(ends) == {(topic, 0), (topic, 1)}
    assert all(ends[topic, record.partition] > record.offset for record in log)
