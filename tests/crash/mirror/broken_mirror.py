"""A worker of the mirror that dies at a step, or lacks something that makes it exact.

``python tests/crash/broken_mirror.py WHAT --config FILE --worker I``, WHAT one of `STEPS`, of `FAULTS`, or `RIVAL`:
nothing is missing then, but it is in a group of its own and believes that every lane is its own.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from logferry.gateway.contract.offset_history import Run
from logferry.gateway.identity import LaneIdentity
from logferry.gateway.kafka.transactional_producer import Part, TransactionalProducer
from logferry.gateway.lanes.transaction import Record
from logferry.mirror.__main__ import main
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.coalesce import Written
from logferry.mirror.lanes import lane

# In the order of a transaction: nothing is written; the batches are; the history and the progress too; committed.
STEPS = ("fetched", "produced", "booked", "committed")
# The fence is switched off; the history says the next offset; the progress is committed after its records, and the
# worker dies in between.
FAULTS = ("no-fence", "pairs-off-by-one", "progress-late")
RIVAL = "rival"
# Some transactions pass before it dies.
_PASS = 12


def die_at(step: str) -> None:
    passed = itertools.count()
    write, commit = TransactionalProducer.write, TransactionalProducer.commit

    def at(now: str) -> None:
        if now == step and next(passed) >= _PASS:
            os.kill(os.getpid(), signal.SIGKILL)

    async def dying_write(self: TransactionalProducer, parts: Sequence[Part]) -> None:
        is_book = any(part.topic == self.lane.state[0] for part in parts)
        if not is_book:
            at("fetched")
        await write(self, parts)
        at("booked" if is_book else "produced")

    async def dying_commit(self: TransactionalProducer) -> None:
        await commit(self)
        at("committed")

    TransactionalProducer.write = dying_write  # type: ignore[method-assign]
    TransactionalProducer.commit = dying_commit  # type: ignore[method-assign]


def no_fence() -> None:
    """Each opening of a lane takes a transactional id of its own, so nobody is ever shut out."""
    numbers, fenced = itertools.count(), MirrorConfig.lane

    def unfenced(self: MirrorConfig, number: int) -> LaneIdentity:
        transactional_id = f"unfenced-{number}-{os.getpid()}-{next(numbers)}"
        return fenced(self, number)._replace(transactional_id=transactional_id)

    MirrorConfig.lane = unfenced  # type: ignore[method-assign]


def pairs_off_by_one() -> None:
    right = lane.runs_of

    def wrong(found: list[Written], part: Part) -> Iterator[Run]:
        return (run._replace(local=run.local + 1) for run in right(found, part))

    lane.runs_of = wrong


def progress_late() -> None:
    # Each lane by itself: where nothing is known of a partition that has records, a worker stops it.
    passed, keep_books = Counter[int](), lane.MirrorLane._keep_books

    async def late(
        self: lane.MirrorLane, producer: TransactionalProducer, chapters: list[Record], states: list[Record]
    ) -> None:
        await producer.commit()
        passed[self.number] += 1
        if passed[self.number] > _PASS:
            os.kill(os.getpid(), signal.SIGKILL)
        await keep_books(self, producer, chapters, states)

    lane.MirrorLane._keep_books = late  # type: ignore[method-assign]


def rival() -> None:
    MirrorConfig.group = property(lambda self: f"rival-{os.getpid()}")  # type: ignore[assignment]


if __name__ == "__main__":
    what = sys.argv[1]
    if what == RIVAL:
        rival()
    elif what in FAULTS:
        {"no-fence": no_fence, "pairs-off-by-one": pairs_off_by_one, "progress-late": progress_late}[what]()
    else:
        die_at(what)
    sys.exit(main(sys.argv[2:]))
