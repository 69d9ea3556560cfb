"""The named groups of a regular expression with their numbers, and the same expression without the names. Pure.

Java's group names have no ``_``, and Java lists them only from version 20 on; so groups are counted here, and Java gets
numbers. Java reports other mistakes in a pattern when the job starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_NAMED: Final = re.compile(r"\(\?<([a-zA-Z_][a-zA-Z0-9_]*)>")
_AGAIN: Final = re.compile(r"\\k<([a-zA-Z_][a-zA-Z0-9_]*)>")


class NumberedPattern(NamedTuple):
    """``pattern`` with numbered groups only. ``groups``: name → number, in order."""

    pattern: str
    groups: Mapping[str, int]


def named_groups(pattern: str) -> NumberedPattern:
    """Parentheses in character classes, after backslashes and in ``\\Q…\\E`` are not groups. Raises ValueError for a
    duplicate name, or a reference to an unknown one.
    """
    found: dict[str, int] = {}
    plain: list[str] = []
    number = classes = position = 0
    while position < len(pattern):
        end = position + 1
        text = pattern[position]
        if pattern.startswith("\\Q", position):
            close = pattern.find("\\E", position)
            end = len(pattern) if close < 0 else close + 2
        elif (again := _AGAIN.match(pattern, position)) is not None:
            if again[1] not in found:
                raise ValueError(f"\\k<{again[1]}> does not refer to a group before it")
            plain.append(f"(?:\\{found[again[1]]})")
            position = again.end()
            continue
        elif text == "\\":
            end = position + 2
        elif text == "[":
            classes += 1
        elif text == "]":
            classes = max(0, classes - 1)
        elif text == "(" and not classes:
            named = _NAMED.match(pattern, position)
            if named is not None:
                number += 1
                if named[1] in found:
                    raise ValueError(f"the group {named[1]} is defined twice")
                found[named[1]] = number
                plain.append("(")
                position = named.end()
                continue
            number += not pattern.startswith("(?", position)
        plain.append(pattern[position:end])
        position = end
    return NumberedPattern("".join(plain), found)
