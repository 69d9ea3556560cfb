"""The configuration of the mirror: one TOML file, checked as a whole before anything starts."""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated

from logferry.gateway.config import MIB, Dc, Dcs, KafkaSettings, Pattern, Rate, ServiceConfig, Strict, load_as
from logferry.gateway.contract.names import Malformed, split_topic
from logferry.gateway.kafka.types import LaneIdentity
from pydantic import BaseModel, ConfigDict, Field, model_validator


class Remote(BaseModel):
    """A remote cluster that topics are mirrored from."""

    model_config = Strict.model_config
    dc: Dc
    """The name of the remote data centre."""
    kafka: KafkaSettings
    """The connection to its Kafka cluster."""
    topics: Annotated[list[Pattern], Field(min_length=1)] = ["*"]
    """Patterns of the topics to mirror, without the data centre."""
    exclude: list[Pattern] = []
    """Patterns of the topics among them that are not mirrored, without the data centre."""
    renamed: dict[str, str] = {}
    """Topics without the name of a data centre, and the names of their copies, as in `{ "orders" = "dc1.orders" }`."""
    prefixes: Dcs = []
    """The data centres whose topics are taken from there; default: its own. A chain lists others, too."""
    bytes_per_s: Rate | None = None
    """The most that all workers together fetch from there, in bytes per second; default: no limit."""

    @property
    def taken(self) -> tuple[str, ...]:
        """The data centres whose topics are taken from there."""
        return tuple(self.prefixes or [self.dc])

    def is_chained(self, topic: str) -> bool:
        """Whether the remote has the topic as a copy itself."""
        dc = topic.partition(".")[0]
        return dc != self.dc and dc in self.taken

    @model_validator(mode="after")
    def _renamed(self) -> Remote:
        for there, here in self.renamed.items():
            dc, name = _split(here)
            if dc != self.dc:
                raise ValueError(f"renamed: {there}: the copy must be named {self.dc}.{name or there}, not {here}")
            if there.partition(".")[0] in self.taken:
                raise ValueError(f"renamed: {there}: it has the name of a data centre already, and keeps it")
        if len({*self.renamed.values()}) < len(self.renamed):
            raise ValueError("renamed: two topics cannot have one copy")
        return self

    def here(self, topic: str, also: Container[str] = ()) -> str | None:
        """The name of the copy of a topic of the remote; None: it is not mirrored. ``also``: others that are."""
        return self.renamed.get(topic, topic if self.takes(topic) or topic in also else None)

    def there(self, topic: str) -> str:
        """The name in the remote of the topic that has this copy."""
        return next((there for there, here in self.renamed.items() if here == topic), topic)

    def takes(self, topic: str) -> bool:
        """Whether the topic, by its full name, is mirrored."""
        dc, dot, name = topic.partition(".")
        if topic in self.renamed.values():  # that one is the copy of another
            return False
        if not dot or dc not in self.taken or any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return any(fnmatchcase(name, pattern) for pattern in self.topics)


def _split(topic: str) -> tuple[str, str]:
    try:
        return split_topic(topic)
    except Malformed as error:
        raise ValueError(f"renamed: {topic}: {error}") from None


class Limits(Strict):
    """Limits of memory and of transactions, in bytes."""

    fetch_bytes: Annotated[int, Field(ge=64 * 1024, le=64 * MIB)] = 8 * MIB
    """The most bytes that one fetch from a broker returns."""
    partition_bytes: Annotated[int, Field(ge=64 * 1024, le=64 * MIB)] = 2 * MIB
    """The most fetched bytes of one partition that wait to be committed."""
    waiting_bytes: Annotated[int, Field(ge=MIB)] = 48 * MIB
    """The most fetched bytes of one worker process that wait to be committed."""
    transaction_bytes: Annotated[int, Field(ge=64 * 1024, le=32 * MIB)] = 8 * MIB
    """The most bytes in one Kafka transaction."""


class MirrorConfig(ServiceConfig):
    """The mirror of one data centre: the topics that it takes from others."""

    model_config = ConfigDict(populate_by_name=True)
    service = "mirror"
    listen: str = "127.0.0.1:8180"
    """The address of the first worker as `host:port`; worker i listens on port + i."""
    lanes: Annotated[int, Field(ge=1, le=1024)] = 4
    """The number of lanes when the state topic is created; `logferry lanes --mirror --to` changes it later."""
    carry_positions: bool = True
    """Synchronise the committed offsets of consumer groups to this data centre."""
    carry_sources: bool = True
    """Mirror the state topics of the remote gateways, so that the gateway here knows their sources."""
    carry_settings: bool = True
    """Keep the settings of the copies like their originals'; false: they are alike at the creation only."""
    replicas: Annotated[int, Field(ge=1, le=16)] = 3
    """The replicas of the copies that are created; fewer than 3 only with `replication` in `accept_weak_kafka`."""
    history_retention_ms: Annotated[int, Field(ge=1000)] = 604_800_000
    """For how long the offset history of records is kept that are not here any more."""
    remotes: Annotated[list[Remote], Field(min_length=1, alias="remote")]
    """The remote data centres."""
    limits: Limits = Limits()
    """Limits of memory and of transactions."""

    @model_validator(mode="after")
    def _rights(self) -> MirrorConfig:
        """A right or setting that the mirror does not know would promise what it does not keep."""
        for token in self.tokens:
            if token.write or token.read or not {"*", "*.*"} & set(token.admin):
                raise ValueError(f'tokens: {token.name}: the mirror knows one right, admin = ["*"]')
        if self.tls is not None and self.tls.ca is not None:
            raise ValueError("tls.ca: has no effect, since the mirror's workers do not connect to each other")
        return self

    @model_validator(mode="after")
    def _durable(self) -> MirrorConfig:
        if self.replicas < 3 and "replication" not in self.accept_weak_kafka:
            raise ValueError(
                f"replicas: {self.replicas} are too few; accept it by name: accept_weak_kafka = ['replication']"
            )
        return self

    @model_validator(mode="after")
    def _together(self) -> MirrorConfig:
        seen: dict[str, str] = {}
        for remote in self.remotes:
            if remote.dc == self.dc:
                raise ValueError(f"remote: {remote.dc} is this data centre itself; remove it")
            for dc in remote.taken:
                if dc == self.dc:
                    raise ValueError(
                        f"remote {remote.dc}: prefixes: topics of {dc} are written here; taking them from {remote.dc} "
                        "would be a replication cycle"
                    )
                if dc in seen:
                    raise ValueError(
                        f"remote: topics of {dc} are taken from both {seen[dc]} and {remote.dc}; choose one"
                    )
                seen[dc] = remote.dc
        self.check_names_and_ports({self.dc, *seen})
        return self

    @property
    def history_topic(self) -> str:
        """The topic with the offset history; as many partitions as there were lanes at the beginning."""
        return f"{self.group}.pairs"

    def sources_of(self, remote: Remote) -> frozenset[str]:
        """The state topics that are mirrored, too. They alone have no offset history: they are not read by offset."""
        if not self.carry_sources:
            return frozenset()
        return frozenset(f"{self.prefix}.gateway.{dc}.state" for dc in remote.taken)

    def lane(self, number: int) -> LaneIdentity:
        prefixes = tuple(f"{dc}." for remote in self.remotes for dc in remote.taken)
        states = frozenset().union(*map(self.sources_of, self.remotes))
        own = self.state_topic, number

        def may_write(topic: str, partition: int) -> bool:
            """Any copy: the number of lanes may change."""
            is_of_copies = topic == self.history_topic or topic in states or topic.startswith(prefixes)
            return is_of_copies or (topic, partition) == own

        return LaneIdentity(number, f"{self.group}.lane-{number}", (self.state_topic, number), may_write)


# Reads the mirror's configuration. Raises ConfigError.
load = partial(load_as, MirrorConfig)
