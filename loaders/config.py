"""The configuration of the loader, from options or one TOML file, checked as a whole before anything starts.

Unknown keys are rejected with their path. What the guarantee depends on (isolation level, failing on lost data, the
ledger) is not configurable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from logferry.gateway.config import ConfigError, Dc, KafkaSettings, Pattern, Strict, load_as
from logferry.gateway.contract.names import check_url
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.location import Access, AzureAccess, GsAccess, Location, S3Access
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import DUPLICATE_WINDOW_DAYS, LEDGER_BATCHES, TablePaths
from logferry.loaders.planning.segment_states import SegmentRules
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

TOPIC = "{topic}"
JARS_VARIABLE = "LOGFERRY_SPARK_JARS"
# By minor version of Spark, the pyspark with which the loader is tested.
TESTED_PYSPARK = {"4.1": "4.1.3", "4.0": "4.0.4"}
WHICH_PYSPARK = f"install one of {', '.join(f'pyspark=={version}' for version in TESTED_PYSPARK.values())}"
# Rows and tables depend on these, whatever else is configured.
OWN = {
    "spark.sql.session.timeZone": "UTC",
    # The older default holds nanoseconds: it ends in the year 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Texts that an older Spark parsed as another time become null, without an error.
    "spark.sql.legacy.timeParserPolicy": "CORRECTED",
    # Of two headers of one name the last one counts.
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
}
# Set by the loader: from its own settings, or because rows depend on them.
_TAKEN = {
    "spark.master",
    "spark.jars",
    "spark.driver.memory",
    "spark.driver.extraClassPath",
    "spark.driver.extraJavaOptions",
    *OWN,
}


def _url(url: str) -> str:
    check_url(url, "urls:")
    return url


class SparkSettings(Strict):
    """The Spark session. Under spark-submit, the settings given there take precedence, master and memory included."""

    master: Annotated[str, Field(min_length=1)] = "local[*]"
    """Spark's master; with one that is not local, executors keep batches on their own disks."""
    driver_memory: Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$")] = "1g"
    """Heap of Spark's driver, in m (MiB) or g (GiB)."""
    scratch: Path | None = None
    """Folder for batches between reading and writing and for Spark's log (default: the system's temporary folder)."""
    conf: dict[Annotated[str, Field(pattern=r"^spark\.[a-zA-Z0-9._-]+$")], str] = Field(default={})
    """More settings of Spark itself, by name."""

    @field_validator("conf")
    @classmethod
    def _conf(cls, conf: dict[str, str]) -> dict[str, str]:
        if taken := sorted(conf.keys() & _TAKEN):
            raise ValueError(f"{', '.join(taken)}: this is set by the loader")
        return conf


class GatewayAccess(Strict):
    """The gateway of one data centre."""

    urls: Annotated[list[Annotated[str, AfterValidator(_url)]], Field(min_length=1)]
    """URLs of any of its workers; the next one is tried when one does not answer."""
    token_file: Path | None = None
    """File with a token that may read the topics of the data centre."""
    ca_file: Path | None = None
    """CA certificates for https URLs, as PEM (default: the system's)."""


class ReportSettings(Strict):
    """Reports of the tables' state to a gateway, for its console (default: none)."""

    urls: Annotated[list[Annotated[str, AfterValidator(_url)]], Field(min_length=1)]
    """URLs of any of its workers; the next one is tried when one does not answer."""
    token_file: Path | None = None
    """File with a token that has the right `report` to the tables' topics."""
    ca_file: Path | None = None
    """CA certificates for https URLs, as PEM (default: the system's)."""


class SegmentSettings(Strict):
    """The segments of a table: when each is complete, and who is notified. See `planning.segment_states`."""

    window_s: Annotated[int, Field(ge=10, le=7 * 86_400)] = 3600
    """Length of a segment in seconds of event time; cannot be changed after creation."""
    late_wait_s: Annotated[float, Field(ge=0, le=86_400)] = 3600.0
    """Seconds without new rows before a segment closes, counted after the low watermark passed its end."""
    max_wait_s: Annotated[float, Field(ge=0, le=7 * 86_400)] = 12 * 3600.0
    """Upper bound in seconds of that wait, and of the wait for sources that fell silent together, unless most did."""
    source_idle_s: Annotated[float, Field(ge=1, le=7 * 86_400)] = 900.0
    """A source without a chunk or heartbeat for this many seconds no longer holds segments open."""
    silent_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the sources with heartbeats that hold segments open if they fall silent together (1: more than half)."""
    success: Place | None = None
    """Folder, or URI, in which each READY segment gets a folder with a file `_SUCCESS`."""
    webhook: str | None = None
    """URL that receives a POST for each READY segment."""

    @property
    def rules(self) -> SegmentRules:
        return SegmentRules(self.window_s, self.late_wait_s, self.max_wait_s, self.source_idle_s, self.silent_share)


class S3Settings(Strict):
    """Access to S3, for tables at `s3://` (default: the variables `AWS_…`, else the platform's roles)."""

    endpoint: Annotated[str | None, Field(pattern=r"^https?://[^@?#\s]+$")] = None
    """URL of a server of one's own (default: that of AWS)."""
    region: str | None = None
    """Region of the bucket."""
    access_key_file: Path | None = None
    """File with the access key."""
    secret_key_file: Path | None = None
    """File with the secret key."""
    session_token_file: Path | None = None
    """File with the session token of temporary keys."""

    @property
    def access(self) -> S3Access:
        return S3Access(**dict(self))


class GsSettings(Strict):
    """Access to Google Cloud Storage, for tables at `gs://` (default: Google's application default credentials)."""

    endpoint: Annotated[str | None, Field(pattern=r"^https?://[^@?#\s]+$")] = None
    """URL of another endpoint; without TLS it gets no credentials (default: `STORAGE_EMULATOR_HOST`, else Google's)."""
    service_account_file: Path | None = None
    """File with the JSON key of a service account, at this path on all hosts of Spark."""

    @property
    def access(self) -> GsAccess:
        return GsAccess(**dict(self))


class AzureSettings(Strict):
    """Access to Azure's storage accounts, for tables at `abfss://` (default: the variables `AZURE_…`)."""

    account_key_file: Path | None = None
    """File with the key of the storage account."""

    @property
    def access(self) -> AzureAccess:
        return AzureAccess(**dict(self))


class StoreSettings(BaseModel):
    """How the stores of tables are accessed."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    s3: S3Settings = S3Settings()
    """Access to S3, for tables at `s3://`."""
    gs: GsSettings = GsSettings()
    """Access to Google Cloud Storage, for tables at `gs://`."""
    azure: AzureSettings = AzureSettings()
    """Access to Azure's storage accounts, for tables at `abfss://`."""

    @property
    def accesses(self) -> tuple[Access, ...]:
        return self.s3.access, self.gs.access, self.azure.access


def _location(value: Any) -> Location:
    return Location.of(value)


Place = Annotated[Location, PlainValidator(_location)]


# Parts that every catalog takes without quotes.
_PART = r"[A-Za-z0-9_]*(\{topic\})?[A-Za-z0-9_]*"
_CATALOG_NAME = rf"^{_PART}(\.{_PART}){{1,2}}$"


class TableJob(Strict):
    """One table, and the topics that are loaded into it."""

    path: Place
    """Folder of the table, or a URI such as `s3://bucket/nginx`; `{topic}` in it stands for one table per topic, named
    without the data centre."""
    topics: Annotated[list[Pattern], Field(min_length=1)]
    """Full topic names (`dc1.nginx`), or patterns with `*` and `?` (`*.nginx`: of all data centres)."""
    max_records: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    """Upper bound of the offsets that a batch reads."""
    batch_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 256 << 20
    """Target size of a batch in bytes."""
    parser: ParserSettings = ParserSettings()
    """How lines become columns."""
    partition_by: list[Literal["event_date", "recorded_date", "dc", "topic"]] = Field(default=[])
    """Columns by which the table is partitioned; cannot be changed after creation."""
    register_as: Annotated[str | None, Field(alias="register", pattern=_CATALOG_NAME)] = None
    """Name in the catalog of the Spark session, such as `logs.nginx`, with `{topic}` if the path has it."""
    segments: SegmentSettings | None = None
    """Completeness of the table by segments of event time (default: none)."""

    @field_validator("path")
    @classmethod
    def _path(cls, path: Location) -> Location:
        if not path.name:
            raise ValueError(f"{path} is no path of a table")
        return path

    def accessed_by(self, *accesses: Access) -> TableJob:
        """The same job, with this access to its store."""
        segments = self.segments
        if segments is not None and segments.success is not None:
            segments = segments.model_copy(update={"success": Location.of(segments.success, *accesses)})
        return self.model_copy(update={"path": Location.of(self.path, *accesses), "segments": segments})

    @property
    def is_template(self) -> bool:
        return TOPIC in str(self.path)

    @model_validator(mode="after")
    def _partitions(self) -> TableJob:
        if self.register_as is not None and (TOPIC in self.register_as) != self.is_template:
            raise ValueError("register: {topic} must be in both the path and the name, or in neither")
        if len(set(self.partition_by)) != len(self.partition_by):
            raise ValueError("partition_by: a column is listed twice")
        if self.segments is not None and self.parser.time is None:
            raise ValueError("segments need parser.event_time")
        if "event_date" in self.partition_by and self.parser.time is None:
            raise ValueError("partition_by: event_date needs parser.event_time")
        return self


class Config(StoreSettings, Strict):
    """The settings of a loader."""

    dc: Dc = "dc1"
    """The data centre whose Kafka is read; the ledger's offsets belong to it."""
    parallel: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of tables that are loaded at the same time."""
    follow_s: Annotated[float, Field(ge=0.1, le=3600)] = 5.0
    """Seconds between two loads of a table with --follow."""
    duplicate_window_days: Annotated[int, Field(ge=1, le=3650)] = DUPLICATE_WINDOW_DAYS
    """A chunk that arrived by two data centres is loaded once if both copies were recorded within this many days."""
    ledger_batches: Annotated[int, Field(ge=16, le=1_000_000)] = LEDGER_BATCHES
    """Number of the newest batches of a table whose offsets are kept singly; those of older loads are summed up."""
    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "logferry"
    """Prefix of the mirror's internal topics."""
    kafka: KafkaSettings
    """The connection to the Kafka cluster to read; its files are read again before each batch."""
    other_kafka: dict[Dc, KafkaSettings] = Field(default={})
    """Kafka clusters by data centre, for `table move` (default: the ledger's address, with the security of `kafka`)."""
    spark: SparkSettings = SparkSettings()
    """The Spark session."""
    gateways: dict[Dc, GatewayAccess] = Field(default={})
    """Gateways by data centre; the segments' check asks them for sources and their heartbeats."""
    report: ReportSettings | None = None
    """Reports of the tables' state to a gateway."""
    metrics_listen: str | None = None
    """Address as `host:port` at which `logferry load --follow` serves its metrics (default: nowhere)."""
    metrics_file: Path | None = None
    """File `*.prom` into which any other load writes its metrics at its end, for node_exporter's textfile collector."""
    metrics_push: str | None = None
    """Pushgateway, `http://HOST:PORT`, to which any other load pushes its metrics at its end; with a path
    `/metrics/job/NAME/LABEL/VALUE` as this group."""
    tables: Annotated[list[TableJob], Field(min_length=1)]
    """The tables to load."""

    @field_validator("tables")
    @classmethod
    def _accessed(cls, tables: list[TableJob], info: ValidationInfo) -> list[TableJob]:
        accesses = [info.data[name].access for name in StoreSettings.model_fields if name in info.data]
        return [table.accessed_by(*accesses) for table in tables]

    @model_validator(mode="after")
    def _together(self) -> Config:
        taken: set[Location] = set()
        names: set[str] = set()
        for table in self.tables:
            if table.register_as is not None and (name := table.register_as.lower()) in names:
                raise ValueError(f"tables: {name} would stand for two tables")
            names |= {table.register_as.lower()} if table.register_as else set()
            for path in TablePaths.of(table.path):
                if path in taken:
                    raise ValueError(f"tables: {path} would belong to two tables")
                taken.add(path)
        return self


def check_config(raw: dict[str, Any], origin: str) -> Config:
    """Raises LoaderConfigError, which names ``origin``, the setting and what is wrong with it."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'configuration'}: {e['msg']}" for e in error.errors()]
        raise LoaderConfigError(f"{origin}: " + "; ".join(lines)) from None


def load_config(path: Path) -> Config:
    """Reads and checks the file. Raises LoaderConfigError."""
    try:
        return load_as(Config, path)
    except ConfigError as error:
        raise LoaderConfigError(str(error)) from None


def jar_files(given: str | None) -> list[Path]:
    """The jars of Spark's Kafka connector and of Delta, separated as in PATH; else those of `JARS_VARIABLE`.

    Nothing is downloaded here. Raises LoaderConfigError.
    """
    given = given or os.environ.get(JARS_VARIABLE)
    if not given:
        raise LoaderConfigError(
            f"the jars of Spark's Kafka connector and of Delta are not known: name them by --jars or {JARS_VARIABLE} "
            "(`logferry load` and `logferry table` set it)"
        )
    jars = [Path(jar).absolute() for jar in given.split(os.pathsep)]
    for jar in jars:
        if not jar.is_file():
            raise LoaderConfigError(f"{jar} is not a file; it is named in --jars or {JARS_VARIABLE}")
    return jars
