"""``logferry token NAME``: makes a token and prints its entry for the gateway's configuration. Nothing is stored."""

from __future__ import annotations

import argparse
import hashlib
import re
import secrets
import sys
from typing import Final

_TOKEN_PREFIX: Final = "lf_"
_TOKEN_BYTES: Final = 32
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,64}")


def new_token() -> tuple[str, str]:
    """A token of 256 random bits, and its SHA-256 for the configuration."""
    token = _TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    return token, hashlib.sha256(token.encode()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Prints a new token (for the caller) and its entry (for the configuration). Exit status: 0, 2 wrong use."""
    parser = argparse.ArgumentParser(
        prog="logferry token",
        description="example: logferry token web1\n\n"
        "Makes a token for a caller of the gateway. Prints the token, which is stored nowhere, and its\n"
        "entry with the SHA-256 for the gateway's configuration, to which the operator adds the rights.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", default="caller", metavar="NAME", help="the caller's name (default: %(default)s)"
    )
    name = parser.parse_args(argv).name
    if not _NAME.fullmatch(name):
        parser.error(f"NAME: {name!r} must be 1 to 64 of a-z A-Z 0-9 . _ -")
    token, sha256 = new_token()
    print(f"# the token, for the caller; it is stored nowhere:\n# {token}\n")
    print(f'[[tokens]]\nname = "{name}"\nsha256 = "{sha256}"\nwrite = []\nread = []\nadmin = []')
    return 0


if __name__ == "__main__":
    sys.exit(main())
