"""What a read session reads: topics by name and by pattern, and the filters of its chunks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from logferry.gateway.errors import Problem


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a session reads: topics by full name and by pattern, of those that its caller may read; and its filters."""

    consumer: str
    topics: frozenset[str]
    patterns: tuple[str, ...]
    may_read: Callable[[str], bool]
    source_prefix: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """The topics to read, of those that exist."""
        return frozenset(name for name in names if name in self.topics or self._fits(name))

    def _fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns) and self.may_read(name)

    def passes(self, source_id: str, attributes: dict[str, str]) -> bool:
        return source_id.startswith(self.source_prefix) and self.attributes.items() <= attributes.items()


def unknown_topic(topic: str) -> Problem:
    return Problem("unknown-topic", f"there is no topic {topic}", topic=topic)
