"""The pieces of uploads that a worker keeps in memory: the right ones, as many as fit, as long as they may count."""

from __future__ import annotations

import asyncio

from logferry.gateway.contract.upload_state import StagedPiece, UploadState, next_digest
from logferry.gateway.lanes.staging_topic import RecentPieces

PIECES = [b"one", b"two", b"three"]


def upload(*pieces: bytes) -> UploadState:
    state = UploadState("dc1.t", b"t" * 16, {"file": "f"}, 1000)
    staged, digest = [], state.digest
    for offset, data in enumerate(pieces):
        digest = next_digest(digest, data)
        staged.append(StagedPiece(offset, len(data), digest))
    return state._replace(pieces=tuple(staged))


def kept(recent: RecentPieces, state: UploadState, *pieces: bytes) -> None:
    for piece, data in zip(state.pieces, pieces, strict=False):
        recent.keep(piece.digest, data)


async def test_those_of_an_upload_up_to_the_first_that_is_missing() -> None:
    recent, state = RecentPieces(100, 60), upload(*PIECES)
    assert recent.first_of(state) == []
    kept(recent, state, *PIECES)
    assert recent.first_of(state) == PIECES
    recent.drop(state.pieces[1].digest)
    assert recent.first_of(state) == PIECES[:1]
    assert recent.first_of(upload(b"one", b"2", b"three")) == PIECES[:1]
    assert recent.first_of(upload(b"other", *PIECES[1:])) == []


async def test_the_oldest_make_room() -> None:
    recent, state = RecentPieces(8, 60), upload(*PIECES)
    kept(recent, state, *PIECES)
    kept(recent, state, PIECES[0])
    assert (recent.used_bytes, recent.first_of(state)) == (8, [PIECES[0]])
    recent.keep(b"large", b"x" * 9)
    assert (recent.used_bytes, recent.first_of(state)) == (0, [])


async def test_they_are_forgotten_when_their_time_is_over() -> None:
    recent, state = RecentPieces(100, 0.05), upload(*PIECES)
    kept(recent, state, *PIECES[:2])
    async with asyncio.timeout(60):
        while recent.used_bytes > len(PIECES[0]):
            await asyncio.sleep(0.01)
            recent.keep(state.pieces[0].digest, PIECES[0])  # it is used again
        assert recent.first_of(state) == PIECES[:1]
        while recent.used_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert recent.first_of(state) == []
