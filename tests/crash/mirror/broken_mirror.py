"""A worker of the mirror that dies at a step, or lacks something that makes it exact.

``python tests/crash/mirror/broken_mirror.py WHAT --config FILE --worker I``, WHAT one of `STEPS`, of
`FAULTS`, or `RIVAL`: nothing is missing then, but it is in a group of its own and believes that every lane is its own.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from logferry.gateway.contract.mirror_state import MirrorCheckpoint, OffsetRange
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.transactional_producer import PartitionBatches, TransactionalProducer
from logferry.gateway.kafka.types import LaneIdentity
from logferry.mirror.__main__ import main
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.batch_rewrite import CoalescedBatch
from logferry.mirror.lanes import transaction
from logferry.mirror.lanes.transaction import LaneTransactions

# In the order of a transaction: nothing is written; the batches are; history and checkpoints too; committed.
STEPS = ("fetched", "produced", "recorded", "committed")
# The fence is switched off; the history says the next offset; the checkpoint is committed after its records, and the
# worker dies in between.
FAULTS = ("no-fence", "history-off-by-one", "checkpoint-late")
RIVAL = "rival"
# Some transactions pass before it dies.
_PASS = 12


def die_at(step: str) -> None:
    passed = itertools.count()
    write, commit = TransactionalProducer.write, TransactionalProducer.commit

    def at(now: str) -> None:
        if now == step and next(passed) >= _PASS:
            os.kill(os.getpid(), signal.SIGKILL)

    async def dying_write(self: TransactionalProducer, parts: Sequence[PartitionBatches]) -> None:
        is_state = any(part.topic == self.lane.state[0] for part in parts)
        if not is_state:
            at("fetched")
        await write(self, parts)
        at("recorded" if is_state else "produced")

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


def history_off_by_one() -> None:
    right = transaction.copied_ranges

    def wrong(found: list[CoalescedBatch], part: PartitionBatches) -> Iterator[OffsetRange]:
        return (span._replace(local=span.local + 1) for span in right(found, part))

    transaction.copied_ranges = wrong


def checkpoint_late() -> None:
    # Each lane by itself: where nothing is known of a partition that has records, a worker stops it.
    passed, write_state = Counter[int](), LaneTransactions.write_state

    async def late(self: LaneTransactions, checkpoints: Mapping[TopicPartition, MirrorCheckpoint]) -> None:
        await self.producer.commit()
        number = self.producer.lane.number
        passed[number] += 1
        if passed[number] > _PASS:
            os.kill(os.getpid(), signal.SIGKILL)
        await write_state(self, checkpoints)

    LaneTransactions.write_state = late  # type: ignore[method-assign]


def rival() -> None:
    """The group is its own; what the lanes have in Kafka is that of both."""
    shared, lane = MirrorConfig.group.fget, MirrorConfig.lane  # type: ignore[attr-defined]

    def shared_lane(self: MirrorConfig, number: int) -> LaneIdentity:
        return lane(self, number)._replace(transactional_id=f"{shared(self)}.lane-{number}")

    MirrorConfig.state_topic = property(lambda self: f"{shared(self)}.state")  # type: ignore[assignment]
    MirrorConfig.history_topic = property(lambda self: f"{shared(self)}.pairs")  # type: ignore[assignment]
    MirrorConfig.lane = shared_lane  # type: ignore[method-assign]
    MirrorConfig.group = property(lambda self: f"rival-{os.getpid()}")  # type: ignore[assignment]


if __name__ == "__main__":
    what = sys.argv[1]
    if what == RIVAL:
        rival()
    elif what in FAULTS:
        {"no-fence": no_fence, "history-off-by-one": history_off_by_one, "checkpoint-late": checkpoint_late}[what]()
    else:
        die_at(what)
    sys.exit(main(sys.argv[2:]))
