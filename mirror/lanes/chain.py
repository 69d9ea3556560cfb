"""Topics that the remote mirrors itself: a chain, dc1 → dc2 → dc3.

dc3 copies dc2's offsets, while cursors and positions name dc1's. So dc3 composes its history of both steps: dc2's
history, and where dc3 wrote the copy. It is exact like each of them, and a reader in dc3 does not notice the chain.

* A record is written here only when dc2's history names its original. Both are committed in one transaction there.
* A record whose history leads back to here is in a replication cycle, and is not written a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.config import ConfigError
from logferry.gateway.contract.mirror_state import OffsetRange
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.mirror.config import Remote
from logferry.mirror.copy.batch_rewrite import CopiedBatch
from logferry.mirror.copy.partition import MirroredPartition

_HISTORY_WAIT_S: Final = 2.0
_POLL_S: Final = 0.02


class ChainOrigin(NamedTuple):
    """The origin of a remote's copy: ``ranges`` lead from the original, whose topic has the ``id``, to the remote."""

    id: bytes
    ranges: Sequence[OffsetRange]


class ChainStopped(Exception):
    """The partition must stop. ``kind``: one of `partition.STOPS`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ChainHistories:
    """``histories``: those of remotes whose own copies are taken, by their data centre."""

    histories: dict[str, OffsetTranslation]

    def of(self, partition: MirroredPartition) -> OffsetTranslation | None:
        """The remote's history; None: the partition is taken from its original."""
        return self.histories.get(partition.dc) if partition.is_chained else None

    async def origin(self, partition: MirroredPartition, batches: Sequence[CopiedBatch]) -> ChainOrigin | None:
        """None: the partition is taken from its original. Raises ChainStopped."""
        history = self.of(partition)
        if history is None:
            return None
        first, last = batches[0].ranges[0].source, batches[-1].ranges[-1]
        try:
            async with asyncio.timeout(_HISTORY_WAIT_S):
                known = None
                while known is None:
                    known = await history.originals(partition.tp, first, last.source + last.size - 1)
                    await asyncio.sleep(0 if known else _POLL_S)
        except (errors.KafkaError, Problem, OSError, TimeoutError) as error:
            raise ChainStopped(
                "origin-unknown", f"the offset history of the mirror in {partition.dc} cannot be read: {error!r}"
            ) from error
        checkpoint, ranges = known
        if checkpoint.source_id == partition.local_id:
            raise ChainStopped("replication-cycle", f"{partition.dc} mirrors {partition.topic} from here")
        origin = ChainOrigin(checkpoint.original.id, ranges)
        before = None if partition.checkpoint is None else partition.checkpoint.chained
        if before is not None and before.id == origin.id and ranges and ranges[0].source < before.next_offset:
            raise ChainStopped(
                "duplicate-records",
                f"offset {ranges[0].source} of the original was copied before; everything before {before.next_offset} "
                "is here",
            )
        return origin


async def reject_cycles(
    chained: ChainHistories, remote: Remote, theirs: dict[str, TopicMetadata], ours: dict[str, TopicMetadata]
) -> None:
    """Raises ConfigError when the remote mirrors from here what is to be mirrored from it; KafkaError, OSError."""
    history = chained.histories.get(remote.dc)
    for name, topic in theirs.items():
        local = ours.get(name)
        if history is None or local is None or not remote.is_chained(name):
            continue
        for partition in topic.partitions:
            with suppress(Problem):  # not mirrored yet
                if (await history.checkpoint((name, partition.partition))).source_id == local.id:
                    raise ConfigError(
                        f"remote {remote.dc}: prefixes: {remote.dc} mirrors {name} from here, which would be a "
                        f"replication cycle; configure one of the two to take it from {name.partition('.')[0]}"
                    )
