"""The settings that a copy shares with its original, and those that every copy has.

The others belong to the data centre, and are never copied: replicas, ``min.insync.replicas``, throttles, tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ALIKE: Final = (
    *("retention.ms", "retention.bytes", "cleanup.policy", "max.message.bytes", "segment.bytes", "segment.ms"),
    *("min.cleanable.dirty.ratio", "min.compaction.lag.ms", "max.compaction.lag.ms", "delete.retention.ms"),
)
_MAX_BYTES: Final = "max.message.bytes"
_ANY_TIME_MS: Final = str(2**63 - 1)
# A batch that is encoded again may be a few bytes larger.
_ROOM_BYTES: Final = 4096
_EVERY_COPY: Final = {
    "compression.type": "producer",
    # Records keep the time at which they were written to the original.
    "message.timestamp.type": "CreateTime",
    # The original took them.
    "message.timestamp.before.max.ms": _ANY_TIME_MS,
    "message.timestamp.after.max.ms": _ANY_TIME_MS,
}


def settings_of_copy(original: Mapping[str, str]) -> dict[str, str]:
    """Of a copy, by the settings of its original; a name that the original's Kafka does not know is left out."""
    found = {name: original[name] for name in ALIKE if name in original}
    return found | {_MAX_BYTES: str(int(original[_MAX_BYTES]) + _ROOM_BYTES)} | _EVERY_COPY


def changes_of_copy(original: Mapping[str, str], copy: Mapping[str, str]) -> dict[str, str]:
    """What must change, so that the copy has its settings. It may take larger batches than its original."""
    wanted = settings_of_copy(original)
    if _MAX_BYTES in copy and int(copy[_MAX_BYTES]) >= int(wanted[_MAX_BYTES]):
        del wanted[_MAX_BYTES]
    return {name: value for name, value in wanted.items() if copy.get(name, value) != value}
