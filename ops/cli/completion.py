"""``logferry completion SHELL``: a static completion script for bash, zsh or fish, made from each command's help.

Standard library only and Python 3.9+. The options of a command whose extra is not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

from logferry.ops.cli.main import COMMANDS
from logferry.ops.cli.main import main as run

_EXAMPLE = """examples:
  logferry completion bash > /etc/bash_completion.d/logferry
  logferry completion zsh > ~/.zsh/logferry.zsh && echo 'source ~/.zsh/logferry.zsh' >> ~/.zshrc
  logferry completion fish > ~/.config/fish/completions/logferry.fish
"""
_OPTION = re.compile(r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z][a-z0-9-]*)", re.MULTILINE)
_CHOICES = re.compile(r"^  \{([a-z,]+)\}", re.MULTILINE)
_SUB_COMMAND = re.compile(r"^    ([a-z]+)(?:  |$)", re.MULTILINE)
_BASH = Path(__file__).with_name("completion.bash")
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def main(argv: Sequence[str]) -> int:
    """Prints the script; 0."""
    parser = argparse.ArgumentParser(
        prog="logferry completion",
        description=f"{_EXAMPLE}\nPrints a completion script for a shell.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script")
    shell = parser.parse_args(argv).shell
    words = {name: words_of(name) for name in COMMANDS}
    if shell == "fish":
        print("\n".join(_fish(words)))
    else:
        cases = "\n".join(f'            {name}) words="{" ".join(found)}" ;;' for name, found in words.items())
        script = _BASH.read_text(encoding="utf-8").replace("@COMMANDS@", " ".join(words)).replace("@CASES@", cases)
        print((_ZSH if shell == "zsh" else "") + script, end="")
    return 0


def words_of(name: str) -> list[str]:
    """The sub-commands or actions (``list``, ``create``) and the options of a command, as its help lists them."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            run([name, "--help"])
    shown = text.getvalue()
    actions = _CHOICES.search(shown)
    names = actions[1].split(",") if actions else _SUB_COMMAND.findall(shown)
    return [*names, *dict.fromkeys(_OPTION.findall(shown))]


def _fish(words: dict[str, list[str]]) -> list[str]:
    lines = [
        f'complete -c logferry -f -n __fish_use_subcommand -a {name} -d "{COMMANDS[name].summary}"' for name in words
    ]
    for name, found in words.items():
        seen = f"complete -c logferry -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -l {word[2:]}" if word.startswith("--") else f"{seen} -a {word}" for word in found]
    return lines
