"""The time of what happened, out of a text: an expression of the JVM, null where no format fits."""

from __future__ import annotations

import re
from typing import Final

from logferry.loaders.parsing.settings import EventTime
from pyspark.sql import Column
from pyspark.sql import functions as F

_EPOCHS: Final = {"epoch_s": 1_000_000, "epoch_ms": 1_000}
# The years 1 to 9999, which every reader of the table can show; what is outside was no time.
_FIRST_US: Final = -62_135_596_800_000_000
_LAST_US: Final = 253_402_300_799_999_999
_ZONES: Final = frozenset("VzOXxZ")
_YEARS: Final = frozenset("yu")
_NAMES_ZONE: Final = r"(Z|[+-]\d\d:?\d\d)$"


def event_time(said: Column, settings: EventTime, made: Column) -> Column:
    """``made``: about when the line was written; it tells the year where the text does not."""
    text = F.trim(F.regexp_replace(said, r"\s+", " "))
    found = F.coalesce(*(_by(text, pattern, settings.zone, made) for pattern in settings.formats))
    return F.when(F.unix_micros(found).between(_FIRST_US, _LAST_US), found)


def _by(text: Column, pattern: str, zone: str, made: Column) -> Column:
    if pattern in _EPOCHS:
        exact = F.try_multiply(text.try_cast("decimal(26,6)"), F.lit(_EPOCHS[pattern]))
        micros = exact.try_cast("bigint")
        return F.when(micros.between(0, _LAST_US), F.timestamp_micros(micros))
    if pattern == "iso":
        found = text.try_cast("timestamp")
        return F.when(text.rlike(_NAMES_ZONE), found).otherwise(_from(found, zone))
    letters = set(re.sub(r"'[^']*'", "", pattern))
    if letters & _YEARS:
        found = F.try_to_timestamp(text, F.lit(pattern))
        return found if letters & _ZONES else _from(found, zone)
    return _without_year(text, pattern, zone if not letters & _ZONES else "UTC", made)


def _without_year(text: Column, pattern: str, zone: str, made: Column) -> Column:
    """The latest of such times that is at most a day after ``made``: its year or the one before (or after, around the
    turn of the year)."""
    latest = made + F.expr("interval 1 day")

    def in_year(shift: int) -> Column:
        dated = F.concat((F.year(made) + F.lit(shift)).cast("string"), F.lit(" "), text)
        found = _from(F.try_to_timestamp(dated, F.lit(f"yyyy {pattern}")), zone)
        return F.when(found <= latest, found)

    # The 29th of February may be four years back, and eight at the turn of some centuries.
    return F.coalesce(*(in_year(shift) for shift in (1, 0, -1, -2, -3, -4)))


def _from(found: Column, zone: str) -> Column:
    return found if zone == "UTC" else F.to_utc_timestamp(found, zone)
