"""The configuration of the gateway: one TOML file, checked as a whole before anything starts.

Unknown keys are refused with their path: a misspelt limit must not be a limit that is off.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from logferry.gateway.contract.chunk import check_dc, check_topic, full_topic, split_topic
from logferry.gateway.identity import LaneIdentity
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MIB = 1 << 20
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
_ALL_ADDRESSES = ("0.0.0.0", "[::]")

Pattern = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._*?\[\]!-]{1,256}$")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weakness = Literal["replication", "min-isr", "unclean-election"]


class ConfigError(Exception):
    """The configuration cannot be used; the text names the file, the setting and what is wrong with it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KafkaSettings(_Strict):
    """How to reach the cluster of this data centre. The password stands in a file of its own."""

    bootstrap_servers: Annotated[str, Field(min_length=1)]
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    sasl_username: str | None = None
    sasl_password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @property
    def is_encrypted(self) -> bool:
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def is_authenticated(self) -> bool:
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @model_validator(mode="after")
    def _together(self) -> KafkaSettings:
        """A setting that would have no effect is refused: what it was meant to secure would not be."""
        given = self.model_fields_set
        if self.is_authenticated and (self.sasl_username is None or self.sasl_password_file is None):
            raise ValueError(f"{self.security_protocol} needs sasl_username and sasl_password_file")
        if not self.is_authenticated and (found := given & {"sasl_mechanism", "sasl_username", "sasl_password_file"}):
            raise ValueError(f"{min(found)} has no effect with security_protocol {self.security_protocol}")
        if not self.is_encrypted and (found := given & {"ca_file", "cert_file", "key_file"}):
            raise ValueError(f"{min(found)} has no effect with security_protocol {self.security_protocol}")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self


class Tls(_Strict):
    """The certificate that this gateway shows. ``ca``: who signed those of the other workers; None: the system's."""

    certificate: Path
    key: Path
    ca: Path | None = None


class TokenSettings(_Strict):
    """A caller and what it may do. The token itself is never written down, its SHA-256 is.

    ``sources``: what it writes is narrowed to source ids of this pattern.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    write: list[Pattern] = []
    read: list[Pattern] = []
    admin: list[Pattern] = []
    sources: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    bytes_per_s: Rate | None = None
    chunks_per_s: Rate | None = None

    @model_validator(mode="after")
    def _together(self) -> TokenSettings:
        if not (self.write or self.read or self.admin):
            raise ValueError(f"{self.name} may do nothing; give it write, read or admin")
        if self.sources is not None and not self.write:
            raise ValueError(f"{self.name}: sources narrows what may be written, but write is empty")
        return self


class QuotaSettings(_Strict):
    """How much may be written to each topic of this pattern, in each worker process."""

    topic: Pattern
    bytes_per_s: Rate | None = None
    chunks_per_s: Rate | None = None

    @model_validator(mode="after")
    def _together(self) -> QuotaSettings:
        if self.bytes_per_s is None and self.chunks_per_s is None:
            raise ValueError(f"{self.topic} limits nothing; give it bytes_per_s or chunks_per_s")
        return self


class Limits(_Strict):
    """A limit on everything; what is over one is refused with the limit in the answer. Bytes unless said otherwise.

    ``lane_sources``: how many one lane may know; a new one is refused until others expire or are forgotten.
    """

    chunk_bytes: Annotated[int, Field(ge=1024, le=16 * MIB)] = 4 * MIB
    request_bytes: Annotated[int, Field(ge=1024, le=64 * MIB)] = 16 * MIB
    request_chunks: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    transaction_bytes: Annotated[int, Field(ge=64 * 1024, le=32 * MIB)] = 8 * MIB
    lane_bytes: Annotated[int, Field(ge=MIB)] = 64 * MIB
    lane_sources: Annotated[int, Field(ge=1)] = 1_000_000
    process_bytes: Annotated[int, Field(ge=MIB)] = 256 * MIB
    read_bytes: Annotated[int, Field(ge=1024, le=64 * MIB)] = 8 * MIB
    read_wait_ms: Annotated[int, Field(ge=0, le=30_000)] = 30_000
    sessions: Annotated[int, Field(ge=0, le=100_000)] = 1000
    session_bytes: Annotated[int, Field(ge=64 * 1024, le=256 * MIB)] = 16 * MIB
    session_stall_s: Annotated[float, Field(gt=0)] = 300
    connections: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    header_bytes: Annotated[int, Field(ge=1024, le=MIB)] = 16 * 1024
    heads_bytes: Annotated[int, Field(ge=MIB)] = 64 * MIB
    idle_timeout_s: Annotated[float, Field(gt=0)] = 75
    body_timeout_s: Annotated[float, Field(gt=0)] = 60
    request_timeout_s: Annotated[float, Field(gt=0)] = 30


class Graphite(_Strict):
    """Where each worker sends its metrics to. ``tags``: labels as Graphite's tags, not as parts of the name."""

    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)] = 2003
    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*$")] = "logferry"
    interval_s: Annotated[float, Field(ge=1)] = 60
    tags: bool = False


class Service(_Strict):
    """What runs as workers in a data centre. Worker ``i`` listens on the port of ``listen`` plus ``i``."""

    dc: str
    listen: str
    advertised_host: str | None = None
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "logferry"
    session_timeout_ms: Annotated[int, Field(ge=1000, le=60_000)] = 6000
    accept_weak_kafka: list[Weakness] = []
    kafka: KafkaSettings

    @field_validator("dc")
    @classmethod
    def _dc(cls, dc: str) -> str:
        return check_dc(dc)

    @field_validator("listen")
    @classmethod
    def _listen(cls, listen: str) -> str:
        host, colon, port = listen.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{listen!r} is not <address>:<port>")
        return listen

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    def port(self, worker: int) -> int:
        return int(self.listen.rpartition(":")[2]) + worker

    def check_ports(self) -> None:
        """Raises ValueError when the workers' ports do not fit."""
        if self.port(self.workers - 1) > 65535:
            raise ValueError(f"listen: {self.workers} workers do not fit above port {self.port(0)}")


class Config(Service):
    """One data centre's gateway."""

    data_centres: list[str] = []
    listen: str = "127.0.0.1:8080"
    lanes: Annotated[int, Field(ge=1, le=1024)] = 8
    codec: Literal["none", "gzip", "lz4", "snappy", "zstd"] = "zstd"
    source_retention_ms: Annotated[int, Field(ge=1000)] = 14 * 86_400_000
    max_seqno_jump: Annotated[int, Field(ge=1)] | None = None
    anonymous: bool = False
    open_metrics: bool = False
    tokens: list[TokenSettings] = []
    quotas: list[QuotaSettings] = []
    tls: Tls | None = None
    graphite: Graphite | None = None
    limits: Limits = Limits()

    @field_validator("data_centres")
    @classmethod
    def _data_centres(cls, names: list[str]) -> list[str]:
        return [check_dc(name) for name in names]

    @model_validator(mode="after")
    def _together(self) -> Config:
        if self.prefix in {self.dc, *self.data_centres}:
            raise ValueError(f"prefix: {self.prefix!r} is the name of a data centre too")
        self.check_ports()
        self._check_who_may_call()
        return self

    def _check_who_may_call(self) -> None:
        """Nobody gets more than was said in so many words."""
        host = self.listen.rpartition(":")[0]
        if self.tokens and self.anonymous:
            raise ValueError("anonymous: would let everybody do what the tokens are there for; choose one")
        if not (self.is_loopback or self.tokens or self.anonymous):
            raise ValueError(
                f"listen: {host} is not a loopback address; without tokens the gateway serves loopback only. "
                "Configure [[tokens]], or say: anonymous = true"
            )
        if host in _ALL_ADDRESSES and self.advertised_host is None:
            raise ValueError(f"listen: others cannot reach {host}; say under which name they can: advertised_host")
        for what in ("name", "sha256"):
            values = [getattr(token, what) for token in self.tokens]
            twice = [token.name for token, value in zip(self.tokens, values, strict=True) if values.count(value) > 1]
            if twice:
                raise ValueError(f"tokens: {' and '.join(twice)} have the same {what}")

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine can call."""
        return self.listen.rpartition(":")[0] in LOOPBACK

    @property
    def known_dcs(self) -> frozenset[str]:
        return frozenset({self.dc, *self.data_centres})

    def full_name(self, topic: str) -> str:
        """``nginx`` and ``dc1.nginx`` name the same topic here: a known data centre in front stays."""
        first, dot, _ = topic.partition(".")
        if dot and first in self.known_dcs:
            split_topic(topic)
            return topic
        return full_topic(self.dc, check_topic(topic))

    def url(self, worker: int) -> str:
        """Where others reach this worker."""
        host = self.advertised_host or self.listen.rpartition(":")[0]
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port(worker)}"

    @property
    def state_topic(self) -> str:
        """The compacted topic with the states of the sources, a partition for each lane."""
        return f"{self.prefix}.gateway.{self.dc}.state"

    @property
    def group(self) -> str:
        """The consumer group whose members are the workers."""
        return f"{self.prefix}.gateway.{self.dc}"

    def lane(self, number: int) -> LaneIdentity:
        state_topic, written = self.state_topic, f"{self.dc}."
        return LaneIdentity(
            number,
            f"{self.prefix}.gateway.{self.dc}.lane-{number}",
            (state_topic, number),
            lambda topic, partition: topic.startswith(written) or (topic, partition) == (state_topic, number),
        )


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def load_as(model: type[ConfigT], path: Path) -> ConfigT:
    """Reads and checks the file. Raises ConfigError."""
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'configuration'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{path}: " + "; ".join(lines)) from None


def load(path: Path) -> Config:
    """The gateway's. Raises ConfigError."""
    return load_as(Config, path)
