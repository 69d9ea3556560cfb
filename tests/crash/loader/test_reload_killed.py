"""Loaders that reload a range, killed at each step, racing and frozen: the table ends with exactly the rows of Kafka.

Before each reload the table is damaged by hand: rows gone, forged and doubled, lines of the quarantine gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from deltalake import write_deltalake
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import RELOAD, TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import existing_table, last_batch, read_ledger

from tests.support.loader import Topic, check_kept, quarantine, stored
from tests.support.loader_faults import RacingLoaders, frozen, logs, seeded
from tests.support.loader_process import STEPS, LoaderProcess, data_files, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.long]


def damage(table: Location) -> None:
    """Damages the table by hand, while no loader runs."""
    main = table
    existing_table(main).delete("line % 7 = 3")
    existing_table(main).update(updates={"text": "'forged'"}, predicate="line = 1")
    write_deltalake(
        existing_table(main), existing_table(main).to_pyarrow_table(filters=[("line", "=", 0)]), mode="append"
    )
    existing_table(TablePaths.of(table).quarantine).delete("seqno % 2 = 0")


def what(table: Location) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    rows: list[tuple[object, ...]] = sorted((r["source_id"], r["seqno"], r["line"], r["text"]) for r in stored(table))
    return rows, sorted((r["source_id"], r["seqno"], r["line"], r["bytes"]) for r in quarantine(table))


@pytest.mark.parametrize("step", ["ledger", "mid-write", "quarantine", "commit"])
async def test_killed_at_each_step_under_live_input(
    step: str, start: Callable[..., LoaderProcess], topic: Topic, warehouse: Location
):
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    dice = seeded()
    unfinished = 0
    for round_ in range(3):
        await topic.write(logs(8, 100, 2 * round_), partitions=2)
        status, _, err = start(table, topic.name).finish()
        assert status == 0, err
        check_kept(table, topic.committed)
        damage(table)
        damaged, positions, last = (
            what(table),
            read_ledger(table)[-1].ranges,
            last_batch(open_table(table)),
        )
        await topic.write(logs(4, 50, 2 * round_ + 1), partitions=2)
        before = STEPS[step](paths)
        victim = start(table, topic.name, "", "reload", "--from", topic.name, "--yes")
        wait_for(lambda before=before: STEPS[step](paths) > before, step, victim)  # type: ignore[misc]
        await asyncio.sleep(dice.random() * 0.3 * (round_ > 0))  # killed at the step, or somewhat later
        victim.kill()
        victim.finish()
        entry = read_ledger(table)[-1]
        assert (entry.kind, [r.end for r in entry.ranges]) == (RELOAD, [r.end for r in positions])
        if last_batch(open_table(table)) == last:
            unfinished += 1
            assert what(table) == damaged, "the batch is not in the table, so nothing has changed"
    assert unfinished or step == "commit"
    status, summary, err = start(table, topic.name).finish()
    assert status == 0, (summary, err)
    check_kept(table, topic.committed)


async def test_racing_with_loads_and_killed_at_random(
    start: Callable[..., LoaderProcess], topic: Topic, warehouse: Location
):
    """Two reloads of different ranges, beside loads and live input."""
    table = warehouse / "logs"
    dice = seeded()
    await topic.write(logs(8, 200), partitions=2)
    status, _, err = start(table, topic.name).finish()
    assert status == 0, err
    damage(table)
    ends = {r.partition: r.end for r in read_ledger(table)[-1].ranges}
    kinds: list[tuple[str, ...]] = [
        ("reload", "--from", f"{topic.name}:0", "--yes"),
        (),
        ("reload", "--from", f"{topic.name}:1=0..{ends[1] // 2}", f"{topic.name}:0=5..9", "--yes"),
    ]
    racers = RacingLoaders(dice, [partial(start, table, topic.name, "", *options) for options in kinds])
    for round_ in range(6):
        await topic.write(logs(6, 100, 1 + round_), partitions=2)
        await asyncio.sleep(3 + dice.random() * 7)  # killed at any instant
        racers.kill_one()
    racers.finish()
    for options in ((), ("reload", "--from", f"{topic.name}:1=0..{ends[1]}", "--yes")):
        status, summary, err = start(table, topic.name, "", *options).finish()
        assert status == 0, (summary, err)
    check_kept(table, topic.committed)
    assert sum(entry.kind == RELOAD for entry in read_ledger(table)) > 1


async def test_a_frozen_reload_that_wakes_after_another_loader_has_done_it(
    start: Callable[..., LoaderProcess], topic: Topic, warehouse: Location
):
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    await topic.write(logs(8, 200), partitions=2)
    status, _, err = start(table, topic.name).finish()
    assert status == 0, err
    damage(table)
    files, batch = data_files(paths.main), last_batch(open_table(table)) + 1
    zombie = start(table, topic.name, "", "reload", "--from", topic.name, "--yes")
    wait_for(lambda: data_files(paths.main) > files, "the first file of rows", zombie)
    with frozen(zombie):
        assert last_batch(open_table(table)) == batch - 1, "it was stopped too late to show anything"
        await topic.write(logs(8, 50, 1), partitions=2)
        status, _, err = start(table, topic.name).finish()
        assert status == 0, err
        check_kept(table, topic.committed)
        for path in (paths.main, paths.quarantine):
            existing_table(path).optimize.compact()
    status, summary, err = zombie.finish()
    assert status == 0, (summary, err)
    assert [(done["batch"], done["ours"]) for done in summary["tables"][0]["batches"]] == [(batch, False)]
    check_kept(table, topic.committed)
