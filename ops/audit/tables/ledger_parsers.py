"""Which parsers may have made a row: the ledger says it of the offsets of each data centre.

A row is of a load or a reload that read its offset. If none of their parsers makes a row of its text, the line was
in the quarantine until a batch parsed it again. An offset that no entry holds may be of any parser.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from logferry.loaders.planning.ledger_entry import LOAD, MOVE, RELOAD, REQUARANTINE, LedgerEntry

_PLACE = ("dc", "topic", "partition")
_Place = tuple[str, str, int]


class LedgerParser(NamedTuple):
    """``settings``: JSON, as in the ledger."""

    name: str
    settings: str


class Candidates(NamedTuple):
    """``loaded``: parsers of the batches that read the offset. ``later``: those of lines that were quarantined."""

    loaded: tuple[LedgerParser, ...]
    later: tuple[LedgerParser, ...] = ()


class _Spans(NamedTuple):
    """From each start up to the next one: the numbers of the parsers, if any."""

    starts: list[int]
    parsers: list[tuple[int, ...]]


@dataclass(frozen=True)
class LedgerParsers:
    """``every``: all parsers, in the order of the ledger. ``places``: only where there are several."""

    every: tuple[LedgerParser, ...]
    later: tuple[LedgerParser, ...] = ()
    places: Mapping[_Place, _Spans] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[LedgerEntry], last: int) -> LedgerParsers:
        """``last``: the last batch of the table; of later ones there is no row."""
        ranges: dict[_Place, list[tuple[int, int, int]]] = {}
        number: dict[LedgerParser, int] = {}
        later: dict[LedgerParser, None] = {}
        for entry in entries:
            if entry.batch > last or entry.kind not in (LOAD, MOVE, RELOAD, REQUARANTINE):
                continue
            # A move has what the batch before it read in the other data centre.
            read = [r for r in entry.reload or entry.ranges if r.size]
            parser = LedgerParser(entry.parser, entry.settings)
            if entry.kind == REQUARANTINE:
                later[parser] = None
            elif not read:
                continue
            mine = number.setdefault(parser, len(number))
            for r in read if entry.kind != REQUARANTINE else ():
                known = ranges.setdefault((entry.dc, r.topic, r.partition), [])
                if known and known[-1][1:] == (r.start, mine):
                    known[-1] = (known[-1][0], r.end, mine)
                else:
                    known.append((r.start, r.end, mine))
        places = {place: _spans(found) for place, found in ranges.items()} if len(number) > 1 else {}
        return cls(tuple(number), tuple(later), places)

    def groups(self, batch: pa.RecordBatch) -> Iterator[tuple[np.ndarray, Candidates]]:
        """The rows, as indices, with the parsers that may have made them. ``batch``: with place and offset."""
        if len(self.every) <= 1:
            yield np.arange(batch.num_rows), Candidates(self.every)
            return
        offsets = batch.column("offset").fill_null(-1).to_numpy()
        words = [batch.column(name).cast(pa.string()).fill_null("") for name in _PLACE]
        codes = pc.binary_join_element_wise(*words, "\0").dictionary_encode()
        code_of = codes.indices.to_numpy()
        rows_of: dict[tuple[int, ...], list[np.ndarray]] = {}
        for code, word in enumerate(codes.dictionary.to_pylist()):
            dc, topic, partition = word.split("\0")
            spans = self.places.get((dc, topic, int(partition or -1)), _Spans([], []))
            rows = np.flatnonzero(code_of == code)
            at = np.searchsorted(np.array(spans.starts, dtype=np.int64), offsets[rows], side="right") - 1
            for index in np.unique(at).tolist():
                parsers = spans.parsers[index] if index >= 0 else ()
                rows_of.setdefault(parsers, []).append(rows[at == index])
        for parsers, parts in rows_of.items():
            loaded = tuple(self.every[one] for one in parsers) or self.every
            yield np.concatenate(parts), Candidates(loaded, tuple(one for one in self.later if one not in loaded))


def _spans(ranges: list[tuple[int, int, int]]) -> _Spans:
    """``ranges``: start, end and parser; they may overlap."""
    starts = sorted({edge for start, end, _ in ranges for edge in (start, end)})
    at: list[dict[int, None]] = [{} for _ in starts]
    for start, end, parser in ranges:
        for index in range(bisect_right(starts, start) - 1, bisect_right(starts, end) - 1):
            at[index][parser] = None
    return _Spans(starts, [tuple(one) for one in at])
