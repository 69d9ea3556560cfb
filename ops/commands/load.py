"""``logferry load``: the loader, with the Java of this machine and the Spark jars of the user's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from logferry.loaders.config import JARS_VARIABLE
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java

_STORES = {"s3": re.compile(r"\bs3a?://"), "gs": re.compile(r"\bgs://"), "azure": re.compile(r"\babfss://")}


def main(argv: list[str]) -> int:
    """Runs the loader. Raises Unavailable where no Java is found or the jars cannot be fetched."""
    from logferry.loaders.commands import load

    provide_java(argv)
    return load.main(argv)


def provide_java(argv: list[str]) -> None:
    """Sets the environment for Spark, unless only help is asked for. Raises Unavailable."""
    if {"-h", "--help"} & set(argv):
        return
    os.environ["JAVA_HOME"] = str(find_java().home)
    if not os.environ.get(JARS_VARIABLE) and not any(a.partition("=")[0] == "--jars" for a in argv):
        os.environ[JARS_VARIABLE] = os.pathsep.join(map(str, spark_jars(**_stores(argv))))


def _stores(argv: list[str]) -> dict[str, bool]:
    """By store, whether an argument names a table there, or a file that does, so that its jars are needed."""
    texts = list(argv)
    for before, argument in pairwise(["", *argv]):
        given = argument.partition("=")[2] if argument.startswith("--config=") else argument
        with suppress(OSError, ValueError):
            if given != argument or before == "--config" or given.endswith(".toml"):
                texts.append(Path(given).read_text(encoding="utf-8"))
    return stores_in(texts)


def stores_in(texts: Iterable[str]) -> dict[str, bool]:
    """By store, whether the texts have a URI of it."""
    known = list(texts)
    return {name: any(map(uri.search, known)) for name, uri in _STORES.items()}
