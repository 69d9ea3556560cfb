"""Each format as expressions of the JVM: a line's columns, or why it has none.

A format gets a frame whose column `line_text` is the line (null where it is not UTF-8), and says for each of its
columns how it is read, and what is wrong with the line. Nothing here can fail on a line, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from logferry.loaders.parsing import access_log as access
from logferry.loaders.parsing.access_log import MARK
from logferry.loaders.parsing.columns import column_type
from logferry.loaders.parsing.regex_groups import named_groups
from logferry.loaders.parsing.settings import FIELDS, ParserSettings
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import MapType, StringType, StructField, StructType

LINE: Final = "line_text"
_PARTS: Final = "line_parts"
# Texts that stand for nothing where a number, a date, … is wanted.
_NOTHING: Final = ("", "-")

MARKED: Final = "the line holds the control character U+0001"
# Java matches some patterns, `(a|b)*` say, by recursion, and a stack that overflows would end the JVM, at the same line
# again and again. So the stack is large (see `session`), and longer lines are not tried.
_LONGEST: Final = 32_768
TOO_LONG: Final = f"the line is longer than {_LONGEST} characters: too long for a regular expression"
NO_FIT: Final = "the line does not fit the pattern"
NOT_JSON: Final = "the line is not JSON"
NOT_OBJECT: Final = "the JSON is not one object, or a value of it is not what its column wants"
NOT_LOGFMT: Final = "the line is not logfmt: key=value …"

_QUOTED: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PAIR: Final = rf'[^\s="]++(?:=(?:{_QUOTED}|[^\s"]*+))?+'


class Read(NamedTuple):
    """``frame`` has what the columns are made of. ``flaw``: why the line has no columns, else null."""

    frame: DataFrame
    columns: Mapping[str, Column]
    flaw: Column


def texts(frame: DataFrame, settings: ParserSettings) -> Read:
    """The parser's columns, not typed yet but for JSON's; of all formats but lines and chunk."""
    return _FORMATS[settings.format](frame, settings)


def typed(read: Read, settings: ParserSettings) -> Read:
    """The columns with their types; a text that is not of its type is a flaw of the line."""
    if settings.format == "json":
        return read
    columns: dict[str, Column] = {}
    flaws = [F.when(read.flaw.isNotNull(), read.flaw)]
    for name, kind in settings.kinds.items():
        text = read.columns[name]
        if kind == "string":
            columns[name] = text
            continue
        value = F.when(~text.isin(*_NOTHING), text.try_cast(column_type(kind)))
        columns[name] = value
        wrong = ~text.isin(*_NOTHING) & value.isNull()
        flaws.append(F.when(wrong, F.lit(f"{name} is not of the type {kind}")))
    return read._replace(columns={**read.columns, **columns}, flaw=F.coalesce(*flaws))


def _json(frame: DataFrame, settings: ParserSettings) -> Read:
    fields = [StructField(name, column_type(kind)) for name, kind in settings.kinds.items()]
    schema = StructType([*fields, StructField("line_flaw", StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "line_flaw"}
    read = frame.withColumn(_PARTS, F.from_json(LINE, schema, options))
    parts = F.col(_PARTS)
    # Behind an object Spark's reader does not look; what ends in a brace is taken for nothing else.
    unread = parts.isNull() | parts["line_flaw"].isNotNull() | ~F.endswith(F.rtrim(LINE), F.lit("}"))
    flaw = F.when(unread, F.when(F.try_parse_json(F.col(LINE)).isNull(), F.lit(NOT_JSON)).otherwise(F.lit(NOT_OBJECT)))
    return Read(read, {name: parts[name] for name in settings.kinds}, flaw)


def _regex(frame: DataFrame, settings: ParserSettings) -> Read:
    return _matched(frame, settings.pattern or "", _LONGEST)


def _access(frame: DataFrame, settings: ParserSettings) -> Read:
    read = _matched(frame, access.LINE)
    request = read.columns["request"]
    parts = {
        name: F.nullif(F.regexp_extract(request, access.REQUEST, i), F.lit(""))
        for name, i in access.REQUEST_PARTS.items()
    }
    return read._replace(columns={**read.columns, **parts})


def _matched(frame: DataFrame, pattern: str, longest: int | None = None) -> Read:
    """One match a line, however many groups: it is replaced by the groups between marks, and cut at these."""
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
    return Read(read, {name: F.get(parts, i) for i, name in enumerate(groups, 1)}, flaw)


def _logfmt(frame: DataFrame, settings: ParserSettings) -> Read:
    line = F.col(LINE)
    fits = line.rlike(rf"(?s)\A\s*+(?:{_PAIR}(?:\s++|\z))++\z")
    pairs = F.transform(F.regexp_extract_all(line, F.lit(f"(?s){_PAIR}"), F.lit(0)), _entry)
    read = frame.withColumn(_PARTS, F.when(fits & ~F.contains(line, F.lit(MARK)), F.map_from_entries(pairs)))
    parts = F.col(_PARTS)
    flaw = F.when(F.contains(line, F.lit(MARK)), F.lit(MARKED)).when(parts.isNull(), F.lit(NOT_LOGFMT))
    names = list(settings.kinds)
    columns = {name: F.try_element_at(parts, F.lit(name)) for name in names}
    rest = F.map_filter(parts, lambda key, _: ~key.isin(*names))
    return Read(read, {**columns, FIELDS: rest}, flaw)


def _entry(pair: Column) -> Column:
    """``key``, ``key=value`` or ``key="value with \\" and \\n"``."""
    value = F.when(F.contains(pair, F.lit("=")), F.regexp_replace(pair, F.lit(r"(?s)\A[^=]*+="), F.lit("")))
    inner = value.substr(F.lit(2), F.length(value) - 2)
    for escaped, meant in (("\\\\", MARK), ('\\"', '"'), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), (MARK, "\\")):
        inner = F.replace(inner, F.lit(escaped), F.lit(meant))
    plain = F.when(F.startswith(value, F.lit('"')), inner).otherwise(value)
    return F.struct(F.substring_index(pair, "=", 1).alias("key"), F.coalesce(plain, F.lit("")).alias("value"))


def _delimited(frame: DataFrame, settings: ParserSettings) -> Read:
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
    return Read(read, {name: F.get(parts, i) for i, name in enumerate(names)}, flaw)


def _unquoted(field: Column) -> Column:
    inner = F.replace(field.substr(F.lit(2), F.length(field) - 2), F.lit('""'), F.lit('"'))
    return F.when(F.startswith(field, F.lit('"')), inner).otherwise(field)


_FORMATS: Final[Mapping[str, Callable[[DataFrame, ParserSettings], Read]]] = {
    "json": _json,
    "access": _access,
    "logfmt": _logfmt,
    "regex": _regex,
    "delimited": _delimited,
}
# Beside the typed columns: the pairs of logfmt that have no column.
EXTRA: Final = {"logfmt": StructField(FIELDS, MapType(StringType(), StringType()))}
