"""``logferry table``: the loader's commands on tables; those with Spark get the Java and the jars of this machine."""

from __future__ import annotations

from logferry.loaders.commands import table
from logferry.ops.commands.load import provide_java


def main(argv: list[str]) -> int:
    """Runs the sub-command. Raises Unavailable where no Java is found or the jars cannot be fetched."""
    return table.main(argv, lambda: provide_java(argv))
