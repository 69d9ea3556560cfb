"""The configuration of an audit of everything: one TOML file, checked as a whole before anything is read."""

from __future__ import annotations

import glob
import tomllib
from pathlib import Path
from typing import Annotated, Final

from logferry.gateway.config import KafkaSettings, Pattern, load_as
from logferry.gateway.contract.chunk import check_dc
from logferry.ops.cli.problems import WrongUse
from pydantic import BaseModel, ConfigDict, Field, field_validator

_OURS: Final = ("tables", "files", "keep", "copies", "topics")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CopySettings(_Strict):
    """Another data centre that has a copy. ``topics``: patterns of their names without the data centre."""

    dc: str
    kafka: KafkaSettings
    topics: Annotated[list[Pattern], Field(min_length=1)] = ["*"]

    @field_validator("dc")
    @classmethod
    def _dc(cls, dc: str) -> str:
        return check_dc(dc)


class AuditConfig(_Strict):
    """``dc``, ``prefix`` and ``source_retention_ms``: as the gateway has them. ``topics``: as writers name them, none
    for all. ``files``: patterns of original files. ``keep``: where it is kept what was proven.
    """

    dc: str | None = None
    prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "logferry"
    source_retention_ms: Annotated[int, Field(ge=1000)] = 14 * 86_400_000
    kafka: KafkaSettings
    topics: list[str] = []
    tables: list[Path] = []
    files: list[str] = []
    copies: list[CopySettings] = []
    keep: Path | None = None

    @field_validator("dc")
    @classmethod
    def _dc(cls, dc: str | None) -> str | None:
        return None if dc is None else check_dc(dc)

    @field_validator("copies")
    @classmethod
    def _copies(cls, copies: list[CopySettings]) -> list[CopySettings]:
        names = [copy.dc for copy in copies]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{twice[0]} stands there twice")
        return copies


def is_audit(path: Path) -> bool:
    """Whether a configuration is an audit's, and not a gateway's, which serves as well. Errors are told by reading."""
    try:
        return any(name in _OURS for name in tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False


def load(path: Path) -> AuditConfig:
    """Raises ConfigError."""
    return load_as(AuditConfig, path)


def found_files(patterns: list[str]) -> list[Path]:
    """The files that the patterns mean now. Raises WrongUse for a name without wildcards that is not there."""
    found: list[Path] = []
    for pattern in patterns:
        names = sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not names and not glob.has_magic(pattern):
            raise WrongUse(f"files: {pattern}: there is no such file")
        found += [Path(name) for name in names]
    return list(dict.fromkeys(found))
