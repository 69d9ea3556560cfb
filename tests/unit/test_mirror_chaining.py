"""Copies of copies: each record is known by its place in the original, and none goes round in a circle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from logferry.gateway.contract.offset_history import Original, Progress, Run
from logferry.gateway.errors import Problem
from logferry.gateway.topics.offset_translation import Translation
from logferry.mirror.copy.batch_rewrite import committed_batches
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.lanes import chain as chaining
from logferry.mirror.lanes.chain import Chains, Stopped
from unit.test_moving import encoded, record

FIRST, MIDDLE, LOCAL = b"1" * 16, b"2" * 16, b"3" * 16
THERE = Progress(FIRST, MIDDLE, 100, 50, 40, 0, 0, 0, 1, ())


class Books:
    """Of the middle of a chain; ``answers`` to one question after the other, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    async def originals(self, place: Any, first: int, last: int) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def partition(progress: Progress | None = None, *, is_chained: bool = True) -> MirroredPartition:
    return MirroredPartition(
        topic="dc1.t",
        number=0,
        dc="dc2",
        source_id=MIDDLE,
        local_id=LOCAL,
        partition_bytes=1 << 20,
        progress=progress,
        is_chained=is_chained,
    )


async def origin(moved: MirroredPartition, *answers: Any) -> chaining.Origin | None:
    batches = committed_batches(memoryview(encoded(7, [record(7), record(8)])), [], 7).batches
    return await Chains({"dc2": cast(Translation, Books(*answers))}).origin(moved, batches)


async def test_what_is_no_copy_there_is_its_own_original() -> None:
    assert await origin(partition(is_chained=False)) is None


async def test_the_books_there_are_waited_for() -> None:
    runs = [Run(70, 7, 2)]
    assert await origin(partition(), None, None, (THERE, runs)) == chaining.Origin(FIRST, runs)


async def test_without_the_books_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaining, "_BOOKS_S", 0.05)
    for answer in (None, Problem("not-mirrored", "no mirror writes it"), OSError("away")):
        with pytest.raises(Stopped) as stopped:
            await origin(partition(), answer)
        assert stopped.value.kind == "no-original"


async def test_what_comes_from_here_goes_round_in_a_circle() -> None:
    with pytest.raises(Stopped) as stopped:
        await origin(partition(), (replace(THERE, source_id=LOCAL), [Run(70, 7, 2)]))
    assert stopped.value.kind == "in-a-circle"


async def test_what_is_here_already_is_not_written_again() -> None:
    here = replace(THERE, source_id=MIDDLE, local_id=LOCAL, chained=Original(FIRST, 71))
    with pytest.raises(Stopped) as stopped:
        await origin(partition(here), (THERE, [Run(70, 7, 2)]))
    assert stopped.value.kind == "comes-again"
    after = replace(here, chained=Original(FIRST, 70))
    assert await origin(partition(after), (THERE, [Run(70, 7, 2)])) is not None
    # Of another original, offsets begin anew.
    other = replace(here, chained=Original(b"4" * 16, 71))
    assert await origin(partition(other), (THERE, [Run(70, 7, 2)])) is not None


def test_a_copy_of_a_copy_goes_on_from_the_original_itself() -> None:
    moved = partition(replace(THERE, source_id=MIDDLE, local_id=LOCAL, chained=Original(FIRST, 71)))
    moved.source_id, moved.dc, moved.is_chained = FIRST, "dc1", False
    moved.rewind()
    assert (moved.stop, moved.position, moved.checks) == (None, 71, False)
