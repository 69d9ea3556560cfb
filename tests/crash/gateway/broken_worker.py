"""A gateway worker with one guard switched off, for the proof that the crash tests would notice.

``python tests/crash/gateway/broken_worker.py GUARD --config FILE --worker I``, GUARD one of the names below.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable

from logferry.gateway.__main__ import main
from logferry.gateway.config import Config
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import SourceState
from logferry.gateway.kafka import transaction_coordinator
from logferry.gateway.kafka.types import LaneIdentity
from logferry.gateway.lanes import transaction
from logferry.gateway.lanes.dedup import Advance, Refusal


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


GUARDS: dict[str, Callable[[], None]] = {
    "deduplication": no_deduplication,
    "fence": no_fence,
}

if __name__ == "__main__":
    GUARDS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
