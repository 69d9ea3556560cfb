r"""Lines to the texts of a parser's columns, without Spark: logfmt, regular expressions, delimited fields.

Each format has a slow way, in Python, which is the rule (that of `parsing.formats`), and a fast one in Arrow for lines
whose form leaves one reading only. Both give the same texts; the fast one leaves the other lines to the slow one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from logferry.loaders.parsing.columns import MARK
from logferry.loaders.query.java_pattern import translate

MARKED: Final = "the line holds the control character U+0001"
LONGEST: Final = 32_768
TOO_LONG: Final = f"the line is longer than {LONGEST} characters: too long for a regular expression"
NO_FIT: Final = "the line does not fit the pattern"
NOT_LOGFMT: Final = "the line is not logfmt: key=value …"
FIELDS: Final = "fields"

# The texts of a line's columns; as a string: why it has none.
Read = Mapping[str, str | None] | str


class Texts(NamedTuple):
    """``rows``: indices of lines. ``column`` gives their texts of a column, in this order.

    ``sure``: columns whose texts have these types, as name and type: nobody need look.
    """

    rows: np.ndarray
    column: Callable[[str], pa.Array]
    sure: frozenset[tuple[str, str]] = frozenset()


class Format(Protocol):
    def fast(self, lines: pa.StringArray) -> list[Texts]:
        """The lines that have one reading only."""
        ...

    def slow(self, line: str) -> Read:
        """Any line that is UTF-8, without the carriage return at its end."""
        ...


def split_lines(fmt: Format, lines: pa.StringArray) -> tuple[list[Texts], dict[int, str]]:
    """All lines as texts, and why the others are none."""
    found = [texts for texts in fmt.fast(lines) if len(texts.rows)]
    left = np.ones(len(lines), dtype=bool)
    for texts in found:
        left[texts.rows] = False
    rest, flaws = np.flatnonzero(left), {}
    rows: list[int] = []
    read: list[Mapping[str, str | None]] = []
    for row, line in zip(rest.tolist(), lines.take(pa.array(rest)).to_pylist(), strict=True):
        columns = fmt.slow(line)
        if isinstance(columns, str):
            flaws[row] = columns
        else:
            rows.append(row)
            read.append(columns)
    if rows:
        found.append(Texts(np.array(rows), lambda name: _texts(name, read)))
    return found, flaws


def _texts(name: str, read: Iterable[Mapping[str, str | None]]) -> pa.Array:
    kind = pa.map_(pa.string(), pa.string()) if name == FIELDS else pa.string()
    return pa.array([columns[name] for columns in read], kind)


def where(mask: pa.Array) -> np.ndarray:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False))


def every_nth(flat: pa.Array, first: int, step: int) -> pa.Array:
    """Each ``step``-th value."""
    return flat.take(pa.array(np.arange(first, len(flat), step)))


def _has_mark(lines: pa.StringArray) -> bool:
    data = lines.buffers()[2]
    return data is not None and bool((np.frombuffer(data, np.uint8) == ord(MARK)).any())


# ---- regular expressions ----------------------------------------------------------------------------------


class PatternLines:
    """Raises LoaderConfigError for a pattern that only Java can match."""

    def __init__(self, pattern: str) -> None:
        self._found = translate(pattern)
        self._simple = self._found.simple
        try:
            pc.extract_regex(pa.array([""]), self._simple or "(?P<x>.)")
        except pa.ArrowInvalid:  # RE2 knows less
            self._simple = None

    def fast(self, lines: pa.StringArray) -> list[Texts]:
        if self._simple is None:
            return []
        read = pc.extract_regex(lines, self._simple)
        # A text of so many bytes has at most as many characters.
        short = pc.less_equal(pc.binary_length(lines), LONGEST)
        fits = pc.and_(read.is_valid(), short)
        if _has_mark(lines):
            fits = pc.and_(fits, pc.invert(pc.match_substring(lines, MARK)))
        rows = where(fits)
        texts = read.take(pa.array(rows))
        return [Texts(rows, lambda name: texts.field(name))]

    def slow(self, line: str) -> Read:
        if len(line) > LONGEST:
            return TOO_LONG
        if MARK in line:
            return MARKED
        if self._found.ascii_only and not line.isascii():
            raise UnequalLine(f"the pattern has \\b, of which versions of Java differ in the line {line[:100]!r}")
        match = self._found.compiled.fullmatch(line)
        return NO_FIT if match is None else {name: match[name] or "" for name in self._found.groups}


class UnequalLine(ValueError):
    """A line that cannot be parsed as Spark would."""


# ---- logfmt -----------------------------------------------------------------------------------------------

_LOGFMT_QUOTED: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PAIR: Final = rf'[^\s="]++(?:=(?:{_LOGFMT_QUOTED}|[^\s"]*+))?+'
_PAIRS: Final = re.compile(rf"\s*+(?:{_PAIR}(?:\s++|\Z))++", re.ASCII | re.DOTALL)
_EACH: Final = re.compile(_PAIR, re.ASCII | re.DOTALL)
_ESCAPES: Final = (("\\\\", MARK), ('\\"', '"'), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), (MARK, "\\"))


# Forms of a portion's lines that are tried, and the fewest lines for which that pays.
_FORMS: Final = 4
_LEAST_LINES: Final = 64
_MOST_KEYS: Final = 100
_SPACE: Final = r" \t\n\x0b\f\r"


class _Form(NamedTuple):
    """Keys in order, and the expression of RE2 for lines that have them, each with a value without a backslash."""

    keys: tuple[str, ...]
    pattern: str


def _form(line: str) -> _Form | None:
    """None where the line's pairs are not ``key=value`` with one blank between two, or a key comes twice."""
    pairs = _EACH.findall(line)
    keys = tuple(pair.partition("=")[0] for pair in pairs)
    if not 0 < len(pairs) <= _MOST_KEYS or " ".join(pairs) != line or len({*keys}) < len(keys):
        return None
    if any("=" not in pair for pair in pairs):
        return None
    value = rf'"[^"\\]*"|[^"{_SPACE}]*'
    parts = (f"{_RE2_SPECIAL.sub(_escaped, key)}=(?P<g{n}>{value})" for n, key in enumerate(keys))
    return _Form(keys, f"^{' '.join(parts)}$")


_RE2_SPECIAL: Final = re.compile(r"[^A-Za-z0-9_\x80-\U0010ffff]")


def _escaped(match: re.Match[str]) -> str:
    return rf"\x{{{ord(match[0]):x}}}"


class LogfmtLines:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def fast(self, lines: pa.StringArray) -> list[Texts]:
        """Lines of an application have the same keys in the same order: one expression reads those of such a form."""
        found: list[Texts] = []
        left = np.arange(len(lines))
        if _has_mark(lines):
            left = where(pc.invert(pc.match_substring(lines, MARK)))
        for number in range(_FORMS):
            if len(left) < _LEAST_LINES:
                break
            among = lines if len(left) == len(lines) else lines.take(pa.array(left))
            form = _form(among[len(left) * number // _FORMS].as_py())
            if form is None:
                continue
            read = pc.extract_regex(among, form.pattern)
            fits = read.is_valid()
            found.append(self._texts_of(form, left[where(fits)], read.filter(fits)))
            left = left[where(pc.invert(fits))]
        return found

    def _texts_of(self, form: _Form, rows: np.ndarray, read: pa.StructArray) -> Texts:
        @cache
        def values(key: str) -> pa.Array:
            text = read.field(f"g{form.keys.index(key)}")
            is_quoted = pc.starts_with(text, '"')
            if not pc.any(is_quoted).as_py():
                return text
            inner = pc.binary_slice(pc.filter(text, is_quoted).cast(pa.binary()), 1, -1).cast(pa.string())
            return inner if len(inner) == len(text) else pc.replace_with_mask(text, is_quoted, inner)

        def column(name: str) -> pa.Array:
            if name != FIELDS:
                return values(name) if name in form.keys else pa.nulls(len(rows), pa.string())
            others = [key for key in form.keys if key not in self._names]
            ends = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * len(others))
            order = np.arange(len(others) * len(rows)).reshape(len(others), len(rows)).T.reshape(-1)
            flat = pa.concat_arrays([pa.array([], pa.string()), *map(values, others)]).take(pa.array(order))
            return pa.MapArray.from_arrays(ends, pa.array(others * len(rows), pa.string()), flat)

        return Texts(rows, column)

    def slow(self, line: str) -> Read:
        if MARK in line:
            return MARKED
        if _PAIRS.fullmatch(line) is None:
            return NOT_LOGFMT
        pairs = dict(map(_entry, _EACH.findall(line)))
        found: dict[str, object] = {name: pairs.pop(name, None) for name in self._names}
        found[FIELDS] = list(pairs.items())
        return found  # type: ignore[return-value]


def _entry(pair: str) -> tuple[str, str]:
    key, _, value = pair.partition("=")
    if value.startswith('"'):
        value = value[1:-1]
        if "\\" in value:
            for escaped, meant in _ESCAPES:
                value = value.replace(escaped, meant)
    return key, value


# ---- delimited fields -------------------------------------------------------------------------------------


class DelimitedLines:
    def __init__(self, names: Sequence[str], separator: str, *, quoted: bool) -> None:
        self._names, self._separator = names, separator
        self._wrong = f"the line does not have {len(names)} fields"
        quote = re.escape(separator)
        token = rf'("[^"]*+(?:""[^"]*+)*+"|[^"{quote}]*+){quote}'
        self._quoted = quoted
        self._whole, self._token = (re.compile(text, re.DOTALL) for text in (rf"(?:{token})++", token))

    def fast(self, lines: pa.StringArray) -> list[Texts]:
        parts = pc.split_pattern(lines, self._separator)
        fits = pc.equal(pc.list_value_length(parts), len(self._names))
        if self._quoted:
            fits = pc.and_(fits, pc.invert(pc.match_substring(lines, '"')))
        flat, count = pc.list_flatten(parts.filter(fits)), len(self._names)
        return [Texts(where(fits), lambda name: every_nth(flat, self._names.index(name), count))]

    def slow(self, line: str) -> Read:
        if self._quoted:
            ended = line + self._separator
            if self._whole.fullmatch(ended) is None:
                return self._wrong
            fields = [_unquoted(field) for field in self._token.findall(ended)]
        else:
            fields = line.split(self._separator)
        return dict(zip(self._names, fields, strict=True)) if len(fields) == len(self._names) else self._wrong


def _unquoted(field: str) -> str:
    return field[1:-1].replace('""', '"') if field.startswith('"') else field
