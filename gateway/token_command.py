"""``logferry token NAME``: makes a token and prints its entry for the gateway's configuration. Nothing is stored."""

from __future__ import annotations

import argparse
import hashlib
import re
import secrets
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

_TOKEN_PREFIX: Final = "lf_"
_TOKEN_BYTES: Final = 32
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,64}")
_WRONG_USE: Final = 2


def new_token() -> tuple[str, str]:
    """A token of 256 random bits, and its SHA-256 for the configuration."""
    token = _TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    return token, hashlib.sha256(token.encode()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Prints a new token (for the caller) and its entry (for the configuration). Exit status: 0, 2 wrong use."""
    parser = argparse.ArgumentParser(
        prog="logferry token",
        description="example: logferry token web1 --days 180\n\n"
        "Makes a token for a caller of the gateway. Prints the token, which is stored nowhere, and its\n"
        "entry with the SHA-256 for the gateway's configuration, to which the operator adds the rights.\n"
        "With --config it rotates: it prints the `secrets` of the entry that is there, with the new one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", default="caller", metavar="NAME", help="the caller's name (default: %(default)s)"
    )
    parser.add_argument("--days", type=_days, metavar="N", help="the token ends after so many days (default: never)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration that has an entry of the name")
    parser.add_argument(
        "--overlap-days",
        type=_days,
        default=7,
        metavar="N",
        help="with --config: its present tokens end after so many days (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not _NAME.fullmatch(args.name):
        parser.error(f"NAME: {args.name!r} must be 1 to 64 of a-z A-Z 0-9 . _ -")
    now = datetime.now(UTC).replace(microsecond=0)
    token, sha256 = new_token()
    ends = None if args.days is None else now + timedelta(days=args.days)
    fresh: dict[str, Any] = {"sha256": sha256, "not_after": ends}
    if args.config is None:
        secret = f'sha256 = "{sha256}"' if ends is None else f"secrets = [{_inline(fresh)}]"
        entry = f'[[tokens]]\nname = "{args.name}"\n{secret}\nwrite = []\nread = []\nadmin = []'
    else:
        try:
            kept = _kept(args.config, args.name, now, now + timedelta(days=args.overlap_days))
        except (OSError, ValueError, TypeError) as error:
            print(f"logferry token: {error}", file=sys.stderr)
            return _WRONG_USE
        lines = "".join(f"    {_inline(secret)},\n" for secret in [*kept, fresh])
        entry = f"# in the entry {args.name}, in place of its sha256 and secrets:\nsecrets = [\n{lines}]"
    print(f"# the token, for the caller; it is stored nowhere:\n# {token}\n")
    print(entry)
    return 0


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= 36_500:
        raise argparse.ArgumentTypeError(f"{days} is not from 1 to 36500")
    return days


def _kept(path: Path, name: str, now: datetime, at_most: datetime) -> list[dict[str, Any]]:
    """The present secrets of the entry, which end with the overlap. Raises OSError, or ValueError or TypeError for a
    file that is no configuration."""
    tokens = tomllib.loads(path.read_text(encoding="utf-8")).get("tokens", [])
    entry = next((token for token in tokens if token.get("name") == name), None)
    if entry is None:
        raise ValueError(f"{path}: no entry of [[tokens]] has the name {name}")
    plain = entry.get("sha256", [])
    found = [{"sha256": one} for one in ([plain] if isinstance(plain, str) else plain)] + entry.get("secrets", [])
    kept = []
    for secret in found:
        ends = min(secret.get("not_after", at_most), at_most)
        if ends > now:
            kept.append({**secret, "not_after": ends})
    return kept


def _inline(secret: dict[str, Any]) -> str:
    """One secret as an inline table of TOML."""
    given = [name for name in ("not_before", "not_after") if secret.get(name) is not None]
    dates = [f"{name} = {secret[name].astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" for name in given]
    return "{ " + ", ".join([f'sha256 = "{secret["sha256"]}"', *dates]) + " }"


if __name__ == "__main__":
    sys.exit(main())
