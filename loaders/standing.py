"""Which rows of the quarantine count, as a table stands whose last batch is given. Without Spark.

Two tables cannot change in one commit. So a row of the quarantine says from which batch on it stands there (``since``)
and up to which (``resolved``), and the main table's commit of that batch is the one instant in which it comes or goes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import pyarrow.dataset as ds

_ALL: Final = ds.scalar(True)


def standing(columns: Collection[str], last: int) -> Any:
    """A filter of pyarrow. ``columns``: the quarantine's, of which an older one lacks some."""
    stands = _ALL
    if "resolved" in columns:
        stands = stands & (ds.field("resolved").is_null() | (ds.field("resolved") > last))
    if "since" in columns:
        stands = stands & (ds.field("since").is_null() | (ds.field("since") <= last))
    return stands
