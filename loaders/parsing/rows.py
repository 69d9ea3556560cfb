r"""Records into rows: one row per line, in the table or the quarantine. Expressions of the JVM only, without Python.

A line is the bytes between two ``\n`` bytes (a ``\r`` stays). The identity of its row is (topic, source_id, seqno,
line). A line that is not UTF-8, or that the table's parser cannot read, goes to the quarantine under the same identity;
a record that no gateway wrote goes there whole, with its key and headers. Table and quarantine together have all lines
of a record, numbered from 0 without a gap. The parser ``chunk`` makes one row of a record, of any bytes.

The text of a row is the whole line, whatever columns the parser makes of it: so the stored lines can be compared with
the sent ones, and parsed again by a corrected parser.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.jvm_errors import JVM_ERRORS, java_chain, sorted_error
from logferry.loaders.parsing import hbase_events
from logferry.loaders.parsing.columns import DATES, LAST_MS
from logferry.loaders.parsing.formats import LINE, event_time, extra_fields, spark_fields, texts, typed
from logferry.loaders.parsing.settings import LINES, ParserSettings
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    MapType,
    StructField,
    StructType,
    TimestampType,
)

NOT_UTF8: Final = "the line is not UTF-8"

_IDENTITY: Final = spark_fields(topic="string", source_id="string", seqno="bigint", line="int")
_ORIGIN: Final = [
    *spark_fields(prev="bigint", dc="string", partition="int", offset="bigint"),
    *spark_fields(created="timestamp", recorded="timestamp", attributes="map<string,string>"),
]
_LINE: Final = spark_fields(text="string", newline="boolean")
_DATA: Final = StructField("data", BinaryType())
# The columns of the parser `chunk`.
CHUNK: Final = StructType([*(field for field in _IDENTITY if field.name != "line"), *_ORIGIN, _DATA])

NO_TIME: Final = "the time of the event is missing or of no known format"


def kafka_records(kafka: DataFrame, dc: str) -> DataFrame:
    """Kafka's records with the columns of a row, `value`, `key` and `headers`, and two verdicts.

    ``flaw``: why the record as a whole cannot become rows, else null. ``clean``: it can, and all of it is UTF-8.
    """
    entry = "h -> struct(substring(h.key, 3) as key, cast(h.value as string) as value)"
    attributes = F.expr(f"map_from_entries(transform(raw_attributes, {entry}))")
    raw = kafka.select(
        "*",
        _header("seqno").alias("raw_seqno"),
        _header("prev").alias("raw_prev"),
        _header("created").alias("raw_created"),
        F.expr("filter(headers, h -> startswith(h.key, 'a.'))").alias("raw_attributes"),
    ).withColumns({"seqno": _number("raw_seqno"), "prev": _number("raw_prev"), "created_ms": _number("raw_created")})
    return raw.withColumn("flaw", _flaw()).select(
        "topic",
        F.expr("if(is_valid_utf8(cast(key as string)), cast(key as string), null)").alias("source_id"),
        "seqno",
        "prev",
        F.lit(dc).alias("dc"),
        "partition",
        "offset",
        F.expr(f"if(created_ms between 0 and {LAST_MS}, timestamp_millis(created_ms), null)").alias("created"),
        F.col("timestamp").alias("recorded"),
        F.when(F.col("flaw").isNull(), attributes).alias("attributes"),
        "value",
        F.when(F.col("flaw").isNotNull(), F.col("key")).alias("key"),
        F.when(F.col("flaw").isNotNull(), F.col("headers")).alias("headers"),
        "flaw",
        F.expr("flaw is null and is_valid_utf8(cast(value as string))").alias("clean"),
    )


def row_schema(parser: ParserSettings = LINES, dates: Sequence[str] = ()) -> StructType:
    """The columns of the main table. ``dates``: those of `DATES` by which it is partitioned."""
    fields = [*CHUNK.fields] if parser.format == "chunk" else [*_IDENTITY, *_ORIGIN, *_LINE]
    fields += spark_fields(**parser.kinds)
    fields += extra_fields(parser)
    if parser.time is not None:
        fields.append(StructField("event_time", TimestampType()))
    return StructType([*fields, *(StructField(name, DateType()) for name in dates)])


def check_parser(spark: SparkSession, parser: ParserSettings) -> None:
    """Lets Java check the patterns of lines and times. Raises LoaderConfigError, SparkUnavailable."""
    # Of values, which Spark evaluates while it plans: nothing is compiled, and no task starts.
    values = "('1 x', true, current_timestamp(), current_timestamp())"
    lines = spark.sql(f"select * from values {values} as lines(text, clean, created, recorded)")
    try:
        jvm_frames: list[Any] = [read_lines(lines, parser).select("reason", *parser.kinds)._jdf]
        if parser.time is not None:
            jvm_frames.append(lines.select(event_time(F.lit("1"), parser.time, F.col("created")).alias("time"))._jdf)
        for frame in jvm_frames:
            frame.head()
    except JVM_ERRORS as error:
        chain = java_chain(error)
        if not chain:
            raise sorted_error(error, "checking the parser") from None
        said = next((text for _, text in reversed(chain) if text), chain[-1][0])
        raise LoaderConfigError(f"parser: {said.splitlines()[0]}") from None


def parse_records(records: DataFrame, parser: ParserSettings = LINES) -> DataFrame:
    """Every line of the records without a flaw, with the parser's columns and ``reason``: its flaw, or null."""
    good = records.where("flaw is null")
    if parser.format == "chunk":
        return good.withColumns({"data": F.col("value"), "reason": F.lit(None).cast("string")})
    return read_lines(_lines(_plain(good, parser)), parser)


def read_lines(lines: DataFrame, parser: ParserSettings) -> DataFrame:
    """Parses lines with `text`, `clean` and the other columns of a row; adds the parser's columns and ``reason``."""
    not_utf8 = F.when(F.expr("not (clean or is_valid_utf8(text))"), F.lit(NOT_UTF8))
    if parser.format == "lines":
        return lines.withColumn("reason", not_utf8)
    # A carriage return at the end is part of the line, and of no column.
    line = F.expr("if(endswith(text, '\r'), substring(text, 1, char_length(text) - 1), text)")
    unparsed = texts(lines.withColumn(LINE, F.when(not_utf8.isNull(), line)), parser)
    read = typed(unparsed, parser)
    columns, flaw = dict(read.columns), F.coalesce(not_utf8, read.flaw)
    if parser.time is not None:
        time = unparsed.columns[parser.time.column].cast("string")
        columns["event_time"] = event_time(time, parser.time, F.coalesce("created", "recorded"))
    frame = read.frame.withColumns({**columns, "reason": flaw})
    if parser.time is not None:
        late = F.when(F.col("event_time").isNull(), F.lit(NO_TIME))
        frame = frame.withColumn("reason", F.coalesce("reason", late))
    return frame


def table_rows(parsed: DataFrame, parser: ParserSettings = LINES, dates: Sequence[str] = ()) -> DataFrame:
    """The rows of the main table."""
    dated = {name: F.to_date(DATES[name]) for name in dates}
    return parsed.where("reason is null").withColumns(dated).select(*row_schema(parser, dates).fieldNames())


def as_stored(rows: DataFrame, schema_json: str) -> DataFrame:
    """The rows with the types of a stored table, whose columns may be wider than those of the batch's own parser."""
    stored = {field.name: field.dataType for field in StructType.fromJson(json.loads(schema_json))}
    columns = []
    for field in rows.schema:
        kind = stored.get(field.name, field.dataType)
        columns.append(_fitted(F.col(field.name), field.dataType, kind).alias(field.name))
    return rows.select(*columns)


def with_columns_of(rows: DataFrame, schema: StructType) -> DataFrame:
    """The rows with all columns of a stored table; those of an earlier parser are null."""
    own = {field.name: field.dataType for field in rows.schema}
    return rows.select(
        *(
            (_fitted(F.col(c.name), own[c.name], c.dataType) if c.name in own else F.lit(None).cast(c.dataType)).alias(
                c.name
            )
            for c in schema
        )
    )


def _fitted(value: Column, have: DataType, want: DataType) -> Column:
    """The value with a wider type. Spark's cast takes no struct with more fields."""
    if have.simpleString() == want.simpleString():
        return value
    if isinstance(have, ArrayType) and isinstance(want, ArrayType):
        old, new = have.elementType, want.elementType
        return F.transform(value, lambda one: _fitted(one, old, new))
    if isinstance(have, MapType) and isinstance(want, MapType):
        low, high = have.valueType, want.valueType
        return F.transform_values(value, lambda _, one: _fitted(one, low, high))
    if isinstance(have, StructType) and isinstance(want, StructType):
        own = {field.name: field.dataType for field in have}
        fields = (
            _fitted(value[c.name], own[c.name], c.dataType) if c.name in own else F.lit(None).cast(c.dataType)
            for c in want
        )
        named = [field.alias(c.name) for field, c in zip(fields, want, strict=True)]
        return F.when(value.isNotNull(), F.struct(*named))
    return value.cast(want)


def quarantined_rows(records: DataFrame, columns: Sequence[str], parser: ParserSettings = LINES) -> DataFrame:
    """The rows of the quarantine, with its columns: lines that are not rows, and whole records with a flaw."""
    nothing = F.lit(None).cast("long")
    more = {"parser": F.lit(parser.name), "resolved": nothing, "since": nothing}
    whole = records.where("flaw is not null").withColumns(
        {
            "line": F.lit(None).cast("int"),
            "bytes": F.col("value"),
            "newline": F.lit(None).cast("boolean"),
            "reason": F.col("flaw"),
            **more,
        }
    )
    if parser.format == "chunk":
        return whole.select(*columns)
    lines = records.where("flaw is null and not clean") if parser.format == "lines" else records.where("flaw is null")
    bad = read_lines(_lines(_plain(lines, parser)), parser).where("reason is not null")
    return (
        bad.withColumns({"bytes": F.expr("cast(text as binary)"), **more})
        .select(*columns)
        .unionByName(whole.select(*columns))
    )


def _plain(records: DataFrame, parser: ParserSettings) -> DataFrame:
    """The records with lines of JSON in place of MessagePack, where the parser reads it."""
    if parser.format != "hbase" or not parser.msgpack:
        return records
    # Executors need not have this package.
    register_pickle_by_value(hbase_events)  # type: ignore[no-untyped-call]
    is_packed = F.expr("attributes['format'] <=> 'msgpack'")
    lines = F.udf(hbase_events.json_lines, BinaryType(), useArrow=False)(F.when(is_packed, F.col("value")))
    unpacked = records.withColumn("value", F.coalesce(lines, F.col("value")))
    return unpacked.withColumn("clean", F.expr("is_valid_utf8(cast(value as string))"))


def _lines(records: DataFrame) -> DataFrame:
    """One row per line, `text` holding its bytes unchanged.

    Splitting a string decodes it, which is exact for UTF-8 only; other bytes are split as Latin-1, where every byte is
    a character. ``posexplode_outer``, though there always is a line: for ``posexplode`` Spark adds a filter and splits
    twice.
    """
    split = F.expr(
        r"""if(clean, split(cast(value as string), '\n', -1),
               transform(split(decode(value, 'ISO-8859-1'), '\n', -1), l -> cast(encode(l, 'ISO-8859-1') as string)))"""
    )
    exploded = (
        records.withColumn("parts", split)
        .withColumn("last", F.size("parts") - 1)
        .select("*", F.posexplode_outer("parts").alias("line", "text"))
    )
    # The rest after the last newline is a line only if it is not empty.
    return exploded.where("line < last or text != ''").withColumn("newline", F.expr("line < last")).drop("parts")


def _header(name: str) -> Column:
    """The value of the last header of that name; null when there is none."""
    return F.expr(f"try_element_at(filter(headers, h -> h.key = '{name}'), -1)")


def _number(header: str) -> Column:
    """Eight bytes, big-endian, from 0 to 2^63-1; null for anything else."""
    raw = f"{header}.value"
    return F.expr(f"if(octet_length({raw}) = 8, try_cast(conv(hex({raw}), 16, 10) as bigint), null)")


def _flaw() -> Column:
    readable = "coalesce(forall(raw_attributes, h -> is_valid_utf8(cast(h.value as string))), false)"
    return F.expr(
        f"""case
            when raw_seqno is null then 'no seqno header: the record was not written by a gateway'
            when seqno is null then 'the seqno header is not 8 bytes of a number from 0 to 2^63-1'
            when raw_prev is not null and prev is null
                then 'the prev header is not 8 bytes of a number from 0 to 2^63-1'
            when raw_created is not null and coalesce(octet_length(raw_created.value), 0) != 8
                then 'the created header is not 8 bytes'
            when not {readable} then 'an attribute is not UTF-8'
            when key is null then 'no key: the source is not known'
            when not is_valid_utf8(cast(key as string)) then 'the key is not UTF-8'
            when value is null then 'no value'
        end"""
    )
