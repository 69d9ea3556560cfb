"""Authentication and authorisation: tokens, their rights by patterns of topics, and the check before each handler.

Invariants:

* A right that is not granted is refused. A route without a declared right needs the right to administer everything.
* A caller without a known token learns nothing else (401). One with a token, but not for this topic, gets the same 403
  whether the topic exists or not, before anything is looked up.
* Tokens are kept as SHA-256. They are random and long, so a plain hash is enough, and the look-up is by that hash:
  its duration reveals nothing about a token, since nobody can choose the hash of a guess. The last comparison takes
  constant time all the same. Neither token nor hash is ever logged or put into an answer.

A **pattern** is a shell's (``*``, ``?``, ``[…]``). With a known data centre or ``*`` before its first dot it is one of
full names: ``dc1.nginx``, ``dc2.*``, ``*.nginx``; else it is the topic's name in every data centre: ``nginx-*``.

`logferry token NAME` makes a token and prints its entry for the configuration.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from logferry.gateway.config import ServiceConfig, TokenSettings
from logferry.gateway.contract.names import check_topic, full_topic, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.http.request import percent_decoded

_DECISIONS: Final = 4096
# The places of topic and source in a path: /v1/topics/{3}/sources/{5}/….
_TOPIC, _SOURCE = 3, 5


class Right(Enum):
    OPEN = auto()  # nothing
    METRICS = auto()  # `EVERYTHING`, unless metrics are open
    KNOWN = auto()  # any token; the handler shows what the caller may see
    WRITE = auto()  # to write the topic of the path, as the source of the path if there is one
    READ = auto()  # to read the topic of the path, a full name
    TOPIC = auto()  # to do anything at all with the topic of the path
    SOURCE = auto()  # to write as the source of the path, or to read or administer its topic
    ADMIN = auto()  # to administer the topic of the path
    AGENT = auto()  # any token, in the ways of other agents; the handler checks what is written
    EVERYTHING = auto()  # to administer every topic


class Patterns:
    """Patterns of topics, with a cache of decisions."""

    def __init__(self, texts: Iterable[str], dcs: frozenset[str]) -> None:
        self._parts: list[tuple[re.Pattern[str], re.Pattern[str]]] = []
        for text in texts:
            first, dot, rest = text.partition(".")
            dc, name = (first, rest) if dot and (first == "*" or first in dcs) else ("*", text)
            self._parts.append((re.compile(fnmatch.translate(dc)), re.compile(fnmatch.translate(name))))
        self._decided: dict[str, bool] = {}
        self.is_everything = any(text in ("*", "*.*") for text in texts)
        self.is_nothing = not self._parts

    def match(self, topic: str) -> bool:
        """Whether one of the patterns matches the topic, by its full name."""
        known = self._decided.get(topic)
        if known is None:
            dc, name = split_topic(topic)
            known = any(dcs.match(dc) is not None and names.match(name) is not None for dcs, names in self._parts)
            if len(self._decided) >= _DECISIONS:
                self._decided.clear()
            self._decided[topic] = known
        return known


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller and its rights. ``name``: None where no tokens are configured. ``sha256``: of its token."""

    name: str | None
    write: Patterns
    read: Patterns
    admin: Patterns
    sources: re.Pattern[str] | None = None
    consumers: re.Pattern[str] | None = None
    report: Patterns = field(default_factory=lambda: Patterns([], frozenset()))
    sha256: bytes = field(default=b"", repr=False)

    def may_write_as(self, topic: str, source_id: str) -> bool:
        return self.write.match(topic) and (self.sources is None or self.sources.match(source_id) is not None)

    def may_read(self, topic: str) -> bool:
        return self.read.match(topic)

    def may_use(self, consumer: str) -> bool:
        """Whether the caller may read as this consumer, and set its positions."""
        return self.consumers is None or self.consumers.match(consumer) is not None

    def may_see(self, topic: str) -> bool:
        """Whether the caller may know that there is such a topic."""
        return self.write.match(topic) or self.read.match(topic) or self.admin.match(topic)

    def may_see_source(self, topic: str, source_id: str) -> bool:
        """Whoever reads or administers a topic sees its sources anyway; a writer sees its own."""
        return self.read.match(topic) or self.admin.match(topic) or self.may_write_as(topic, source_id)


_EVERY: Final = Patterns(["*"], frozenset())
_NONE: Final = Patterns([], frozenset())
ANYBODY: Final = Caller(None, _EVERY, _EVERY, _EVERY, report=_EVERY)
NOBODY: Final = Caller(None, _NONE, _NONE, _NONE)


_BEARER: Final = ("bearer",)
_SCHEMES: Final = ("bearer", "splunk", "apikey", "basic")


def presented_token(authorization: str | None, schemes: tuple[str, ...] = _SCHEMES) -> str:
    """The token in an Authorization header. Raises Problem ``unauthenticated``.

    Of ``Basic`` it is the password, of ``ApiKey`` what follows the colon: the rest is the agent's own name.
    """
    if authorization is None:
        raise Problem("unauthenticated", "a token is needed: send the header Authorization: Bearer <token>")
    scheme, _, presented = authorization.partition(" ")
    scheme, presented = scheme.lower(), presented.strip()
    if scheme not in schemes:
        raise Problem("unauthenticated", "the Authorization header must have the form Bearer <token>")
    if scheme in ("apikey", "basic"):
        try:
            plain = base64.b64decode(presented, validate=True).decode()
        except ValueError:
            raise Problem("unauthenticated", f"the {scheme} credentials are not base64 of name:token") from None
        presented = plain.partition(":")[2]
    return presented


class Gate:
    """Admits requests, or raises. `replace` changes the tokens while connections stay open."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._tokens: dict[bytes, Caller] = {}
        self.replace(config.tokens)

    def replace(self, tokens: list[TokenSettings]) -> None:
        """Accepts these tokens and no others from now on.

        Raises ValueError: the last one cannot be removed, on loopback neither, where a proxy may be in front.
        """
        if self._tokens and not tokens:
            raise ValueError(
                f"tokens: the last one cannot be removed while the {self._config.service} runs: "
                "everybody could do everything"
            )
        dcs = self._config.known_dcs
        self._tokens = {caller.sha256: caller for token in tokens for caller in _callers(token, dcs)}

    def present(self, caller: Caller) -> Caller:
        """A caller admitted before, with its present rights: none if its token is gone, whatever bears its name."""
        return self._tokens.get(caller.sha256, NOBODY) if self._tokens else ANYBODY

    def admit(self, right: Right, headers: Mapping[str, str], segments: list[str]) -> Caller:
        """The caller, if it may do this. ``headers``: those of the request; ``segments``: of the raw path.

        Raises Problem ``unauthenticated`` or ``forbidden``, and Malformed for a name that cannot be one.
        """
        if not self._tokens or right is Right.OPEN or (right is Right.METRICS and self._config.open_metrics):
            return ANYBODY
        caller = self._caller(headers.get("Authorization"), _SCHEMES if right is Right.AGENT else _BEARER)
        if not self._allows(caller, right, segments):
            raise Problem("forbidden", f"the token {caller.name} does not have the right to do this")
        return caller

    def _caller(self, authorization: str | None, schemes: tuple[str, ...]) -> Caller:
        presented = presented_token(authorization, schemes)
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        caller = self._tokens.get(digest, NOBODY)
        if not hmac.compare_digest(caller.sha256, digest):
            raise Problem("unauthenticated", "the token is not configured here")
        return caller

    def _allows(self, caller: Caller, right: Right, segments: list[str]) -> bool:
        if right in (Right.KNOWN, Right.AGENT):
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
            return caller.admin.match(topic)
        if caller.sources is None or len(segments) <= _SOURCE:
            return caller.write.match(topic) or (right is Right.SOURCE and caller.may_see(topic))
        source_id = percent_decoded(segments[_SOURCE], "sourceId")
        allowed = caller.may_write_as if right is Right.WRITE else caller.may_see_source
        return allowed(topic, source_id)


def _callers(token: TokenSettings, dcs: frozenset[str]) -> list[Caller]:
    """One for each hash: the same caller to everybody else, told apart when a hash is removed."""
    sources = None if token.sources is None else re.compile(fnmatch.translate(token.sources))
    patterns = (Patterns(texts, dcs) for texts in (token.write, token.read, token.admin, token.report))
    write, read, admin, report = patterns
    consumers = None
    if token.consumers is not None:
        consumers = re.compile("|".join(map(fnmatch.translate, token.consumers)) or r"(?!)")
    hashes = map(bytes.fromhex, token.sha256)
    return [Caller(token.name, write, read, admin, sources, consumers, report, sha256) for sha256 in hashes]
