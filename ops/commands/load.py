"""``logferry load``: the loader, with the Java of this machine and the Spark jars of the user's cache."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from logferry.loaders.config import JARS_VARIABLE
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java

_S3 = re.compile(r"\bs3a?://")


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
        os.environ[JARS_VARIABLE] = os.pathsep.join(map(str, spark_jars(s3=_uses_s3(argv))))


def _uses_s3(argv: list[str]) -> bool:
    """Whether an argument names a table on S3, or a file that does, so that its jars are needed."""
    for argument in argv:
        given = argument.partition("=")[2] if argument.startswith("--config=") else argument
        if _S3.search(given):
            return True
        with suppress(OSError, ValueError):
            if given.endswith(".toml") and _S3.search(Path(given).read_text(encoding="utf-8")):
                return True
    return False
