"""Receipts: what a lane keeps of requests without seqnos, so that the same request again is a duplicate. Pure.

* A receipt is committed in the transaction of its chunks: it is in the log if and only if they are.
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
from typing import Final

from logferry.gateway.contract.source_state import Receipt, source_of_record
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
