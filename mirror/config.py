"""The configuration of the mirror: one TOML file, checked as a whole before anything starts."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from logferry.gateway.config import MIB, KafkaSettings, Pattern, Service, load_as
from logferry.gateway.contract.chunk import check_dc
from logferry.gateway.contract.offset_history import lane_of
from logferry.gateway.identity import LaneIdentity
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Remote(_Strict):
    """A cluster that topics are taken from.

    ``topics``: patterns of their names without the data centre. ``prefixes``: the data centres whose topics are taken
    there, its own alone unless said otherwise: a chain takes those that it mirrors, too.
    """

    dc: str
    kafka: KafkaSettings
    topics: Annotated[list[Pattern], Field(min_length=1)] = ["*"]
    prefixes: list[str] = []
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @field_validator("dc")
    @classmethod
    def _dc(cls, dc: str) -> str:
        return check_dc(dc)

    @field_validator("prefixes")
    @classmethod
    def _prefixes(cls, names: list[str]) -> list[str]:
        return [check_dc(name) for name in names]

    @property
    def taken(self) -> tuple[str, ...]:
        """The data centres whose topics are taken here."""
        return tuple(self.prefixes or [self.dc])

    def is_chained(self, topic: str) -> bool:
        """Whether it is a copy there, too."""
        dc = topic.partition(".")[0]
        return dc != self.dc and dc in self.taken

    def takes(self, topic: str) -> bool:
        """By its full name."""
        dc, dot, name = topic.partition(".")
        return bool(dot) and dc in self.taken and any(fnmatchcase(name, pattern) for pattern in self.topics)


class Limits(_Strict):
    """Bytes. ``waiting_bytes``: of all that was fetched and is not committed; ``partition_bytes``: of one partition.

    ``fetch_bytes``: what one fetch from a broker brings at most, and ``transaction_bytes`` what one commit holds.
    """

    fetch_bytes: Annotated[int, Field(ge=64 * 1024, le=64 * MIB)] = 8 * MIB
    partition_bytes: Annotated[int, Field(ge=64 * 1024, le=64 * MIB)] = 2 * MIB
    waiting_bytes: Annotated[int, Field(ge=MIB)] = 48 * MIB
    transaction_bytes: Annotated[int, Field(ge=64 * 1024, le=32 * MIB)] = 8 * MIB


class MirrorConfig(Service):
    """What one data centre takes from others.

    ``carry_positions``: the committed positions of consumers come along. ``carry_sources``: so do the state topics of
    the gateways there, by which the gateway here can tell of their sources; the prefix must be the same.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    listen: str = "127.0.0.1:8180"
    lanes: Annotated[int, Field(ge=1, le=1024)] = 4
    carry_positions: bool = True
    carry_sources: bool = True
    remotes: Annotated[list[Remote], Field(min_length=1, alias="remote")]
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _together(self) -> MirrorConfig:
        seen: dict[str, str] = {}
        for remote in self.remotes:
            if remote.dc == self.dc:
                raise ValueError(f"remote: {remote.dc} is this data centre itself")
            for dc in remote.taken:
                if dc == self.dc:
                    raise ValueError(
                        f"remote {remote.dc}: prefixes: topics of {dc} are written here; taking them from elsewhere "
                        "would send them round in a circle"
                    )
                if dc in seen:
                    raise ValueError(f"topics of {dc} would come from {seen[dc]} and from {remote.dc}; choose one")
                seen[dc] = remote.dc
        if self.prefix in {self.dc, *seen}:
            raise ValueError(f"prefix: {self.prefix!r} is the name of a data centre too")
        self.check_ports()
        return self

    def url(self, worker: int) -> str:
        """Where others reach this worker."""
        return f"http://{self.advertised_host or self.listen.rpartition(':')[0]}:{self.port(worker)}"

    @property
    def group(self) -> str:
        """The consumer group whose members are the workers."""
        return f"{self.prefix}.mirror.{self.dc}"

    @property
    def state_topic(self) -> str:
        """The compacted topic with the progress of each partition; its partitions are the lanes."""
        return f"{self.prefix}.mirror.{self.dc}.state"

    @property
    def pairs_topic(self) -> str:
        """The history of offset pairs; its partitions are the lanes."""
        return f"{self.prefix}.mirror.{self.dc}.pairs"

    def sources_of(self, remote: Remote) -> frozenset[str]:
        """The state topics that come along. Of them alone no history of pairs is kept: nobody reads them by offsets."""
        if not self.carry_sources:
            return frozenset()
        return frozenset(f"{self.prefix}.gateway.{dc}.state" for dc in remote.taken)

    def lane_of(self, topic: str, partition: int) -> int:
        return lane_of(topic, partition, self.lanes)

    def lane(self, number: int) -> LaneIdentity:
        prefixes = tuple(f"{dc}." for remote in self.remotes for dc in remote.taken)
        states = frozenset().union(*map(self.sources_of, self.remotes))
        own = {(self.state_topic, number), (self.pairs_topic, number)}

        def may_write(topic: str, partition: int) -> bool:
            if (topic, partition) in own:
                return True
            is_mirrored = topic.startswith(prefixes) or topic in states
            return is_mirrored and self.lane_of(topic, partition) == number

        transactional_id = f"{self.prefix}.mirror.{self.dc}.lane-{number}"
        return LaneIdentity(number, transactional_id, (self.state_topic, number), may_write)


def load(path: Path) -> MirrorConfig:
    """Raises ConfigError."""
    return load_as(MirrorConfig, path)
