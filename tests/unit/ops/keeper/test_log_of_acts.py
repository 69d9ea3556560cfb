"""A keeper whose log of acts is closed, since a record was not committed, opens it again, whether it plans acts or not.

Against Kafka: tests/integration/ops/test_keeper_rights.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from logferry.ops.keeper.config import KeeperConfig
from logferry.ops.keeper.journal import NotActing
from logferry.ops.keeper.keeper import Keeper


class ClosingJournal:
    """It closes where a record is not committed, as the real one does."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.is_open = self.fails = False

    async def open(self) -> list[dict[str, Any]]:
        self.is_open = True
        return [dict(record) for record in self.records]

    async def append(self, record: Mapping[str, Any]) -> None:
        self.is_open = self.is_open and not self.fails
        if not self.is_open:
            raise NotActing("its record is not committed")
        self.records.append(record)


def test_a_pause_that_was_refused_can_be_repeated() -> None:
    async def pauses() -> None:
        config, unused = KeeperConfig.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "k:9"}}), list[Any]()
        keeper = Keeper(config, "u", unused)  # type: ignore[arg-type]
        journal, election = ClosingJournal(), SimpleNamespace(terms=1, acts=True)
        keeper.election, keeper._journal = election, journal  # type: ignore[assignment]

        async def looks() -> None:
            await keeper._has_taken_over(election)  # type: ignore[arg-type]

        await looks()
        journal.fails = True
        with pytest.raises(NotActing):
            await keeper.pause("refused")
        journal.fails = False
        await looks()
        await keeper.pause("taken")
        assert keeper.state.paused == "taken"

    asyncio.run(pauses())
