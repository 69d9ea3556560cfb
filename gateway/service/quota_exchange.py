"""The reports of `shared_limits` between the workers of a data centre, by a topic in its Kafka.

Nothing waits for them. Where Kafka does not take them, or gives none, each worker has an equal part of each limit. Each
listens to what is published from then on, and to the last report of each worker alone: what was taken in a time that it
did not hear of is no debt that its callers would have to pay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, OffsetOutOfRangeError
from logferry.gateway import log
from logferry.gateway.http.quotas import Quotas
from logferry.gateway.http.shared_limits import QuotaReport
from logferry.gateway.http.shares import INTERVAL_S
from logferry.gateway.kafka.client import LATEST, KafkaClient
from logferry.gateway.topics.compacted_store import create_store

_PAUSE_S: Final = 5.0
_WRITE_S: Final = 3.0
_WAIT_MS: Final = 2000
_FETCH_BYTES: Final = 1 << 20
# Only the last report of each worker counts; Kafka removes whole segments.
_CONFIGS: Final = {"cleanup.policy": "delete", "retention.ms": "600000", "segment.ms": "600000"}


def quota_usage_topic(group: str) -> str:
    return f"{group}.quota-usage"


class QuotaExchange:
    """``others``: the URLs of the other workers, also those without lanes; None: not known yet. Both methods run until
    they are cancelled."""

    def __init__(
        self,
        kafka: KafkaClient,
        group: str,
        url: str,
        accepted: Sequence[str],
        quotas: Quotas,
        others: Callable[[], Collection[str] | None],
    ) -> None:
        self._kafka, self._url, self._quotas, self._others = kafka, url, quotas, others
        self._topic, self._accepted = quota_usage_topic(group), accepted
        self._is_created = self._is_failing = False

    async def publish(self) -> None:
        """Divides the limits and publishes the usage, once in each interval; not where there is nobody to hear it."""
        loop = asyncio.get_running_loop()
        producer: AIOKafkaProducer | None = None
        due_s = retry_s = loop.time()
        try:
            while True:
                due_s = max(due_s + INTERVAL_S, loop.time())
                await asyncio.sleep(due_s - loop.time())
                others = self._others()
                if others is None:
                    continue
                report = self._quotas.shared.report(others)
                if not self._quotas.is_active or not others or loop.time() < retry_s:
                    continue
                try:
                    async with asyncio.timeout(_WRITE_S):
                        if producer is None:
                            await self._create()
                            producer = await self._producer()
                        key = self._url.encode()
                        await producer.send_and_wait(self._topic, report.encode(), key=key, partition=0)
                    self._is_failing = False
                except (KafkaError, OSError, TimeoutError) as error:
                    self._failed(error)
                    retry_s = loop.time() + _PAUSE_S
        finally:
            if producer is not None:
                await producer.stop()

    async def listen(self) -> None:
        """Takes over what the others publish."""
        position: int | None = None
        last: dict[bytes | None, bytes | None] = {}
        while True:
            if not self._quotas.is_active or not self._others():
                position = None
                await asyncio.sleep(INTERVAL_S)
                continue
            try:
                if position is None:
                    await self._create()
                    position, last = await self._kafka.offset(self._topic, 0, LATEST), {}
                found = await self._kafka.fetch(self._topic, 0, position, max_bytes=_FETCH_BYTES, wait_ms=_WAIT_MS)
            except OffsetOutOfRangeError:
                position = None
                continue
            except (KafkaError, OSError, TimeoutError) as error:
                self._failed(error)
                position = None
                await asyncio.sleep(_PAUSE_S)
                continue
            position = found.next_offset
            last |= {record.key: record.value for record in found.records}
            if found.at_end:
                while last:
                    self._hear(*last.popitem())
                    # Each may take some ms.
                    await asyncio.sleep(0)

    def _hear(self, worker: bytes | None, data: bytes | None) -> None:
        """Of another version the report may be of another form: the worker is not heard then."""
        url = (worker or b"").decode("utf-8", "replace")
        if url != self._url:
            with suppress(ValueError):
                self._quotas.shared.hear(url, QuotaReport.decode(data or b""))

    async def _create(self) -> None:
        if not self._is_created:
            await create_store(self._kafka, self._topic, self._accepted, _CONFIGS)
            self._is_created = True

    async def _producer(self) -> AIOKafkaProducer:
        # A report that is lost is made up by the next: no wait for the replicas.
        producer = AIOKafkaProducer(acks=1, **self._kafka.options)
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        return producer

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            log.event("quota_usage_failed", topic=self._topic, error=repr(error))
        self._is_failing, self._is_created = True, False
