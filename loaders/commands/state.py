"""``logferry table state``: the last batch of a table, its positions and its quarantine. Without Spark or Kafka."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from logferry.loaders.commands.options import table_paths
from logferry.loaders.errors import EXIT_DONE, LoaderConfigError
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.storage.ledger import open_table
from logferry.loaders.storage.quarantine import active_filter
from logferry.loaders.storage.tables import read_state
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def run_state(options: argparse.Namespace) -> int:
    """Prints the state of each table. Raises LoaderConfigError, Terminal, StorageUnavailable."""
    facts = [table_facts(path) for path in table_paths(options, options.paths)]
    if options.json:
        print(json.dumps(facts))
        return EXIT_DONE
    console = Console()
    for found in facts:
        show(found, console)
    return EXIT_DONE


def table_facts(path: Path) -> dict[str, Any]:
    """As JSON. Raises LoaderConfigError where there is no table, Terminal, StorageUnavailable."""
    paths = TablePaths.of(path)
    state = read_state(paths)
    if state.newest is None:
        raise LoaderConfigError(f"{paths.main}: no batch was ever loaded: check the path, or run logferry load first")
    return {
        "table": str(paths.main),
        "last": _facts(state.committed),
        "planned": _facts(state.planned),
        "quarantine": _quarantined(paths, state.last),
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


def _quarantined(paths: TablePaths, last: int) -> dict[str, int]:
    """Reason → number of active lines and records in the quarantine."""
    table = open_table(paths.quarantine)
    if table is None:
        return {}
    stored = table.to_pyarrow_dataset()
    found: Counter[str] = Counter()
    for batch in stored.scanner(columns=["reason"], filter=active_filter(stored.schema.names, last)).to_batches():
        found.update({one["values"]: one["counts"] for one in batch.column(0).value_counts().to_pylist()})
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
