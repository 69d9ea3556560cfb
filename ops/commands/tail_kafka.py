"""The records of a table's topics that are not loaded yet, read from Kafka itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from logferry.client import Chunk
from logferry.gateway.config import ConfigError, KafkaSettings, load_as
from logferry.gateway.contract.chunk import ATTRIBUTE_PREFIX, HEADER_CREATED, HEADER_PREV, HEADER_SEQNO
from logferry.gateway.contract.names import split_topic
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.reading.formats import row_of
from logferry.gateway.tls import kafka_options
from logferry.loaders.batches.topic_lag import topic_views
from logferry.loaders.errors import TopicChanged
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.tables import TableSnapshot, origin_of, tail_of
from logferry.ops.audit.log.read import committed, connected
from logferry.ops.cli.problems import UsageError
from pydantic import BaseModel


class _ConfigFile(BaseModel):
    """Any configuration with a connection to Kafka: of the loader, the gateway or the audit."""

    kafka: KafkaSettings


class KafkaTail:
    """Kafka as the source of a tail. Reading again gives the same chunks. Topic ids are compared, too."""

    def __init__(self, bootstrap_servers: str | None, file: str | None) -> None:
        """The connection of the file's section ``kafka``, else an address alone. Raises UsageError."""
        try:
            raw = {"bootstrap_servers": bootstrap_servers}
            settings = KafkaSettings.model_validate(raw) if file is None else load_as(_ConfigFile, Path(file)).kafka
            self._servers, self._options = settings.bootstrap_servers, kafka_options(settings)
        except (ConfigError, ValueError) as error:
            raise UsageError(str(error)) from None

    def ranges(self, snapshot: TableSnapshot, chosen: Sequence[str] | None) -> tuple[Range, ...]:
        """The ranges behind the snapshot now. ``chosen``: topics or patterns; None: those of the table.

        Raises Unavailable, ConfigError, TopicChanged.
        """
        patterns = origin_of(snapshot, self._servers, chosen).topics
        return asyncio.run(self._ranges(snapshot, patterns, chosen is not None))

    def chunks(self, ranges: Iterable[Range]) -> Iterator[Chunk]:
        """Exactly the chunks of these ranges, fetch by fetch. Raises Unavailable, TopicChanged."""
        with asyncio.Runner() as runner:
            fetches = self._fetches([r for r in ranges if r.size])
            try:
                found: list[Chunk] = []
                while runner.run(_next(fetches, found)):
                    yield from found
            finally:
                runner.run(fetches.aclose())

    async def _ranges(self, snapshot: TableSnapshot, patterns: Sequence[str], is_chosen: bool) -> tuple[Range, ...]:
        async with connected(self._options) as kafka:
            views, wanted = await topic_views(kafka, snapshot, patterns, is_chosen=is_chosen)
        return tail_of(snapshot, views, wanted)

    async def _fetches(self, ranges: Sequence[Range]) -> AsyncGenerator[list[Chunk], None]:
        if not ranges:
            return
        async with connected(self._options) as kafka:
            await kafka.describe(sorted({r.topic for r in ranges}))
            for r in ranges:
                dc, inside = split_topic(r.topic)[0], range(r.start, r.end)
                async for fetched in committed(kafka, (r.topic, r.partition), r.start, r.end, partial(_lost, r)):
                    chunks = (chunk_of(dc, r, *one) for one in fetched.records if one.offset in inside)
                    yield [chunk for chunk in chunks if chunk is not None]


def chunk_of(
    dc: str,
    r: Range,
    offset: int,
    recorded_ms: int,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
) -> Chunk | None:
    """None for a record that no gateway wrote: it goes into the quarantine, not into the table."""
    if key is None or value is None or any(content is None and _is_own(name) for name, content in headers):
        return None
    known = [(name, content) for name, content in headers if content is not None]
    row = row_of(dc, r.topic, r.partition, KafkaRecord(offset, recorded_ms, key, value, known))
    chunk = None if row is None else Chunk(*row)
    return None if chunk is None or chunk.seqno < 0 or (chunk.prev or 0) < 0 else chunk


def _is_own(header: str) -> bool:
    return header in (HEADER_SEQNO, HEADER_PREV, HEADER_CREATED) or header.startswith(ATTRIBUTE_PREFIX)


async def _next(fetches: AsyncGenerator[list[Chunk], None], found: list[Chunk]) -> bool:
    """False at the end. The chunks are not its result, of which asyncio's runner writes a text each time."""
    chunks = await anext(fetches, None)
    found[:] = chunks or ()
    return chunks is not None


def _lost(r: Range, start: int, end: int) -> None:
    raise TopicChanged(f"{r.topic}: the records {start} to {end - 1} of partition {r.partition} were removed")
