"""The rows of the quarantine that are active as of a batch of the main table. Without Spark.

Two tables cannot change in one commit. So a row of the quarantine names the batch that activates it (``since``) and the
one that deactivates it (``resolved``): the main table's commit of that batch is the instant in which it takes effect.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from logferry.loaders.storage.ledger import open_table, storage_errors
from logferry.loaders.storage.rewrite import Change


def active_filter(columns: Collection[str], last: int) -> Any:
    """A filter of pyarrow for batch ``last``. ``columns``: the quarantine's; an older one lacks some."""
    active = ds.scalar(True)
    if "resolved" in columns:
        active = active & (ds.field("resolved").is_null() | (ds.field("resolved") > last))
    if "since" in columns:
        active = active & (ds.field("since").is_null() | (ds.field("since") <= last))
    return active


def count_rows(path: Path, selected: Any, active_as_of: int | None = None) -> int:
    """The rows that a filter selects; of a quarantine those active as of a batch. Raises StorageUnavailable."""
    table = open_table(path)
    if table is None:
        return 0
    with storage_errors(f"{path} cannot be read"):
        stored = table.to_pyarrow_dataset()
        if active_as_of is not None:
            selected = selected & active_filter(stored.schema.names, active_as_of)
        return int(stored.count_rows(filter=selected))


def resolved_by(batch: int) -> Change:
    """Marks rows of the quarantine as resolved by a batch; those resolved before stay as they are."""

    def marked(part: pa.Table, is_meant: Any) -> pa.Table:
        if "resolved" not in part.schema.names:
            # A file of an older loader.
            part = part.append_column("resolved", pa.nulls(part.num_rows, pa.int64()))
        before, index = part["resolved"], part.schema.get_field_index("resolved")
        is_ours = pc.and_(is_meant, pc.is_null(before))
        return part.set_column(
            index, part.schema.field(index), pc.if_else(is_ours, pa.scalar(batch, pa.int64()), before)
        )

    return marked
