"""The named groups of a regular expression with their numbers, and the same expression without the names. Pure.

Java's names of groups have no ``_``, and it tells which there are only from version 20 on; so they are counted here,
and Java gets numbers. What is wrong with a pattern beyond that, Java says itself when the job starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_NAMED: Final = re.compile(r"\(\?<([a-zA-Z_][a-zA-Z0-9_]*)>")
_AGAIN: Final = re.compile(r"\\k<([a-zA-Z_][a-zA-Z0-9_]*)>")


class Grouped(NamedTuple):
    """``pattern`` with numbered groups only. ``groups``: name → number, in order."""

    pattern: str
    groups: Mapping[str, int]


def named_groups(pattern: str) -> Grouped:
    """Groups in character classes, behind backslashes and in ``\\Q…\\E`` are none. Raises ValueError for a name that
    stands twice, or is referred to and is none.
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
                raise ValueError(f"\\k<{again[1]}> refers to no group before it")
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
                    raise ValueError(f"the group {named[1]} stands twice")
                found[named[1]] = number
                plain.append("(")
                position = named.end()
                continue
            number += not pattern.startswith("(?", position)
        plain.append(pattern[position:end])
        position = end
    return Grouped("".join(plain), found)
