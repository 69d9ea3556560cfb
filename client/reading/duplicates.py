"""Which chunks a reader delivered already, from the topic of another data centre. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from logferry.client.reading.decode import ReceivedChunk

_MOST_SOURCES = 200_000
_MOST_SPANS = 8

Span = tuple[int, int]  # all of the source above the first and up to the second


class DuplicateFilter:
    """Chunks that are in the topics of two data centres: source and seqno identify the second copy.

    A source whose data centre is gone fails over to the next one, and sends there the chunks whose outcome is unknown.
    When the first one comes back, chunks that it had recorded exist twice: in ``dc1.nginx`` and in ``dc2.nginx``.

    The delivered seqnos of each source are known by data centre; sources that were silent for longest are forgotten.
    """

    def __init__(self, most_sources: int = _MOST_SOURCES) -> None:
        self._most = most_sources
        self._sources: OrderedDict[tuple[str, str], dict[str, list[Span]]] = OrderedDict()

    def is_duplicate(self, chunk: ReceivedChunk) -> bool:
        """Whether the chunk was delivered from another data centre's topic before; if not, it is remembered."""
        source = (chunk.topic.partition(".")[2], chunk.source_id)
        by_dc = self._sources.setdefault(source, {})
        self._sources.move_to_end(source)
        if len(self._sources) > self._most:
            self._sources.popitem(last=False)
        for dc, spans in by_dc.items():
            if dc != chunk.dc and any(low < chunk.seqno <= high for low, high in spans):
                return True
        spans = by_dc.setdefault(chunk.dc, [])
        low = chunk.seqno - 1 if chunk.prev is None else chunk.prev
        if spans and low == spans[-1][1]:
            spans[-1] = (spans[-1][0], chunk.seqno)
        elif not any(first < chunk.seqno <= last for first, last in spans):
            spans.append((low, chunk.seqno))
            del spans[:-_MOST_SPANS]
        return False


def spans_data_centres(topics: Iterable[str]) -> bool:
    """Whether these can be topics of one name in several data centres."""
    topics = list(topics)
    names = {topic.partition(".")[2] for topic in topics}
    return any(mark in topic for topic in topics for mark in "*?[") or len(names) < len(set(topics))
