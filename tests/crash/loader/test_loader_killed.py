"""The loader killed at each named step, at random, and frozen; two at once. The table is exact each time.

Nothing in the loader helps these tests: they watch the tables' folders, and strike when the file of a step appears.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable
from logferry.loaders.commands import compact as compact_command
from logferry.loaders.notes import read_notes
from logferry.loaders.storage.compact import compact
from logferry.loaders.storage.ledger import TablePaths, last_batch, open_table, read_ledger
from logferry.ops.stack.kafka_cluster import Cluster

from tests.striking import STEPS, data_files, loaders, wait_for
from tests.support.loader import LoaderProcess, Sent, Topic, check_exact, check_kept, chunks_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def logs(sources: int, lines: int, round_: int = 0) -> list[Sent]:
    """Lines of several sources, a bad one in each chunk, a megabyte or so in all."""
    sent: list[Sent] = []
    for source in range(sources):
        parts = [
            b"".join(b"%d %d %s\n" % (part, line, b"x" * 60) for line in range(lines)) + b"\xff\n" for part in range(20)
        ]
        sent += chunks_of(f"web{source}", *parts, start=round_ * 100_000_000)
    return sent


@pytest.fixture
def start(kafka: Cluster, tmp_path: Path) -> Iterator[Callable[[Path, str], LoaderProcess]]:
    with loaders(kafka.bootstrap, tmp_path) as begin:
        yield begin


@pytest.fixture
async def topic(kafka: Cluster, topic_name: str) -> Topic:
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create(partitions=2)
    return topic


async def test_killed_at_every_step_in_a_row(start: Callable[[Path, str], LoaderProcess], topic: Topic, tmp_path: Path):
    """Each run takes up what the one before left, and is killed itself one step later; the last one finishes."""
    table, paths = tmp_path / "logs", TablePaths.of(tmp_path / "logs")
    await topic.write(logs(8, 300), partitions=2)

    first = start(table, topic.name)
    wait_for(lambda: bool(read_ledger(table)), "the first entry of the ledger", first)
    first.kill()
    first.finish()
    (planned,) = read_ledger(table)

    # The JVM alone dies: the loader commits what is written by then, if it is, and says that the next run will do.
    second = start(table, topic.name)
    wait_for(lambda: last_batch(open_table(paths.quarantine)) == 0, "the quarantine's commit", second)
    second.kill(python=False)
    status, summary, _ = second.finish()
    assert status == 3
    assert "JVM has ended" in summary["tables"][0]["error"]

    # Python alone dies: its JVM ends by itself, whatever it still wrote.
    await topic.write(logs(8, 300, round_=1), partitions=2)
    files = data_files(paths.main)
    third = start(table, topic.name)
    wait_for(lambda: data_files(paths.main) > files, "the first file of rows", third)
    jvm = third.kill(jvm=False)
    third.finish()
    assert jvm is not None
    wait_for(lambda: is_gone(jvm), "the end of the JVM")

    await topic.write(logs(8, 300, round_=2), partitions=2)
    done = last_batch(open_table(paths.main))
    fourth = start(table, topic.name)
    wait_for(lambda: last_batch(open_table(paths.main)) == done + 1, "the commit of a batch", fourth)
    fourth.kill()
    fourth.finish()

    status, summary, _ = start(table, topic.name).finish()
    assert (status, summary["exit"]) == (0, 0)
    check_kept(table, topic.committed)
    assert read_ledger(table)[0] == planned
    assert not list((tmp_path / "runs").iterdir()), "folders of killed runs are left"


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
async def test_killed_again_and_again_at_one_step(
    step: str, start: Callable[[Path, str], LoaderProcess], topic: Topic, tmp_path: Path
):
    table, paths = tmp_path / "logs", TablePaths.of(tmp_path / "logs")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for round_ in range(4):
        await topic.write(logs(8, 200, round_), partitions=2)
        before = STEPS[step](paths)
        victim = start(table, topic.name)
        # Not at the very instant only: somewhere in the step and the next one.
        wait_for(lambda before=before: STEPS[step](paths) > max(before, 1), step, victim)  # type: ignore[misc]
        await asyncio.sleep(dice.random() * 0.3)
        victim.kill()
        victim.finish()
    status, _, err = start(table, topic.name).finish()
    assert status == 0, err
    check_kept(table, topic.committed)


@pytest.mark.long
async def test_two_racing_and_killed_at_random(
    start: Callable[[Path, str], LoaderProcess], topic: Topic, tmp_path: Path
):
    table = tmp_path / "logs"
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    racers = [start(table, topic.name) for _ in range(2)]
    for round_ in range(8):
        await topic.write(logs(8, 200, round_), partitions=2)
        await asyncio.sleep(3 + dice.random() * 9)
        victim = dice.randrange(2)
        racers[victim].kill(python=dice.random() < 0.7, jvm=dice.random() < 0.7)
        for i, racer in enumerate(racers):
            if i == victim or racer.process.poll() is not None:
                racer.kill()
                racer.finish()
                racers[i] = start(table, topic.name)
    for racer in racers:
        assert racer.finish()[0] in (0, 3)
    status, summary, err = start(table, topic.name).finish()
    assert status == 0, (summary, err)
    check_kept(table, topic.committed)


@pytest.mark.long
@pytest.mark.parametrize("by", ["hand", "command"])
async def test_a_frozen_loader_that_wakes_up_after_all_was_done_and_tidied(
    by: str, start: Callable[[Path, str], LoaderProcess], topic: Topic, tmp_path: Path
):
    """Stopped in mid-write; others finish; table and quarantine are compacted and their history dropped; it goes on."""
    table, paths = tmp_path / "logs", TablePaths.of(tmp_path / "logs")
    await topic.write(logs(8, 300), partitions=2)
    zombie = start(table, topic.name)
    wait_for(lambda: data_files(paths.main) > 0, "the first file of rows", zombie)
    jvm = zombie.jvm()
    assert jvm is not None
    os.kill(jvm, signal.SIGSTOP)
    os.kill(zombie.process.pid, signal.SIGSTOP)
    assert last_batch(open_table(paths.main)) == -1, "it was stopped too late to show anything"
    await topic.write(logs(8, 300, round_=1), partitions=2)
    status, _, err = start(table, topic.name).finish()
    assert status == 0, err
    check_kept(table, topic.committed)
    tidied = last_batch(open_table(paths.main))
    if by == "hand":
        for path in (paths.main, paths.quarantine):
            tidy(path)
    else:
        assert compact_command.main([str(table)]) == 0
    check_kept(table, topic.committed)
    os.kill(jvm, signal.SIGCONT)
    os.kill(zombie.process.pid, signal.SIGCONT)
    status, summary, err = zombie.finish()
    check_kept(table, topic.committed)
    # Delta cannot tell it what became of its batch, for the history is gone; the table can.
    assert status == 0, (summary, err)
    assert [(batch["batch"], batch["ours"]) for batch in summary["tables"][0]["batches"]] == [(0, False)]
    assert last_batch(open_table(paths.main)) == tidied
    status, summary, err = start(table, topic.name).finish()
    assert (status, summary["rows"]) == (0, 0), err
    check_kept(table, topic.committed)


@pytest.mark.long
async def test_a_frozen_loader_whose_batch_nobody_did_finds_its_files_after_a_compaction(
    start: Callable[[Path, str], LoaderProcess], topic: Topic, tmp_path: Path
):
    """Whatever is not named goes, however young it is, but for what belongs to a batch that is not in the table yet."""
    table, paths = tmp_path / "logs", TablePaths.of(tmp_path / "logs")
    await topic.write(logs(8, 100), partitions=2)
    assert start(table, topic.name).finish()[0] == 0
    await topic.write(logs(8, 300, round_=1), partitions=2)
    before, files = last_batch(open_table(table)), data_files(paths.main)
    zombie = start(table, topic.name)
    wait_for(lambda: data_files(paths.main) > files, "the first file of rows", zombie)
    jvm = zombie.jvm()
    assert jvm is not None
    os.kill(jvm, signal.SIGSTOP)
    os.kill(zombie.process.pid, signal.SIGSTOP)
    assert last_batch(open_table(table)) == before, "it was stopped too late to show anything"
    removed = sum(tidied.removed for tidied in compact(table, timedelta(0)))
    assert removed > 0
    os.kill(jvm, signal.SIGCONT)
    os.kill(zombie.process.pid, signal.SIGCONT)
    status, summary, err = zombie.finish()
    assert status == 0, (summary, err)
    assert summary["tables"][0]["batches"][0]["ours"]
    check_kept(table, topic.committed)


@pytest.mark.long
async def test_compacted_all_the_time_while_loaders_race_and_are_killed(
    start: Callable[[Path, str], LoaderProcess], topic: Topic, tmp_path: Path
):
    table = tmp_path / "logs"
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    await topic.write(logs(8, 200), partitions=2)
    racers = [start(table, topic.name) for _ in range(2)]
    ended, merged = threading.Event(), []

    def compact_again_and_again() -> None:
        while not ended.wait(0.2):
            if last_batch(open_table(table)) >= 0:
                tidied = list(compact(table, timedelta(hours=1)))
                merged.append(sum(one.before - one.after for one in tidied))

    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(compact_again_and_again)
        try:
            for round_ in range(1, 7):
                await topic.write(logs(8, 200, round_), partitions=2)
                await asyncio.sleep(3 + dice.random() * 6)
                victim = dice.randrange(2)
                racers[victim].kill(python=dice.random() < 0.7, jvm=dice.random() < 0.7)
                for i, racer in enumerate(racers):
                    if i == victim or racer.process.poll() is not None:
                        racer.kill()
                        racer.finish()
                        racers[i] = start(table, topic.name)
            for racer in racers:
                status, summary, err = racer.finish()
                assert status in (0, 3), (summary, err)
        finally:
            ended.set()
        compacting.result()
    assert sum(merged) > 0
    status, summary, err = start(table, topic.name).finish()
    assert status == 0, (summary, err)
    check_kept(table, topic.committed)
    assert sum(tidied.removed for tidied in compact(table, timedelta(0))) > 0
    check_kept(table, topic.committed)


def tidy(path: Path) -> None:
    """Compacts, drops what that replaced, and leaves nothing of the history but a checkpoint.

    Files that no commit names stay: they are the frozen loader's, which is to get as far as it can.
    """
    table = DeltaTable(str(path))
    replaced = {Path(uri) for uri in table.file_uris()}
    table.optimize.compact()
    table = DeltaTable(str(path))
    table.create_checkpoint()
    for file in replaced - {Path(uri) for uri in table.file_uris()}:
        file.unlink()
    for log in (path / "_delta_log").iterdir():
        if log.suffix in (".json", ".crc") and log.stem.isdigit() and int(log.stem) < table.version():
            log.unlink()


@pytest.mark.long
async def test_racing_and_killed_while_sources_move(
    start: Callable[[Path, str], LoaderProcess], kafka: Cluster, topic_name: str, tmp_path: Path
):
    """Two data centres, chunks in both, two loaders that are killed at random: each chunk once."""
    table = tmp_path / "logs"
    centres = [Topic(kafka.bootstrap, f"dc{i}.{topic_name}") for i in (1, 2)]
    for topic in centres:
        await topic.create(partitions=2)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    racers = [start(table, f"*.{topic_name}") for _ in range(2)]
    sent: list[Sent] = []
    for round_ in range(6):
        chunks = logs(6, 100, round_)
        here, there = dice.sample(centres, 2)
        # Some are in both, some come a round later in the other.
        await here.write(chunks, partitions=2)
        copies = dice.sample([*sent, *chunks], min(len(chunks) // 4, len(chunks)))
        await there.write([one for one in copies if one not in there.committed], partitions=2)
        sent += chunks
        await asyncio.sleep(2 + dice.random() * 5)
        victim = dice.randrange(2)
        racers[victim].kill(python=dice.random() < 0.7, jvm=dice.random() < 0.7)
        for i, racer in enumerate(racers):
            if i == victim or racer.process.poll() is not None:
                racer.kill()
                racer.finish()
                racers[i] = start(table, f"*.{topic_name}")
    for racer in racers:
        status, summary, err = racer.finish()
        assert status in (0, 3), (summary, err)
    status, summary, err = start(table, f"*.{topic_name}").finish()
    assert status == 0, (summary, err)
    check_exact(table, sent)
    twice = sum(len(topic.committed) for topic in centres) - len(sent)
    left_out = read_notes(TablePaths.of(table).moved, last_batch(open_table(table)))
    assert len(left_out) == twice > 0
