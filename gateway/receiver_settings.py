"""The settings of the receivers: which protocols of other agents the gateway takes, and where their lines go."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from logferry.gateway.contract.names import check_topic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class TopicRule(BaseModel):
    """Where the lines of one name go. The first rule that fits counts."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """A pattern of names: of an index, of a service, or of a host, as the receiver says."""
    topic: Annotated[str, AfterValidator(check_topic)]
    """The topic, without its data centre."""


Rules = list[TopicRule]


def topic_for(rules: Rules, name: str) -> str | None:
    """The topic of the first rule whose pattern fits the name; None: none does."""
    return next((rule.topic for rule in rules if fnmatchcase(name, rule.name)), None)


class SyslogSettings(BaseModel):
    """The port for syslog, which all workers of the host share."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    listen: Annotated[str, Field(pattern=r"^[^ ]+:[0-9]{1,5}$")]
    """The address of TCP, and of UDP with `udp`, as `host:port`."""
    topic: Annotated[str, AfterValidator(check_topic)]
    """The topic, without its data centre."""
    udp: bool = False
    """Takes datagrams, too: they are lost where the network or the gateway has no room."""
    tls: bool = False
    """Serves TLS over TCP with the certificate of `[tls]`."""
    client_ca: Path | None = None
    """With `tls`: the certificates (PEM) that sign the senders' ones; a sender without such a certificate is refused.
    By default, senders need none."""
    token_file: Path | None = None
    """A file with the token whose rights and quotas count; required with `[[tokens]]`."""
    message_bytes: Annotated[int, Field(ge=1024, le=262_144)] = 65_536
    """The largest message, in bytes; a larger one is dropped and counted."""


class ArchiveSettings(BaseModel):
    """The archive's protocol: files in pieces, visible by their commit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    topics: Annotated[Rules, Field(min_length=1)]
    """The rules choose the topic by the log type."""
    commit_within_s: Annotated[float, Field(ge=1, le=3600)] = 30
    """A transaction that is not committed within so many seconds after its first piece is gone."""
    file_bytes: Annotated[int, Field(ge=1024, le=256 << 20)] = 32 << 20
    """The most bytes of one file; at most half of `limits.lane_bytes`."""
    file_pieces: Annotated[int, Field(ge=1, le=10_000)] = 1000
    """The most pieces of one file."""
    lane_uploads: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """The most open transactions of one lane; no token takes all of them."""
    lane_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """The most bytes of pieces that one lane keeps of open transactions; no token takes all of them."""


class Receivers(BaseModel):
    """What takes the protocols of other agents. Each is off by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    lines: bool = False
    """Takes whole lines without seqnos, and chunks without seqnos, over HTTP."""
    elasticsearch: Rules = []
    """Takes Elasticsearch's `_bulk`; the rules choose the topic by the index."""
    splunk: Rules = []
    """Takes Splunk's HTTP Event Collector; the rules choose the topic by the index."""
    otlp: Rules = []
    """Takes OpenTelemetry's logs over HTTP; the rules choose the topic by `service.name`."""
    syslog: SyslogSettings | None = None
    """Takes syslog over TCP, TLS and UDP."""
    archive: ArchiveSettings | None = None
    """Takes files in pieces, which a commit makes visible."""
    repeat_window_s: Annotated[float, Field(ge=60, le=7 * 86_400)] = 3600
    """For so many seconds a request with a key that was recorded makes the same request again a duplicate; of the
    archive each call of a committed transaction."""
    lane_receipts: Annotated[int, Field(ge=1, le=10_000_000)] = 200_000
    """The most requests with a key, and committed transactions, that one lane remembers; no token takes all of them."""

    @property
    def is_on(self) -> bool:
        """Whether any of them is on."""
        return bool(self.lines or self.elasticsearch or self.splunk or self.otlp or self.syslog)

    def check(self, lane_bytes: int) -> None:
        """Raises ValueError where no file of the largest size fits into a lane's room for requests."""
        if self.archive is not None and 2 * self.archive.file_bytes > lane_bytes:
            raise ValueError(f"receivers.archive.file_bytes: over half of limits.lane_bytes, which is {lane_bytes}")
