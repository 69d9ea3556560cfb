"""A gateway worker that kills itself at one step of an archive's transaction, once.

``python tests/crash/gateway/archive_worker.py FOLDER --config FILE --worker I``. The test writes the name of a step,
``CALL-POINT``, into the file ``step`` of the folder; the worker that reaches it first removes the file and dies.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from logferry.gateway.__main__ import main
from logferry.gateway.contract.upload_state import UploadState
from logferry.gateway.lanes import group_commit
from logferry.gateway.lanes.transaction import Draft
from logferry.gateway.receivers import archive

CALLS = ("store", "commit_request", "commit", "expiry")
# Before anything is written; written and not committed; committed and not answered.
POINTS = ("before", "written", "committed")
STEPS = (*(f"{call}-{point}" for call in CALLS for point in POINTS), "commit-read")


def calls_of(draft: Draft) -> set[str]:
    """The calls that the transaction is about."""
    found = set()
    for upload in draft.uploads.states.values():
        if upload is None:
            found.add("expiry")
        elif isinstance(upload, UploadState):
            found.add("commit" if upload.commit else "commit_request" if upload.is_sealed else "store")
    return found


def arm(folder: Path) -> None:
    file, producer = folder / "step", group_commit.GroupCommit
    transact, commit = producer.transact, producer.commit
    handlers: Any = archive
    read = handlers.read_pieces

    def reached(calls: set[str], point: str) -> None:
        try:
            wanted = file.read_text()
            if wanted in {f"{call}-{point}" for call in calls}:
                file.unlink()  # of two workers one alone does it
                os.kill(os.getpid(), signal.SIGKILL)
        except FileNotFoundError:
            return

    async def transact_or_die(self: Any, draft: Draft) -> Any:
        calls = calls_of(draft)
        reached(calls, "before")
        self.__dict__["calls"] = calls
        found = await transact(self, draft)
        reached(calls, "committed")
        return found

    async def commit_or_die(self: Any) -> None:
        reached(self.__dict__.get("calls", set()), "written")
        await commit(self)

    async def read_or_die(*args: Any) -> Any:
        found = await read(*args)
        reached({"commit"}, "read")
        return found

    producer.transact = transact_or_die  # type: ignore[method-assign]
    producer.commit = commit_or_die  # type: ignore[method-assign]
    handlers.read_pieces = read_or_die


if __name__ == "__main__":
    arm(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
