"""Tells others that segments are READY: a file ``_SUCCESS``, and an address that takes a POST; once for each version.

Told is what the table holds. Who tells claims it first, by creating a file beside the table, and marks it as told
afterwards; so of several loaders one tells. What was claimed a minute ago and is not marked was not told, or not quite:
the claimant has died, and the next loader tells, maybe a second time. Receivers know a repetition by
``Idempotency-Key``.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from logferry.loaders.config import SegmentSettings, TableJob
from logferry.loaders.errors import StorageAway
from logferry.loaders.planning.segment_states import READY, Segment, end_of, said
from logferry.loaders.storage.ledger import TablePaths
from logferry.loaders.storage.segment_table import read_segments

_TIMEOUT_S: Final = 10.0
_TOLD: Final = "_told"
_CLAIM_S: Final = 60.0
SUCCESS: Final = "_SUCCESS"


def announce(job: TableJob, paths: TablePaths, last: int) -> list[str]:
    """Tells of what is READY as of a batch and was not told. Returns what could not be: it is tried again later.

    Raises StorageAway.
    """
    settings = job.segments
    if settings is None or (settings.success is None and settings.webhook is None):
        return []
    told = paths.segments / _TOLD
    failed: list[str] = []
    for segment in read_segments(paths.segments, last).values():
        mark = told / f"{window_name(segment)}-{segment.version}"
        if segment.state != READY or mark.exists() or not _claimed(mark.with_suffix(".claim")):
            continue
        text = json.dumps(_facts(paths, segment, settings))
        try:
            if settings.success is not None:
                _replace(settings.success / window_name(segment) / SUCCESS, text)
            if settings.webhook is not None:
                _post(settings.webhook, f"{paths.main}/{mark.name}", text)
            _replace(mark, text)
        except urllib.error.URLError as error:
            failed.append(f"{settings.webhook}: {error}")
            mark.with_suffix(".claim").unlink(missing_ok=True)
        except OSError as error:
            raise StorageAway(f"{error.filename or told}: {error.strerror or error}") from error
    return failed


def _claimed(claim: Path) -> bool:
    """Whether we are to tell. Raises OSError."""
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        claim.open("x").close()
    except FileExistsError:
        try:
            if time.time() - claim.stat().st_mtime < _CLAIM_S:
                return False
            claim.touch()
        except FileNotFoundError:
            return False
    return True


def window_name(segment: Segment) -> str:
    """``2026-11-20T10``, with minutes and more only where there are some."""
    name = segment.start.strftime("%Y-%m-%dT%H:%M:%S")
    return name.removesuffix(":00").removesuffix(":00")


def _facts(paths: TablePaths, segment: Segment, settings: SegmentSettings) -> dict[str, object]:
    return {
        "table": str(paths.main),
        "window": window_name(segment),
        "start": said(segment.start),
        "end": said(end_of(segment.start, settings.rules)),
        "version": segment.version,
        "rows": segment.rows,
        "bytes": segment.bytes,
        "late_rows": segment.late_rows,
        "batch": segment.batch,
    }


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _post(url: str, key: str, text: str) -> None:
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    request = urllib.request.Request(url, text.encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
        return
