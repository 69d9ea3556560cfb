"""Any interleaving of the archive's calls, kills, lost answers, clocks and take-overs keeps the promise; without a
guard one does not. What a step is and what must hold: `archive_world`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from logferry.gateway.contract.upload_state import UploadState, next_digest
from logferry.gateway.lanes import resolution, uploads
from logferry.gateway.lanes.receipts import UploadTable
from logferry.gateway.lanes.transaction import Draft
from logferry.gateway.lanes.uploads import UploadDraft, UploadOutcome

from tests.model.archive_world import FILES, WINDOW_MS, ArchiveWorld, Violated

OFTEN = ("step", "step", "call", "serve", "gather", "commit")
FAULTS = (
    *("call_again", "fail", "late_commit", "open", "kill", "free", "restart_client", "pass_time", "pass_time"),
    "set_clock",
)
Step = tuple[str, int, int]


def parsed(faults: set[str], clients: set[int], raw: bytes) -> tuple[list[int], list[Step]]:
    names = [*OFTEN * 2, *(name for name in FAULTS * 2 if name in faults)]
    happened = [(names[x % len(names)], y % 16, y // 16) for x, y in zip(raw[::2], raw[1::2], strict=False)]
    return sorted(clients), happened


worlds = st.builds(
    parsed,
    st.sets(st.sampled_from(FAULTS)),
    st.sets(st.integers(0, len(FILES) - 1), min_size=1),
    st.binary(min_size=60, max_size=400),
)


def run(clients: list[int], happened: list[Step]) -> ArchiveWorld:
    world = ArchiveWorld(clients)
    for name, a, b in happened:
        getattr(world, name)(a, b)
    return world


def at_rest(world: ArchiveWorld) -> None:
    """Everybody finishes; then an hour passes, and nothing is kept."""
    for worker in world.workers:
        worker.finish("commit")
    world.open(0, 0)
    worker = world.workers[0]
    while worker.queue:
        world.serve(0, 3)
    world.check_space()
    world.now_ms += WINDOW_MS + 100
    world.serve(0, 0)
    table = worker.table
    kept = (len(table.uploads), table.uploads.staged.used, table.receipts.shares.used, len(table))
    worker.free()
    if kept != (0, 0, 0, 0) or world.log.deleted_to != worker.end:
        raise Violated(f"something is kept: {kept}, deleted to {world.log.deleted_to} of {worker.end}")


@settings(max_examples=2000, deadline=None)
@given(worlds)
def test_a_file_is_visible_whole_and_once_or_not_at_all(of: tuple[list[int], list[Step]]) -> None:
    at_rest(run(*of))


@pytest.mark.parametrize("client", range(len(FILES)))
def test_without_failures_the_file_is_visible(client: int) -> None:
    world = run([client], [("step", 0, 0)] * (len(FILES[client][1]) + 2))
    assert [content for _, content, _ in world.log.visible] == [world.clients[0].content]
    assert world.acknowledged == 1


# ---- without a guard ------------------------------------------------------------------------------------------------

ADD, KNOWN, RESOLVE = Draft.add, UploadDraft._known, resolution.resolve_upload
PIECE, END, EXPIRE = uploads.decide_piece, uploads.decide_end, Draft.expire_uploads


def any_content(known: UploadState | None, request: Any, rules: Any) -> Any:
    """A piece follows whatever is there."""
    if known is not None and request.number == len(known.pieces) + 1:
        request.before = known.digest
        request.after = next_digest(known.digest, request.data)
    return PIECE(known, request, rules)


def same_number(known: UploadState | None, request: Any, rules: Any) -> Any:
    """A piece with a number that is there is a repetition."""
    if known is not None and request.number <= len(known.pieces):
        return "repeated"
    return PIECE(known, request, rules)


def any_digest(known: UploadState | None, request: Any) -> Any:
    if known is not None:
        request.digest = known.digest
    return END(known, request)


def again(known: UploadState | None, request: Any) -> Any:
    """What is visible is made visible again."""
    verdict = END(known, request)
    return "commit" if verdict == "repeated" and isinstance(request, uploads.CommitUpload) else verdict


def at_once(draft: Draft, request: Any) -> Any:
    """Answered before the commit."""
    return ADD(draft, request)[0], False


def never_expire(draft: Draft, limit: int, only: bytes | None = None) -> None:
    """Nothing ends."""


GUARDS: list[Any] = [
    ("acknowledged for another one's content", [(uploads, "decide_piece", any_content)]),
    ("acknowledged for another one's content", [(uploads, "decide_piece", same_number)]),
    ("the client has", [(uploads, "decide_end", any_digest)]),
    ("^visible", [(uploads, "decide_end", again)]),
    ("acknowledged, and not visible", [(Draft, "add", at_once)]),
    ("something is kept", [(Draft, "expire_uploads", never_expire)]),
    (
        "acknowledged, and not visible",
        [(resolution, "resolve_upload", lambda outcome, found: UploadOutcome(outcome.upload))],
    ),
    (
        "acknowledged for another one's content",
        [(resolution, "resolve_upload", lambda outcome, found: found and UploadOutcome(found))],
    ),
    ("a piece of an open upload was deleted", [(UploadTable, "needed_from", lambda table, end: end)]),
    ("something is kept", [(UploadTable, "ended", lambda table, now_ms, window_ms: iter([*table._done]))]),
]


@pytest.mark.parametrize(("violation", "guards"), GUARDS)
def test_without_a_guard_a_counter_example_is_found(
    monkeypatch: pytest.MonkeyPatch, violation: str, guards: list[tuple[object, str, Callable[..., object]]]
) -> None:
    for owner, name, without in guards:
        monkeypatch.setattr(owner, name, without)

    @settings(max_examples=20_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(worlds)
    def search(of: tuple[list[int], list[Step]]) -> None:
        at_rest(run(*of))

    with pytest.raises(Violated, match=violation):
        search()


# Worker 0, whose clock is ahead, finds the upload over and loses the lane; a delayed commit reaches worker 1.
TWO_CLOCKS: list[Step] = [
    *[("step", 0, 0)] * 3,
    ("set_clock", 0, 6),
    ("pass_time", 0, 7),
    ("pass_time", 0, 1),
    ("call", 0, 0),
    ("gather", 0, 0),
    ("fail", 0, 1),
    ("open", 1, 0),
    ("call_again", 0, 7),
    ("serve", 1, 0),
]


def gone_in_memory(draft: UploadDraft, request: Any) -> Any:
    """An upload that is over is refused, and its end is not in the log."""
    found = KNOWN(draft, request)
    is_over = isinstance(found, UploadState) and found.commit is None and found.expires_ms <= NOW[0]
    return None if is_over else found


NOW = [0]


def expire_by_itself(draft: Draft, limit: int, only: bytes | None = None) -> None:
    NOW[0] = draft.now_ms
    if only is None:
        EXPIRE(draft, limit)


def test_what_is_gone_is_gone_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too rare a chain to be drawn."""
    assert len(run([0], TWO_CLOCKS).log.visible) == 1
    monkeypatch.setattr(UploadDraft, "_known", gone_in_memory)
    monkeypatch.setattr(Draft, "expire_uploads", expire_by_itself)
    with pytest.raises(Violated, match="a client knows it to be gone"):
        run([0], TWO_CLOCKS)
