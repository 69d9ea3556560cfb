"""Access logs to the texts of their columns, without Spark: see `line_texts`."""

from __future__ import annotations

import re
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from logferry.loaders.parsing.columns import ACCESS_LINE, MARK, REQUEST, REQUEST_PARTS, named_groups
from logferry.loaders.query.line_texts import MARKED, NO_FIT, Read, Texts, every_nth, where

_PLAIN, _GROUPS = named_groups(ACCESS_LINE)
_LINE: Final = re.compile(_PLAIN, re.ASCII | re.DOTALL)
_REQUEST: Final = re.compile(REQUEST.replace(r"\z", r"\Z").replace(".+?", r"[^\n\r\u0085\u2028\u2029]+?"))
# No field but the quoted ones has a space or a quote, and these have no backslash: the quotes divide the line.
_WORD: Final = r'[^ \t\n\x0b\f\r"\[\x01]+'
_QUOTED: Final = r'"[^"\\\x01]*"'
_STAMP: Final = r"[0-9]{2}/[A-Za-z]{3}/[0-9]{4}:[0-9]{2}:[0-9]{2}:[0-9]{2} [+-][0-9]{4}"
_SIMPLE_REQUEST: Final = '"[A-Za-z0-9_-]+ [^ "\\\\\\x01\\n\\r\u0085\u2028\u2029]+ [A-Za-z]+/[0-9.]+"'
_BEFORE: Final = rf"^{_WORD} {_WORD} {_WORD} \[{_STAMP}\]"
_AFTER: Final = "(?:[0-9]{3}|-) (?:[0-9]{1,18}|-)"
_STAMP_BYTES: Final = len("25/Nov/2026:10:00:00 +0000")
_OF_QUOTES: Final = {"request": 0, "referer": 2, "user_agent": 4}
_PREFIX: Final = ("remote_host", "ident", "user")


class _Form(NamedTuple):
    """An expression of RE2 for lines, how many quotes each has, and whether its request is three words."""

    pattern: str
    quotes: int
    is_simple: bool


# The most common ones first. A line that fits none is left to the slow way.
_FORMS: Final = (
    _Form(f"{_BEFORE} {_SIMPLE_REQUEST} {_AFTER} {_QUOTED} {_QUOTED}$", 6, True),
    _Form(f"{_BEFORE} {_SIMPLE_REQUEST} {_AFTER}$", 2, True),
    _Form(f"{_BEFORE} {_QUOTED} {_AFTER} {_QUOTED} {_QUOTED}$", 6, False),
    _Form(f"{_BEFORE} {_QUOTED} {_AFTER}$", 2, False),
)
_SURE: Final = frozenset((("status", "int"), ("body_bytes", "bigint")))


class AccessLines:
    def fast(self, lines: pa.StringArray) -> list[Texts]:
        found = []
        left = np.arange(len(lines))
        for form in _FORMS:
            if not len(left):
                break
            among = lines if len(left) == len(lines) else lines.take(pa.array(left))
            fits = pc.match_substring_regex(among, form.pattern)
            if pc.all(fits).as_py():
                found.append(_access_texts(left, among, form))
                break
            if pc.any(fits).as_py():
                found.append(_access_texts(left[where(fits)], among.filter(fits), form))
                left = left[where(pc.invert(fits))]
        return [texts for texts in found if len(texts.rows)]

    def slow(self, line: str) -> Read:
        if MARK in line:
            return MARKED
        match = _LINE.fullmatch(line)
        if match is None:
            return NO_FIT
        found: dict[str, str | None] = {name: match[number] or "" for name, number in _GROUPS.items()}
        request = _REQUEST.search(match[_GROUPS["request"]])
        return found | {name: request[n] if request is not None else None for name, n in REQUEST_PARTS.items()}


def _access_texts(rows: np.ndarray, lines: pa.StringArray, form: _Form) -> Texts:
    known: dict[str, pa.Array] = {}
    quotes = form.quotes

    @cache
    def quoted() -> np.ndarray:
        return _places(lines, '"', quotes)

    def column(name: str) -> pa.Array:
        if name in known:
            return known[name]
        if name == "time":
            return _stamps(lines)
        if name in _OF_QUOTES:
            first = _OF_QUOTES[name]
            is_there = first < quotes
            return _between(lines, quoted()[:, first] + 1, quoted()[:, first + 1]) if is_there else _empty(len(rows))
        if name in _PREFIX:
            words = pc.list_flatten(pc.split_pattern(lines, " ", max_splits=3))
            known.update({each: every_nth(words, number, 4) for number, each in enumerate(_PREFIX)})
        elif name in REQUEST_PARTS:
            known.update((_words if form.is_simple else _request_parts)(column("request")))
        else:
            ends = quoted()[:, 2] - 1 if quotes > 2 else _ends(lines)
            words = _between(lines, quoted()[:, 1] + 2, ends)
            blanks = _places(words, " ", 1)[:, 0]
            known.update(
                status=_between(words, _starts(words), blanks), body_bytes=_between(words, blanks + 1, _ends(words))
            )
        return known[name]

    return Texts(rows, column, _SURE)


def _stamps(lines: pa.StringArray) -> pa.StringArray:
    """The texts after the first brackets."""
    if not len(lines):
        return lines
    starts = _starts(lines) + pc.find_substring(lines, "[").to_numpy() + 1
    windows = np.lib.stride_tricks.sliding_window_view(_bytes(lines), _STAMP_BYTES)
    ends = np.arange(len(lines) + 1, dtype=np.int32) * _STAMP_BYTES
    return pa.Array.from_buffers(pa.string(), len(lines), [None, pa.py_buffer(ends), pa.py_buffer(windows[starts])])


def _words(requests: pa.StringArray) -> dict[str, pa.Array]:
    """The parts of requests of three words."""
    blanks = _places(requests, " ", 2)
    bounds = _starts(requests), blanks[:, 0], blanks[:, 0] + 1, blanks[:, 1], blanks[:, 1] + 1, _ends(requests)
    return {name: _between(requests, *bounds[2 * n - 2 : 2 * n]) for name, n in REQUEST_PARTS.items()}


def _request_parts(requests: pa.StringArray) -> dict[str, pa.Array]:
    """The parts of any requests."""
    found = [_REQUEST.search(text) for text in requests.to_pylist()]
    parts = REQUEST_PARTS.items()
    return {name: pa.array([match and match[n] for match in found], pa.string()) for name, n in parts}


def _bytes(texts: pa.StringArray) -> np.ndarray:
    """Of all texts, in a row. Texts without any have no bytes."""
    data = texts.buffers()[2]
    return np.frombuffer(b"" if data is None else data, np.uint8)


def _starts(texts: pa.StringArray) -> np.ndarray:
    return np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts)]


def _ends(texts: pa.StringArray) -> np.ndarray:
    return np.frombuffer(texts.buffers()[1], np.int32)[texts.offset + 1 : texts.offset + 1 + len(texts)]


def _places(texts: pa.StringArray, char: str, count: int) -> np.ndarray:
    """Where an ASCII character is in the bytes: ``count`` places for each text, which has as many."""
    if not len(texts):
        return np.empty((0, count), np.int32)
    first, last = int(_starts(texts)[0]), int(_ends(texts)[-1])
    places = np.flatnonzero(_bytes(texts)[first:last] == ord(char)) + first
    return places.astype(np.int32).reshape(len(texts), count)


def _between(texts: pa.StringArray, starts: np.ndarray, ends: np.ndarray) -> pa.StringArray:
    """The bytes from ``starts`` to ``ends``, one piece for each text, in order: all bytes are cut at these places, and
    every second piece is taken.
    """
    if not len(texts):
        return texts
    bounds = np.column_stack((starts, ends)).astype(np.int32, copy=False).reshape(-1)
    cut = pa.Array.from_buffers(pa.string(), len(bounds) - 1, [None, pa.py_buffer(bounds), texts.buffers()[2]])
    return cut.take(pa.array(np.arange(0, len(bounds), 2)))


def _empty(size: int) -> pa.StringArray:
    return pa.repeat(pa.scalar("", pa.string()), size)
