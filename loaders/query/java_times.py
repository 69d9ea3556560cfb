"""Event times as `parsing.formats.event_time` reads them, without Java.

A pattern of Java's DateTimeFormatter becomes a regular expression where both accept the same texts: the letters ``y M d
H h a m s S X x Z``, as Spark builds the formatter (ignoring case, strict, ``S`` of 1 to n digits). Other letters, and
optional sections, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.query.spark_values import days_of, exact_decimal, micros, to_utc

# Text, and when it was written in microseconds → microseconds since 1970, or None.
Reader = Callable[[str, int], int | None]

_EPOCHS: Final = {"epoch_s": 1_000_000, "epoch_ms": 1_000}
FIRST_US: Final = -62_135_596_800_000_000
LAST_US: Final = 253_402_300_799_999_999
_DAY_US: Final = 86_400_000_000
_NAMES_ZONE: Final = re.compile(r"(?:Z|[+-][0-9]{2}:?[0-9]{2})\Z")
_SPACES: Final = re.compile(r"\s+", re.ASCII)
_SPACED: Final = re.compile(r"\s\s|[^\S ]", re.ASCII)
# Characters whose other case is an ASCII letter, which Java's formatter takes for it.
_FOLDED: Final = str.maketrans("\u017f\u212a\u0130\u0131", "skii")

_MONTHS: Final = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_LONG_MONTHS: Final = [
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
]
_TWO: Final = "[0-9]{2}"
_ANY: Final = "[0-9]{1,19}"
_NUMBERS: Final = {
    "yyyy": ("year", r"[0-9]{4}|\+[0-9]{5,19}"),
    "yy": ("short", _TWO),
    "y": ("year", _ANY),
    "M": ("month", _ANY),
    "MM": ("month", _TWO),
    "d": ("day", _ANY),
    "dd": ("day", _TWO),
    "MMM": ("name", "|".join(_MONTHS)),
    "MMMM": ("long", "|".join(_LONG_MONTHS)),
    "H": ("hour", _ANY),
    "HH": ("hour", _TWO),
    "h": ("half", _ANY),
    "hh": ("half", _TWO),
    "a": ("noon", "am|pm"),
    "m": ("minute", _ANY),
    "mm": ("minute", _TWO),
    "s": ("second", _ANY),
    "ss": ("second", _TWO),
}
_NO_COLON: Final = "[+-][0-9]{4}"
_COLON: Final = "[+-][0-9]{2}:[0-9]{2}"
_SHORT_OFFSET: Final = "[+-][0-9]{2}(?:[0-9]{2})?"
_OFFSETS: Final = {
    **dict.fromkeys(("Z", "ZZ", "ZZZ"), _NO_COLON),
    "X": f"z|{_SHORT_OFFSET}",
    "XX": f"z|{_NO_COLON}",
    "XXX": f"z|{_COLON}",
    "x": _SHORT_OFFSET,
    "xx": _NO_COLON,
    "xxx": _COLON,
}
_PIECE: Final = re.compile(r"'(?P<quoted>[^']*)'|(?P<letters>([A-Za-z])\3*)|(?P<plain>[^A-Za-z'\[\]{}#])", re.DOTALL)


def event_times(column: str, formats: Sequence[str], zone: str) -> Reader:
    """The first format that fits counts. Raises LoaderConfigError, which names a pattern that only Java can read."""
    readers = [_reader(column, text, zone) for text in formats]

    def read(said: str, made: int) -> int | None:
        text = (_SPACES.sub(" ", said) if _SPACED.search(said) else said).strip(" ")
        found = next((us for reader in readers if (us := reader(text, made)) is not None), None)
        return found if found is not None and FIRST_US <= found <= LAST_US else None

    return read


def needs_made(formats: Sequence[str]) -> bool:
    """Whether a time depends on when its chunk was made."""
    return any(text not in (*_EPOCHS, "iso") and "y" not in _letters(text) for text in formats)


def _letters(pattern: str) -> str:
    return re.sub(r"'[^']*'", "", pattern)


def _reader(column: str, pattern: str, zone: str) -> Reader:
    if pattern in _EPOCHS:
        return _epoch(_EPOCHS[pattern])
    if pattern == "iso":
        return lambda text, _: _iso(text, zone)
    letters = _letters(pattern)
    is_zoned = any(letter in letters for letter in "VzOXxZ")
    where = "UTC" if is_zoned else zone
    if "y" in letters:
        of_pattern = _compiled(column, pattern)
        return lambda text, _: _local(of_pattern(text), where)
    in_year = _compiled(column, f"yyyy {pattern}")
    return lambda text, made: _latest(in_year, text, where, made)


def _epoch(factor: int) -> Reader:
    def read(text: str, _: int) -> int | None:
        exact = exact_decimal(26, 6, text.strip("".join(map(chr, range(33)))))
        if exact is None:
            return None
        found = int(exact * Decimal(factor))
        return found if 0 <= found <= LAST_US else None

    return read


def _iso(text: str, zone: str) -> int | None:
    found = micros(text)
    return found if found is None or _NAMES_ZONE.search(text) else _local(found, zone)


def _local(found: int | None, zone: str) -> int | None:
    return found if found is None or zone == "UTC" else to_utc(found, zone)


def _latest(in_year: Callable[[str], int | None], text: str, zone: str, made: int) -> int | None:
    year = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=made)).year
    for shift in (1, 0, -1, -2, -3, -4):
        found = _local(in_year(f"{year + shift} {text}"), zone)
        if found is not None and found <= made + _DAY_US:
            return found
    return None


def _compiled(column: str, pattern: str) -> Callable[[str], int | None]:
    """Microseconds of a text that the pattern fits; without a zone in UTC."""
    # Two letters of a kind, such as a month twice, would have to agree.
    parts: list[str] = []
    names: set[str] = set()
    position = 0
    while position < len(pattern):
        piece = _PIECE.match(pattern, position)
        if piece is None:
            raise _refused(column, pattern, pattern[position])
        position = piece.end()
        if piece["letters"] is None:
            parts.append(re.escape("'" if piece["quoted"] == "" else piece["quoted"] or piece["plain"]))
            continue
        name, expression = _field(column, pattern, piece["letters"])
        kind = {"short": "year", "name": "month", "long": "month"}.get(name, name)
        if kind in names:
            raise _refused(column, pattern, piece["letters"])
        names.add(kind)
        parts.append(f"(?P<{name}>{expression})")
    if names & {"half", "noon"} and (names >= {"hour"} or not names >= {"half", "noon"}):
        raise _refused(column, pattern, "h or a")
    whole = re.compile("".join(parts), re.IGNORECASE | re.DOTALL)

    def read(text: str) -> int | None:
        match = whole.fullmatch(text if text.isascii() else text.translate(_FOLDED))
        return None if match is None else _micros(match.groupdict())

    return read


def _field(column: str, pattern: str, letters: str) -> tuple[str, str]:
    if letters in _NUMBERS:
        return _NUMBERS[letters]
    if letters in _OFFSETS:
        return "offset", _OFFSETS[letters]
    if set(letters) == {"S"} and len(letters) <= 9:
        return "fraction", f"[0-9]{{1,{len(letters)}}}"
    raise _refused(column, pattern, letters)


def _refused(column: str, pattern: str, part: str) -> LoaderConfigError:
    return LoaderConfigError(
        f"event_time of {column}: {part!r} in the format {pattern!r} can be read by Java alone: the records not loaded "
        "yet cannot be parsed without Spark"
    )


def _micros(found: dict[str, Any]) -> int | None:
    year = 2000 + int(found["short"]) if "short" in found else int(found.get("year", "1970"))
    month = int(found.get("month", "1"))
    for name, months in (("name", _MONTHS), ("long", _LONG_MONTHS)):
        if name in found:
            month = months.index(found[name].lower()) + 1
    days = days_of(year, month, int(found.get("day", "1"))) if year <= 999_999 else None
    if days is None:
        return None
    hour = int(found.get("hour", "0"))
    if "half" in found:
        half = int(found["half"])
        if not 1 <= half <= 12:
            return None
        hour = half % 12 + 12 * (found["noon"].lower() == "pm")
    minute, second = int(found.get("minute", "0")), int(found.get("second", "0"))
    if hour > 23 or minute > 59 or second > 59:
        return None
    shift = _offset_s(found.get("offset", "z").lower())
    fraction = int((found.get("fraction", "") + "000000")[:6])
    if shift is None:
        return None
    return days * _DAY_US + ((hour * 60 + minute) * 60 + second - shift) * 1_000_000 + fraction


def _offset_s(text: str) -> int | None:
    if text == "z":
        return 0
    digits = text[1:].replace(":", "").ljust(4, "0")
    hour, minute = int(digits[:2]), int(digits[2:])
    seconds = hour * 3600 + minute * 60
    return None if minute > 59 or seconds > 18 * 3600 else -seconds if text[0] == "-" else seconds
