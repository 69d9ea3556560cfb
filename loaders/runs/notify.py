"""Notifies others that segments are READY, by a file ``_SUCCESS`` and a POST to a webhook; once per version.

Only what the table holds is reported. A loader first claims a notification by creating a file beside the table, and
marks it as sent afterwards; so of several loaders one sends it. A claim without a mark that is a minute old belongs to
a loader that died: the next one sends the notification, maybe a second time. Receivers recognise a repetition by the
header ``Idempotency-Key``.
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
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.low_watermark import utc_text
from logferry.loaders.planning.segment_states import READY, Segment, segment_end
from logferry.loaders.storage.side_tables import read_segments

_TIMEOUT_S: Final = 10.0
_SENT: Final = "_told"
_CLAIM_S: Final = 60.0
SUCCESS: Final = "_SUCCESS"


def notify_ready(job: TableJob, paths: TablePaths, last: int) -> list[str]:
    """Notifies of segments that are READY as of a batch. Returns the failures, which are retried later.

    Raises StorageUnavailable.
    """
    settings = job.segments
    if settings is None or (settings.success is None and settings.webhook is None):
        return []
    sent = paths.segments / _SENT
    failed: list[str] = []
    for segment in read_segments(paths.segments, last).values():
        mark = sent / f"{segment_name(segment)}-{segment.version}"
        if segment.state != READY or mark.exists() or not _claimed(mark.with_suffix(".claim")):
            continue
        text = json.dumps(_facts(paths, segment, settings))
        try:
            if settings.success is not None:
                _replace(settings.success / segment_name(segment) / SUCCESS, text)
            if settings.webhook is not None:
                _post(settings.webhook, f"{paths.main}/{mark.name}", text)
            _replace(mark, text)
        except urllib.error.URLError as error:
            failed.append(f"{settings.webhook}: {error}")
            mark.with_suffix(".claim").unlink(missing_ok=True)
        except OSError as error:
            raise StorageUnavailable(f"{error.filename or sent}: {error.strerror or error}") from error
    return failed


def _claimed(claim: Path) -> bool:
    """Whether this loader sends it. Raises OSError."""
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


def segment_name(segment: Segment) -> str:
    """``2026-11-20T10``, with minutes and seconds only where they are not zero."""
    name = segment.start.strftime("%Y-%m-%dT%H:%M:%S")
    return name.removesuffix(":00").removesuffix(":00")


def _facts(paths: TablePaths, segment: Segment, settings: SegmentSettings) -> dict[str, object]:
    return {
        "table": str(paths.main),
        "segment": segment_name(segment),
        "start": utc_text(segment.start),
        "end": utc_text(segment_end(segment.start, settings.rules)),
        "version": segment.version,
        "rows": segment.rows,
        "bytes": segment.bytes,
        "late_rows": segment.late_rows,
        "batch": segment.batch,
        "sources": segment.sources,
        "silent_sources": segment.silent_sources,
        "watermark": utc_text(segment.watermark) if segment.watermark else None,
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
