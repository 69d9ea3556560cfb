"""The column ``rescued`` of a line of JSON, as Spark makes it by `parsing.formats`, without Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Final

from logferry.loaders.parsing.columns import MEMBER_KEY, NO_MEMBER, member_pattern
from logferry.loaders.query.jackson import whole_characters

_KEY: Final = re.compile(MEMBER_KEY)
_EMPTY: Final = re.compile(NO_MEMBER.replace(r"\z", r"\Z"))


class NotStrict(ValueError):
    """The line has JSON that cannot be rescued."""


class Members:
    """Of lines that Jackson reads. ``names``: the columns, whose keys are not rescued."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        # Each match begins where the one before ended, which Java calls \G.
        self._member = re.compile(member_pattern(names).replace(r"\G", "", 1))

    def of(self, line: str) -> str | None:
        """A JSON object of the other members, None without any. Raises NotStrict."""
        line = line.rstrip(" ")
        found, at = [], 0
        while (match := self._member.match(line, at)) is not None:
            at = match.end()
            if match[1]:
                found.append(match[1])
        if (not at or at < len(line)) and _EMPTY.match(line) is None:
            raise NotStrict
        if len(found) > 1 or (found and "\\" in found[0]):
            last = {_key(member): number for number, member in enumerate(found)}
            kept = sorted(number for key, number in last.items() if key not in self._names)
            found = [found[number] for number in kept]
        return f"{{{','.join(found)}}}" if found else None


def _key(member: str) -> str:
    match = _KEY.match(member)
    assert match is not None
    return whole_characters(json.loads(match[0])) if "\\" in match[0] else match[0][1:-1]
