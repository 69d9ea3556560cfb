"""What the demo does, where, and with which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logferry.gateway.contract.chunk import full_topic

DC: Final = "dc1"
OTHER_DC: Final = "dc2"
TOPIC: Final = "nginx"
FULL_TOPIC: Final = full_topic(DC, TOPIC)
PARTITIONS: Final = 4
WORKERS: Final = 2
LANES: Final = 8
RATE_MB_S: Final = 3.0
SEGMENT_S: Final = 10


@dataclass(frozen=True)
class Plan:
    """``files``: the user's, absolute; none: access logs are generated for at least ``seconds``."""

    data: Path
    files: tuple[Path, ...]
    seconds: int
    seed: int
    port: int

    @property
    def stack(self) -> Path:
        """Kafka and the gateways."""
        return self.data / "stack"

    @property
    def mirror(self) -> Path:
        """The configuration of the mirror in the other data centre."""
        return self.stack / OTHER_DC / "mirror.toml"

    @property
    def table(self) -> Path:
        return self.data / "warehouse" / TOPIC

    @property
    def generated(self) -> Path:
        return self.data / "logs"

    @property
    def is_live(self) -> bool:
        """The files grow while they are sent, and their lines have times: those of the user are as they are."""
        return not self.files

    @property
    def runs(self) -> Path:
        """What the processes of the story said."""
        return self.data / "runs"

    def originals(self) -> list[Path]:
        """The files whose lines must be in the table, as they are now."""
        return list(self.files) or sorted(path for path in self.generated.glob("*.log*"))
