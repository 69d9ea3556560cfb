"""A worker of the mirror that dies at a step, or has its fence switched off.

``python tests/crash/broken_mirror.py WHAT --config FILE --worker I``, WHAT one of `STEPS` or ``no-fence``.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Sequence

from logferry.gateway.identity import LaneIdentity
from logferry.gateway.transactional import Part, TransactionalProducer
from logferry.mirror.__main__ import main
from logferry.mirror.config import MirrorConfig

# In the order of a transaction: nothing is written; the batches are; the history and the progress too; committed.
STEPS = ("fetched", "produced", "booked", "committed")
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


if __name__ == "__main__":
    if sys.argv[1] == "no-fence":
        no_fence()
    else:
        die_at(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
