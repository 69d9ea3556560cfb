"""The configuration of an audit: one TOML file, validated as a whole before any data is read."""

from __future__ import annotations

import glob
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

from logferry.gateway.config import Dc, KafkaSettings, Pattern
from logferry.loaders.config import Place, StoreSettings
from logferry.ops.cli.problems import UsageError
from pydantic import BaseModel, ConfigDict, Field

MAX_WORKERS: Final = 256
_OURS: Final = {"tables", "files", "state_file", "copies", "topics"}  # and no gateway's


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CopySettings(_Strict):
    """A data centre that mirrors the audited topics."""

    dc: Dc
    """Name of the data centre."""

    kafka: KafkaSettings
    """Kafka of the data centre."""

    topics: Annotated[list[Pattern], Field(min_length=1)] = ["*"]
    """Patterns of the mirrored topics, without the name of the data centre."""

    def takes(self, topic: str) -> bool:
        """Whether the topic, by its full name, is mirrored."""
        return any(fnmatchcase(topic.partition(".")[2], pattern) for pattern in self.topics)


class AuditConfig(StoreSettings, _Strict):
    """The configuration of ``logferry audit``."""

    dc: Dc | None = None
    """Data centre whose topics are audited; by default the only one in this Kafka."""

    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "logferry"
    """Prefix of the service's own topics, as in the gateway's configuration."""

    source_retention_ms: Annotated[int, Field(ge=1000)] = 14 * 86_400_000
    """Milliseconds after which the gateway forgets a silent source, as in its configuration."""

    kafka: KafkaSettings
    """Kafka of the data centre."""

    topics: list[str] = []
    """Topics to audit, as writers name them; by default all topics of the data centre."""

    tables: list[Place] = []
    """Paths or URIs of tables that are loaded from this Kafka."""

    files: list[str] = []
    """Paths or patterns of original files that were pushed."""

    copies: list[CopySettings] = []
    """Data centres that mirror the topics."""

    workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    """Processes that read at the same time; by default one for each processor."""

    state_file: Path | None = None
    """File that stores the proof, so that the next audit reads only newer data; by default none."""


def is_audit(path: Path) -> bool:
    """Whether a file is an audit's configuration, not a gateway's. An unreadable file is reported when it is loaded."""
    try:
        names = tomllib.loads(path.read_text(encoding="utf-8")).keys()
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False
    return bool(names & _OURS) or names <= AuditConfig.model_fields.keys()


def found_files(patterns: list[str]) -> list[Path]:
    """The files that match the patterns now. Raises UsageError for a path without wildcards that does not exist."""
    found: list[Path] = []
    for pattern in patterns:
        names = sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not names and not glob.has_magic(pattern):
            raise UsageError(f"files: {pattern}: no such file")
        found += [Path(name) for name in names]
    return list(dict.fromkeys(found))
