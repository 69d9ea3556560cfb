"""An entry of the batch ledger: its kinds, ranges and origins, and the paths of a table's side tables. Pure."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Range, TopicPartition

LOAD: Final = "load"
REQUARANTINE: Final = "requarantine"
RESET: Final = "reset"
MOVE: Final = "move"
RELOAD: Final = "reload"
DROP: Final = "drop"

# Default of the setting `duplicate_window_days`.
DUPLICATE_WINDOW_DAYS: Final = 14
# Default of the setting `ledger_batches`.
LEDGER_BATCHES: Final = 1000


class JobOrigin(NamedTuple):
    """Where a job reads, and its duplicate window: for readers of records that are not loaded yet."""

    bootstrap_servers: str
    topics: tuple[str, ...]
    duplicate_window_days: int = DUPLICATE_WINDOW_DAYS

    @property
    def as_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def parse(cls, text: str) -> JobOrigin:
        said = json.loads(text)
        days = said.get("duplicate_window_days", DUPLICATE_WINDOW_DAYS)
        return cls(said["bootstrap_servers"], tuple(said["topics"]), days)


class OriginOffset(NamedTuple):
    """An offset in the original topic, the same in every data centre. ``topic_id``: the original's."""

    topic: str
    partition: int
    topic_id: str
    offset: int

    @property
    def key(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class LedgerEntry(NamedTuple):
    """One batch. ``ranges`` hold every partition known by then, also those of which the batch reads nothing.

    ``kind``: ``load`` reads the ranges from Kafka; ``requarantine`` moves quarantined lines into the table; ``reset``
    sets positions by command; ``move`` translates them to another data centre, to which they belong then; ``reload``
    reads the ranges of ``reload`` again and replaces their rows; ``drop`` removes the rows from before ``cutoff``.
    ``settings``: the parser's, so that a planned batch is finished as planned. ``origin``: the job's Kafka and topics;
    None in entries of older loaders. ``originals``: where the ranges of other data centres' topics end there, if known.
    ``first``: of an entry that sums up several loads, the first of its batches; ``batch`` is the last.
    """

    batch: int
    dc: str
    parser: str
    run: str
    planned: datetime
    ranges: tuple[Range, ...]
    kind: str = LOAD
    settings: str = ""
    origin: JobOrigin | None = None
    originals: tuple[OriginOffset, ...] = ()
    reload: tuple[Range, ...] = ()
    cutoff: datetime | None = None
    first: int | None = None

    @property
    def batches(self) -> range:
        return range(self.batch if self.first is None else self.first, self.batch + 1)

    @property
    def reads(self) -> tuple[Range, ...]:
        """The ranges to read from Kafka. A move has none: its ranges are what the batch before it has read in the new
        data centre, after it could not be finished in the old one.
        """
        return tuple(r for r in self.reload or self.ranges if r.size) if self.kind != MOVE else ()


class TablePaths(NamedTuple):
    """All folders that belong to a table, whether they exist or not."""

    main: Location
    ledger: Location
    quarantine: Location
    sources: Location
    left_out: Location
    segments: Location
    excluded: Location
    latest: Location

    @classmethod
    def of(cls, path: Location | Path | str) -> TablePaths:
        """Raises ValueError, as `Location.of`."""
        main = Location.of(path)
        beside = ("ledger", "quarantine", "sources", "moved", "segments", "excluded", "latest")
        return cls(main, *(main.with_name(f"{main.name}_{name}") for name in beside))
