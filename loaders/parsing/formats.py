"""Each format as expressions of the JVM: a line's columns, or why it has none; and the event time, from a text.

A format gets a frame whose column `line_text` is the line (null where it is not UTF-8). It returns an expression for
each of its columns, and one for the flaw of the line. No expression can fail, whatever a line contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Final, NamedTuple

from logferry.loaders.parsing.columns import (
    ACCESS_LINE,
    ESCAPED_KEY,
    LAST_MS,
    MARK,
    MEMBER_KEY,
    NO_MEMBER,
    REQUEST,
    REQUEST_PARTS,
    RESCUED_DEPTH,
    column_type,
    member_pattern,
    named_groups,
    schema_field,
)
from logferry.loaders.parsing.settings import FIELDS, HBASE, HBASE_BYTES, RESCUED, EventTime, ParserSettings
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructField, StructType

LINE: Final = "line_text"
_PARTS: Final = "line_parts"
_REQUEST: Final = "request_parts"
_MEMBERS: Final = "line_members"
_RESCUED: Final = "line_rescued"
# Texts that mean null in columns that are not text.
_NOTHING: Final = ("", "-")

MARKED: Final = "the line holds the control character U+0001"
# Java matches some patterns, like `(a|b)*`, by recursion, and a stack overflow would end the JVM, at the same line
# every time. So the stack is large (see `spark.session`), and longer lines are not matched.
_LONGEST: Final = 32_768
TOO_LONG: Final = f"the line is longer than {_LONGEST} characters: too long for a regular expression"
NO_FIT: Final = "the line does not fit the pattern"
NOT_JSON: Final = "the line is not JSON"
NOT_OBJECT: Final = "the JSON is not one object, or a value does not have the type of its column"
NOT_STRICT: Final = (
    "the line has JSON that cannot be rescued: single quotes, NaN, Infinity, text after the object, "
    f"or a value of more than {RESCUED_DEPTH} levels"
)
NOT_CHANGE: Final = "the line is no change of HBase"
HBASE_TYPES: Final = ("put", "delete", "delete_column", "delete_family", "delete_family_version")
NOT_LOGFMT: Final = "the line is not logfmt: key=value …"

_QUOTED: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PAIR: Final = rf'[^\s="]++(?:=(?:{_QUOTED}|[^\s"]*+))?+'


class ParsedLines(NamedTuple):
    """``frame``: with what the expressions refer to. ``flaw``: why the line has no columns, else null."""

    frame: DataFrame
    columns: Mapping[str, Column]
    flaw: Column


def spark_fields(**kinds: str) -> list[StructField]:
    """Columns, name → type as in a configuration, as fields of Spark's."""
    return [StructField.fromJson(schema_field(name, column_type(kind))) for name, kind in kinds.items()]


def texts(frame: DataFrame, settings: ParserSettings) -> ParsedLines:
    """The parser's columns, as text except for JSON's; for all formats but lines and chunk."""
    return _FORMATS[settings.format](frame, settings)


def typed(read: ParsedLines, settings: ParserSettings) -> ParsedLines:
    """The columns with their types; a text that does not have its type is a flaw of the line."""
    if settings.format in ("json", "hbase"):
        return read
    columns: dict[str, Column] = {}
    flaws = [F.when(read.flaw.isNotNull(), read.flaw)]
    for name, kind in settings.kinds.items():
        text = read.columns[name]
        if kind == "string":
            columns[name] = text
            continue
        value = F.when(~text.isin(*_NOTHING), text.try_cast(spark_fields(**{name: kind})[0].dataType))
        columns[name] = value
        wrong = ~text.isin(*_NOTHING) & value.isNull()
        flaws.append(F.when(wrong, F.lit(f"{name} is not of the type {kind}")))
    return read._replace(columns={**read.columns, **columns}, flaw=F.coalesce(*flaws))


def _json(frame: DataFrame, settings: ParserSettings) -> ParsedLines:
    fields = spark_fields(**settings.kinds)
    schema = StructType([*fields, StructField("line_flaw", StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "line_flaw"}
    read = frame.withColumn(_PARTS, F.from_json(LINE, schema, options))
    parts = F.col(_PARTS)
    # Spark's reader ignores text after an object, so the line must end with a brace.
    unread = parts.isNull() | parts["line_flaw"].isNotNull() | ~F.endswith(F.rtrim(LINE), F.lit("}"))
    flaw = F.when(unread, F.when(F.try_parse_json(F.col(LINE)).isNull(), F.lit(NOT_JSON)).otherwise(F.lit(NOT_OBJECT)))
    kinds = {field.name: field.dataType for field in fields}
    found = ParsedLines(read, {name: _unique(parts[name], kind) for name, kind in kinds.items()}, flaw)
    return _rescued(found, settings) if settings.rescued else found


def _unique(value: Column, kind: DataType) -> Column:
    """The value with each key of a map once, with its last value: Spark keeps all, and then some readers fail."""
    if "map<" not in kind.simpleString():
        return value
    if isinstance(kind, ArrayType):
        inner = kind.elementType
        return F.transform(value, lambda one: _unique(one, inner))
    if isinstance(kind, StructType):
        fields = [_unique(value[field.name], field.dataType).alias(field.name) for field in kind]
        return F.when(value.isNotNull(), F.struct(*fields))
    if not isinstance(kind, MapType):
        return value
    keys = F.map_keys(value)
    last = _let(F.map_entries(value), lambda all_: F.transform(_last_places(keys), lambda i: F.get(all_, i)))
    once = F.when(F.size(F.array_distinct(keys)) < F.size(keys), F.map_from_entries(last)).otherwise(value)
    low = kind.valueType
    return F.transform_values(once, lambda _, one: _unique(one, low)) if "map<" in low.simpleString() else once


def _rescued(read: ParsedLines, settings: ParserSettings) -> ParsedLines:
    """Adds the members whose keys are no columns, as they are in the line: reading and writing their values again would
    change numbers. Of a key that comes twice the last value counts."""
    # One replacement leaves of a line those members, with a mark after each one. JSON has no such character.
    line = F.when(read.flaw.isNull(), F.rtrim(LINE))
    marked = F.regexp_replace(line, F.lit(member_pattern(settings.kinds)), F.lit(f"$1{MARK}"))
    frame = read.frame.withColumn(_MEMBERS, F.split(marked, MARK))
    parts = F.col(_MEMBERS)
    frame = frame.withColumn(_RESCUED, F.filter(F.slice(parts, 1, F.size(parts) - 1), lambda text: text != ""))
    texts_of = F.col(_RESCUED)
    plain = F.transform(texts_of, lambda text: F.substring_index(text.substr(F.lit(2), F.length(text)), '"', 1))
    has_plain_keys = ~F.exists(texts_of, lambda text: text.rlike(ESCAPED_KEY))
    is_plain = has_plain_keys & (F.size(F.array_distinct(plain)) == F.size(texts_of))
    kept = F.when(is_plain, texts_of).otherwise(_last_of_each(texts_of, list(settings.kinds)))
    rescued = F.nullif(F.concat(F.lit("{"), F.array_join(kept, ","), F.lit("}")), F.lit("{}"))
    is_whole = (F.element_at(parts, -1) == "") | line.rlike(NO_MEMBER)
    flaw = F.when(read.flaw.isNotNull(), read.flaw).when(~is_whole, F.lit(NOT_STRICT))
    found = F.when(F.size(texts_of) > 0, rescued)
    return ParsedLines(frame, {**read.columns, RESCUED: found}, flaw)


def _last_of_each(members: Column, names: list[str]) -> Column:
    """The last of the members with each key that is none of the names, with its escapes read."""
    keyed = F.transform(members, lambda text: F.struct(_key(text).alias("key"), text.alias("text")))
    others = F.filter(keyed, lambda member: ~member["key"].isin(*names))

    def last(found: Column) -> Column:
        places = _last_places(F.transform(found, lambda member: member["key"]))
        return F.transform(places, lambda i: F.get(found, i)["text"])

    return _let(others, last)


def _last_places(keys: Column) -> Column:
    """Where each key is for the last time, in order. Sorted, since a line may have any number of keys."""
    pairs = F.array_sort(F.transform(keys, lambda key, i: F.struct(key.alias("key"), i.alias("i"))))
    last = _let(pairs, lambda all_: F.filter(all_, lambda one, i: ~F.get(all_, i + 1)["key"].eqNullSafe(one["key"])))
    return F.array_sort(F.transform(last, lambda one: one["i"]))


def _let(value: Column, body: Callable[[Column], Column]) -> Column:
    """The body with the value, which is computed once: in the function of another column it would be each time."""
    return F.transform(F.array(value), body)[0]


def _key(member: Column) -> Column:
    raw = F.regexp_extract(member, MEMBER_KEY, 0)
    unescaped = F.from_json(F.concat(F.lit("["), raw, F.lit("]")), "array<string>")[0]
    return F.when(F.contains(raw, F.lit("\\")), unescaped).otherwise(raw.substr(F.lit(2), F.length(raw) - 2))


def _hbase(frame: DataFrame, settings: ParserSettings) -> ParsedLines:
    """What is missing, of a wrong type or unknown is a flaw: the latest state may be made of sound changes only."""
    coded = [f"{name}_base64" for name in HBASE_BYTES]
    plain = spark_fields(**{**HBASE, **dict.fromkeys(coded, "string"), "write_time": "bigint"})
    tags = spark_fields(tags="array<struct<type:int,data_base64:string>>")
    schema = StructType([*plain, *tags, StructField("line_flaw", StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "line_flaw"}
    read = frame.withColumn(_PARTS, F.from_json(LINE, schema, options))
    parts = F.col(_PARTS)
    columns = {name: parts[name] for name in HBASE}
    columns["write_time"] = F.when(parts["write_time"].between(0, LAST_MS), F.timestamp_millis(parts["write_time"]))
    flaws = [parts.isNull(), parts["line_flaw"].isNotNull(), ~F.endswith(F.rtrim(LINE), F.lit("}"))]
    flaws += [columns[name].isNull() for name in HBASE if name not in HBASE_BYTES]
    for name in HBASE_BYTES:
        columns[f"{name}_bytes"] = _decoded(parts[f"{name}_base64"])
        is_there = parts[name].isNotNull().cast("int") + columns[f"{name}_bytes"].isNotNull().cast("int")
        # Only a put has a value.
        flaws.append(is_there != (F.when(parts["type"] == "put", 1).otherwise(0) if name == "value" else F.lit(1)))
        flaws.append(parts[f"{name}_base64"].isNotNull() & columns[f"{name}_bytes"].isNull())
    flaws.append(~parts["type"].isin(*HBASE_TYPES))
    columns["tags"] = F.transform(
        parts["tags"], lambda tag: F.struct(tag["type"].alias("type"), _decoded(tag["data_base64"]).alias("data"))
    )
    flaw = F.when(reduce(or_, (F.coalesce(one, F.lit(True)) for one in flaws)), F.lit(NOT_CHANGE))
    return ParsedLines(read, columns, flaw)


def _decoded(text: Column) -> Column:
    return F.try_to_binary(text, F.lit("base64"))


def _access(frame: DataFrame, settings: ParserSettings) -> ParsedLines:
    read = _matched(frame, ACCESS_LINE)
    request = F.regexp_replace(read.columns["request"], F.lit(REQUEST), F.lit(f"{MARK}$1{MARK}$2{MARK}$3"))
    frame = read.frame.withColumn(_REQUEST, F.split(request, MARK))
    parts = F.when(F.size(_REQUEST) > 1, F.col(_REQUEST))
    found = {name: F.nullif(F.get(parts, i), F.lit("")) for name, i in REQUEST_PARTS.items()}
    return ParsedLines(frame, {**read.columns, **found}, read.flaw)


def _matched(frame: DataFrame, pattern: str, longest: int | None = None) -> ParsedLines:
    """One match per line for all groups: the line is replaced by its groups between marks, and split at these."""
    line = F.col(LINE)
    if longest is not None:
        line = F.when(F.length(line) <= longest, line)
    plain, groups = named_groups(pattern)
    whole = rf"(?s)\A(?:{plain})\z"
    parts_of_it = "".join(f"{MARK}${number}" for number in groups.values())
    marked = F.regexp_replace(line, F.lit(whole), F.lit(parts_of_it))
    read = frame.withColumn(_PARTS, F.split(marked, MARK))
    parts = F.col(_PARTS)
    flaw = F.when(F.contains(F.col(LINE), F.lit(MARK)), F.lit(MARKED)).when(
        F.coalesce(F.size(parts) != len(groups) + 1, F.lit(True)), F.lit(NO_FIT)
    )
    if longest is not None:
        flaw = F.when(F.length(LINE) > longest, F.lit(TOO_LONG)).otherwise(flaw)
    return ParsedLines(read, {name: F.get(parts, i) for i, name in enumerate(groups, 1)}, flaw)


def _logfmt(frame: DataFrame, settings: ParserSettings) -> ParsedLines:
    line = F.col(LINE)
    fits = line.rlike(rf"(?s)\A\s*+(?:{_PAIR}(?:\s++|\z))++\z")
    pairs = F.transform(F.regexp_extract_all(line, F.lit(f"(?s){_PAIR}"), F.lit(0)), _entry)
    read = frame.withColumn(_PARTS, F.when(fits & ~F.contains(line, F.lit(MARK)), F.map_from_entries(pairs)))
    parts = F.col(_PARTS)
    flaw = F.when(F.contains(line, F.lit(MARK)), F.lit(MARKED)).when(parts.isNull(), F.lit(NOT_LOGFMT))
    names = list(settings.kinds)
    columns = {name: F.try_element_at(parts, F.lit(name)) for name in names}
    rest = F.map_filter(parts, lambda key, _: ~key.isin(*names))
    return ParsedLines(read, {**columns, FIELDS: rest}, flaw)


def _entry(pair: Column) -> Column:
    """``key``, ``key=value`` or ``key="value with \\" and \\n"``."""
    value = F.when(F.contains(pair, F.lit("=")), F.regexp_replace(pair, F.lit(r"(?s)\A[^=]*+="), F.lit("")))
    inner = value.substr(F.lit(2), F.length(value) - 2)
    for escaped, meant in (("\\\\", MARK), ('\\"', '"'), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), (MARK, "\\")):
        inner = F.replace(inner, F.lit(escaped), F.lit(meant))
    plain = F.when(F.startswith(value, F.lit('"')), inner).otherwise(value)
    return F.struct(F.substring_index(pair, "=", 1).alias("key"), F.coalesce(plain, F.lit("")).alias("value"))


def _delimited(frame: DataFrame, settings: ParserSettings) -> ParsedLines:
    separator = settings.separator or ""
    line, names = F.col(LINE), list(settings.kinds)
    quote = re.escape(separator)
    if settings.quoted:
        # Each field with the separator behind it, the last one too.
        ended = F.concat(line, F.lit(separator))
        token = rf'("[^"]*+(?:""[^"]*+)*+"|[^"{quote}]*+){quote}'
        fits = ended.rlike(rf"(?s)\A(?:{token})++\z")
        found = F.when(fits, F.transform(F.regexp_extract_all(ended, F.lit(f"(?s){token}"), F.lit(1)), _unquoted))
    else:
        found = F.split(line, quote, -1)
    read = frame.withColumn(_PARTS, found)
    parts = F.col(_PARTS)
    wrong = F.lit(f"the line does not have {len(names)} fields")
    flaw = F.when(F.coalesce(F.size(parts) != len(names), F.lit(True)), wrong)
    return ParsedLines(read, {name: F.get(parts, i) for i, name in enumerate(names)}, flaw)


def _unquoted(field: Column) -> Column:
    inner = F.replace(field.substr(F.lit(2), F.length(field) - 2), F.lit('""'), F.lit('"'))
    return F.when(F.startswith(field, F.lit('"')), inner).otherwise(field)


_FORMATS: Final[Mapping[str, Callable[[DataFrame, ParserSettings], ParsedLines]]] = {
    "json": _json,
    "access": _access,
    "logfmt": _logfmt,
    "regex": lambda frame, settings: _matched(frame, settings.pattern or "", _LONGEST),
    "delimited": _delimited,
    "hbase": _hbase,
}


def extra_fields(settings: ParserSettings) -> list[StructField]:
    """Beside the typed columns: what has no column of its own."""
    if settings.format == "logfmt":
        return [StructField(FIELDS, MapType(StringType(), StringType()))]
    if settings.format == "hbase":
        tag = StructType([*spark_fields(type="int"), StructField("data", BinaryType())])
        names = (f"{name}_bytes" for name in HBASE_BYTES)
        return [*(StructField(name, BinaryType()) for name in names), StructField("tags", ArrayType(tag))]
    return [StructField(RESCUED, StringType())] if settings.rescued else []


# ---- event time -----------------------------------------------------------------------------------------

_EPOCHS: Final = {"epoch_s": 1_000_000, "epoch_ms": 1_000}
# The years 1 to 9999, which every reader of the table can show; other values become null.
_FIRST_US: Final = -62_135_596_800_000_000
_LAST_US: Final = 253_402_300_799_999_999
_ZONES: Final = frozenset("VzOXxZ")
_YEARS: Final = frozenset("yu")
_NAMES_ZONE: Final = r"(Z|[+-]\d\d:?\d\d)$"


def event_time(said: Column, settings: EventTime, made: Column) -> Column:
    """Null where no format fits. ``made``: about when the line was written; it gives the year to a text without one."""
    spaced = F.regexp_replace(said, r"\s+", " ")
    text = F.trim(F.when(said.rlike(r"\s\s|[^\S ]"), spaced).otherwise(said))
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
