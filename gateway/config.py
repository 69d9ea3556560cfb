"""The configuration of the gateway: one TOML file, checked as a whole before anything starts.

Unknown keys are refused with their path: a misspelt limit must not be a limit that is off.
"""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from logferry.gateway.access.settings import IssuerSettings, QuotaSettings, TokenSettings, check_tokens
from logferry.gateway.access.settings import Pattern as Pattern
from logferry.gateway.access.settings import Rate as Rate
from logferry.gateway.access.settings import Strict as Strict
from logferry.gateway.contract.names import check_dc, check_topic, full_topic, split_topic
from logferry.gateway.kafka.types import LaneIdentity
from logferry.gateway.receiver_settings import Receivers
from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator
from pydantic_core import ValidationError

MIB = 1 << 20
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
_ALL_ADDRESSES = ("0.0.0.0", "[::]")
_KEY_BYTES = 32

Dc = Annotated[str, AfterValidator(check_dc)]
Dcs = Annotated[list[str], AfterValidator(lambda names: [check_dc(name) for name in names])]
Weakness = Literal["replication", "min-isr", "unclean-election", "partition-verification"]


class ConfigError(Exception):
    """The configuration cannot be used; the text names the file, the setting and what is wrong with it."""


class KafkaSettings(Strict):
    """Connections to the Kafka cluster of this data centre. The password is in a file of its own."""

    bootstrap_servers: Annotated[str, Field(min_length=1)]
    """The brokers to connect to first, as `host:port,host:port`."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Encryption and authentication of connections to the brokers."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "SCRAM-SHA-512"
    """The SASL mechanism, with SASL_PLAINTEXT or SASL_SSL."""
    sasl_username: str | None = None
    """The SASL user name."""
    sasl_password_file: Path | None = None
    """A file that holds the SASL password on one line."""
    sasl_token_file: Path | None = None
    """A file that holds the present access token (JWT) for OAUTHBEARER; each connection reads it again."""
    ca_file: Path | None = None
    """The certificates (PEM) that sign the brokers' ones; default: those of the system."""
    cert_file: Path | None = None
    """The client certificate (PEM) for the brokers, together with `key_file`."""
    key_file: Path | None = None
    """The unencrypted key (PEM) of `cert_file`."""

    @property
    def is_encrypted(self) -> bool:
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def is_authenticated(self) -> bool:
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @model_validator(mode="after")
    def _together(self) -> KafkaSettings:
        """A setting without effect is an error: the connection would lack the security that it was meant to give."""
        given = self.model_fields_set
        password, token = ("sasl_username", "sasl_password_file"), ("sasl_token_file",)
        needed, other = (token, password) if self.sasl_mechanism == "OAUTHBEARER" else (password, token)
        if self.is_authenticated and any(getattr(self, name) is None for name in needed):
            raise ValueError(f"{self.security_protocol} with {self.sasl_mechanism} needs {' and '.join(needed)}")
        if self.is_authenticated and (found := given & {*other}):
            raise ValueError(f"{min(found)} has no effect with sasl_mechanism {self.sasl_mechanism}")
        if not self.is_authenticated and (found := given & {"sasl_mechanism", *password, *token}):
            raise ValueError(f"{min(found)} has no effect with security_protocol {self.security_protocol}")
        if not self.is_encrypted and (found := given & {"ca_file", "cert_file", "key_file"}):
            raise ValueError(f"{min(found)} has no effect with security_protocol {self.security_protocol}")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self


class Tls(Strict):
    """The certificate of this host's workers; with it they serve HTTPS only."""

    certificate: Path
    """The certificate chain (PEM) of the workers."""
    key: Path
    """The unencrypted key (PEM) of `certificate`."""
    ca: Path | None = None
    """The certificates (PEM) that sign the other workers' ones; default: those of the system."""
    client_ca: Path | None = None
    """The certificates (PEM) that sign those of callers; default: no caller is known by a certificate."""
    client_crl: Path | None = None
    """The list of revoked certificates (PEM) of `client_ca`."""
    client_certificates: Literal["optional", "required"] = "optional"
    """Whether each connection needs a certificate that `client_ca` signs."""

    @model_validator(mode="after")
    def _together(self) -> Tls:
        if self.client_ca is None and self.model_fields_set & {"client_crl", "client_certificates"}:
            raise ValueError("client_crl and client_certificates have no effect without client_ca")
        return self


class Limits(Strict):
    """Limits on everything. A request over one is rejected, with the limit in the answer."""

    chunk_bytes: Annotated[int, Field(ge=1024, le=16 * MIB)] = 4 * MIB
    """The largest chunk, in bytes."""
    request_bytes: Annotated[int, Field(ge=1024, le=64 * MIB)] = 16 * MIB
    """The largest request body, in bytes, compressed or not."""
    request_chunks: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    """The most chunks in one request."""
    transaction_bytes: Annotated[int, Field(ge=64 * 1024, le=32 * MIB)] = 8 * MIB
    """The target size of one Kafka transaction of a lane, in bytes."""
    lane_bytes: Annotated[int, Field(ge=MIB)] = 64 * MIB
    """The most bytes of requests that wait in one lane; no token takes all of it."""
    lane_sources: Annotated[int, Field(ge=1)] = 1_000_000
    """The most sources in one lane; no token takes all of them, and a name of over 256 bytes counts as several."""
    process_bytes: Annotated[int, Field(ge=MIB)] = 256 * MIB
    """The most bytes of request bodies in flight in one worker process, as received; no token takes all of them."""
    read_bytes: Annotated[int, Field(ge=1024, le=64 * MIB)] = 8 * MIB
    """The most bytes that one read answers with."""
    reads_bytes: Annotated[int, Field(ge=MIB)] = 256 * MIB
    """The most bytes of answers to reads, and of read sessions, in one worker process; no token takes all of them."""
    read_wait_ms: Annotated[int, Field(ge=0, le=30_000)] = 30_000
    """The longest wait of one read for a chunk, in milliseconds."""
    sessions: Annotated[int, Field(ge=0, le=100_000)] = 1000
    """The most open read sessions and event streams in one worker process; no token takes all of them."""
    session_bytes: Annotated[int, Field(ge=64 * 1024, le=256 * MIB)] = 16 * MIB
    """The most bytes of fetched batches that one read session holds; less where many sessions share `reads_bytes`."""
    session_stall_s: Annotated[float, Field(gt=0)] = 300
    """A reader that takes nothing of its read or session for so many seconds is disconnected."""
    connections: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """The most open connections of callers to one worker process."""
    header_bytes: Annotated[int, Field(ge=1024, le=MIB)] = 16 * 1024
    """The largest line of a request head, in bytes."""
    heads_bytes: Annotated[int, Field(ge=MIB)] = 64 * MIB
    """The most bytes of unfinished request heads in one worker process."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 75
    """An idle connection is closed after so many seconds."""
    body_timeout_s: Annotated[float, Field(gt=0)] = 60
    """A request body must arrive within so many seconds."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 30
    """A write is answered within so many seconds, at the latest as outcome-unknown."""


class Graphite(Strict):
    """The Graphite server to which each worker sends its metrics."""

    host: Annotated[str, Field(min_length=1)]
    """The host of Graphite."""
    port: Annotated[int, Field(ge=1, le=65535)] = 2003
    """The port of Graphite's plaintext protocol."""
    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*$")] = "logferry"
    """The beginning of all metric names."""
    interval_s: Annotated[float, Field(ge=1)] = 60
    """The interval between two transmissions, in seconds."""
    tags: bool = False
    """Sends labels as Graphite's tags instead of parts of the name."""


class ServiceConfig(Strict):
    """The settings that gateway and mirror share."""

    service: ClassVar[str]
    dc: Dc
    """The name of this data centre."""
    listen: str
    """The address of the first worker as `host:port`; worker i listens on port + i."""
    advertised_host: str | None = None
    """The host name under which others reach the workers; default: that of `listen`."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """The number of worker processes on this host."""
    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "logferry"
    """The beginning of the names of logferry's own topics and groups."""
    session_timeout_ms: Annotated[int, Field(ge=1000, le=60_000)] = 6000
    """A worker that is silent for so many milliseconds loses its lanes."""
    accept_weak_kafka: list[Weakness] = Field(default_factory=list)
    """Weaknesses of Kafka's settings that are accepted instead of refusing to start."""
    kafka: KafkaSettings
    """The connection to the Kafka cluster of this data centre."""
    worker_key_file: Path | None = None
    """A file with a secret of 32 characters or more, the same for all workers; needed for some settings of tokens."""
    anonymous: bool = False
    """Without tokens: let everybody do everything, also from other hosts."""
    open_metrics: bool = False
    """Serve /metrics without a token, also to other hosts."""
    tokens: list[TokenSettings] = Field(default_factory=list)
    """The callers and their rights."""
    issuers: list[IssuerSettings] = Field(default_factory=list)
    """The OpenID Connect providers whose JSON Web Tokens are accepted."""
    tls: Tls | None = None
    """The certificate of the workers; default: plain HTTP."""

    @field_validator("listen")
    @classmethod
    def _listen(cls, listen: str) -> str:
        host, colon, port = listen.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{listen!r} is not <address>:<port>")
        return listen

    @model_validator(mode="after")
    def _access(self) -> ServiceConfig:
        """No caller gets a right that the configuration does not name."""
        host = self.address
        if self.tokens and self.anonymous:
            raise ValueError("anonymous: would give everybody the rights that tokens restrict; choose one of the two")
        if not (self.is_loopback or self.tokens or self.anonymous):
            raise ValueError(
                f"listen: {host} is not a loopback address; without tokens the {self.service} serves loopback only. "
                "Configure [[tokens]], or set anonymous = true"
            )
        if host in _ALL_ADDRESSES and self.advertised_host is None:
            raise ValueError(f"listen: other hosts cannot connect to {host}; set advertised_host to the name they use")
        check_tokens(self.tokens, self.issuers)
        if any(token.certificates for token in self.tokens):
            if self.tls is None or self.tls.client_ca is None:
                raise ValueError("tokens: certificates have no effect without tls.client_ca")
            if self.worker_key_file is None:
                raise ValueError("worker_key_file: is needed, since tokens have certificates: workers forward requests")
        return self

    @property
    def worker_key(self) -> bytes | None:
        """By which workers tell each other their callers. Raises ConfigError."""
        return None if self.worker_key_file is None else read_worker_key(self.worker_key_file)

    @property
    def address(self) -> str:
        """That of `listen` without the port; an IPv6 address stands in brackets."""
        return self.listen.rpartition(":")[0]

    @property
    def host(self) -> str:
        return self.address.strip("[]")

    def port(self, worker: int) -> int:
        return int(self.listen.rpartition(":")[2]) + worker

    def url(self, worker: int) -> str:
        """Where others reach this worker."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self.advertised_host or self.address}:{self.port(worker)}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.address in LOOPBACK

    @property
    def shows_tokens(self) -> bool:
        """Whether tokens cross the network unencrypted, as far as this configuration says."""
        return bool(self.tokens) and self.tls is None and not self.is_loopback

    @property
    def warnings(self) -> list[str]:
        """Risks of the configuration that an operator may have accepted."""
        plain = "tokens cross the network in plain text: configure tls, or listen on loopback behind a proxy with TLS"
        return [plain] * self.shows_tokens

    @property
    def known_dcs(self) -> frozenset[str]:
        """The data centres whose topics have names here."""
        return frozenset({self.dc})

    def full_name(self, topic: str) -> str:
        """The full name of a topic; ``nginx`` and ``dc1.nginx`` name the same one in dc1."""
        first, dot, _ = topic.partition(".")
        if dot and first in self.known_dcs:
            split_topic(topic)
            return topic
        return full_topic(self.dc, check_topic(topic))

    @property
    def group(self) -> str:
        """The consumer group whose members are the workers; all that the service has in Kafka begins with its name."""
        return f"{self.prefix}.{self.service}.{self.dc}"

    @property
    def state_topic(self) -> str:
        """The compacted topic with what the lanes recorded of sources or partitions; its partitions are the lanes."""
        return f"{self.group}.state"

    def check_names_and_ports(self, dcs: set[str]) -> None:
        """Raises ValueError when the prefix is the name of one of these data centres, or the ports do not fit."""
        if self.prefix in dcs:
            raise ValueError(f"prefix: {self.prefix!r} is also the name of a data centre; choose another prefix")
        if self.port(self.workers) > 65536:
            raise ValueError(f"listen: {self.workers} workers do not fit above port {self.port(0)}")


class Config(ServiceConfig):
    """One data centre's gateway."""

    service = "gateway"
    data_centres: Dcs = Field(default_factory=list)
    """The data centres whose topics can be read here, in addition to this one."""
    listen: str = "127.0.0.1:8080"
    """The address of the first worker as `host:port`; worker i listens on port + i."""
    lanes: Annotated[int, Field(ge=1, le=1024)] = 8
    """The number of lanes when the state topic is created; `logferry lanes --to` changes it later."""
    codec: Literal["none", "gzip", "lz4", "snappy", "zstd"] = "zstd"
    """The compression of record batches in Kafka."""
    source_retention_ms: Annotated[int, Field(ge=1000)] = 14 * 86_400_000
    """A source that is silent for so many milliseconds is forgotten."""
    max_seqno_jump: Annotated[int, Field(ge=1)] | None = None
    """A seqno that is more than so far above the recorded one is rejected; default: no limit."""
    session_lapse_s: Annotated[float, Field(ge=0, le=86_400)] = 900
    """A write session that is silent for so many seconds has ended: others may open one, or write without it."""
    quotas: list[QuotaSettings] = Field(default_factory=list)
    """Limits of the rate of writing by topic."""
    worker_hosts: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = None
    """Patterns of the hosts of all workers: only they get forwarded requests; default: any, or loopback on loopback."""
    admin_log_days: Annotated[int, Field(ge=0, le=36_500)] = 365
    """The log of administrative acts and refusals is kept for so many days; 0: none is written."""
    graphite: Graphite | None = None
    """The Graphite server for metrics; default: none."""
    receivers: Receivers = Receivers()
    """The protocols of other agents; default: none."""
    limits: Limits = Limits()
    """Limits of size, number and time."""

    @model_validator(mode="after")
    def _together(self) -> Config:
        self.check_names_and_ports({self.dc, *self.data_centres})
        if self.worker_key_file is None and (found := [one.name for one in self.tokens if one.counts_requests]):
            counted = f"{found[0]} has requests_per_s or connections"
            raise ValueError(f"worker_key_file: is needed, since {counted}: workers forward requests")
        self.receivers.check(self.limits.lane_bytes)
        return self

    @property
    def known_dcs(self) -> frozenset[str]:
        return frozenset({self.dc, *self.data_centres})

    @property
    def staging_topic(self) -> str:  # of pieces of files that are not committed yet; its partitions are the lanes
        return f"{self.group}.archive"

    def lane(self, number: int) -> LaneIdentity:
        own, written = {(self.state_topic, number), (self.staging_topic, number)}, f"{self.dc}."

        def may_write(topic: str, partition: int) -> bool:
            return topic.startswith(written) or (topic, partition) in own

        return LaneIdentity(number, f"{self.group}.lane-{number}", (self.state_topic, number), may_write)


def read_worker_key(path: Path) -> bytes:
    """Raises ConfigError."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"worker_key_file: {path}: {error.strerror}") from None
    if len(key) < _KEY_BYTES:
        raise ConfigError(f"worker_key_file: {path} must hold at least {_KEY_BYTES} characters")
    return key


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


load = partial(load_as, Config)  # the gateway's configuration; raises ConfigError
