"""Reading tables from outside: `realtime` (Spark and Kafka) and the Spark data source `LogferrySource` (HTTP)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logferry.gateway.config import KafkaSettings
    from logferry.loaders.query.realtime_view import realtime
    from logferry.loaders.query.spark_source import LogferrySource

__all__ = ["KafkaSettings", "LogferrySource", "realtime"]

_MODULES = {
    "KafkaSettings": "logferry.gateway.config",
    "LogferrySource": f"{__name__}.spark_source",
    "realtime": f"{__name__}.realtime_view",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for, so that one works without the requirements of the other."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
