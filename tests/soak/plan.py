"""What a campaign consists of: its processes and links by name, and the faults, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

DCS: Final = ("dc1", "dc2")
BROKERS: Final = (1, 2, 3)
WORKERS: Final = 2
TOPIC: Final = "soak"
HOSTS: Final = ("host1", "host2", "host3")
MODES: Final = ("create", "dateext", "compress", "delaycompress", "copytruncate", "copytruncate-compress")

GATEWAY_WORKERS: Final = tuple(f"{dc}/gateway-{n}" for dc in DCS for n in range(WORKERS))
MIRROR_WORKERS: Final = tuple(f"{dc}/mirror-{n}" for dc in DCS for n in range(WORKERS))
KAFKA_NODES: Final = tuple(f"{dc}/kafka-{n}" for dc in DCS for n in BROKERS)
LINKS: Final = tuple(
    [f"{dc}/client-gateway-{n}" for dc in DCS for n in range(WORKERS)]
    + [f"{dc}/{who}-kafka-{n}" for dc in DCS for who in ("gateway", "mirror") for n in BROKERS]
)
FILES: Final = tuple(f"{host}/{mode}" for host in HOSTS for mode in MODES)
# Whose clock can be wrong: a gateway, or a host. One at a time: no two clocks that agree on a wrong time.
CLOCKS: Final = ("dc2/gateway", "host2")


class Kind(NamedTuple):
    """``weight``: how often, of the sum of all; ``seconds``: how long, from and to; 0: it has no duration."""

    weight: float
    seconds: tuple[float, float]
    targets: tuple[str, ...]


_AT_ONCE: Final = (0.0, 0.0)
KINDS: Final[dict[str, Kind]] = {
    "gateway worker killed": Kind(5, _AT_ONCE, GATEWAY_WORKERS),
    "gateway worker frozen": Kind(5, (1, 9), GATEWAY_WORKERS),
    "gateway supervisor killed": Kind(1, _AT_ONCE, ("dc1/gateway", "dc2/gateway")),
    "gateway supervisor frozen": Kind(1, (1, 9), ("dc1/gateway", "dc2/gateway")),
    "mirror worker killed": Kind(3, _AT_ONCE, MIRROR_WORKERS),
    "mirror worker frozen": Kind(4, (1, 9), MIRROR_WORKERS),
    "mirror supervisor killed": Kind(0.7, _AT_ONCE, ("dc1/mirror", "dc2/mirror")),
    "push-client killed": Kind(5, _AT_ONCE, HOSTS),
    "push-client frozen": Kind(5, (1, 9), HOSTS),
    "loader killed": Kind(0.7, _AT_ONCE, ("loader",)),
    "loader frozen": Kind(2, (1, 9), ("loader",)),
    "broker killed": Kind(1.5, _AT_ONCE, KAFKA_NODES),
    "broker frozen": Kind(4, (1, 8), KAFKA_NODES),
    "controller killed": Kind(0.7, _AT_ONCE, DCS),
    "all brokers killed": Kind(0.3, _AT_ONCE, DCS),
    "all brokers frozen": Kind(1, (1, 5), DCS),
    "min ISR lost": Kind(0.5, (4, 9), DCS),
    "link cut": Kind(7, _AT_ONCE, LINKS),
    "link refused": Kind(6, (1, 6), LINKS),
    "link silent": Kind(6, (1, 8), LINKS),
    "link slow": Kind(4, (2, 9), LINKS),
    "answers lost": Kind(7, (1, 3), LINKS),
    "disk full": Kind(4, (1, 7), (*HOSTS, *HOSTS, "loader", "dc1/kafka-1", "dc2/kafka-3")),
    "clock shifted": Kind(2, (3, 8), CLOCKS),
    "topic created and deleted": Kind(2, (1, 6), DCS),
    "partition added": Kind(0.5, _AT_ONCE, DCS),
    "tokens changed": Kind(1.5, _AT_ONCE, DCS),
    "certificate changed": Kind(1.5, _AT_ONCE, DCS),
    "state folder copied": Kind(0.4, _AT_ONCE, HOSTS),
    "host rebooted": Kind(1.5, (0.5, 4), HOSTS),
    "file rotated": Kind(12, _AT_ONCE, FILES),
}


class Fault(NamedTuple):
    """``at_s``: since the start of the campaign; ``seconds``: until it is mended; ``draw``: for choices of detail."""

    at_s: float
    kind: str
    target: str
    seconds: float
    draw: float

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at_s:7.1f} s  {self.kind}: {self.target}{lasting}"


def draw_faults(seed: int, seconds: float, every_s: float) -> Iterator[Fault]:
    """The same faults for the same arguments. One begins every ``every_s`` on average, whatever others last."""
    rng = random.Random(seed)
    names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    at = rng.expovariate(1 / every_s)
    while at < seconds:
        name = rng.choices(names, weights)[0]
        kind = KINDS[name]
        yield Fault(at, name, rng.choice(kind.targets), rng.uniform(*kind.seconds), rng.random())
        at += rng.expovariate(1 / every_s)
