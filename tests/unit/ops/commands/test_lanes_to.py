"""`logferry lanes --to` refuses what it cannot do before it asks Kafka."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.gateway.config import Config
from logferry.gateway.contract.lane_count import COUNT_KEY, LaneCount
from logferry.mirror.config import MirrorConfig
from logferry.ops.cli.problems import UsageError
from logferry.ops.commands import lanes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--to", "8", "--deliver"], "those of deliver are fixed"),
        (["--to", "0"], "0 is not 1 to 1024"),
        (["--to", "1025"], "1025 is not 1 to 1024"),
    ],
)
def test_it_is_refused(options: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        lanes.main(["--config", "absent.toml", *options])


@pytest.mark.parametrize("kind", [Config, MirrorConfig])
def test_the_number_of_lanes_is_no_record_to_forget(kind: Any) -> None:
    """Who waits for it in each partition of the state topic would wait until the next change."""
    kafka = {"bootstrap_servers": "k:9092"}
    config = kind.model_validate(
        {"dc": "dc2", "kafka": kafka, "remote": [{"dc": "dc1", "kafka": kafka}]}
        if kind is MirrorConfig
        else {"dc": "dc2", "kafka": kafka}
    )
    lanes._decode(config, COUNT_KEY, LaneCount(8, 4, 2).encode())
    with pytest.raises(ValueError, match="version"):
        lanes._decode(config, COUNT_KEY, b"\x09")
