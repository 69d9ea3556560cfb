"""The audit reads its own configuration, or a gateway's; the names of the settings say which."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.ops.audit.config import is_audit

KAFKA = 'kafka.bootstrap_servers = "127.0.0.1:1"\n'


@pytest.mark.parametrize(
    ("settings", "is_ours"),
    [
        ('workers = 2\nlisten = "127.0.0.1:8080"\ndc = "dc1"\n', False),
        ('workers = 2\ndc = "dc1"\nlanes = 4\ntopics = ["a"]\n', True),  # its unknown settings are named as the audit's
        ("workers = 2\n", True),
        ('files = ["/a.log"]\n', True),
        ('dc = "dc1"\ncodec = "lz4"\n', False),
        ("no TOML", False),
    ],
)
def test_whose_configuration_a_file_is(tmp_path: Path, settings: str, is_ours: bool) -> None:
    path = tmp_path / "some.toml"
    path.write_text(settings + KAFKA)
    assert is_audit(path) is is_ours


def test_a_file_that_cannot_be_read_is_reported_later(tmp_path: Path) -> None:
    assert is_audit(tmp_path / "absent.toml") is False
