"""What a table holds, in words: its last batch, its positions, its quarantine. Without Spark or Kafka."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from logferry.loaders.batches.create_tables import read_state
from logferry.loaders.errors import ConfigError
from logferry.loaders.standing import standing
from logferry.loaders.storage.ledger import LedgerEntry, TablePaths, open_table
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def table_facts(path: Path) -> dict[str, Any]:
    """As JSON. Raises ConfigError where there is no table, Terminal, StorageAway."""
    paths = TablePaths.of(path)
    state = read_state(paths)
    if state.committed is None and state.planned is None:
        raise ConfigError(f"{paths.main}: no batch was ever loaded into it")
    return {
        "table": str(paths.main),
        "last": _facts(state.committed),
        "planned": _facts(state.planned),
        "quarantine": _standing(paths, state.last),
        "positions": [
            {"topic": r.topic, "partition": r.partition, "offset": r.end, "topic_id": r.topic_id}
            for r in (state.committed.ranges if state.committed else ())
        ],
    }


def _facts(entry: LedgerEntry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "batch": entry.batch,
        "kind": entry.kind,
        "dc": entry.dc,
        "parser": entry.parser,
        "planned": entry.planned.isoformat(),
        "reads": sum(r.size for r in entry.reads),
        "cutoff": entry.cutoff.isoformat() if entry.cutoff else None,
    }


def _standing(paths: TablePaths, last: int) -> dict[str, int]:
    """Reason → how many lines and records stand in the quarantine for it."""
    table = open_table(paths.quarantine)
    if table is None:
        return {}
    stored = table.to_pyarrow_dataset()
    found: dict[str, int] = {}
    for batch in stored.scanner(columns=["reason"], filter=standing(stored.schema.names, last)).to_batches():
        for count in batch.column(0).value_counts().to_pylist():
            found[count["values"]] = found.get(count["values"], 0) + count["counts"]
    return dict(sorted(found.items()))


def show(facts: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{escape(facts['table'])}[/]", highlight=False)
    for word, entry in (("holds", facts["last"]), ("planned", facts["planned"])):
        if entry is not None:
            said = f"  {word} batch {entry['batch']} ({entry['kind']}, {entry['parser']}, offsets of {entry['dc']}"
            console.print(f"{said}, planned {entry['planned']})", highlight=False, soft_wrap=True)
    shown = Table("topic", "partition", "next offset", box=None, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for position in facts["positions"]:
        shown.add_row(escape(position["topic"]), str(position["partition"]), f"{position['offset']:,}")
    console.print(shown)
    for reason, count in facts["quarantine"].items():
        console.print(f"  quarantined: {count:,} · {escape(reason)}", highlight=False, soft_wrap=True)
