"""Names, sizes, durations and folders of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logferry.gateway.contract.names import full_topic

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
class DemoPlan:
    """``files``: absolute paths of the user's files; empty: access logs are generated for at least ``seconds``."""

    data: Path
    files: tuple[Path, ...]
    seconds: int
    seed: int
    port: int

    @property
    def stack(self) -> Path:
        """Folder of Kafka, gateways and mirrors."""
        return self.data / "stack"

    @property
    def table(self) -> Path:
        return self.data / "warehouse" / TOPIC

    @property
    def generated(self) -> Path:
        return self.data / "logs"

    @property
    def is_live(self) -> bool:
        """Whether the files grow while they are sent and their lines have times; False for the user's files."""
        return not self.files

    @property
    def runs(self) -> Path:
        """Folder of the processes' logs."""
        return self.data / "runs"

    def originals(self) -> list[Path]:
        """The files whose lines must be in the table, at this moment."""
        return list(self.files) or sorted(path for path in self.generated.glob("*.log*"))
