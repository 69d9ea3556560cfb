"""What the state topic holds of the audited topics: the last record of each key, decoded. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from logferry.gateway.contract.chunk import lane_of
from logferry.gateway.lanes.dedup import Source, SourceState
from logferry.ops.audit.digests.findings import Finding, Findings


class Known(NamedTuple):
    """One state."""

    source: Source
    state: SourceState


@dataclass(slots=True)
class States:
    """Records are applied in offset order. Kept encoded: there may be a million.

    ``topics``: the others are passed over; None: all are wanted. ``forgotten``: (topic, source) of tombstones, while
    Kafka keeps them. ``reborn``: those of them that were recorded again, with the base of each time.
    """

    topic: str
    lanes: int
    topics: frozenset[str] | None
    findings: Findings
    forgotten: set[tuple[str, str]] = field(default_factory=set)
    reborn: dict[tuple[str, str], list[int | None]] = field(default_factory=dict)
    _by_key: dict[bytes, bytes] = field(default_factory=dict)
    _dropped: set[bytes] = field(default_factory=set)

    def apply(self, lane: int, offset: int, key: bytes, value: bytes | None) -> None:
        """A record that cannot be decoded, or stands in a lane that is not its key's, is a finding."""
        try:
            source = Source.of_state_key(key)
            if self.topics is not None and source.topic not in self.topics:
                return
            state = None if value is None else SourceState.decode(value)
        except (ValueError, IndexError, struct.error) as error:
            self._add("state-unreadable", lane, offset, None, str(error))
            return
        owner = lane_of(source.key, self.lanes)
        if owner != lane:
            detail = f"a state in lane {lane}, but the key belongs to lane {owner}: two lanes may write this source"
            self._add("state-in-wrong-lane", lane, offset, source.source_id, detail)
            return
        if state is None or value is None:
            self._by_key.pop(key, None)
            self._dropped.add(key)
            self.forgotten.add((source.topic, source.source_id))
            return
        self._by_key[key] = value
        if state.recorded is not None and key in self._dropped:
            self._dropped.remove(key)
            self.reborn.setdefault((source.topic, source.source_id), []).append(state.base)

    def known(self) -> Iterator[Known]:
        for key, value in self._by_key.items():
            yield Known(Source.of_state_key(key), SourceState.decode(value))

    def _add(self, kind: str, lane: int, offset: int, source_id: str | None, detail: str) -> None:
        self.findings.add(Finding(kind, f"{self.topic}-{lane}", detail, source_id, offset, offset))
