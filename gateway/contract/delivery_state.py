"""The progress of a subscription in one partition: key and value of a record in the state topic of `deliver`. Pure.

The state of a *unit*: one subscription, one partition of a topic, and one of its shards. It is written before a batch
is sent for the first time, so that any worker cuts the batch in the same places again: the same bytes, the same token.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from logferry.gateway.contract.names import lane_of

DELIVERY_STATE_VERSION: Final = 1


class UnitKey(NamedTuple):
    """``shard``: sources are divided among the shards of a partition by a hash; 0 of 1 has all of them."""

    subscription: str
    topic: str
    partition: int
    shard: int = 0

    def encode(self) -> bytes:
        """NUL parts the fields: it is in none of them."""
        return "\0".join((self.subscription, self.topic, str(self.partition), str(self.shard))).encode()

    @classmethod
    def decode(cls, raw: bytes) -> UnitKey:
        """Raises ValueError."""
        subscription, topic, partition, shard = raw.decode().split("\0")
        return cls(subscription, topic, int(partition), int(shard))

    def lane(self, lanes: int) -> int:
        """The lane of `deliver` that it falls to. The partitions of a topic are spread evenly, as the load is."""
        return (lane_of(f"{self.subscription}\0{self.topic}", lanes) + self.partition) % lanes

    def __str__(self) -> str:
        return f"{self.subscription}: {self.topic}-{self.partition}" + (f" shard {self.shard}" if self.shard else "")


class DeliveryStop(NamedTuple):
    """Why a unit delivers nothing until an operator acts. ``kind``: of `gateway.delivery.progress.STOPS`."""

    kind: str
    detail: str
    at_ms: int


class DeliveryError(NamedTuple):
    """Why the last attempt failed; it is retried."""

    detail: str
    at_ms: int
    attempts: int


class DeliveryState(NamedTuple):
    """``subscription_id``: a subscription that was removed and made again is another one.

    ``epoch``: begins with the time in ms, and rises whenever another worker, or this one again, takes over the unit.
    ``position``: everything before is done. ``ends``: where the planned batches end, in order; the first one begins at
    ``position``. ``shape``: format, compression and filters of the planned batches, as JSON. ``replay``, ``resumed``:
    the numbers of the last replay and the last resumption that the unit has followed; ``replay`` begins with the time
    at which the subscription was made.
    """

    subscription_id: str
    topic_id: bytes
    epoch: int
    position: int
    ends: tuple[int, ...] = ()
    shape: str = ""
    replay: int = 0
    resumed: int = 0
    stop: DeliveryStop | None = None
    error: DeliveryError | None = None

    def encode(self) -> bytes:
        found: dict[str, Any] = {"version": DELIVERY_STATE_VERSION, **self._asdict(), "topic_id": self.topic_id.hex()}
        for name in ("stop", "error"):
            value = getattr(self, name)
            found[name] = None if value is None else value._asdict()
        return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> DeliveryState:
        """Raises ValueError: another version, or not a state."""
        try:
            found: dict[str, Any] = json.loads(raw)
            if (version := found.pop("version")) != DELIVERY_STATE_VERSION:
                raise ValueError(f"state of version {version}; this logferry reads version {DELIVERY_STATE_VERSION}")
            stop, error = found["stop"], found["error"]
            return cls(
                **{
                    **found,
                    "topic_id": bytes.fromhex(found["topic_id"]),
                    "ends": tuple(map(int, found["ends"])),
                    "stop": None if stop is None else DeliveryStop(**stop),
                    "error": None if error is None else DeliveryError(**error),
                }
            )
        except (KeyError, TypeError, AttributeError) as wrong:
            raise ValueError(f"a delivery's state that cannot be read: {wrong!r}") from None
