"""What a lane keeps of requests that may come again: receipts of those without seqnos, and uploads. Pure.

A receipt makes the same request without seqnos a duplicate:

* It is committed in the transaction of its chunks: it is in the log if and only if they are.
* It counts for a window after it was recorded, by the brokers' time; then it is as if it were not there, and the next
  transactions forget it, the oldest first.
* It is of one incarnation of its topic, as the states of sources are.
* Tokens share the number of them by the rule of `FairShare`. Where there is no room a request with a key is refused:
  to forget a younger receipt would break its promise.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.gateway.contract.source_state import Receipt, source_of_record
from logferry.gateway.contract.upload_state import UploadState
from logferry.gateway.limits import FairShare

# A longer key counts as so many more sources or receipts, for each so many bytes.
_KEY_BYTES: Final = 256


def weight(key: bytes) -> int:
    """As how many sources or receipts a key of the state topic counts."""
    return 1 + len(key) // _KEY_BYTES


@dataclass(slots=True)
class ReceiptTable:
    """The committed receipts of one lane, in the order in which they were recorded."""

    shares: FairShare = field(default_factory=lambda: FairShare(sys.maxsize))
    _kept: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kept)

    def apply(self, key: bytes, raw: bytes | None) -> None:
        """Takes over a committed receipt; None forgets it. Raises ValueError on a format that is not known."""
        if raw is not None:
            source_of_record(key)
            token = Receipt.decode(raw).token
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.shares.give(Receipt.decode(kept).token, weight(key))
        if raw is not None:
            self.shares.take(token, weight(key))
            self._kept[key] = raw

    def get(self, key: bytes) -> Receipt | None:
        kept = self._kept.get(key)
        return None if kept is None else Receipt.decode(kept)

    def expired(self, before_ms: int) -> Iterator[bytes]:
        """The keys of those that were recorded before that time, the oldest first."""
        for key, raw in self._kept.items():
            if Receipt.decode(raw).at_ms >= before_ms:
                return
            yield key


class _OpenUpload(NamedTuple):
    raw: bytes
    expires_ms: int
    first_offset: int
    size_bytes: int
    token: str | None


@dataclass(slots=True)
class UploadTable:
    """The committed states of one lane's uploads.

    ``count``, ``staged``: how many are open and the bytes of their pieces, by token. ``kept``: those that are visible,
    and those that are marked as gone, which are remembered among the receipts.
    """

    kept: FairShare
    count: FairShare = field(default_factory=lambda: FairShare(sys.maxsize))
    staged: FairShare = field(default_factory=lambda: FairShare(sys.maxsize))
    _open: dict[bytes, _OpenUpload] = field(default_factory=dict)
    _done: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._open)

    def apply(self, key: bytes, raw: bytes | None) -> None:
        """Takes over a committed state; None forgets it. Raises ValueError or struct.error on an unknown format."""
        upload = None if raw is None else UploadState.decode(raw)
        before = self._open.pop(key, None)
        if before is not None:
            self.count.give(before.token, 1)
            self.staged.give(before.token, before.size_bytes)
        done = self._done.pop(key, None)
        if done is not None:
            self.kept.give(UploadState.decode(done).token, weight(done))
        if raw is None or upload is None:
            return
        if upload.commit is not None or upload.is_expired:
            self.kept.take(upload.token, weight(raw))
            self._done[key] = raw
            return
        first, size = upload.pieces[0].at_least, upload.size_bytes
        self._open[key] = _OpenUpload(raw, upload.expires_ms, first, size, upload.token)
        self.count.take(upload.token, 1)
        self.staged.take(upload.token, size)

    def read(self, key: bytes) -> UploadState | None:
        """The state, also of one that is over, or marked as gone."""
        found = self._open.get(key)
        raw = self._done.get(key) if found is None else found.raw
        return None if raw is None else UploadState.decode(raw)

    def get(self, key: bytes) -> UploadState | None:
        """The state, also of one that is over, unless it is marked as gone."""
        found = self.read(key)
        return None if found is None or found.is_expired else found

    def ended(self, now_ms: int, window_ms: int) -> Iterator[bytes]:
        """The keys of those that were not committed in time, and of those that are remembered no longer."""
        yield from (key for key, upload in self._open.items() if upload.expires_ms <= now_ms)
        for key, raw in self._done.items():
            upload = UploadState.decode(raw)
            at_ms = upload.expires_ms if upload.commit is None else upload.commit.at_ms
            if at_ms + window_ms >= now_ms:
                return
            yield key

    def needed_from(self, end: int) -> int:
        """The offset in the staging topic before which nothing is needed any more. ``end``: of the partition."""
        return min((upload.first_offset for upload in self._open.values()), default=end)
