"""Records into rows: one row a line, or a row of the quarantine. Expressions of the JVM only, no Python in the way.

A line is what stands between two ``\\n`` bytes, byte for byte (a ``\\r`` stays). Its row's identity is (topic,
source_id, seqno, line), the same in every data centre. A line that is not UTF-8 goes to the quarantine under the same
identity; a record that no gateway wrote goes there whole, with its key and headers. Lines of table and quarantine
together are all lines of a record, numbered from 0 without a hole.

`PARSER` names these rules in the ledger. Whoever changes which line goes where changes the name.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

PARSER: Final = "lines/1"

NOT_UTF8: Final = "the line is not UTF-8"

_IDENTITY: Final = [
    StructField("topic", StringType()),
    StructField("source_id", StringType()),
    StructField("seqno", LongType()),
    StructField("line", IntegerType()),
]
_ORIGIN: Final = [
    StructField("prev", LongType()),
    StructField("dc", StringType()),
    StructField("partition", IntegerType()),
    StructField("offset", LongType()),
    StructField("created", TimestampType()),
    StructField("recorded", TimestampType()),
    StructField("attributes", MapType(StringType(), StringType())),
]
_HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

ROWS: Final = StructType(
    [*_IDENTITY, *_ORIGIN, StructField("text", StringType()), StructField("newline", BooleanType())]
)

# ``key`` and ``headers`` only where a whole record is quarantined; ``line`` and ``newline`` only where a line is.
QUARANTINE: Final = StructType(
    [
        *_IDENTITY,
        *_ORIGIN,
        StructField("bytes", BinaryType()),
        StructField("newline", BooleanType()),
        StructField("reason", StringType()),
        StructField("key", BinaryType()),
        StructField("headers", _HEADERS),
    ]
)

# The end of the year 9999, the last that every reader of the table can show; what is outside was no time.
_LAST_MS: Final = 253_402_300_799_999


def records(kafka: DataFrame, dc: str) -> DataFrame:
    """Kafka's records with what their headers say: the columns of a row, `value`, `key`, `headers`, and two verdicts.

    ``flaw``: why the record as a whole cannot be rows, else null. ``clean``: it can, and all of it is UTF-8.
    """
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
        F.expr(f"if(created_ms between 0 and {_LAST_MS}, timestamp_millis(created_ms), null)").alias("created"),
        F.col("timestamp").alias("recorded"),
        F.when(F.col("flaw").isNull(), _attributes()).alias("attributes"),
        "value",
        F.when(F.col("flaw").isNotNull(), F.col("key")).alias("key"),
        F.when(F.col("flaw").isNotNull(), F.col("headers")).alias("headers"),
        "flaw",
        F.expr("flaw is null and is_valid_utf8(cast(value as string))").alias("clean"),
    )


def rows(records: DataFrame) -> DataFrame:
    """The rows of the main table: every line that is UTF-8, of every record without a flaw."""
    lines = _lines(records.where("flaw is null"))
    return lines.where("clean or is_valid_utf8(text)").select(*ROWS.fieldNames())


def quarantined(records: DataFrame) -> DataFrame:
    """The rows of the quarantine: lines that are not UTF-8, and whole records with a flaw."""
    lines = _lines(records.where("flaw is null and not clean")).where("not is_valid_utf8(text)")
    whole = records.where("flaw is not null").withColumns(
        {
            "line": F.lit(None).cast("int"),
            "bytes": F.col("value"),
            "newline": F.lit(None).cast("boolean"),
            "reason": F.col("flaw"),
        }
    )
    bad = lines.withColumns({"bytes": F.expr("cast(text as binary)"), "reason": F.lit(NOT_UTF8)})
    columns = QUARANTINE.fieldNames()
    return bad.select(*columns).unionByName(whole.select(*columns))


def _lines(records: DataFrame) -> DataFrame:
    """One row a line, `text` holding its bytes as they are.

    Splitting a string decodes it, which is exact for UTF-8 only; bytes that are not are split as Latin-1, where every
    byte is a character of its own. ``posexplode_outer``, though there always is a line: for ``posexplode`` Spark puts
    a filter before, and splits twice.
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
    # What stands after the last newline is a line only if it is something.
    return exploded.where("line < last or text != ''").withColumn("newline", F.expr("line < last")).drop("parts")


def _header(name: str) -> Column:
    """The value of the last header of that name; null when there is none."""
    return F.expr(f"try_element_at(filter(headers, h -> h.key = '{name}'), -1)")


def _number(header: str) -> Column:
    """Eight bytes, big-endian, from 0 to 2^63-1; null for anything else."""
    raw = f"{header}.value"
    return F.expr(f"if(octet_length({raw}) = 8, try_cast(conv(hex({raw}), 16, 10) as bigint), null)")


def _attributes() -> Column:
    entry = "h -> struct(substring(h.key, 3) as key, cast(h.value as string) as value)"
    return F.expr(f"map_from_entries(transform(raw_attributes, {entry}))")


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
