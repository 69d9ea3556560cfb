"""Reads the partitions of a data centre's log: work for the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from logferry.gateway.config import KafkaSettings
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.tls import kafka_options
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.log.original_files import OriginalFiles, Pair
from logferry.ops.audit.log.partition import PartitionLog
from logferry.ops.audit.log.read import committed, connected
from logferry.ops.audit.records.batches import CorruptRecords


@dataclass
class PartitionJob:
    """``start``: the first offset to read. The log is read up to the end of its span."""

    log: PartitionLog
    start: int
    has_originals: bool


@dataclass
class PartitionRead:
    """The log after it was read. ``taken``: what was found of the original files."""

    log: PartitionLog
    findings: Findings
    taken: list[tuple[int, Pair]] = field(default_factory=list)


@dataclass
class PartitionWork:
    """``kafka``: the settings; ``client``: one that is connected already, in the process that has it."""

    kafka: KafkaSettings
    originals: OriginalFiles
    client: KafkaClient | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __getstate__(self) -> dict[str, Any]:
        return {"kafka": self.kafka, "originals": self.originals, "client": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _stack=AsyncExitStack())

    async def __aenter__(self) -> PartitionWork:
        if self.client is None:
            self.client = await self._stack.enter_async_context(connected(kafka_options(self.kafka)))
            self._stack.callback(self.originals.close)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.__aexit__(*error)  # type: ignore[arg-type]

    def handles(self) -> Sequence[int]:
        return self.originals.descriptors()

    def adopt(self, handles: list[int]) -> None:
        self.originals.adopt(handles)

    def name(self, job: PartitionJob) -> str:
        return f"{job.log.topic}-{job.log.partition}"

    async def do(self, job: PartitionJob, advance: Callable[[int], None]) -> PartitionRead:
        """Where stored bytes are damaged, the rest of the partition is skipped. Raises Unavailable, KafkaError."""
        log, findings = job.log, Findings()
        log.findings, log.originals = findings, self.originals if job.has_originals else None
        place, client = (log.topic, log.partition), self.client
        if client is None:
            raise RuntimeError("the work was not entered")
        try:
            async for fetched in committed(client, place, job.start, log.span.end, log.overtaken):
                log.take(fetched.records)
                log.reached = fetched.next_offset
                advance(fetched.next_offset - job.start)
            log.ended()
        except CorruptRecords as error:
            detail = f"{error}; the rest of the partition was not read"
            findings.add(Finding("corrupt-batch", f"{place[0]}-{place[1]}", detail))
        log.originals = None
        return PartitionRead(log, findings, self.originals.taken())
