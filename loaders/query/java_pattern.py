r"""Java's regular expressions as Python's, where both match alike.

Both try alternatives in order and backtrack, and the line is matched as a whole. What differs is translated: ``\s``,
``\w``, ``\d`` and case are ASCII; ``.`` and ``$`` know Java's line terminators; a class is written again, with each of
its characters escaped. What cannot be translated is refused: intersections and unions of classes, properties of
Unicode, flags within the pattern, a named group that repeats (the engines keep other texts of it).

``\b`` depends on the version of Java outside of ASCII, so with it a line must be ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from logferry.loaders.errors import LoaderConfigError

_SPACE: Final = r" \t\n\x0b\f\r"
_CLASSES: Final = {
    "d": "0-9",
    "w": "a-zA-Z0-9_",
    "s": _SPACE,
    "h": r" \t\xa0\u1680\u180e\u2000-\u200a\u202f\u205f\u3000",
}
_POSIX: Final = {
    "Alpha": "a-zA-Z",
    "Digit": "0-9",
    "Alnum": "a-zA-Z0-9",
    "Upper": "A-Z",
    "Lower": "a-z",
    "XDigit": "0-9a-fA-F",
    "Punct": r"!-/:-@\[-`{-~",
    "Space": _SPACE,
    "ASCII": r"\x00-\x7f",
    "Blank": r" \t",
}
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "a": "\a", "e": "\x1b"}
_QUANTIFIER: Final = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})[+?]?")
_GROUP: Final = re.compile(r"\(\?<(?P<name>[a-zA-Z][a-zA-Z0-9]*|[a-zA-Z_][a-zA-Z0-9_]*)>|\(\?(?:[:>=!]|<[=!])|\((?!\?)")
_FLAGS: Final = re.compile(r"\(\?([is]+)\)")
_HEX: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|x\{([0-9a-fA-F]{1,6})\})")
_PROPERTY: Final = re.compile(r"\\([pP])\{(?:Is)?([A-Za-z]+)\}")
# At the end, or before a line terminator that ends the line.
_DOLLAR: Final = r"(?=[\r\x85\u2028\u2029]?\Z)"


class TranslatedPattern(NamedTuple):
    """``groups``: names in order, as the settings have them. ``simple``: RE2 matches it alike, if case counts."""

    compiled: re.Pattern[str]
    groups: tuple[str, ...]
    ascii_only: bool
    simple: str | None


def translate(pattern: str) -> TranslatedPattern:
    """Raises LoaderConfigError, which names what has no equal."""
    return _Translation(pattern).result()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0
        self._out: list[str] = []
        # The same for RE2, which has no look-around, no possessive quantifiers and no references.
        self._re2: list[str] = []
        self._is_simple = True
        self._names: list[str] = []
        self._ascii_only = False
        # Where the groups that are open have their first name.
        self._open: list[int] = []
        self._flags = re.DOTALL | re.ASCII

    def result(self) -> TranslatedPattern:
        while (flags := _FLAGS.match(self._pattern, self._at)) is not None:
            self._flags |= re.IGNORECASE if "i" in flags[1] else re.NOFLAG
            self._at = flags.end()
        while self._at < len(self._pattern):
            self._step()
        try:
            compiled = re.compile("".join(self._out), self._flags)
        except re.error as error:
            raise self._refused(str(error)) from None
        simple = f"(?s)\\A(?:{''.join(self._re2)})\\z" if self._is_simple and not self._flags & re.IGNORECASE else None
        return TranslatedPattern(compiled, tuple(self._names), self._ascii_only, simple)

    def _step(self) -> None:
        pattern, at = self._pattern, self._at
        letter = pattern[at]
        if letter == "(":
            self._group()
        elif letter == ")":
            self._at += 1
            first = self._open.pop() if self._open else 0
            self._put(")")
            self._quantified(self._names[first:])
        elif letter == "[":
            self._class()
        elif letter == "\\":
            self._escape()
        elif letter == ".":
            self._single(".")
        elif letter == "$":
            self._at += 1
            self._out.append(_DOLLAR)
            self._is_simple = self._is_simple and self._at == len(pattern)
        elif letter in "|^":
            self._at += 1
            self._put(letter)
        elif letter in "*+?{":
            raise self._refused(pattern[at : at + 5])
        else:
            self._single(re.escape(letter))

    def _put(self, text: str) -> None:
        self._out.append(text)
        self._re2.append(text)

    def _single(self, text: str, length: int = 1) -> None:
        """One character or class, and its quantifier."""
        self._at += length
        self._put(text)
        self._quantified(())

    def _quantified(self, names: Mapping[str, int] | tuple[str, ...] | list[str]) -> None:
        quantifier = _QUANTIFIER.match(self._pattern, self._at)
        if quantifier is None:
            return
        text = quantifier[0]
        if names and not text.startswith("?"):
            raise self._refused(f"the group {next(iter(names))} repeats by {text}")
        self._at = quantifier.end()
        self._put(text)
        counts = [int(n) for n in re.findall(r"[0-9]+", text)]
        if (text.endswith("+") and len(text) > 1) or max(counts, default=0) > 200:
            self._is_simple = False

    def _group(self) -> None:
        match = _GROUP.match(self._pattern, self._at)
        if match is None:
            raise self._refused(self._pattern[self._at : self._at + 6])
        self._open.append(len(self._names))
        self._at = match.end()
        if match["name"] is not None:
            self._names.append(match["name"])
            self._put(f"(?P<{match['name']}>")
            return
        self._put("(?:" if match[0] == "(" and not self._has_references() else match[0])
        if match[0] not in ("(", "(?:"):
            self._is_simple = False

    def _has_references(self) -> bool:
        return re.search(r"\\[1-9]", self._pattern) is not None

    def _escape(self) -> None:
        pattern, at = self._pattern, self._at
        letter = pattern[at + 1 : at + 2]
        if letter == "Q":
            end = pattern.find("\\E", at)
            text = pattern[at + 2 : end if end >= 0 else len(pattern)]
            self._at = end + 2 if end >= 0 else len(pattern)
            for one in text[:-1]:
                self._put(re.escape(one))
            if text:
                self._put(re.escape(text[-1]))
                self._quantified(())
        elif letter in ("b", "B", "A", "z", "Z"):
            self._at += 2
            self._ascii_only = self._ascii_only or letter in "bB"
            self._out.append({"z": r"\Z", "Z": _DOLLAR}.get(letter, f"\\{letter}"))
            self._re2.append(f"\\{letter}")
            self._is_simple = self._is_simple and letter != "Z"
        elif letter == "k" or letter.isdigit():
            self._reference()
        else:
            text, length = self._characters(at, in_class=False)
            self._single(text, length)

    def _reference(self) -> None:
        named = re.compile(r"\\k<([a-zA-Z_0-9]+)>|\\([1-9])(?![0-9])").match(self._pattern, self._at)
        if named is None:
            raise self._refused(self._pattern[self._at : self._at + 3])
        self._is_simple = False
        self._single(f"(?P={named[1]})" if named[1] else f"(?:\\{named[2]})", len(named[0]))

    def _characters(self, at: int, *, in_class: bool) -> tuple[str, int]:
        """The character or class after a backslash, written as of a class if it is in one; and its length."""
        pattern = self._pattern
        letter = pattern[at + 1 : at + 2]
        if letter in _CLASSES:
            return (_CLASSES[letter] if in_class else f"[{_CLASSES[letter]}]"), 2
        if letter.lower() in _CLASSES and letter:
            if in_class:
                if letter == "H":
                    raise self._refused("\\H in a class")
                self._is_simple = False
                return f"\\{letter}", 2
            return f"[^{_CLASSES[letter.lower()]}]", 2
        if letter in _CONTROLS:
            return re.escape(_CONTROLS[letter]), 2
        if (code := _HEX.match(pattern, at)) is not None:
            return re.escape(chr(int(code[1] or code[2] or code[3], 16))), len(code[0])
        if (named := _PROPERTY.match(pattern, at)) is not None and named[2] in _POSIX:
            inside = _POSIX[named[2]]
            if named[1] == "p":
                return (inside if in_class else f"[{inside}]"), len(named[0])
            if not in_class:
                return f"[^{inside}]", len(named[0])
        if not letter or letter.isalnum():
            raise self._refused(pattern[at : at + 8])
        return re.escape(letter), 2

    def _class(self) -> None:
        pattern, at = self._pattern, self._at + 1
        out = ["["]
        if pattern[at : at + 1] == "^":
            out.append("^")
            at += 1
        first = at
        while pattern[at : at + 1] != "]" or at == first:
            letter = pattern[at : at + 1]
            if not letter or letter == "[" or pattern.startswith("&&", at) or pattern.startswith("\\Q", at):
                raise self._refused(pattern[self._at : at + 2])
            if letter == "\\":
                text, length = self._characters(at, in_class=True)
                out.append(text)
                at += length
            elif letter == "-" and at != first and pattern[at + 1 : at + 2] != "]":
                if len(out[-1]) > 2 and not out[-1].startswith("\\"):
                    raise self._refused(pattern[self._at : at + 2])
                out.append("-")
                at += 1
            else:
                out.append(re.escape(letter))
                at += 1
        self._single("".join(out) + "]", at + 1 - self._at)

    def _refused(self, part: str) -> LoaderConfigError:
        return LoaderConfigError(
            f"pattern: {part!r} may match otherwise outside of Java: the records not loaded yet cannot be parsed "
            "without Spark"
        )
