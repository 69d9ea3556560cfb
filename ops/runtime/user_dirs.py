"""The user's folders by the XDG base directory specification.

Standard library only: used before anything is installed.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """May be removed at any time; its files are created or fetched again."""
    return _base("XDG_CACHE_HOME", ".cache") / "logferry"


def data_dir() -> Path:
    """The default folder of ``logferry up``."""
    return _base("XDG_DATA_HOME", ".local/share") / "logferry"


def _base(variable: str, below_home: str) -> Path:
    """By the specification, a relative path in the variable is ignored."""
    chosen = Path(os.environ.get(variable) or "")
    return chosen if chosen.is_absolute() else Path.home() / below_home
