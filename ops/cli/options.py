"""Argument parsers of the operators' commands, and ``--config FILE``: a TOML file with one table per command.

The keys are the command's options without the leading dashes (``no-restart`` or ``no_restart``). They replace the
defaults; options on the command line win. Unknown keys are rejected with their path.
"""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from pathlib import Path
from typing import Any, Final

from logferry.ops.cli.problems import UsageError

_WIDTH: Final = 100


def command_parser(name: str, usage: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help begins with the examples. The text after their first empty line comes last in the help."""
    examples, _, notes = examples.partition("\n\n")
    return argparse.ArgumentParser(
        prog=f"logferry {name}",
        usage=f"logferry {name} {usage}",
        description=f"{examples.rstrip()}\n\n{textwrap.fill(description, _WIDTH)}",
        epilog=notes or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_with_file(
    name: str, parser: argparse.ArgumentParser, options: list[argparse.Action], argv: list[str]
) -> argparse.Namespace:
    """Adds ``--config`` to the parser and parses. The table ``name`` of that file replaces the defaults of ``options``.

    Raises UsageError.
    """
    parser.add_argument("--config", metavar="FILE", help=f"TOML file; its table [{name}] sets options")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    file = first.parse_known_args(argv)[0].config
    known = {action.dest: action for action in options}
    for key, value in ({} if file is None else _table(file, name)).items():
        where, action = f"{file}: {name}.{key}", known.get(key.replace("-", "_"))
        if action is None:
            raise UsageError(f"{where}: unknown setting; the known ones are {', '.join(known)}")
        parser.set_defaults(**{action.dest: _checked(where, action, value)})
    return parser.parse_intermixed_args(argv)


def _table(file: Path, name: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get(name, {})
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{file}: {name} must be a table: [{name}]")
    return table


def _checked(where: str, action: argparse.Action, value: Any) -> Any:
    """A switch takes a boolean, a number an integer; a list of strings is joined as on the command line."""
    wanted = bool if action.nargs == 0 else int if action.type is int else str
    if wanted is str and isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = ",".join(value)
    if type(value) is not wanted:
        raise UsageError(f"{where}: {value!r} is not of type {wanted.__name__}")
    return value
