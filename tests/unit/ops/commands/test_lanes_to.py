"""`logferry lanes --to` refuses what it cannot do before it asks Kafka."""

from __future__ import annotations

import pytest
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
