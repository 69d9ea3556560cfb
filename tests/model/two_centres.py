"""Two data centres for tests of the client: gateways that know nothing of each other, and what both hold together."""

from __future__ import annotations

from logferry.client.transport.connections import Body, Reply
from logferry.gateway.contract.chunk import Chunk

from tests.support.fake_gateway import FakeGateway, Stored

FIRST, SECOND = "http://g:1", "http://g:2"


class TwoCentres:
    """The client's exchange. Whoever owns a source is reached at another URL of its data centre."""

    def __init__(self, first: FakeGateway | None = None) -> None:
        self.first, self.second = first or FakeGateway(), FakeGateway()
        self.of = {FIRST: self.first, SECOND: self.second}
        for gateway in self.of.values():
            gateway.is_one_of_many = True

    def __call__(self, url: str, headers: dict[str, str], body: Body | None, method: str = "POST") -> Reply:
        base = url.partition("/v1/")[0].removesuffix("/readyz").removesuffix("/owner")
        return self.of[base](url.replace("/owner/v1/", "/v1/"), headers, body, method)

    def together(self) -> dict[str, Stored]:
        """What both hold of each source, in order. Chunks of the same source and seqno have to hold the same bytes."""
        found: dict[str, dict[int, Chunk]] = {}
        topics: dict[str, str] = {}
        for gateway in self.of.values():
            for name, stored in gateway.sources.items():
                topics[name] = stored.topic
                seqnos = [chunk.seqno for chunk in stored.chunks]
                assert seqnos == sorted(set(seqnos)), (name, seqnos)
                for chunk in stored.chunks:
                    known = found.setdefault(name, {}).setdefault(chunk.seqno, chunk)
                    assert known.data == chunk.data, f"{name}, {chunk.seqno}: {known.data!r} and {chunk.data!r}"
        return {
            name: Stored(topics[name], chunks=[chunks[seqno] for seqno in sorted(chunks)])
            for name, chunks in found.items()
        }

    def copies(self) -> int:
        """Chunks that both hold."""
        every = sum(len(stored.chunks) for gateway in self.of.values() for stored in gateway.sources.values())
        return every - sum(len(stored.chunks) for stored in self.together().values())
