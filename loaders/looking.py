"""A look at the segments: begun before Kafka is asked where it ends, and ended when all of that is loaded.

So what a gateway told at its beginning is in the table at its end, or is known to be owed. What a look changes is a
batch of the ledger, without rows; one that changes nothing is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from logferry.loaders.batches.dedup import create_moved, known_before
from logferry.loaders.batches.execute import Loader, Looked
from logferry.loaders.config import TableJob
from logferry.loaders.errors import GatewayAway
from logferry.loaders.planning.segment_states import Look, look_at, low_watermark
from logferry.loaders.planning.source_facts import SourceKey
from logferry.loaders.runs.segment_check import Heard, ask, views
from logferry.loaders.storage.ledger import TablePaths
from logferry.loaders.storage.segment_table import keep_look, segments_before


@dataclass(frozen=True)
class Looking:
    """A look that is under way. ``missing``: why it cannot end, else empty."""

    began: datetime
    topics: tuple[str, ...]
    heard: Mapping[SourceKey, Heard]
    missing: str


def begin(loader: Loader, job: TableJob, topics: Sequence[str]) -> Looking:
    """Before Kafka is asked for offsets. Raises ConfigError."""
    began = datetime.now(UTC)
    try:
        return Looking(began, tuple(topics), ask(loader.gateways, topics), "")
    except GatewayAway as error:
        return Looking(began, tuple(topics), {}, str(error))


def look(job: TableJob, paths: TablePaths, last: int, run: str, looking: Looking) -> Looked | None:
    """When the table holds, as of batch ``last``, all that Kafka had; None: nothing changes by it. Raises Overtaken."""
    if job.segments is None:
        return None
    rules = job.segments.rules
    create_moved(paths)
    known = known_before(paths, last + 1, run)
    sources = views(known, looking.heard, looking.topics)
    found = Look(looking.began, low_watermark(sources, looking.began, rules))
    keep_look(paths.segments, found)
    changes = look_at(segments_before(paths, last + 1, run, rules), found, last + 1, rules)
    return Looked(found, rules) if changes else None
