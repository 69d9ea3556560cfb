"""Who may do what: tokens, the patterns of topics that they are good for, and the check before each handler.

The law of this module:

* What is not granted is refused. A route that does not say which right it needs, needs the right over everything.
* Whoever has no token that is known learns nothing but that (401). Whoever has one, but not for this topic, gets the
  same 403 whether the topic exists or not, before anything is looked up.
* Tokens are kept as SHA-256. They are random and long, so a plain hash is enough, and the look-up is by that hash:
  how long it takes tells nothing about a token, since nobody can choose the hash of a guess. The last comparison takes
  constant time all the same. Neither token nor hash is ever logged or put into an answer.

A **pattern** is a shell's (``*``, ``?``, ``[…]``). With a known data centre or ``*`` before its first dot it is one of
full names: ``dc1.nginx``, ``dc2.*``, ``*.nginx``; else it is the topic's name in every data centre: ``nginx-*``.

``python -m logferry.gateway.auth NAME`` makes a token and prints what belongs into the configuration.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from logferry.gateway.config import Config, TokenSettings
from logferry.gateway.contract.chunk import check_topic, full_topic, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.http.request import percent_decoded

_TOKEN_PREFIX: Final = "lf_"
_TOKEN_BYTES: Final = 32
_DECISIONS: Final = 4096
# The places of topic and source in a path: /v1/topics/{3}/sources/{5}/….
_TOPIC, _SOURCE = 3, 5


class Right(Enum):
    """What a route needs."""

    OPEN = auto()  # nothing
    METRICS = auto()  # `EVERYTHING`, unless metrics are open
    KNOWN = auto()  # any token; the handler shows what the caller may see
    WRITE = auto()  # to write the topic of the path, as the source of the path if there is one
    READ = auto()  # to read the topic of the path, a full name
    TOPIC = auto()  # to do anything at all with the topic of the path
    SOURCE = auto()  # to write as the source of the path, or to read or administer its topic
    ADMIN = auto()  # to administer the topic of the path
    EVERYTHING = auto()  # to administer every topic


class Patterns:
    """Patterns of topics. Decisions are remembered, a few thousand of them."""

    def __init__(self, texts: Iterable[str], dcs: frozenset[str]) -> None:
        self._parts = [_compiled(text, dcs) for text in texts]
        self._decided: dict[str, bool] = {}
        self.is_everything = any(text in ("*", "*.*") for text in texts)

    def match(self, topic: str) -> bool:
        """Whether one of the patterns is good for the full topic."""
        known = self._decided.get(topic)
        if known is None:
            dc, name = split_topic(topic)
            known = any(dcs.match(dc) is not None and names.match(name) is not None for dcs, names in self._parts)
            if len(self._decided) >= _DECISIONS:
                self._decided.clear()
            self._decided[topic] = known
        return known


def _compiled(text: str, dcs: frozenset[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    first, dot, rest = text.partition(".")
    dc, name = (first, rest) if dot and (first == "*" or first in dcs) else ("*", text)
    return re.compile(fnmatch.translate(dc)), re.compile(fnmatch.translate(name))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what it may do. ``name`` is None for everybody where there are no tokens."""

    name: str | None
    write: Patterns
    read: Patterns
    admin: Patterns
    sources: re.Pattern[str] | None = None

    def may_write(self, topic: str) -> bool:
        return self.write.match(topic)

    def may_write_as(self, topic: str, source_id: str) -> bool:
        return self.write.match(topic) and (self.sources is None or self.sources.match(source_id) is not None)

    def may_read(self, topic: str) -> bool:
        return self.read.match(topic)

    def may_administer(self, topic: str) -> bool:
        return self.admin.match(topic)

    def may_see(self, topic: str) -> bool:
        """Whether the caller may know that there is such a topic."""
        return self.write.match(topic) or self.read.match(topic) or self.admin.match(topic)

    def may_see_source(self, topic: str, source_id: str) -> bool:
        """Whoever reads or administers a topic sees its sources anyway; a writer sees its own."""
        return self.read.match(topic) or self.admin.match(topic) or self.may_write_as(topic, source_id)


_EVERY: Final = Patterns(["*"], frozenset())
_NONE: Final = Patterns([], frozenset())
ANYBODY: Final = Caller(None, _EVERY, _EVERY, _EVERY)
NOBODY: Final = Caller(None, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class _Token:
    sha256: bytes = field(repr=False)
    caller: Caller


class Gate:
    """Lets requests in, or raises. `replace` takes other tokens over while connections live on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokens: dict[bytes, _Token] = {}
        self.replace(config.tokens)

    def replace(self, tokens: list[TokenSettings]) -> None:
        """From now on these tokens are good, and no others. Raises ValueError: the last one cannot be taken away."""
        if self._tokens and not tokens and not self._config.is_loopback:
            raise ValueError("tokens: without any, everybody could do everything")
        dcs = self._config.known_dcs
        found = (_Token(bytes.fromhex(token.sha256), _caller(token, dcs)) for token in tokens)
        self._tokens = {token.sha256: token for token in found}
        self._by_name = {token.caller.name: token.caller for token in self._tokens.values()}

    def present(self, caller: Caller) -> Caller:
        """A caller that was let in before, with the rights that it has by now: none if its token is gone."""
        return self._by_name.get(caller.name, NOBODY) if self._tokens else ANYBODY

    def admit(self, right: Right, headers: Mapping[str, str], segments: list[str]) -> Caller:
        """The caller, if it may do this. ``headers``: those of the request; ``segments``: of the raw path.

        Raises Problem ``unauthenticated`` or ``forbidden``, and Malformed for a name that cannot be one.
        """
        if not self._tokens or right is Right.OPEN or (right is Right.METRICS and self._metrics_are_open):
            return ANYBODY
        caller = self._caller(headers.get("Authorization"))
        if not self._allows(caller, right, segments):
            raise Problem("forbidden", f"the token {caller.name} does not have the right to do this")
        return caller

    @property
    def _metrics_are_open(self) -> bool:
        return self._config.open_metrics or self._config.is_loopback

    def _caller(self, authorization: str | None) -> Caller:
        if authorization is None:
            raise Problem("unauthenticated", "a token is needed: send the header Authorization: Bearer <token>")
        scheme, _, presented = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Problem("unauthenticated", "the Authorization header is not of the form Bearer <token>")
        digest = hashlib.sha256(presented.strip().encode("utf-8", "surrogateescape")).digest()
        token = self._tokens.get(digest)
        if token is None or not hmac.compare_digest(token.sha256, digest):
            raise Problem("unauthenticated", "the token is not known here")
        return token.caller

    def _allows(self, caller: Caller, right: Right, segments: list[str]) -> bool:
        if right is Right.KNOWN:
            return True
        if right in (Right.METRICS, Right.EVERYTHING):
            return caller.admin.is_everything
        name = percent_decoded(segments[_TOPIC], "topic")
        if right is Right.READ:
            split_topic(name)
            return caller.may_read(name)
        if right is Right.TOPIC:
            return caller.may_see(self._config.full_name(name))
        topic = full_topic(self._config.dc, check_topic(name))
        if right is Right.ADMIN:
            return caller.may_administer(topic)
        if caller.sources is None or len(segments) <= _SOURCE:
            return caller.may_write(topic) or (right is Right.SOURCE and caller.may_see(topic))
        source_id = percent_decoded(segments[_SOURCE], "sourceId")
        allowed = caller.may_write_as if right is Right.WRITE else caller.may_see_source
        return allowed(topic, source_id)


def _caller(token: TokenSettings, dcs: frozenset[str]) -> Caller:
    sources = None if token.sources is None else re.compile(fnmatch.translate(token.sources))
    write, read, admin = (Patterns(texts, dcs) for texts in (token.write, token.read, token.admin))
    return Caller(token.name, write, read, admin, sources)


# ---- a new token ----------------------------------------------------------------------------------------------


def new_token() -> tuple[str, str]:
    """A token of 256 random bits, and its SHA-256 for the configuration."""
    token = _TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    return token, hashlib.sha256(token.encode()).hexdigest()


def main(argv: list[str]) -> int:
    """Prints a new token (for the caller) and its entry (for the configuration). Nothing is stored."""
    name = argv[0] if argv else "caller"
    if len(argv) > 1 or name.startswith("-") or not re.fullmatch(r"[a-zA-Z0-9._-]{1,64}", name):
        print("usage: python -m logferry.gateway.auth [NAME]   (NAME: 1 to 64 of a-z A-Z 0-9 . _ -)", file=sys.stderr)
        return 2
    token, sha256 = new_token()
    print(f"# the token, for the caller; it is not kept anywhere:\n# {token}\n")
    print(f'[[tokens]]\nname = "{name}"\nsha256 = "{sha256}"\nwrite = []\nread = []\nadmin = []')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
