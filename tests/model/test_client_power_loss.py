"""Power fails after more was sent than the checkpoint knows: what the file holds at the next start decides."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.model.client_world import ClientWorld, begin_of

NAME = "a.log"


def send(world: ClientWorld, lines: int) -> int:
    """Returns how many bytes are sent in all."""
    world.append(NAME, lines, 500)
    while world.step(2):
        pass
    sent = world.recorded(world.at[NAME])
    assert sent == len(world.at[NAME].content)
    return sent


@pytest.fixture
def world() -> Iterator[ClientWorld]:
    world = ClientWorld(None, 1)
    world.start()
    yield world
    world.close()


def saved_then_sent(world: ClientWorld) -> tuple[int, int]:
    """The position in the checkpoint, and that of the gateway."""
    saved = send(world, 10)
    assert world.client
    assert world.client[0].remember(world.now)
    world.client[0]._remembered = float("inf")  # no other save
    return saved, send(world, 10)


def begins(world: ClientWorld) -> list[int]:
    """Where the sources begin, after everything came to rest."""
    world.come_to_rest()
    world.check()
    return sorted(begin_of(stored) for stored in world.centres.together().values() if stored.chunks)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("lost", [40, 3000])
def test_lines_in_the_place_of_lost_ones_arrive(world: ClientWorld, lost: int, zeros: bool) -> None:
    """The program starts before the client, so the file is as long as before."""
    saved, sent = saved_then_sent(world)
    world.power_fails({NAME: (lost, zeros)}, undone=False, survives=False)
    world.append(NAME, 10, 500)
    assert len(world.at[NAME].content) > sent
    assert begins(world) == [0, saved]


def test_a_file_that_is_shorter_than_what_was_sent_is_not_sent_from_its_start(world: ClientWorld) -> None:
    saved, _ = saved_then_sent(world)
    world.power_fails({NAME: (3000, False)}, undone=False, survives=False)
    assert begins(world) == [0, saved]


@pytest.mark.parametrize("when", ["sent", "answer lost"])
def test_a_reboot_that_loses_nothing_doubles_nothing(world: ClientWorld, when: str) -> None:
    """Also of what was sent after the last save, or is not answered yet."""
    saved_then_sent(world)
    if when == "answer lost":
        world.append(NAME, 3, 500)
        world.centres.first.faults.append("kill after")
        world.step(2)
        assert world.client is None
    world.power_fails({}, undone=False, survives=True)
    world.append(NAME, 10, 500)
    assert begins(world) == [0]


def test_a_rename_that_did_not_happen_is_no_change(world: ClientWorld) -> None:
    send(world, 10)
    incarnation, new = world.at.pop(NAME), world.path(NAME + ".1")
    world.path(NAME).rename(new)
    world.at[NAME + ".1"], world.renamed = incarnation, (NAME, new, incarnation)
    send(world, 3)
    world.power_fails({}, undone=True, survives=False)
    assert world.at == {NAME: incarnation}
    assert begins(world) == [0, 0]


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_without_syncs_the_checkpoint_would_be_lost(
    world: ClientWorld, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Proof that the model sees what is not synced."""
    monkeypatch.setattr(os, call, lambda fd: None)
    saved_then_sent(world)
    world.power_fails({NAME: (0, False)}, undone=False, survives=False)
    with pytest.raises(AssertionError, match="hold the same"):
        begins(world)
