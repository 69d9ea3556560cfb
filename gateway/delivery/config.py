"""The configuration of `logferry deliver`: one TOML file, checked as a whole before anything starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from logferry.gateway.config import MIB, Dcs, ServiceConfig, Strict, load_as
from logferry.gateway.kafka.types import LaneIdentity
from logferry.gateway.subscriptions import NAME, AllowedAddresses, PushSubscription
from pydantic import Field, field_validator, model_validator


class DeliverLimits(Strict):
    """Limits of memory of one worker process, in bytes."""

    batches_bytes: Annotated[int, Field(ge=16 * MIB)] = 128 * MIB
    """The most bytes of batches that are ready or under way, shared fairly among the subscriptions."""
    pages_bytes: Annotated[int, Field(ge=4 * MIB)] = 64 * MIB
    """Records that were read ahead, and that are kept for the other subscriptions to the same topics."""


class DeliverConfig(ServiceConfig):
    """Push delivery of one data centre: it sends topics that are here to receivers."""

    service = "deliver"
    data_centres: Dcs = Field(default_factory=list)
    """The data centres whose topics can be delivered from here, in addition to this one."""
    listen: str = "127.0.0.1:8290"
    """The address of the first worker as `host:port`; worker i listens on port + i."""
    lanes: Annotated[int, Field(ge=1, le=1024)] = 8
    """The number of lanes, which is fixed when the state topic is created; the most workers that share the work."""
    secrets_dir: Path | None = None
    """The folder of the keys, tokens and certificates that subscriptions name."""
    allowed_networks: list[str] = Field(default_factory=list)
    """Networks that are not public and may be delivered to, as `10.0.0.0/8`; default: none."""
    subscriptions: dict[str, PushSubscription] = Field(default_factory=dict)
    """Subscriptions by name; others are made by HTTP."""
    limits: DeliverLimits = DeliverLimits()
    """Limits of memory."""

    @field_validator("allowed_networks")
    @classmethod
    def _networks(cls, networks: list[str]) -> list[str]:
        AllowedAddresses(networks)
        return networks

    @model_validator(mode="after")
    def _together(self) -> DeliverConfig:
        self.check_names_and_ports({self.dc, *self.data_centres})
        for name, subscription in self.subscriptions.items():
            if not NAME.match(name):
                raise ValueError(f"subscriptions: {name!r} is not 1 to 100 of a-z A-Z 0-9 . _ -")
            try:
                subscription.check_dead_letters(self.dc)
            except ValueError as error:
                raise ValueError(f"subscriptions.{name}.{error}") from None
        return self

    @property
    def known_dcs(self) -> frozenset[str]:
        return frozenset({self.dc, *self.data_centres})

    @property
    def subscriptions_topic(self) -> str:
        """The compacted topic with the subscriptions, by name."""
        return f"{self.group}.subscriptions"

    def lane(self, number: int) -> LaneIdentity:
        state_topic, written = self.state_topic, f"{self.dc}."
        return LaneIdentity(
            number,
            f"{self.group}.lane-{number}",
            (state_topic, number),
            lambda topic, partition: topic.startswith(written) or (topic, partition) == (state_topic, number),
        )


# Reads the configuration of deliver. Raises ConfigError.
load = partial(load_as, DeliverConfig)
