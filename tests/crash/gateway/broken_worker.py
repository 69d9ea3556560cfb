"""A gateway worker with one guard switched off, for the proof that the crash tests would notice.

``python tests/crash/gateway/broken_worker.py GUARD --config FILE --worker I``, GUARD one of the names below. A worker
freezes when it has decided a transaction and written nothing of it, once, if there is a file ``freeze-I`` beside FILE.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from logferry.gateway.__main__ import main
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import SourceState
from logferry.gateway.kafka import transaction_coordinator
from logferry.gateway.kafka.types import LaneIdentity
from logferry.gateway.lanes import transaction
from logferry.gateway.lanes.dedup import Advance, Refusal
from logferry.gateway.lanes.group_commit import GroupCommit, Offsets


def no_deduplication() -> None:
    """What was recorded before is recorded again."""

    def record_all(
        state: SourceState,
        chunks: list[Chunk],
        session: int | None,
        now_ms: int,
        max_jump: int | None = None,
        token: str | None = None,
        lapse_ms: int = 0,
    ) -> Advance | Refusal:
        after = state._replace(recorded=max(chunks[-1].seqno, state.recorded or 0), written_ms=now_ms)
        return Advance(after, chunks, 0)

    transaction.decide_write = record_all  # type: ignore[attr-defined]


def no_fence() -> None:
    """Each opening of a lane takes a transactional id of its own, so nobody is ever shut out."""
    numbers, fenced = itertools.count(), Config.lane

    def unfenced(self: Config, number: int) -> LaneIdentity:
        transactional_id = f"unfenced-{number}-{os.getpid()}-{next(numbers)}"
        return fenced(self, number)._replace(transactional_id=transactional_id)

    # A worker may be frozen for longer on a slow machine; Kafka would end what it left open, as a fence does.
    transaction_coordinator.TRANSACTION_TIMEOUT_MS = 60_000  # type: ignore[misc]
    Config.lane = unfenced  # type: ignore[method-assign]


def freeze_at(file: Path) -> None:
    """SIGSTOP by itself: from outside, few instants lie within a transaction."""
    transact = GroupCommit.transact

    async def transact_or_freeze(self: GroupCommit, draft: transaction.Draft) -> Offsets:
        if draft.chunks and file.exists():
            file.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        return await transact(self, draft)

    GroupCommit.transact = transact_or_freeze  # type: ignore[method-assign]


GUARDS: dict[str, Callable[[], None]] = {
    "deduplication": no_deduplication,
    "fence": no_fence,
}

if __name__ == "__main__":
    guard, _, config, _, worker = sys.argv[1:]
    freeze_at(Path(config).with_name(f"freeze-{worker}"))
    GUARDS[guard]()
    sys.exit(main(sys.argv[2:]))
