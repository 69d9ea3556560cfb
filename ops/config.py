"""``--config FILE`` of the operators' commands: a TOML file with one table for each command.

Its keys are the command's options without the dashes (``no-restart`` may be written ``no_restart``); they become
the defaults, and the command line wins. Unknown keys are refused with their path.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from logferry.ops.cli.problems import WrongUse


class Defaults:
    """The table ``name`` of the file that ``--config`` names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def add_to(self, parser: argparse.ArgumentParser, options: list[argparse.Action], argv: list[str]) -> None:
        """Adds ``--config`` to ``parser``; if ``argv`` has it, the file's values become the defaults of ``options``."""
        known = {action.dest: action for action in options}
        parser.add_argument("--config", metavar="FILE", help=f"take options from the table [{self._name}] of this file")
        look = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        look.add_argument("--config", type=Path)
        file = look.parse_known_args(argv)[0].config
        if file is None:
            return
        for key, value in self._read(file).items():
            action = known.get(key.replace("-", "_"))
            if action is None:
                raise WrongUse(f"{file}: {self._name}.{key}: there is no such setting")
            parser.set_defaults(**{action.dest: self._checked(f"{file}: {self._name}.{key}", action, value)})

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8")).get(self._name, {})
        except OSError as error:
            raise WrongUse(f"{file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise WrongUse(f"{file}: not TOML: {error}") from None
        if not isinstance(table, dict):
            raise WrongUse(f"{file}: {self._name} is not a table")
        return table

    @staticmethod
    def _checked(where: str, action: argparse.Action, value: Any) -> Any:
        """A switch is a boolean, a number a number, and a list of names is joined as on the command line."""
        if action.nargs == 0:
            wanted: type = bool
        elif action.type is int:
            wanted = int
        else:
            wanted = str
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                value = ",".join(value)
        if type(value) is not wanted:
            raise WrongUse(f"{where}: {value!r} is not of the type {wanted.__name__}")
        return value
