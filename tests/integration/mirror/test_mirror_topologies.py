"""Three data centres: both ways between two, a hub that collects from two, and a chain, all at the same time.

dc1 takes from dc2 and dc3, dc2 from dc1, and dc3 takes from dc2 what is written there and what dc2 has of dc1.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from logferry.ops.audit.command import main as audit
from logferry.ops.cli.main import main as command
from logferry.ops.stack.processes import ServiceWorker, Setting
from logferry.ops.stack.stack import Stack

from tests.support.clients import Load, MovingReader, chunks_of, have_moved
from tests.support.kafka import becomes, commit
from tests.support.mirror import (
    Mirror,
    differences_in_the_end,
    make_topic,
    pairs_by_history,
    read_log,
    remote,
    stopped,
    true_pairs,
)
from tests.support.raw_load import RawLoad

_DCS = ("dc1", "dc2", "dc3")
_PARTITIONS = 2
# Original → where it is copied to.
_COPIES = {"dc1": ("dc2", "dc3"), "dc2": ("dc1", "dc3"), "dc3": ("dc1",)}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), dcs=_DCS) as stack:
        yield stack


@pytest.fixture(scope="module")
def mirrors(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Mirror, ServiceWorker]]]:
    """By the data centre that they bring topics to; each has the prefix that its gateway knows it by."""
    folder = tmp_path_factory.mktemp("mirrors")
    remotes = {
        "dc1": [remote(stack, "dc2"), remote(stack, "dc3")],
        "dc2": [remote(stack, "dc1")],
        "dc3": [remote(stack, "dc2", "dc2", "dc1")],
    }
    # The end of the chain goes in smaller steps than its middle, so it meets parts of what the books there say.
    limits: dict[str, dict[str, Setting]] = {
        dc: {"limits": {"transaction_bytes": 65_536}} if dc == "dc3" else {} for dc in _DCS
    }
    made = {dc: Mirror(stack, folder, "logferry", 1, dc, remote=remotes[dc], **limits[dc]) for dc in _DCS}
    running = {dc: (mirror, mirror.start()) for dc, mirror in made.items()}
    try:
        deadline = time.monotonic() + 60
        for _, worker in running.values():
            while not worker.is_ready():
                assert worker.child.running, worker.child.log_tail()
                assert time.monotonic() < deadline, worker.child.log_tail()
                time.sleep(0.05)
        yield running
    finally:
        for _, worker in running.values():
            worker.child.stop(15)


@pytest.mark.timeout(900)
@pytest.mark.long
async def test_every_copy_is_its_original_and_a_reader_moves_along_the_chain(
    stack: Stack, mirrors: dict[str, tuple[Mirror, ServiceWorker]]
) -> None:
    topics = {dc: await make_topic(stack, "all", _PARTITIONS, dc) for dc in _DCS}
    raw = await make_topic(stack, "raw", _PARTITIONS)
    is_over = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        readers = [MovingReader(stack, topics["dc1"], number, session, _DCS) for number in range(_PARTITIONS)]
        reading = [asyncio.create_task(reader.to_and_fro(is_over)) for reader in readers]
        async with AsyncExitStack() as loads:
            load = {dc: Load("all", stack.urls(dc), seed=40 + n, sources=8) for n, dc in enumerate(_DCS)}
            for each in load.values():
                await loads.enter_async_context(each)
            strangers = RawLoad(stack.cluster("dc1").bootstrap, raw, _PARTITIONS, pause_s=1.5)
            await loads.enter_async_context(strangers)
            await have_moved(readers)
            for dc in ("dc2", "dc3"):
                _, worker = mirrors[dc]
                worker.child.send(signal.SIGKILL)
                worker.child.start()
                await have_moved(readers)
            for each in load.values():
                await each.acknowledged(50)
        is_over.set()
        await asyncio.gather(*reading)
    bootstraps = {dc: stack.cluster(dc).bootstrap for dc in _DCS}
    for dc, topic in (*topics.items(), ("dc1", raw)):
        original = await read_log(bootstraps[dc], topic)
        for copy in _COPIES[dc]:
            assert await differences_in_the_end((bootstraps[dc], topic), (bootstraps[copy], topic)) == []
            # Wherever it came by, the history speaks of the original.
            history = await pairs_by_history(bootstraps[copy], mirrors[copy][0].pairs)
            told = {number: history[topic, number] for number in original}
            assert told == true_pairs(original, await read_log(bootstraps[copy], topic)), f"{topic} in {copy}"
    log = await read_log(bootstraps["dc1"], topics["dc1"])
    for number, reader in enumerate(readers):
        assert reader.seen == chunks_of(log, number)
        assert min(reader.pages.values()) >= 2


@pytest.mark.long
async def test_positions_come_along_the_chain(stack: Stack, mirrors: dict[str, tuple[Mirror, ServiceWorker]]) -> None:
    topic = await make_topic(stack, "steps", 1)
    async with Load("steps", stack.urls("dc1"), seed=50, sources=2) as load:
        await load.acknowledged(40)
    there, clusters = stack.cluster("dc1"), [stack.cluster(dc) for dc in ("dc2", "dc3")]
    for cluster in clusters:
        assert await differences_in_the_end((there.bootstrap, topic), (cluster.bootstrap, topic)) == []
    offset, record = (await read_log(there.bootstrap, topic))[0][25]
    await commit(there, "moves", topic, offset)
    for cluster in clusters:
        copy = (await read_log(cluster.bootstrap, topic))[0]
        assert await becomes(cluster, "moves", topic, next(here for here, copied in copy if copied == record))


@pytest.mark.long
async def test_the_end_of_a_chain_is_audited(
    stack: Stack, mirrors: dict[str, tuple[Mirror, ServiceWorker]], capsys: pytest.CaptureFixture[str]
) -> None:
    topic = await make_topic(stack, "audited", 1)
    async with Load("audited", stack.urls("dc1"), seed=51, sources=2) as load:
        await load.acknowledged(40)
    there, end = stack.cluster("dc1").bootstrap, stack.cluster("dc3").bootstrap
    assert await differences_in_the_end((there, topic), (end, topic)) == []
    options = ["--mirror", "dc1:dc3", "--config", str(mirrors["dc3"][0].file), "--topic", topic]
    assert await asyncio.to_thread(audit, options) == 0
    assert "exact" in capsys.readouterr().out


@pytest.mark.long
async def test_a_way_that_changes_loses_and_doubles_nothing(
    stack: Stack, mirrors: dict[str, tuple[Mirror, ServiceWorker]], tmp_path: Path
) -> None:
    """dc3 takes dc1's topics by way of dc2, then from dc1 itself, then by way of dc2 again."""
    topic = await make_topic(stack, "ways", 1)
    there, end = stack.cluster("dc1").bootstrap, stack.cluster("dc3").bootstrap
    direct = Mirror(stack, tmp_path, "logferry", dc="dc3", remote=[remote(stack, "dc1"), remote(stack, "dc2")])
    mirror, chained = mirrors["dc3"]

    async def load(turn: int) -> None:
        """Many transactions, each third one aborted, so that offsets are others in each data centre."""
        async with AIOKafkaProducer(bootstrap_servers=there, transactional_id="ways") as producer:
            for number in range(40):
                await producer.begin_transaction()
                for index in range(1 + number % 4):
                    await producer.send(topic, b"%d: %d of %d" % (turn, index, number), partition=0)
                await (producer.commit_transaction() if number % 3 else producer.abort_transaction())

    async def is_exact() -> bool:
        assert await differences_in_the_end((there, topic), (end, topic)) == []
        original, copy = await read_log(there, topic), await read_log(end, topic)
        history = await pairs_by_history(end, mirror.pairs)
        return history[topic, 0] == true_pairs(original, copy)[0]

    async def ask(url: str, **parameters: int | str) -> int:
        path = f"{url}/v1/topics/{topic}/partitions/0/translate"
        async with aiohttp.ClientSession() as session, session.get(path, params=parameters) as answer:
            assert answer.status == 200, await answer.text()
            return int((await answer.json())["translated"])

    await load(1)
    assert await is_exact()
    await asyncio.to_thread(chained.child.stop, 15)
    straight = direct.start()
    try:
        await load(2)
        assert await is_exact()
    finally:
        await asyncio.to_thread(straight.child.stop, 15)
        chained.child.start()
    await load(3)
    stop = await stopped(chained.url, topic)
    assert stop["kind"] == "source-recreated"
    # Where it continues in dc2: behind the last record that is here.
    copy = (await read_log(end, topic))[0]
    following = await ask(stack.urls("dc3")[0], offset=copy[-1][0] + 1, **{"from": "dc3"})
    at = await ask(stack.urls("dc2")[0], offset=following, **{"from": "dc1"})
    resume = ["mirror", "resume", topic, "0", "--from", str(at), "--url", chained.url]
    assert await asyncio.to_thread(command, resume) == 0
    assert await is_exact()
    # The history goes back over all three ways.
    for offset, record in (await read_log(there, topic))[0][::20]:
        here = await ask(stack.urls("dc3")[0], offset=offset, **{"from": "dc1"})
        assert dict((await read_log(end, topic))[0])[here] == record


async def test_a_replication_cycle_is_refused_at_the_start(
    stack: Stack, mirrors: dict[str, tuple[Mirror, ServiceWorker]], tmp_path: Path
) -> None:
    topic = await make_topic(stack, "round", 1)
    async with Load("round", stack.urls("dc1"), seed=52, sources=2) as load:
        await load.acknowledged(10)
    here = (stack.cluster("dc3").bootstrap, topic)
    assert await differences_in_the_end((stack.cluster("dc1").bootstrap, topic), here) == []
    before = await read_log(stack.cluster("dc2").bootstrap, topic)
    own: Setting = {"dc": "dc9", "kafka": {"bootstrap_servers": stack.cluster("dc2").bootstrap}}
    refused: list[tuple[list[Setting], str]] = [
        ([own], "remote dc9: this is the cluster of dc2 itself"),
        ([remote(stack, "dc3", "dc3", "dc2")], "topics of dc2 are written here"),
        # Through three: dc3 has them from here.
        ([remote(stack, "dc3", "dc3", "dc1")], r"dc3 mirrors dc1\.\w+ from here, which would be a replication cycle"),
    ]
    for remotes, said in refused:
        worker = Mirror(stack, tmp_path, "logferry", remote=remotes).start(number=0)
        assert await asyncio.to_thread(worker.child.wait_for_end, 60), said
        assert worker.child.exit_status == 2
        assert re.search(said, worker.child.log_tail())
    assert await read_log(stack.cluster("dc2").bootstrap, topic) == before
