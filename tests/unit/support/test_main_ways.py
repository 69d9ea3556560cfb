"""The list of main ways names files and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.main_ways import MAIN_WAYS

INTEGRATION = Path(__file__).parents[2] / "integration"


@pytest.mark.parametrize("file", MAIN_WAYS)
def test_a_main_way_exists(file: str) -> None:
    text = (INTEGRATION / file).read_text(encoding="utf-8")
    assert set(MAIN_WAYS[file].split()) <= set(re.findall(r"def (test_\w+)", text))
