"""JSON as Spark's Jackson parser reads it: tokens of one object, and their text.

Differences from Python's ``json``: strings may have single quotes; ``NaN``, ``Infinity``, ``+INF`` and the like are
numbers; whatever follows the object is ignored; numbers over 1,000 digits, names over 50,000 characters and more than
1,000 levels are errors. An object is a tuple of pairs, so that names may occur twice.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from logferry.loaders.query.spark_values import double_text

# Read at most these by Python's scanner: shorter lines cannot reach Jackson's limits.
_SHORT: Final = 900
_MOST_DEEP: Final = 1000
_LONGEST_NAME: Final = 50_000
_LONGEST_NUMBER: Final = 1000


class NotJson(ValueError):
    """The text does not begin with a JSON object that Jackson reads."""


class Int(str):
    """A number without fraction and exponent, as written."""

    __slots__ = ()


class Float(str):
    """Any other number, as written; also NaN, Infinity and -Infinity."""

    __slots__ = ()


class Pairs(tuple[tuple[str, Any], ...]):
    """An object."""

    __slots__ = ()


_SCANNER: Final = json.JSONDecoder(parse_int=Int, parse_float=Float, parse_constant=Float, object_pairs_hook=Pairs)


def read_object(text: str) -> Pairs:
    """Values: str, `Int`, `Float`, bool, None, `Pairs`, list. Raises NotJson, also where the root is no object."""
    if len(text) <= _SHORT:
        try:
            found = _SCANNER.decode(text)
        except (ValueError, RecursionError):
            pass
        else:
            if not isinstance(found, Pairs):
                raise NotJson("not an object")
            return found
    return _Reader(text).root()


def is_variant(text: str) -> bool:
    """Whether Spark's ``try_parse_json`` reads the text: any value of strict JSON, with the same limits, no object of
    which has a name twice; whatever follows the value is ignored."""
    try:
        _Reader(text, is_strict=True).value()
    except NotJson:
        return False
    return True


_SPACE: Final = re.compile(r"[ \t\n\r]*")
_NUMBER: Final = re.compile(r"-?(?P<whole>0|[1-9][0-9]*)(?P<point>\.(?P<rest>[0-9]+))?(?P<e>[eE][+-]?(?P<exp>[0-9]+))?")
_NOT_FINITE: Final = re.compile(r"NaN|Infinity|[+-]INF|[+-]Infinity")
_FINITE_NAMES: Final = {"+INF": "Infinity", "-INF": "-Infinity", "+Infinity": "Infinity"}
_WORDS: Final = {"true": True, "false": False, "null": None}
_WORD: Final = re.compile("true|false|null")
# Jackson takes no letter, digit or the like right after a word.
_ENDS: Final = re.compile(r"[\s,\]}:]|\Z")
_PLAIN: Final = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\\\x00-\x1f]*")}
_ESCAPES: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX: Final = re.compile("[0-9a-fA-F]{4}")


class _Reader:
    """``is_strict``: with Jackson's defaults, and names in an object differ."""

    def __init__(self, text: str, *, is_strict: bool = False) -> None:
        self._text, self._at, self._is_strict = text, 0, is_strict

    def root(self) -> Pairs:
        self._skip()
        if self._peek() != "{":
            raise NotJson("not an object")
        return self.value()  # type: ignore[no-any-return]

    def value(self) -> Any:
        # Jackson is not recursive, and neither is this.
        stack: list[tuple[str, list[Any], str | None]] = []
        while True:
            value = self._begin(stack)
            while value is not _OPENED:
                if not stack:
                    return value
                value = self._inside(stack, value)

    def _begin(self, stack: list[Any]) -> Any:
        """A value; `_OPENED` if its first part is next."""
        self._skip()
        letter = self._peek()
        if letter in "{[" and letter:
            self._at += 1
            if len(stack) >= _MOST_DEEP:
                raise NotJson("too deep")
            self._skip()
            if self._peek() == ("}" if letter == "{" else "]"):
                self._at += 1
                return Pairs() if letter == "{" else []
            stack.append((letter, [], self._name() if letter == "{" else None))
            return _OPENED
        return self._scalar(letter)

    def _inside(self, stack: list[Any], value: Any) -> Any:
        """Puts a value into what is open; returns this when it ends."""
        kind, found, name = stack[-1]
        found.append((name, value) if kind == "{" else value)
        self._skip()
        letter = self._peek()
        self._at += 1
        if letter == ",":
            if kind == "{":
                self._skip()
                stack[-1] = (kind, found, self._name())
            return _OPENED
        if letter != ("}" if kind == "{" else "]"):
            raise NotJson(f"{letter!r} at {self._at}")
        stack.pop()
        if kind == "{" and self._is_strict and len({name for name, _ in found}) < len(found):
            raise NotJson("a name comes twice")
        return Pairs(found) if kind == "{" else found

    @property
    def _quotes(self) -> tuple[str, ...]:
        return ('"',) if self._is_strict else ('"', "'")

    def _name(self) -> str:
        if self._peek() not in self._quotes:
            raise NotJson("no name")
        name = self._string()
        if len(name.encode("utf-16-le", "surrogatepass")) // 2 > _LONGEST_NAME:
            raise NotJson("a name is too long")
        self._skip()
        if self._peek() != ":":
            raise NotJson("no colon")
        self._at += 1
        return name

    def _scalar(self, letter: str) -> Any:
        if letter in self._quotes:
            return self._string()
        for pattern in (_WORD, _NUMBER) if self._is_strict else (_WORD, _NOT_FINITE, _NUMBER):
            match = pattern.match(self._text, self._at)
            if match is None:
                continue
            self._at = match.end()
            if not _ENDS.match(self._text, self._at):
                raise NotJson(f"not a value at {self._at}")
            if pattern is _WORD:
                return _WORDS[match[0]]
            if pattern is _NOT_FINITE:
                return Float(_FINITE_NAMES.get(match[0], match[0]))
            if sum(len(match[part] or "") for part in ("whole", "rest", "exp")) > _LONGEST_NUMBER:
                raise NotJson("a number is too long")
            return Float(match[0]) if match["point"] or match["e"] else Int(match[0])
        raise NotJson(f"not a value at {self._at}")

    def _string(self) -> str:
        quote = self._text[self._at]
        self._at += 1
        parts = []
        while True:
            plain = _PLAIN[quote].match(self._text, self._at)
            assert plain is not None
            parts.append(plain[0])
            self._at = plain.end()
            letter = self._peek()
            self._at += 1
            if letter == quote:
                found = "".join(parts)
                return found.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            if letter != "\\":
                raise NotJson("a string does not end, or has a control character")
            parts.append(self._escape())

    def _escape(self) -> str:
        letter = self._peek()
        self._at += 1
        if letter == "u":
            code = _HEX.match(self._text, self._at)
            if code is None:
                raise NotJson("\\u without four digits")
            self._at = code.end()
            return chr(int(code[0], 16))
        if letter not in _ESCAPES:
            raise NotJson(f"the escape \\{letter}")
        return _ESCAPES[letter]

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space is not None else self._at

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]


_OPENED: Final = object()

_ESCAPED: Final = re.compile('["\\\\\x00-\x1f\ud800-\udfff\U00010000-\U0010ffff]')
_SHORT_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def as_string(value: Any) -> str:
    """The value as Spark stores it in a column of strings; a surrogate that is alone becomes ``?``."""
    if isinstance(value, (Int, Float)) or not isinstance(value, str):
        return text_of(value)
    return whole_characters(value)


def whole_characters(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def text_of(value: Any) -> str:
    """The value as Jackson writes it."""
    if isinstance(value, Int):
        return "0" if value == "-0" else str(value)
    if isinstance(value, Float):
        number = float(value)
        text = double_text(number)
        return text if number - number == 0 else f'"{text}"'
    if isinstance(value, str):
        return f'"{_ESCAPED.sub(_escaped, value)}"'
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{text_of(str(name))}:{text_of(one)}" for name, one in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return "null" if value is None else "true" if value else "false"


def _escaped(match: re.Match[str]) -> str:
    letter = match[0]
    if letter in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[letter]
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02X}{units[i + 1]:02X}" for i in range(0, len(units), 2))
