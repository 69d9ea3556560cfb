"""The configuration of the keeper: one TOML file, checked as a whole before anything starts. Its limits bound each act.

What is not configured is not done: without `act = true` nothing is changed in Kafka, and without a policy for a topic
none of its records are deleted.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated

from logferry.gateway.config import MIB, Pattern, ServiceConfig, Strict, load_as
from pydantic import ConfigDict, Field, model_validator

_GIB = 1 << 30
Percent = Annotated[float, Field(ge=0, le=100)]


class RetiredDir(Strict):
    """A log directory to take out of service."""

    broker: Annotated[int, Field(ge=0)]
    """The number of the broker."""
    dir: Annotated[str, Field(pattern=r"^/")]
    """The directory, as the broker's `log.dirs` names it."""


class Watching(Strict):
    """How often and how patiently the keeper looks at the cluster."""

    every_s: Annotated[float, Field(ge=0.2, le=3600)] = 10
    """Seconds between two looks at the cluster."""
    answer_s: Annotated[float, Field(ge=0.2, le=30)] = 5
    """A broker that does not answer within so many seconds is reported."""
    growth_s: Annotated[float, Field(ge=1, le=86_400)] = 900
    """The growth of a directory is that over so many seconds."""
    full_within_s: Annotated[float, Field(ge=0)] = 86_400
    """A directory that will be full within so many seconds is reported."""


class Moves(Strict):
    """Bounds of moving replicas."""

    throttle_bytes_per_s: Annotated[int, Field(ge=64 * 1024)] = 32 * MIB
    """The most that a broker sends, receives, or copies between its directories for moves, in bytes per second."""
    bytes_at_once: Annotated[int, Field(ge=MIB)] = 64 * _GIB
    """The most bytes of replicas that move at the same time; a larger replica moves alone."""
    partitions_at_once: Annotated[int, Field(ge=1, le=1000)] = 4
    """The most replicas that move at the same time."""
    fill_percent: Percent = 80
    """A move fills its target to so many percent at most."""
    balance_dirs: bool = False
    """Balance the directories of each broker."""
    balance_brokers: bool = False
    """Balance the brokers."""
    balance_percent: Annotated[float, Field(ge=1, le=100)] = 20
    """Balance where two differ by more than so many percent of their size."""
    preferred_leaders: bool = False
    """Elect the preferred leader where another replica leads and the preferred one is in sync."""


class DeletionPolicy(Strict):
    """Topics whose oldest records may be deleted before their retention ends."""

    topics: Annotated[list[Pattern], Field(min_length=1)]
    """Patterns of topics, with or without the data centre."""
    priority: Annotated[int, Field(ge=0, le=1000)] = 100
    """Topics of the least number go first."""
    keep_s: Annotated[float, Field(ge=0)] = 3600
    """Records of the last so many seconds stay."""


class Deletion(Strict):
    """Forced deletion of segments, where a disk would fill before retention frees enough of it."""

    below_free_percent: Percent = 10
    """Deletion begins where less of a directory is free."""
    until_free_percent: Percent = 15
    """Deletion ends where so much is free."""
    last_free_percent: Percent = 0
    """Below this, records go although a reader still needs them; 0: never."""
    bytes_at_once: Annotated[int, Field(ge=1)] = 64 * _GIB
    """The most bytes that one look deletes of one directory."""
    policies: list[DeletionPolicy] = Field(default_factory=list)
    """The topics that deletion may touch; default: none."""

    @model_validator(mode="after")
    def _together(self) -> Deletion:
        if not self.last_free_percent <= self.below_free_percent <= self.until_free_percent:
            raise ValueError("needed is last_free_percent ≤ below_free_percent ≤ until_free_percent")
        return self


class ReaderSettings(Strict):
    """A reader whose unread records stay: a consumer group, a mirror elsewhere, a table's loader, or push delivery."""

    topics: Annotated[list[Pattern], Field(min_length=1)]
    """Patterns of the topics that it reads, with or without the data centre. Where its position is not known, it needs
    all of the topic."""
    consumer: str | None = None
    """A consumer group, by its committed offsets."""
    mirror: str | None = None
    """URL of a mirror worker in another data centre that takes topics from here; the other workers are found by it."""
    table: str | None = None
    """The path of a table, by its ledger."""
    deliver: Annotated[str, Field(min_length=1)] | None = None
    """A subscription of push delivery in this data centre, or a pattern of names, `*` for all of them, by the positions
    in the state topic. It needs nothing of topics that it does not deliver."""
    token_file: str | None = None
    """The file with the token for `mirror`."""

    @model_validator(mode="after")
    def _one(self) -> ReaderSettings:
        if len(self._given) != 1:
            raise ValueError("give one of consumer, mirror, table and deliver")
        return self

    @property
    def _given(self) -> list[tuple[str, str]]:
        kinds = {"consumer": self.consumer, "mirror": self.mirror, "table": self.table, "deliver": self.deliver}
        return [(kind, value) for kind, value in kinds.items() if value is not None]

    @property
    def name(self) -> str:
        return " ".join(self._given[0])


class KeeperConfig(ServiceConfig):
    """The keeper of one Kafka cluster."""

    model_config = ConfigDict(populate_by_name=True)
    service = "keeper"
    listen: str = "127.0.0.1:8390"
    """The address of its HTTP interface as `host:port`."""
    act: bool = False
    """Act; false: everything is planned and shown, and nothing is changed."""
    protected_topics: list[Pattern] = Field(default_factory=list)
    """Patterns of topics that no act touches, but for moves out of a directory that failed or is retired."""
    log_retention_days: Annotated[int, Field(ge=1)] = 365
    """The log of acts is kept for so many days."""
    watch: Watching = Watching()
    """How often and how patiently it looks."""
    retire: list[RetiredDir] = Field(default_factory=list)
    """Directories to take out of service: their replicas are moved away."""
    moves: Moves = Moves()
    """Bounds of moves."""
    deletion: Deletion = Deletion()
    """Forced deletion."""
    readers: list[ReaderSettings] = Field(default_factory=list)
    """The readers whose unread records stay."""

    @model_validator(mode="after")
    def _together(self) -> KeeperConfig:
        if self.workers != 1:
            raise ValueError("workers: a keeper is one process; start another one on another host to stand by")
        for token in self.tokens:
            if token.write or token.read or not {"*", "*.*"} & set(token.admin):
                raise ValueError(f'tokens: {token.name}: the keeper knows one right, admin = ["*"]')
        return self

    @property
    def log_topic(self) -> str:
        """The topic with a record of each act; the group's only partition, whose owner acts."""
        return f"{self.group}.log"

    def is_protected(self, topic: str) -> bool:
        return matches(self.protected_topics, topic)

    def policy(self, topic: str) -> DeletionPolicy | None:
        """By which the topic's records may be deleted; the first that matches. None: never.

        Kafka's own topics and those of logferry are never touched.
        """
        if topic.startswith(("__", f"{self.prefix}.")) or self.is_protected(topic):
            return None
        return next((policy for policy in self.deletion.policies if matches(policy.topics, topic)), None)


def matches(patterns: list[str], topic: str) -> bool:
    """Whether one of the patterns fits the topic's full name, or its name without the data centre."""
    return any(fnmatchcase(topic, one) or fnmatchcase(topic.partition(".")[2], one) for one in patterns)


# Reads the keeper's configuration. Raises ConfigError.
load = partial(load_as, KeeperConfig)
