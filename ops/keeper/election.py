"""Which keeper acts: the member of the keepers' group that has the only partition of the log. The others stand by.

The group decides about liveness alone. Two keepers that both believe to act do no harm: the journal fences the older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import aiokafka
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, errors
from logferry.gateway import log
from logferry.gateway.kafka.aiokafka_internals import StickyPartitionAssignor, leave_group
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.consumer_groups import Membership
from logferry.ops.keeper.config import KeeperConfig

_HEARTBEAT_MS: Final = 300
_NEVER_MS: Final = 2**31 - 1
_ANSWER_S: Final = 2.0


class Election(ConsumerRebalanceListener):  # type: ignore[misc]
    """``acts``: whether the group says so. ``terms`` counts the assignments, so that a new one is seen."""

    def __init__(self, config: KeeperConfig, url: str, kafka: KafkaClient) -> None:
        self._config, self._url, self._kafka = config, url, kafka
        self._consumer = AIOKafkaConsumer(
            group_id=config.group,
            client_id=url,
            # One that joins takes nothing from the one that acts.
            partition_assignment_strategy=[StickyPartitionAssignor],
            session_timeout_ms=config.session_timeout_ms,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            max_poll_interval_ms=_NEVER_MS,
            enable_auto_commit=False,
            auto_offset_reset="latest",
            **kafka.options,
        )
        self._membership = Membership(self._consumer)
        self.acts = False
        self.terms = 0

    async def start(self) -> None:
        self._consumer.subscribe([self._config.log_topic], listener=self)
        await self._consumer.start()

    def renew(self) -> None:
        """To be called again and again, so that the keeper stays a member of its group. Raises KafkaError."""
        self._membership.renew()

    async def stop(self) -> None:
        self.acts = False
        await leave_group(self._consumer)

    async def on_partitions_revoked(self, revoked: Iterable[aiokafka.TopicPartition]) -> None:
        self.acts = False

    async def on_partitions_assigned(self, assigned: Iterable[aiokafka.TopicPartition]) -> None:
        partitions = list(assigned)
        self._consumer.pause(*partitions)
        self._membership.confirmed()
        self.acts, self.terms = bool(partitions), self.terms + 1
        log.event("keeper_acts" if self.acts else "keeper_stands_by", url=self._url)

    async def acting_url(self) -> str | None:
        """The keeper that acts, by its URL; None while that is not known."""
        if self.acts:
            return self._url
        with suppress(errors.KafkaError, OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                found = await self._kafka.group_assignment(self._config.group, self._config.log_topic)
            return next((url for url, partitions in (found or {}).items() if partitions), None)
        return None
