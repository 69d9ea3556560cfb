"""The order of fences by which the number of lanes can change, in all interleavings; and what breaks without each.

A model of one source, of two workers that open lanes whenever they like and write what they take for the next chunk,
and of the command. The source is in lane 0 before the change, and in lane 1 after it. Kafka is its fence alone: a
transaction is committed only by the newest producer of its transactional id.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from logferry.gateway.config import Config
from logferry.gateway.contract.lane_count import COUNT_KEY, MOVED, LaneCount
from logferry.gateway.contract.names import lane_of
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.contract.upload_state import StagedPiece, UploadCommit, UploadState, upload_key
from logferry.gateway.service.lane_change import ChangeRefused, LaneChange
from logferry.gateway.service.lane_states import LaneStates, key_of, moves

_OPENINGS, _COMMANDS, _CHUNKS = 2, 2, 2


class Worker(NamedTuple):
    """``step``: how far the opening of ``lane`` is; 3: it serves, with what it knows of the source. ``is_old``: of a
    version that knows of no change."""

    lane: int = 0
    step: int = 0
    epoch: int = 0
    recorded: int | None = None
    openings: int = 0
    is_old: bool = False


class Command(NamedTuple):
    """``step``: how far; 0: it does not run."""

    step: int = 0
    epoch: int = 0
    read: int | None = None
    runs: int = 0


class World(NamedTuple):
    """``lanes``, ``change``: the newest epochs. ``states``: of the source, by partition. ``is_new``: the number."""

    lanes: tuple[int, int] = (0, 0)
    change: int = 0
    states: tuple[int | None, int | None] = (0, None)
    is_new: bool = False
    # The lanes have the first record of their number, which an older version cannot read.
    is_marked: bool = False
    log: int = 0
    workers: tuple[Worker, ...] = (Worker(), Worker())
    command: Command = Command()
    broken: bool = False


def fenced(epochs: tuple[int, int], lane: int) -> tuple[int, int]:
    return (epochs[0] + 1, epochs[1]) if lane == 0 else (epochs[0], epochs[1] + 1)


def after_worker(world: World, number: int, without: str) -> Iterator[World]:
    worker = world.workers[number]

    def became(worker: Worker, **changes: object) -> World:
        workers = (*world.workers[:number], worker, *world.workers[number + 1 :])
        return world._replace(workers=workers, **changes)  # type: ignore[arg-type]

    if worker.step in (0, 3) and worker.openings < _OPENINGS:
        for lane in (0, 1):
            yield became(Worker(lane, 1, 0, None, worker.openings + 1, worker.is_old))
    fence_change_first = without == "the lane is fenced first"
    if worker.step in (1, 2) and (worker.step == 2) == fence_change_first:
        lanes = fenced(world.lanes, worker.lane)
        yield became(worker._replace(step=worker.step + 1, epoch=lanes[worker.lane]), lanes=lanes)
    elif worker.step in (1, 2):
        change = world.change + (without != "the change is fenced" and not worker.is_old)
        yield became(worker._replace(step=worker.step + 1), change=change)
    knows = without != "the lane knows the number"
    is_here = worker.lane == 0 if worker.is_old else world.is_new == bool(worker.lane) or not knows
    is_stopped = worker.is_old and world.is_marked and without != "the first record stops an older version"
    if worker.step == 3 and worker.recorded is None and is_here and not is_stopped:
        yield became(worker._replace(recorded=world.states[worker.lane] or 0))
    if worker.recorded is not None and world.lanes[worker.lane] == worker.epoch and world.log < _CHUNKS:
        chunk = worker.recorded + 1
        states = (chunk, world.states[1]) if worker.lane == 0 else (world.states[0], chunk)
        is_next = chunk == world.log + 1
        yield became(worker._replace(recorded=chunk), states=states, log=chunk, broken=world.broken or not is_next)


def after_command(world: World, without: str) -> Iterator[World]:
    command = world.command
    if command.runs < _COMMANDS and not world.is_new:  # also after it was killed at any step
        begun = Command(1, world.change + 1, None, command.runs + 1)
        yield world._replace(change=world.change + 1, command=begun, is_marked=True)
    if command.step == 1:
        lanes = world.lanes if without == "the command fences the lanes" else fenced(world.lanes, 0)
        yield world._replace(lanes=lanes, command=command._replace(step=2))
    if command.step == 2:
        yield world._replace(command=command._replace(step=3, read=world.states[0]))
    if command.step == 3 and world.change == command.epoch and not world.is_new:
        yield world._replace(states=(None, command.read), is_new=True, command=command._replace(step=0))


def breaks(without: str = "", *workers: Worker) -> bool:
    """Whether some interleaving records a chunk twice or out of order."""
    first = World(workers=workers or (Worker(), Worker()))
    seen, waiting = {first}, [first]
    while waiting:
        world = waiting.pop()
        if world.broken:
            return True
        following = [*after_command(world, without)]
        for number in range(len(world.workers)):
            following += after_worker(world, number, without)
        for found in following:
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    assert any(world.is_new and world.log == _CHUNKS for world in seen)
    return False


def test_no_interleaving_breaks_the_change() -> None:
    assert not breaks()


def test_a_worker_of_an_older_version_breaks_nothing_since_it_cannot_read_the_first_record() -> None:
    """It stops its lanes, loudly. A lane that it had opened before is fenced as any other."""
    workers = Worker(), Worker(is_old=True)
    assert not breaks("", *workers)
    assert breaks("the first record stops an older version", *workers)


@pytest.mark.parametrize(
    "guard",
    [
        "the lane is fenced first",
        "the change is fenced",
        "the lane knows the number",
        "the command fences the lanes",
    ],
)
def test_each_guard_is_needed(guard: str) -> None:
    assert breaks(guard)


# ---- the records of a change -----------------------------------------------------------------------------------------


def test_each_state_is_in_its_new_lane_once_and_nowhere_else() -> None:
    state = SourceState(b"i" * 16, 0, 5, None, 0, 1).encode()
    sources = [SourceIdentity("dc1.t", key, f"s{number}") for number in range(200) for key in (None, f"k{number % 7}")]
    for before, to in ((4, 7), (7, 3), (8, 32), (1, 2)):
        lanes = [LaneStates(number) for number in range(before)]
        for source in sources:
            lanes[lane_of(source.key, before)].apply(source.state_key(), state)
        records, moved = moves(lanes, to)
        after = {number: dict(lanes[number].states) if number < before else {} for number in range(max(before, to))}
        for number, found in records.items():
            for key, value, headers in found:
                assert bool(headers) == (value is None)
                if value is None:
                    assert headers == [(MOVED, b"%d" % lane_of(key_of(key), to))]
                    del after[number][key]
                else:
                    after[number][key] = value
        assert moved == sum(lane_of(source.key, to) != lane_of(source.key, before) for source in sources)
        for source in sources:
            [place] = [number for number, states in after.items() if source.state_key() in states]
            assert place == lane_of(source.key, to)


def test_an_upload_moves_and_one_that_is_not_committed_is_gone_after_it() -> None:
    """Its client hears so: that it was there is known, also of one that was gone before. In its lane it stays."""
    open_ = UploadState("dc1.t", b"i" * 16, {"host": "h"}, 1, None, (StagedPiece(7, 1, b"d" * 16),))
    uploads = {
        "open": open_,
        "sealed": open_._replace(is_sealed=True),
        "done": open_._replace(is_sealed=True, commit=UploadCommit(0, 1, 1)),
        "gone": open_._replace(attributes={}, pieces=(), is_expired=True),
    }
    keys = {upload_key(f"{kind}{number}"): upload for kind, upload in uploads.items() for number in range(20)}
    lanes = [LaneStates(0), LaneStates(1)]
    for key, upload in keys.items():
        lanes[lane_of(key_of(key), 2)].apply(key, upload.encode())
    records, moved = moves(lanes, 3)
    after = {
        key: UploadState.decode(value) for found in records.values() for key, value, _ in found if value is not None
    }
    assert after.keys() == {key for key in keys if lane_of(key_of(key), 3) != lane_of(key_of(key), 2)}
    assert moved == len(after)
    for key, upload in after.items():
        assert upload == (keys[key] if keys[key].commit else uploads["gone"])


def test_an_upload_that_cannot_be_decoded_stops_the_change_before_anything_is_written() -> None:
    with pytest.raises((ValueError, struct.error)):
        LaneStates(0).apply(upload_key("u"), b"\x09")


def test_a_key_that_no_gateway_writes_refuses_the_change() -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        LaneStates(0).apply(b"x", b"y")


async def test_a_number_that_is_older_than_that_of_the_lanes_refuses_the_change() -> None:
    """By it the states would be taken from other lanes than they are in."""
    config = Config.model_validate({"dc": "dc1", "lanes": 4, "kafka": {"bootstrap_servers": "127.0.0.1:1"}})
    change: Any = LaneChange(SimpleNamespace(), config, 8, print)  # type: ignore[arg-type]
    change._lanes = [LaneStates(0), LaneStates(1)]
    change._lanes[1].apply(COUNT_KEY, LaneCount(2, 4, 2).encode())
    change._check_epochs(LaneCount(2, 4, 2))
    change._present.count = LaneCount(4, 4, 1)
    with pytest.raises(ChangeRefused, match="deleted, or may not be read"):
        await change.write()


@pytest.mark.parametrize("raw", [b"", b"\x02" + LaneCount(1, 1, 1).encode()[1:], LaneCount(0, 1, 1).encode()])
def test_a_number_that_cannot_be_decoded_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="number of lanes"):
        LaneCount.decode(raw)
