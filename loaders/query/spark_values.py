"""Texts to values, as Spark 4.1 casts them (``try_cast`` in a session in UTC), for one text at a time.

A text that holds a time of day alone gets the present date, as Spark gives it.

Sources: Spark's UTF8String (``toInt``, ``toLong``), SparkDateTimeUtils (``parseTimestampString``, ``stringToDate``),
Decimal and StringUtils; Java's Double and BigDecimal. A test casts the same texts by Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import lru_cache, partial
from typing import Any, Final
from zoneinfo import ZoneInfo, available_timezones

import pyarrow as pa
import pyarrow.compute as pc

# What a value is in Python: int, float, Decimal, bool, str; days of a date and microseconds of a timestamp as int.
Cast = Callable[[str], Any]

# Java's isWhitespace or isISOControl, of a byte.
_BLANK: Final = "".join(map(chr, (*range(33), 127)))
# Java's String.trim.
_TRIM: Final = "".join(map(chr, range(33)))
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_FLOAT: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_HEX_FLOAT: Final = re.compile(r"[+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+")
_DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?(\d+))?")
_SPECIAL: Final = {
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), float("inf")),
    **dict.fromkeys(("-inf", "-infinity"), float("-inf")),
    "nan": float("nan"),
}
_TRUE: Final = frozenset(("t", "true", "y", "yes", "1"))
_FALSE: Final = frozenset(("f", "false", "n", "no", "0"))
_EXACT: Final = Context(prec=1000, Emax=10**9, Emin=-(10**9))
_MOST_DIGITS: Final = 38
_INT32: Final = 32

_DATE: Final = re.compile(r"([+-]?)([0-9]{4,7})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T].*)?)?)?", re.DOTALL)
_TIME: Final = (
    r"(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{1,2})"
    r"(?::(?P<second>[0-9]{1,2})(?:\.(?P<fraction>[0-9]*)(?P<zone>[^0-9].*)?|(?P<zone2>[^0-9.].*))?)?)?"
)
_DATED: Final = re.compile(
    rf"(?P<sign>[+-]?)(?P<year>[0-9]{{4,6}})(?:-(?P<month>[0-9]{{1,2}})"
    rf"(?:-(?P<day>[0-9]{{1,2}})(?:[ T]{_TIME})?)?)?",
    re.DOTALL,
)
_TIME_ALONE: Final = re.compile(_TIME, re.DOTALL)
_MICROS: Final = 1_000_000
_DAY_US: Final = 86_400 * _MICROS
_BIGINT: Final = 2**63


def integer(bits: int, text: str) -> int | None:
    found = text.strip(_BLANK)
    if not _INTEGER.fullmatch(found) or len(found) > 4000:
        return None
    value = int(found)
    return value if -(1 << bits - 1) <= value < 1 << bits - 1 else None


def double(text: str) -> float | None:
    return _floating(text, pa.float64())


def single(text: str) -> float | None:
    return _floating(text, pa.float32())


def _floating(text: str, kind: pa.DataType) -> float | None:
    """Java's parseDouble or parseFloat, then Spark's names of special values."""
    said = text.strip(_TRIM)
    number = said[:-1] if said[-1:] in tuple("dDfF") else said
    if _FLOAT.fullmatch(number):
        # Python rounds to a double; rounding that to a float would round twice.
        value = float(number)
        return value if kind == pa.float64() else _float32(number, value)
    if _HEX_FLOAT.fullmatch(number):
        try:
            value = float.fromhex(number)
        except OverflowError:
            value = float("-inf" if number.startswith("-") else "inf")
        return value if kind == pa.float64() else float(pa.scalar(value, kind).as_py())
    return _SPECIAL.get(said.lower()) if said not in ("+NaN", "-NaN") else float("nan")


def _float32(number: str, value: float) -> float:
    try:
        return float(pc.cast(pa.scalar(number.lstrip("+")), pa.float32()).as_py())
    except pa.ArrowInvalid:
        return float(pa.scalar(value, pa.float32()).as_py())


def boolean(text: str) -> bool | None:
    said = text.strip(_BLANK).lower()
    return True if said in _TRUE else False if said in _FALSE else None


def decimal(precision: int, scale: int, text: str) -> Decimal | None:
    return exact_decimal(precision, scale, text.strip(_TRIM))


def exact_decimal(precision: int, scale: int, text: str) -> Decimal | None:
    """Java's BigDecimal of the text, rounded half up; None where it is none, or has too many digits."""
    match = _DECIMAL.fullmatch(text)
    if match is None or int(match[1] or 0) > 2**31 - 1:
        return None
    try:
        number = Decimal(text)
        # BigDecimal counts the digits of a zero, too.
        if (len(number.as_tuple().digits) + int(number.as_tuple().exponent)) > _MOST_DIGITS:
            return None
        found = number.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, _EXACT)
    except InvalidOperation:
        return Decimal(0).scaleb(-scale) if "-" in text[1:] else None
    return found if len(found.as_tuple().digits) <= precision or not found else None


def day_number(text: str) -> int | None:
    """Days since 1970."""
    match = _DATE.fullmatch(text.strip(_BLANK))
    if match is None:
        return None
    year = int(match[2]) * (-1 if match[1] == "-" else 1)
    return days_of(year, int(match[3] or 1), int(match[4] or 1))


def days_of(year: int, month: int, day: int) -> int | None:
    """Days since 1970 in the proleptic Gregorian calendar; None for a day that is none."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    cycle, inside = divmod(year, 400)
    try:
        ordinal = date(inside + 400, month, day).toordinal()
    except ValueError:
        return None
    return ordinal - date(1970, 1, 1).toordinal() + (cycle - 1) * 146_097


def micros(text: str) -> int | None:
    """Microseconds since 1970 of a timestamp; a text without a zone is in UTC."""
    said = text.strip(_BLANK)
    match, days = _DATED.fullmatch(said), None
    if match is not None:
        year = int(match["year"]) * (-1 if match["sign"] == "-" else 1)
        days = days_of(year, int(match["month"] or 1), int(match["day"] or 1))
    elif text.startswith("T") or ":" in said[:3]:
        match = _TIME_ALONE.fullmatch(said.removeprefix("T") if text.startswith("T") else said)
        days = (datetime.now(UTC) - datetime(1970, 1, 1, tzinfo=UTC)).days
    if match is None or days is None:
        return None
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    if hour > 23 or minute > 59 or second > 59:
        return None
    fraction = int(((match["fraction"] or "") + "000000")[:6])
    local = days * _DAY_US + ((hour * 60 + minute) * 60 + second) * _MICROS + fraction
    named = match["zone"] or match["zone2"]
    if named:
        shift = _zone(named.strip(_TRIM))
        if shift is None:
            return None
        local = shift(local)
    return local if -_BIGINT <= local < _BIGINT else None


_HOUR: Final = re.compile(r"([+-])([0-9]):")
_MINUTE: Final = re.compile(r"([+-])([0-9][0-9]):([0-9])$")
_OFFSET: Final = re.compile(r"([+-])(?:([0-9])|([0-9]{2})(?:(?::?)([0-9]{2}))?|([0-9]{2})(:?)([0-9]{2})\6([0-9]{2}))")
_PREFIX: Final = re.compile(r"(?:UTC|GMT|UT)(?=[+-]|\Z)")
_REGION: Final = re.compile(r"[A-Za-z][A-Za-z0-9~/._+-]+")
# Java's ZoneId.SHORT_IDS.
_SHORT: Final = {
    "EST": "-05:00",
    "MST": "-07:00",
    "HST": "-10:00",
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}


@lru_cache(maxsize=4096)
def _zone(name: str) -> Callable[[int], int] | None:
    """Local microseconds to those in UTC, by Java's ZoneId.of; None: no zone."""
    said = _MINUTE.sub(r"\1\2:0\3", _HOUR.sub(r"\g<1>0\2:", name, count=1))
    said = _SHORT.get(said, said)
    if said == "Z" or _PREFIX.fullmatch(said):
        return lambda local: local
    offset = _PREFIX.sub("", said, count=1)
    if offset[:1] in ("+", "-"):
        match = _OFFSET.fullmatch(offset)
        if match is None:
            return None
        hour = int(match[2] or match[3] or match[5])
        minute, second = int(match[4] or match[7] or 0), int(match[8] or 0)
        seconds = (hour * 60 + minute) * 60 + second
        if minute > 59 or second > 59 or seconds > 18 * 3600:
            return None
        shift = (-seconds if match[1] == "+" else seconds) * _MICROS
        return lambda local: local + shift
    if not _REGION.fullmatch(said) or said not in _regions():
        return None
    return partial(to_utc, zone=said)


@lru_cache(maxsize=1)
def _regions() -> frozenset[str]:
    return frozenset(available_timezones() - {"Factory", "localtime", "posixrules"})


@lru_cache(maxsize=64)
def _zone_info(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def to_utc(local: int, zone: str) -> int:
    """Spark's ``to_utc_timestamp``: where clocks are set back the earlier time, where they are set forward the offset
    before that."""
    days, inside = divmod(local, _DAY_US)
    cycles = 0
    # Outside of Python's years the rules of the last ones hold, or those of the first.
    while not -719_162 <= days + cycles * 146_097 <= 2_932_896:
        cycles += 1 if days < 0 else -1
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=days + cycles * 146_097, seconds=inside // _MICROS)
    offset = moment.replace(tzinfo=_zone_info(zone)).utcoffset() or timedelta()
    return local - (offset.days * 86_400 + offset.seconds) * _MICROS


def caster(kind: str) -> Cast:
    """The cast to a type as a configuration writes it."""
    if kind.startswith("decimal"):
        precision, scale = decimal_digits(kind)
        return partial(decimal, precision, scale)
    return _CASTS[kind]


def decimal_digits(kind: str) -> tuple[int, int]:
    precision, _, scale = kind.partition("(")[2].rstrip(")").partition(",")
    return int(precision), int(scale)


_CASTS: Final[Mapping[str, Cast]] = {
    "string": str,
    "int": partial(integer, _INT32),
    "bigint": partial(integer, 64),
    "float": single,
    "double": double,
    "boolean": boolean,
    "date": day_number,
    "timestamp": micros,
}


def double_text(value: float) -> str:
    """Java's Double.toString, from Java 19 on; earlier ones write some numbers with a digit more."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    text = "".join(map(str, digits))
    point = len(text) + int(exponent)
    text = text.rstrip("0")
    if not text:
        return "-0.0" if sign else "0.0"
    if -3 < point <= 7:
        whole, rest = (text[:point].ljust(point, "0"), text[point:]) if point > 0 else ("0", "0" * -point + text)
        found = f"{whole}.{rest or '0'}"
    else:
        found = f"{text[0]}.{text[1:] or '0'}E{point - 1}"
    return "-" * sign + found
