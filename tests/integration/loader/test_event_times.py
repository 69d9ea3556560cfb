"""The event time of a row: what the formats, the zone and the time of the chunk make of the text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from logferry.loaders.parsing import rows as parsing_rows

from tests.support.loader import CREATED_MS

pytestmark = pytest.mark.spark

MS = CREATED_MS


def ms(*moment: int) -> int:
    return int(at(*moment).timestamp() * 1000)


def at(
    year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0, microsecond: int = 0
) -> datetime:
    return datetime(year, month, day, hour, minute, second, microsecond, UTC)


TIMES = {
    "no year, this one": ("Nov  3 04:05:06", "MMM d HH:mm:ss", "UTC", ms(2026, 11, 21), at(2026, 11, 3, 4, 5, 6)),
    "no year, the one before": (
        "Dec 31 23:59:59",
        "MMM d HH:mm:ss",
        "UTC",
        ms(2026, 1, 1),
        at(2025, 12, 31, 23, 59, 59),
    ),
    "a clock that is ahead": (
        "Jan  1 00:00:05",
        "MMM d HH:mm:ss",
        "UTC",
        ms(2026, 12, 31, 23),
        at(2027, 1, 1, 0, 0, 5),
    ),
    "leap day": ("Feb 29 12:00:00", "MMM d HH:mm:ss", "UTC", ms(2026, 11, 21), at(2024, 2, 29, 12)),
    "a zone's summer": ("2026-07-01 12:00:00", "yyyy-MM-dd HH:mm:ss", "Europe/Zurich", MS, at(2026, 7, 1, 10)),
    "a zone's winter": ("2026-01-01 12:00:00", "yyyy-MM-dd HH:mm:ss", "Europe/Zurich", MS, at(2026, 1, 1, 11)),
    "a text's own zone": ("2026-01-01 12:00 +0200", "yyyy-MM-dd HH:mm Z", "Europe/Zurich", MS, at(2026, 1, 1, 10)),
    "iso without a zone": ("2026-01-01T12:00:00.5", "iso", "Europe/Zurich", MS, at(2026, 1, 1, 11, 0, 0, 500_000)),
    "iso with one": ("2026-01-01 12:00:00-05:00", "iso", "Europe/Zurich", MS, at(2026, 1, 1, 17)),
    "fractions": ("20260101120000,123", "yyyyMMddHHmmss,SSS", "UTC", MS, at(2026, 1, 1, 12, 0, 0, 123_000)),
    "epoch": ("1700000000123", "epoch_ms", "UTC", MS, at(2023, 11, 14, 22, 13, 20, 123_000)),
    "before 1970": ("-1", "epoch_ms", "UTC", MS, None),
    "no such day": ("2026-02-30 12:00:00", "yyyy-MM-dd HH:mm:ss", "UTC", MS, None),
    "something behind it": ("2026-02-03 12:00:00 x", "yyyy-MM-dd HH:mm:ss", "UTC", MS, None),
    "nothing": ("", "yyyy-MM-dd HH:mm:ss", "UTC", MS, None),
}


@pytest.mark.parametrize(
    "case", ["no year, the one before", *(pytest.param(c, marks=pytest.mark.long) for c in TIMES if "before" not in c)]
)
def test_times(case: str, read: Callable[..., dict[str, Any]]):
    text, pattern, zone, created_ms, want = TIMES[case]
    found = read(
        [f"{text}|".encode()],
        created_ms,
        format="regex",
        pattern=r"(?<t>.*)\|",
        event_time={"column": "t", "formats": ["yyyy", pattern], "zone": zone},
    )[f"{text}|"]
    assert (found["event_time"] if want else found) == (want or parsing_rows.NO_TIME)
