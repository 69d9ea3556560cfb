"""The configuration of the loader, by options or by one TOML file, checked as a whole before anything starts.

Unknown keys are refused with their path. What the promise stands on (isolation level, failing on lost data, the
ledger) is not here: it is not a matter of configuration.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from logferry.gateway.contract.chunk import Malformed, check_dc
from logferry.loaders.errors import ConfigError
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.segment_states import Rules
from logferry.loaders.storage.ledger import MOVED_DAYS, TablePaths
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

_BATCH_RECORDS = 50_000
_MIB = 1 << 20
TOPIC = "{topic}"
# By settings of ours, or because rows depend on them.
_TAKEN = {
    "spark.master",
    "spark.jars",
    "spark.driver.memory",
    "spark.driver.extraClassPath",
    "spark.driver.extraJavaOptions",
    "spark.sql.session.timeZone",
    "spark.sql.extensions",
    "spark.sql.catalog.spark_catalog",
    "spark.sql.parquet.outputTimestampType",
    "spark.sql.legacy.timeParserPolicy",
    "spark.sql.mapKeyDedupPolicy",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KafkaSettings(_Strict):
    """The cluster that is read."""

    bootstrap_servers: Annotated[str, Field(min_length=1)]


class SparkSettings(_Strict):
    """``scratch``: where a batch is kept between reading and writing, and Spark's log; none: the system's folder. With
    a master that is not local, executors keep batches on disks of their own. ``conf``: more of Spark's own settings.
    Under spark-submit, what that was told comes first, master and memory above all.
    """

    master: Annotated[str, Field(min_length=1)] = "local[*]"
    driver_memory: Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$")] = "1g"
    scratch: Path | None = None
    conf: dict[Annotated[str, Field(pattern=r"^spark\.[a-zA-Z0-9._-]+$")], str] = {}

    @field_validator("conf")
    @classmethod
    def _conf(cls, conf: dict[str, str]) -> dict[str, str]:
        if taken := sorted(conf.keys() & _TAKEN):
            raise ValueError(f"{', '.join(taken)}: that is set by the loader")
        return conf


class GatewayAccess(_Strict):
    """A data centre's gateway: any of its workers, and a token that may read its topics."""

    urls: Annotated[list[str], Field(min_length=1)]
    token_file: Path | None = None
    ca_file: Path | None = None

    @field_validator("urls")
    @classmethod
    def _urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not like http://127.0.0.1:8080")
        return urls


class SegmentSettings(_Strict):
    """``window_s``: of the table for ever. See `segments.Rules`. ``success``: a folder in which each window that is
    READY gets a folder with a file ``_SUCCESS``. ``webhook``: an address that is told so.
    """

    window_s: Annotated[int, Field(ge=10, le=7 * 86_400)] = 3600
    wait_s: Annotated[float, Field(ge=0, le=86_400)] = 3600.0
    wait_most_s: Annotated[float, Field(ge=0, le=7 * 86_400)] = 12 * 3600.0
    idle_s: Annotated[float, Field(ge=1, le=7 * 86_400)] = 900.0
    success: Path | None = None
    webhook: str | None = None

    @property
    def rules(self) -> Rules:
        return Rules(self.window_s, self.wait_s, self.wait_most_s, self.idle_s)


class TableJob(_Strict):
    """One table, and what is loaded into it.

    ``topics``: full names (``dc1.nginx``), or patterns with ``*`` and ``?`` (``*.nginx``: of all data centres).
    ``max_records`` and ``batch_bytes``: a batch reads at most so many offsets, and about so many bytes, so that a
    backlog is cut into batches. ``partition_by``: the table's, for ever.
    """

    path: Path
    topics: Annotated[list[str], Field(min_length=1)]
    max_records: Annotated[int, Field(ge=1, le=10_000_000)] = _BATCH_RECORDS
    batch_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 256 * _MIB
    parser: ParserSettings = ParserSettings()
    partition_by: list[Literal["event_date", "recorded_date", "dc", "topic"]] = []
    segments: SegmentSettings | None = None

    @field_validator("path")
    @classmethod
    def _path(cls, path: Path) -> Path:
        text = str(path)
        if ":/" in text:
            raise ValueError(f"{text} is not a folder of a file system that is mounted here")
        if any(c in "`%\\" or ord(c) < 32 for c in text) or not path.name:
            raise ValueError(f"{text!r}: a table's path holds no backtick, percent, backslash or control character")
        return path.absolute()

    @property
    def is_template(self) -> bool:
        return TOPIC in str(self.path)

    @field_validator("topics")
    @classmethod
    def _topics(cls, topics: list[str]) -> list[str]:
        for topic in topics:
            if not topic or any(not (c.isalnum() and c.isascii()) and c not in "._-*?[]!" for c in topic):
                raise ValueError(f"{topic!r} is not a topic or a pattern of topics")
        return topics

    @model_validator(mode="after")
    def _partitions(self) -> TableJob:
        if len(set(self.partition_by)) != len(self.partition_by):
            raise ValueError("partition_by: a column stands there twice")
        if self.segments is not None and self.parser.time is None:
            raise ValueError("segments need parser.event_time")
        if "event_date" in self.partition_by and self.parser.time is None:
            raise ValueError("partition_by: event_date needs parser.event_time")
        return self


class Config(_Strict):
    """``dc``: the data centre whose Kafka this is; the ledger's offsets are that one's.

    ``prefix``: the mirrors'.

    ``parallel``: so many tables are loaded at a time. ``follow_s``: how long a load that follows waits before it looks
    again. A table's path with ``{topic}`` stands for a table of each topic, whose name without the data centre goes
    there. ``moved_days``: a chunk that came by two data centres is kept once if the second copy was recorded at most so
    many days after the first.
    """

    dc: str = "dc1"
    parallel: Annotated[int, Field(ge=1, le=64)] = 2
    follow_s: Annotated[float, Field(ge=0.1, le=3600)] = 5.0
    moved_days: Annotated[int, Field(ge=1, le=3650)] = MOVED_DAYS
    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "logferry"
    kafka: KafkaSettings
    spark: SparkSettings = SparkSettings()
    gateways: dict[str, GatewayAccess] = {}
    tables: Annotated[list[TableJob], Field(min_length=1)]

    @field_validator("gateways")
    @classmethod
    def _gateways(cls, gateways: dict[str, GatewayAccess]) -> dict[str, GatewayAccess]:
        for dc in gateways:
            cls._dc(dc)
        return gateways

    @field_validator("dc")
    @classmethod
    def _dc(cls, dc: str) -> str:
        try:
            return check_dc(dc)
        except Malformed as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _together(self) -> Config:
        taken: set[Path] = set()
        for table in self.tables:
            for path in TablePaths.of(table.path).every:
                if path in taken:
                    raise ValueError(f"tables: {path} would belong to two tables")
                taken.add(path)
        return self


def check(raw: dict[str, Any], origin: str) -> Config:
    """Raises ConfigError, which names ``origin``, the setting and what is wrong with it."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'configuration'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from None


def load(path: Path) -> Config:
    """Reads and checks the file. Raises ConfigError."""
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    return check(raw, str(path))
