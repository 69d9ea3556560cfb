"""``logferry load``: the loader, with the Java and the Spark jars that this machine has or fetches."""

from __future__ import annotations

import os
from collections.abc import Sequence

from logferry.loaders import __main__ as loader
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the loader. Raises Problem where no Java is found or the jars can't be fetched."""
    given = list(argv or ())
    if not {"-h", "--help"} & set(given):
        os.environ["JAVA_HOME"] = str(find_java().home)
        if not os.environ.get(loader.JARS_VARIABLE) and not any(a.partition("=")[0] == "--jars" for a in given):
            os.environ[loader.JARS_VARIABLE] = os.pathsep.join(map(str, spark_jars()))
    return loader.main(given)
