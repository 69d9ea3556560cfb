"""``logferry load``: the loader, with the Java of this machine and the Spark jars of the user's cache."""

from __future__ import annotations

import os

from logferry.loaders.config import JARS_VARIABLE
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java


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
        os.environ[JARS_VARIABLE] = os.pathsep.join(map(str, spark_jars()))
