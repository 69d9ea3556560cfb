"""Where this program keeps things of one user: the XDG base directories.

Standard library only: asked before anything is installed.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Can be removed at any time; what is missing is made or fetched again."""
    return _base("XDG_CACHE_HOME", ".cache") / "logferry"


def data_dir() -> Path:
    """Where ``logferry up`` keeps its Kafka data unless told otherwise."""
    return _base("XDG_DATA_HOME", ".local/share") / "logferry"


def _base(variable: str, below_home: str) -> Path:
    """The specification says: a relative path in the variable is to be ignored."""
    chosen = Path(os.environ.get(variable) or "")
    return chosen if chosen.is_absolute() else Path.home() / below_home
