"""The loader killed at each named step, at random, and frozen; two at once. The table is exact each time.

Nothing in the loader helps these tests: they watch the tables' folders, and strike when the file of a step appears.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from logferry.loaders.commands.table import main as table_command
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import delete_files, list_files, open_table
from logferry.loaders.storage.ledger import existing_table, last_batch, read_ledger
from logferry.loaders.storage.retention import compact
from logferry.loaders.storage.rewrite import file_name
from logferry.loaders.storage.side_tables import read_left_out
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Sent, Topic, check_exact, check_kept
from tests.support.loader_faults import RacingLoaders, frozen, logs, seeded
from tests.support.loader_process import STEPS, LoaderProcess, data_files, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_killed_at_every_step_in_a_row(
    start: Callable[[Location, str], LoaderProcess], topic: Topic, tmp_path: Path, warehouse: Location
):
    """Each run resumes the work of the one before and is killed one step later. The last run finishes."""
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
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
    if status == 0:  # its work needed no JVM any more
        assert last_batch(open_table(paths.main)) == 0
        assert summary["tables"][0]["left"] == 0
    else:
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
    wait_for(lambda: last_batch(open_table(paths.main)) > done, "the commit of a batch", fourth)
    fourth.kill()
    fourth.finish()

    status, summary, _ = start(table, topic.name).finish()
    assert (status, summary["exit"]) == (0, 0)
    check_kept(table, topic.committed)
    assert read_ledger(table)[0] == planned
    assert not list((tmp_path / "runs").iterdir()), "folders of killed runs are left"


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
async def test_killed_repeatedly_at_one_step(
    step: str, start: Callable[[Location, str], LoaderProcess], topic: Topic, warehouse: Location
):
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    dice = seeded()
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
    start: Callable[[Location, str], LoaderProcess], topic: Topic, warehouse: Location
):
    table = warehouse / "logs"
    dice = seeded()
    racers = RacingLoaders(dice, [lambda: start(table, topic.name)] * 2)
    for round_ in range(8):
        await topic.write(logs(8, 200, round_), partitions=2)
        await asyncio.sleep(3 + dice.random() * 9)  # killed at any instant
        racers.kill_one()
    racers.finish()
    status, summary, err = start(table, topic.name).finish()
    assert status == 0, (summary, err)
    check_kept(table, topic.committed)


@pytest.mark.long
@pytest.mark.parametrize("by", ["hand", "command"])
async def test_a_frozen_loader_that_wakes_after_its_batch_was_loaded_and_compacted(
    by: str, start: Callable[[Location, str], LoaderProcess], topic: Topic, warehouse: Location
):
    """Stopped in mid-write; others finish; table and quarantine are compacted and lose their history; it continues."""
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    await topic.write(logs(8, 300), partitions=2)
    zombie = start(table, topic.name)
    wait_for(lambda: data_files(paths.main) > 0, "the first file of rows", zombie)
    with frozen(zombie):
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
            assert table_command(["compact", str(table)]) == 0
        check_kept(table, topic.committed)
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
async def test_a_frozen_loader_finds_the_files_of_its_batch_after_a_compaction(
    start: Callable[[Location, str], LoaderProcess], topic: Topic, warehouse: Location
):
    """A compaction removes every unnamed file, however young, except those of a batch that is not in the table yet."""
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    await topic.write(logs(8, 100), partitions=2)
    assert start(table, topic.name).finish()[0] == 0
    await topic.write(logs(8, 300, round_=1), partitions=2)
    before, files = last_batch(open_table(table)), data_files(paths.main)
    zombie = start(table, topic.name)
    wait_for(lambda: data_files(paths.main) > files, "the first file of rows", zombie)
    with frozen(zombie):
        assert last_batch(open_table(table)) == before, "it was stopped too late to show anything"
        removed = sum(tidied.removed for tidied in compact(table, timedelta(0)))
        assert removed > 0
    status, summary, err = zombie.finish()
    assert status == 0, (summary, err)
    assert summary["tables"][0]["batches"][0]["ours"]
    check_kept(table, topic.committed)


@pytest.mark.long
async def test_compacted_all_the_time_while_loaders_race_and_are_killed(
    start: Callable[[Location, str], LoaderProcess], topic: Topic, warehouse: Location
):
    table = warehouse / "logs"
    dice = seeded()
    await topic.write(logs(8, 200), partitions=2)
    racers = RacingLoaders(dice, [lambda: start(table, topic.name)] * 2)
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
                await asyncio.sleep(3 + dice.random() * 6)  # killed at any instant
                racers.kill_one()
            racers.finish()
        finally:
            ended.set()
        compacting.result()
    assert sum(merged) > 0
    status, summary, err = start(table, topic.name).finish()
    assert status == 0, (summary, err)
    check_kept(table, topic.committed)
    assert sum(tidied.removed for tidied in compact(table, timedelta(0))) > 0
    check_kept(table, topic.committed)


def tidy(path: Location) -> None:
    """Compacts, drops what that replaced, and leaves nothing of the history but a checkpoint.

    Files that no commit names stay: they are the frozen loader's, which is to get as far as it can.
    """

    def names() -> set[str]:
        table = existing_table(path)
        return {file_name(table, uri) for uri in table.file_uris()}

    replaced = names()
    existing_table(path).optimize.compact()
    table = existing_table(path)
    table.create_checkpoint()
    delete_files(path, sorted(replaced - names()))
    logs = [file.name for file in list_files(path / "_delta_log")]
    old = [name for name in logs if re.fullmatch(r"[0-9]+\.(json|crc)", name) and int(name[:20]) < table.version()]
    delete_files(path / "_delta_log", old)


@pytest.mark.long
async def test_racing_and_killed_while_sources_move(
    start: Callable[[Location, str], LoaderProcess], kafka: KafkaCluster, topic_name: str, warehouse: Location
):
    """Two data centres, chunks in both, two loaders that are killed at random: each chunk once."""
    table = warehouse / "logs"
    centres = [Topic(kafka.bootstrap, f"dc{i}.{topic_name}") for i in (1, 2)]
    for topic in centres:
        await topic.create(partitions=2)
    dice = seeded()
    racers = RacingLoaders(dice, [lambda: start(table, f"*.{topic_name}")] * 2)
    sent: list[Sent] = []
    for round_ in range(6):
        chunks = logs(6, 100, round_)
        here, there = dice.sample(centres, 2)
        # Some are in both, some come a round later in the other.
        await here.write(chunks, partitions=2)
        copies = dice.sample([*sent, *chunks], min(len(chunks) // 4, len(chunks)))
        await there.write([one for one in copies if one not in there.committed], partitions=2)
        sent += chunks
        await asyncio.sleep(2 + dice.random() * 5)  # killed at any instant
        racers.kill_one()
    racers.finish()
    status, summary, err = start(table, f"*.{topic_name}").finish()
    assert status == 0, (summary, err)
    check_exact(table, sent)
    twice = sum(len(topic.committed) for topic in centres) - len(sent)
    left_out = read_left_out(TablePaths.of(table).left_out, last_batch(open_table(table)))
    assert len(left_out) == twice > 0
