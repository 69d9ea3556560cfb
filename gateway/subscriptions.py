"""Subscriptions of `logferry deliver`: what is pushed to which receiver. As users write them, and as they are stored.

A subscription is a record of a compacted topic with one partition, by its name; a record without a value removes it.
"""

from __future__ import annotations

import ipaddress
import json
import re
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import re2
from logferry.gateway.config import MIB, Pattern, Strict
from logferry.gateway.contract.names import MAX_SEQNO
from pydantic import AfterValidator, Field, field_validator, model_validator

# Not . or .., which URL paths swallow.
NAME: Final = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,100}\Z")
# Replays that a worker may not have seen yet.
_REPLAYS: Final = 1000
# They are in every state of every partition, escaped.
_FILTERS_BYTES: Final = 16 << 10
_RE2: Final = re2.Options()
_RE2.log_errors = False
_RE2.max_mem = 8 * MIB


def compiled(pattern: str) -> Any:
    """An expression of RE2, which takes a time in proportion to the data. Raises ValueError."""
    try:
        return re2.compile(pattern.encode(), _RE2)
    except re2.error as wrong:
        text = wrong.args[0] if wrong.args else wrong
        raise ValueError(f"not an expression of RE2: {text.decode() if isinstance(text, bytes) else text}") from None


def _checked(pattern: str) -> str:
    compiled(pattern)
    return pattern


Expression = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_checked)]
SecretFile = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,99}$")]


class Filters(Strict):
    """Which chunks are delivered; all conditions must hold."""

    source_prefix: Annotated[str, Field(max_length=512)] = ""
    """Only chunks of sources whose id begins so."""
    attributes: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Only chunks with these attributes."""
    pattern: Expression | None = None
    """Only chunks whose data this expression (RE2) finds something in."""

    @model_validator(mode="after")
    def _bounded(self) -> Filters:
        if len(json.dumps(self.model_dump())) > _FILTERS_BYTES:
            raise ValueError(f"over {_FILTERS_BYTES} bytes as JSON")
        return self


class PushSubscription(Strict):
    """What is delivered to one receiver, and how."""

    topics: Annotated[list[Pattern], Field(min_length=1, max_length=100)]
    """Full names of topics, or patterns of full names: `dc1.nginx`, `*.nginx`."""
    url: Annotated[str, Field(max_length=2000)]
    """The receiver: http or https."""
    format: Literal["ndjson", "msgpack", "text", "cloudevents"] = "ndjson"
    """The format of a batch; rows as in reading."""
    order: Literal["source", "partition"] = "partition"
    """`partition`: one batch of a partition at a time. `source`: a few, each of other sources."""
    max_bytes: Annotated[int, Field(ge=1024, le=16 * MIB)] = MIB
    """The approximate size of a batch, in bytes of data; a larger chunk is a batch of its own."""
    max_wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 200
    """How long a chunk waits for others of its batch."""
    max_in_flight: Annotated[int, Field(ge=1, le=256)] = 8
    """The most batches under way from one worker process."""
    timeout_s: Annotated[float, Field(ge=1, le=600)] = 30
    """How long the receiver may take for a batch."""
    compression: Literal["none", "gzip", "zstd"] = "none"
    """The Content-Encoding of batches."""
    filters: Filters = Filters()
    """Which chunks are delivered."""
    on_rejection: Literal["stop", "dead-letter", "split"] = "stop"
    """A batch that the receiver rejects for good: stop; move it to `dead_letter_topic`; or halve it to find the chunk,
    which then goes to `dead_letter_topic` if there is one, else stops."""
    dead_letter_topic: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,200}$")] | None = None
    """A topic of this data centre, without its prefix."""
    start: Literal["earliest", "latest"] = "latest"
    """Where a new subscription begins: at the first retained chunk, or at its creation."""
    secret_file: SecretFile | None = None
    """The name of a file with the signing key, in the folder `secrets_dir` of the workers."""
    old_secret_file: SecretFile | None = None
    """The key before that: batches are signed with both while receivers change over."""
    token_file: SecretFile | None = None
    """The name of a file with a bearer token for the receiver, there."""
    ca_file: SecretFile | None = None
    """The name of a file with the certificates that sign the receiver's, there; default: those of the system."""
    cert_file: SecretFile | None = None
    """The name of a file with a client certificate and its key (PEM), there."""

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_good = False
        if not is_good or not url.isascii() or re.search(r"[\x00-\x20\x7f]", url):
            raise ValueError("is not an http or https URL")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise ValueError("may hold neither a user name nor a password nor a fragment; use token_file")
        return url

    @model_validator(mode="after")
    def _together(self) -> PushSubscription:
        if self.on_rejection == "dead-letter" and self.dead_letter_topic is None:
            raise ValueError("on_rejection: dead-letter needs dead_letter_topic")
        if self.on_rejection == "stop" and self.dead_letter_topic is not None:
            raise ValueError("dead_letter_topic: has no effect with on_rejection stop")
        if self.old_secret_file is not None and self.secret_file is None:
            raise ValueError("old_secret_file: has no effect without secret_file")
        if not self.url.startswith("https://") and (self.ca_file or self.cert_file):
            raise ValueError("ca_file, cert_file: have no effect without https")
        return self

    def check_dead_letters(self, dc: str) -> None:
        """Raises ValueError where what was set aside would be delivered again, and set aside again, without end."""
        topic = f"{dc}.{self.dead_letter_topic}"
        if self.dead_letter_topic is not None and any(fnmatchcase(topic, pattern) for pattern in self.topics):
            raise ValueError(f"dead_letter_topic: {topic} is one of topics, so each dead letter would come back")

    @property
    def shards(self) -> int:
        """Into how many shards each partition is divided."""
        return 4 if self.order == "source" else 1

    @property
    def shape(self) -> str:
        """What the bytes of a batch depend on, besides its place."""
        named = {"format": self.format, "compression": self.compression, "shards": self.shards}
        return json.dumps({**named, "filters": self.filters.model_dump()}, sort_keys=True)


class Replay(Strict):
    """Delivers again, or skips: the position is set. ``topic`` and ``partition`` None: all."""

    topic: str | None = None
    """The full name of a topic; default: all topics of the subscription."""
    partition: Annotated[int, Field(ge=0)] | None = None
    """A partition of the topic; default: all."""
    time_ms: Annotated[int, Field(ge=0, le=MAX_SEQNO)] | None = None
    """From the first chunk recorded at that time or later."""
    offset: Annotated[int, Field(ge=0, le=MAX_SEQNO)] | Literal["earliest", "latest"] | None = None
    """From an offset of the topic in this data centre, or from one of its ends."""
    cursor: Annotated[str, Field(max_length=300)] | None = None
    """From a cursor, as in `dc1.nginx:3:81234`."""

    @model_validator(mode="after")
    def _one(self) -> Replay:
        if sum(given is not None for given in (self.time_ms, self.offset, self.cursor)) != 1:
            raise ValueError("exactly one of time_ms, offset and cursor is needed")
        if self.cursor is not None and (self.topic, self.partition) != (None, None):
            raise ValueError("a cursor names its topic and partition itself")
        if self.partition is not None and self.topic is None:
            raise ValueError("partition: needs topic")
        if isinstance(self.offset, int) and self.partition is None:
            raise ValueError("a number as offset needs topic and partition")
        return self

    @property
    def place(self) -> tuple[str | None, int | None]:
        """The topic and partition, of a cursor too; None: all of them."""
        if self.cursor is None:
            return self.topic, self.partition
        topic, partition, _ = self.cursor.rsplit(":", 2)
        return topic, int(partition)

    def fits(self, topic: str, partition: int) -> bool:
        return self.place[0] in (None, topic) and self.place[1] in (None, partition)

    def covers(self, other: Replay) -> bool:
        """Whether nothing is left to do for the other one, which is older."""
        return all(mine in (None, its) for mine, its in zip(self.place, other.place, strict=True))


class NumberedReplay(Strict):
    number: int
    position: Replay


class StoredSubscription(Strict):
    """A subscription with what happened to it. ``id``: another one each time that it is recreated.

    ``resumed``: how often it was resumed after a stop. ``is_configured``: it stands in the workers' configuration, or
    did; ``left_configuration``: a worker has started since whose file does not have it. It keeps its positions then.
    ``owner``: the caller that made, changed or resumed it last; None: of a gateway without tokens, or configured.
    Replays are numbered from ``created_ms`` on, so a receiver takes a subscription that was made again under its name
    for a replay, and not for a worker that was replaced.
    """

    id: str
    created_ms: int
    definition: PushSubscription
    owner: str | None = None
    is_paused: bool = False
    is_configured: bool = False
    left_configuration: bool = False
    resumed: int = 0
    replays: list[NumberedReplay] = Field(default_factory=list)

    @property
    def is_resting(self) -> bool:
        """Nothing is sent."""
        return self.is_paused or self.left_configuration

    @property
    def last_replay(self) -> int:
        return self.replays[-1].number if self.replays else self.created_ms

    def replayed(self, position: Replay) -> StoredSubscription:
        """Raises ValueError: a worker may not have seen the others yet, so none can be left out."""
        replays = [replay for replay in self.replays if not position.covers(replay.position)]
        if len(replays) >= _REPLAYS:
            raise ValueError(f"{_REPLAYS} replays of single partitions are kept; replay the whole topic")
        replays.append(NumberedReplay(number=self.last_replay + 1, position=position))
        return self.model_copy(update={"replays": replays})

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, raw: bytes) -> StoredSubscription:
        """Raises ValueError."""
        return cls.model_validate_json(raw)


class AllowedAddresses:
    """Addresses that batches may be sent to: public ones, and those of networks that the operator names."""

    def __init__(self, networks: list[str]) -> None:
        """Raises ValueError for what is no network."""
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]

    def __contains__(self, address: object) -> bool:
        found = ipaddress.ip_address(str(address).partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address):
            # An address of IPv4 in the clothes of IPv6 leads to the same host.
            inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
            if inner is None and found in ipaddress.ip_network("64:ff9b::/96"):
                inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
            found = inner or found
        if any(found.version == network.version and found in network for network in self._networks):
            return True
        return found.is_global and not found.is_multicast
